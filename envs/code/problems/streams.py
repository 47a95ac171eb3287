"""Problems for programs that read and write."""

from rollgym.envs.code.problems.problem import CodeProblem, Generator, letters, whole, wholes, words


def sum_lines(text: str) -> str:
    """Each line has whole numbers separated by blanks. Write the sum of each line on a line of its own."""
    return "\n".join(str(sum(map(int, line.split()))) for line in text.splitlines())


def most_frequent_word(text: str) -> str:
    """The first line is a number n, then n words follow, one a line. Write the most frequent word and how often it
    occurs, separated by a blank; the first in alphabetical order where several are as frequent."""
    lines = text.split()[1:]
    word = min(set(lines), key=lambda each: (-lines.count(each), each))
    return f"{word} {lines.count(word)}"


def maze_distance(text: str) -> str:
    """The input is a map: `#` is a wall, `.` is free, `S` the start, `E` the end. Write the least number of steps up,
    down, left and right from S to E, or -1 if there is no way."""
    rows = text.split()
    cells = {(y, x): cell for y, row in enumerate(rows) for x, cell in enumerate(row) if cell != "#"}
    edge = [place for place, cell in cells.items() if cell == "S"]
    seen, steps = set(edge), 0
    while edge:
        if any(cells[place] == "E" for place in edge):
            return str(steps)
        around = [(y + dy, x + dx) for y, x in edge for dy, dx in ((0, 1), (1, 0), (0, -1), (-1, 0))]
        edge = list({place for place in around if place in cells and place not in seen})
        seen.update(edge)
        steps += 1
    return "-1"


def bank(text: str) -> str:
    """Each line is `put NAME AMOUNT`, `take NAME AMOUNT` or `show NAME`; accounts begin with 0. `take` writes `no` and
    does nothing if there is too little, and writes nothing otherwise; `show` writes the amount."""
    amounts: dict[str, int] = {}
    written = []
    for line in text.splitlines():
        order, name, *rest = line.split()
        held = amounts.get(name, 0)
        if order == "put":
            amounts[name] = held + int(rest[0])
        elif order == "show":
            written.append(str(held))
        elif held < int(rest[0]):
            written.append("no")
        else:
            amounts[name] = held - int(rest[0])
    return "\n".join(written)


def postfix(text: str) -> str:
    """The input is an expression of whole numbers and + - * in postfix notation, separated by blanks. Write its
    value."""
    values: list[int] = []
    for word in text.split():
        if word in ("+", "-", "*"):
            right, left = values.pop(), values.pop()
            values.append(left + right if word == "+" else left - right if word == "-" else left * right)
        else:
            values.append(int(word))
    return str(values[0])


def transpose(text: str) -> str:
    """Each line is a row of numbers separated by blanks; all rows are equally long. Write the columns as rows."""
    rows = [line.split() for line in text.splitlines()]
    return "\n".join(" ".join(column) for column in zip(*rows, strict=True))


def build_order(text: str) -> str:
    """Each line `A B` says that A must come before B. Write all names on one line, separated by blanks, in such an
    order; of those that could come next, always the first in alphabetical order. Write `impossible` if there is no
    order."""
    pairs = [line.split() for line in text.splitlines()]
    left = {name for pair in pairs for name in pair}
    order: list[str] = []
    while left:
        free = [name for name in left if not any(after == name and before in left for before, after in pairs)]
        if not free:
            return "impossible"
        order.append(min(free))
        left.remove(order[-1])
    return " ".join(order)


def _maze(rng: Generator) -> list[str]:
    width, height = whole(rng, 2, 6), whole(rng, 2, 5)
    rows = [list(letters(rng, "...#", width, width)) for _ in range(height)]
    rows[0][0], rows[-1][-1] = "S", "E"
    return ["\n".join("".join(row) for row in rows) + "\n"]


def _orders(rng: Generator) -> list[str]:
    lines = []
    for _ in range(whole(rng, 2, 9)):
        order = ("put", "take", "show")[whole(rng, 0, 2)]
        amount = "" if order == "show" else f" {whole(rng, 1, 9)}"
        lines.append(f"{order} {'ab'[whole(rng, 0, 1)]}{amount}")
    return ["\n".join([*lines, "show a"]) + "\n"]


def _expression(rng: Generator) -> list[str]:
    parts, held = [str(whole(rng, 0, 9))], 1
    for _ in range(whole(rng, 1, 6)):
        parts.append(str(whole(rng, 0, 9)))
        held += 1
        while held > 1 and whole(rng, 0, 1):
            parts.append("+-*"[whole(rng, 0, 2)])
            held -= 1
    return [" ".join([*parts, *("+" for _ in range(held - 1))]) + "\n"]


def _rows(rng: Generator) -> list[str]:
    width = whole(rng, 1, 4)
    rows = [" ".join(map(str, wholes(rng, 0, 9, width, width))) for _ in range(whole(rng, 1, 4))]
    return ["\n".join(rows) + "\n"]


def _listed(rng: Generator) -> list[str]:
    given = words(rng, "ab", 2, 9)
    return [f"{len(given)}\n" + "\n".join(given) + "\n"]


def _edges(rng: Generator) -> list[str]:
    names = "abcde"
    edges = [sorted((names[whole(rng, 0, 1)], names[whole(rng, 2, 4)])) for _ in range(whole(rng, 1, 5))]
    if whole(rng, 0, 3) == 0:
        edges.append(edges[0][::-1])
    return ["\n".join(" ".join(edge) for edge in edges) + "\n"]


STREAMS = (
    CodeProblem(
        sum_lines,
        lambda rng: [
            "\n".join(" ".join(map(str, wholes(rng, -9, 99, 1, 5))) for _ in range(whole(rng, 1, 4))) + "\n"
        ],
        [["7\n"]],
        reads=True,
    ),
    CodeProblem(most_frequent_word, _listed, [["3\nb\na\nc\n"]], reads=True),
    CodeProblem(maze_distance, _maze, [["SE\n"], ["S#E\n"]], reads=True),
    CodeProblem(bank, _orders, [["take a 1\nshow a\n"]], reads=True),
    CodeProblem(postfix, _expression, [["5\n"], ["2 3 - 4 *\n"]], reads=True),
    CodeProblem(transpose, _rows, [["1\n"], ["1 2 3\n"]], reads=True),
    CodeProblem(build_order, _edges, [["a b\nb a\n"], ["c b\nb a\n"]], reads=True),
)
