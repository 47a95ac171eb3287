"""Problems that a function solves: about lists of numbers, about numbers, and about texts."""

from rollgym.envs.code.problems.problem import CodeProblem, letters, whole, wholes, words


def running_maximum(numbers: list[int]) -> list[int]:
    """Return a list that has, for each place, the largest of the numbers up to and including that place."""
    largest: list[int] = []
    for number in numbers:
        largest.append(number if not largest else max(number, largest[-1]))
    return largest


def rotate_right(numbers: list[int], steps: int) -> list[int]:
    """Return the list rotated to the right: each step moves the last element to the front. A negative number of steps
    rotates to the left. The list given is not changed."""
    if not numbers:
        return []
    cut = -steps % len(numbers)
    return numbers[cut:] + numbers[:cut]


def longest_run(numbers: list[int]) -> int:
    """Return the length of the longest run of equal neighbours; 0 for an empty list."""
    best = run = 0
    for place, number in enumerate(numbers):
        run = run + 1 if place and numbers[place - 1] == number else 1
        best = max(best, run)
    return best


def merge_intervals(intervals: list[list[int]]) -> list[list[int]]:
    """Merge intervals [start, end], both ends included, that overlap or touch at an end. Return them by start."""
    merged: list[list[int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def pairs_with_sum(numbers: list[int], total: int) -> int:
    """Return how many pairs of places i < j have numbers[i] + numbers[j] == total."""
    seen: dict[int, int] = {}
    count = 0
    for number in numbers:
        count += seen.get(total - number, 0)
        seen[number] = seen.get(number, 0) + 1
    return count


def largest_sum(numbers: list[int]) -> int:
    """Return the largest sum of a contiguous, non-empty part of the list; 0 for an empty list."""
    if not numbers:
        return 0
    best = here = numbers[0]
    for number in numbers[1:]:
        here = max(number, here + number)
        best = max(best, here)
    return best


def trapped_water(heights: list[int]) -> int:
    """The heights are walls of width 1 beside each other. Return how many units of rain water they hold."""
    left, right = 0, len(heights) - 1
    left_wall = right_wall = held = 0
    while left < right:
        if heights[left] < heights[right]:
            left_wall = max(left_wall, heights[left])
            held += left_wall - heights[left]
            left += 1
        else:
            right_wall = max(right_wall, heights[right])
            held += right_wall - heights[right]
            right -= 1
    return held


def spiral(grid: list[list[int]]) -> list[int]:
    """Return the numbers of a rectangular grid in clockwise spiral order, from the top left corner inwards."""
    rows = [list(row) for row in grid]
    order: list[int] = []
    while rows:
        order += rows.pop(0)
        rows = [list(column) for column in zip(*rows, strict=True)][::-1]
    return order


def fewest_coins(coins: list[int], amount: int) -> int:
    """Return the least number of coins that make the amount, each kind as often as you like; -1 if there is no way."""
    fewest = [0] + [amount + 1] * amount
    for sum_ in range(1, amount + 1):
        for coin in coins:
            if coin <= sum_:
                fewest[sum_] = min(fewest[sum_], fewest[sum_ - coin] + 1)
    return fewest[amount] if fewest[amount] <= amount else -1


def islands(grid: list[list[int]]) -> int:
    """Return how many groups of 1 there are in a grid of 0 and 1; cells that share a side belong together."""
    left = {(row, column) for row, line in enumerate(grid) for column, cell in enumerate(line) if cell == 1}
    count = 0
    while left:
        count += 1
        found = [left.pop()]
        while found:
            row, column = found.pop()
            for near in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
                if near in left:
                    left.remove(near)
                    found.append(near)
    return count


def longest_increasing(numbers: list[int]) -> int:
    """Return the length of the longest strictly increasing subsequence, which need not be contiguous."""
    lengths: list[int] = []
    for place, number in enumerate(numbers):
        before = [lengths[other] for other in range(place) if numbers[other] < number]
        lengths.append(1 + max(before, default=0))
    return max(lengths, default=0)


def next_greater(numbers: list[int]) -> list[int]:
    """Return, for each number, the next number to its right that is greater; -1 where there is none."""
    found = [-1] * len(numbers)
    waiting: list[int] = []
    for place, number in enumerate(numbers):
        while waiting and numbers[waiting[-1]] < number:
            found[waiting.pop()] = number
        waiting.append(place)
    return found


LISTS = (
    CodeProblem(running_maximum, lambda rng: [wholes(rng, -20, 20)], [[[]], [[-3, -5]]]),
    CodeProblem(
        rotate_right, lambda rng: [wholes(rng, 0, 9), whole(rng, -15, 15)], [[[], 3], [[1, 2, 3], 0]]
    ),
    CodeProblem(longest_run, lambda rng: [wholes(rng, 0, 2)], [[[]], [[4, 4, 4]]]),
    CodeProblem(
        merge_intervals,
        lambda rng: [
            [[(start := whole(rng, 0, 30)), start + whole(rng, 0, 6)] for _ in range(whole(rng, 1, 7))]
        ],
        [[[]], [[[1, 4], [4, 5]]], [[[5, 6], [1, 9]]]],
    ),
    CodeProblem(
        pairs_with_sum, lambda rng: [wholes(rng, 0, 8), whole(rng, 2, 14)], [[[], 0], [[2, 2, 2], 4]]
    ),
    CodeProblem(largest_sum, lambda rng: [wholes(rng, -9, 9)], [[[]], [[-4, -2, -7]]]),
    CodeProblem(trapped_water, lambda rng: [wholes(rng, 0, 6)], [[[]], [[5]], [[3, 0, 3]]]),
    CodeProblem(
        spiral,
        lambda rng: [
            (lambda width: [wholes(rng, 0, 99, width, width) for _ in range(whole(rng, 1, 4))])(
                whole(rng, 1, 4)
            )
        ],
        [[[]], [[[7]]]],
    ),
    CodeProblem(
        fewest_coins,
        lambda rng: [sorted({whole(rng, 2, 12) for _ in range(3)}), whole(rng, 0, 40)],
        [[[5], 0], [[4, 6], 7]],
    ),
    CodeProblem(
        islands,
        lambda rng: [
            (lambda width: [wholes(rng, 0, 1, width, width) for _ in range(whole(rng, 1, 5))])(
                whole(rng, 1, 5)
            )
        ],
        [[[]], [[[0, 0]]]],
    ),
    CodeProblem(longest_increasing, lambda rng: [wholes(rng, 0, 15)], [[[]], [[5, 5, 5]]]),
    CodeProblem(next_greater, lambda rng: [wholes(rng, 0, 9)], [[[]], [[9, 8, 7]]]),
)


def digit_sum(number: int) -> int:
    """Return the sum of the decimal digits of a number, whatever its sign."""
    return sum(int(digit) for digit in str(abs(number)))


def prime_factors(number: int) -> list[int]:
    """Return the prime factors of a number above 1 in ascending order, each as often as it divides the number."""
    factors, divisor = [], 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return [*factors, number] if number > 1 else factors


def to_roman(number: int) -> str:
    """Write a number from 1 to 3999 in Roman numerals."""
    signs = zip(
        (1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1),
        ("M", "CM", "D", "CD", "C", "XC", "L", "XL", "X", "IX", "V", "IV", "I"),
        strict=True,
    )
    text = ""
    for value, sign in signs:
        text += sign * (number // value)
        number %= value
    return text


def in_base(number: int, base: int) -> str:
    """Write a number in a base from 2 to 16 with the digits 0-9 and a-f; a negative number begins with `-`."""
    digits, left = "", abs(number)
    while left or not digits:
        left, digit = divmod(left, base)
        digits = "0123456789abcdef"[digit] + digits
    return f"-{digits}" if number < 0 else digits


def collatz_steps(number: int) -> int:
    """Halve an even number, or take three times an odd one plus one, until it is 1. Return how many steps it takes."""
    steps = 0
    while number != 1:
        number = number // 2 if number % 2 == 0 else 3 * number + 1
        steps += 1
    return steps


def ways_up(steps: int, strides: list[int]) -> int:
    """Return in how many ways a staircase can be climbed with strides of the given lengths; the order counts."""
    ways = [1] + [0] * steps
    for step in range(1, steps + 1):
        ways[step] = sum(ways[step - stride] for stride in strides if stride <= step)
    return ways[steps]


def last_standing(people: int, count: int) -> int:
    """People 1 to n stand in a circle; counting from 1, every `count`-th leaves until one is left. Return who it is."""
    place = 0
    for size in range(2, people + 1):
        place = (place + count) % size
    return place + 1


def add_fractions(one: list[int], other: list[int]) -> list[int]:
    """Add two fractions [numerator, denominator], with denominators above 0, and reduce the sum as far as possible."""
    numerator = one[0] * other[1] + other[0] * one[1]
    denominator = one[1] * other[1]
    left, right = abs(numerator), denominator
    while right:
        left, right = right, left % right
    return [numerator // left, denominator // left]


def weekday(year: int, month: int, day: int) -> str:
    """Return the English name of the weekday of a date in the Gregorian calendar, such as `Monday`."""
    if month < 3:
        month, year = month + 12, year - 1
    number = (day + 13 * (month + 1) // 5 + year + year // 4 - year // 100 + year // 400) % 7
    return ("Saturday", "Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday")[number]


def mean_without_extremes(numbers: list[int]) -> float:
    """Return the mean of the numbers without one smallest and one largest; 0.0 if fewer than three are given."""
    if len(numbers) < 3:
        return 0.0
    return (sum(numbers) - min(numbers) - max(numbers)) / (len(numbers) - 2)


NUMBERS = (
    CodeProblem(digit_sum, lambda rng: [whole(rng, -99999, 99999)], [[0], [-70]]),
    CodeProblem(prime_factors, lambda rng: [whole(rng, 2, 3000)], [[2], [97], [1024]]),
    CodeProblem(to_roman, lambda rng: [whole(rng, 1, 3999)], [[4], [3999], [1944]]),
    CodeProblem(in_base, lambda rng: [whole(rng, -5000, 5000), whole(rng, 2, 16)], [[0, 2], [-255, 16]]),
    CodeProblem(collatz_steps, lambda rng: [whole(rng, 1, 500)], [[1], [27]]),
    CodeProblem(
        ways_up,
        lambda rng: [whole(rng, 1, 14), sorted({whole(rng, 1, 5) for _ in range(3)})],
        [[0, [1, 2]], [3, [2]]],
    ),
    CodeProblem(last_standing, lambda rng: [whole(rng, 1, 40), whole(rng, 1, 9)], [[1, 3], [5, 1]]),
    CodeProblem(
        add_fractions,
        lambda rng: [[whole(rng, -9, 9), whole(rng, 1, 12)], [whole(rng, -9, 9), whole(rng, 1, 12)]],
        [[[1, 2], [-1, 2]], [[0, 5], [0, 7]]],
    ),
    CodeProblem(
        weekday,
        lambda rng: [whole(rng, 1900, 2100), whole(rng, 1, 12), whole(rng, 1, 28)],
        [[2000, 2, 29], [2024, 12, 31]],
    ),
    CodeProblem(mean_without_extremes, lambda rng: [wholes(rng, 0, 50)], [[[]], [[1, 2]], [[5, 5, 5]]]),
)


def run_lengths(text: str) -> str:
    """Write each run of equal letters as the letter and the length of the run: `aab` becomes `a2b1`."""
    parts: list[list[str]] = []
    for letter in text:
        if parts and parts[-1][0] == letter:
            parts[-1].append(letter)
        else:
            parts.append([letter])
    return "".join(f"{part[0]}{len(part)}" for part in parts)


def balanced(text: str) -> bool:
    """Tell whether the brackets (), [] and {} of a text are closed in the right order; nothing else counts."""
    closing = {")": "(", "]": "[", "}": "{"}
    opened: list[str] = []
    for character in text:
        if character in "([{":
            opened.append(character)
        elif character in closing and (not opened or opened.pop() != closing[character]):
            return False
    return not opened


def longest_palindrome(text: str) -> str:
    """Return the longest contiguous part that reads the same in both directions; the first of equally long ones."""
    best = ""
    for start in range(len(text)):
        for end in range(len(text), start + len(best), -1):
            part = text[start:end]
            if part == part[::-1]:
                best = part
                break
    return best


def edit_distance(one: str, other: str) -> int:
    """Return the least number of letters to insert, delete or replace that turns the one text into the other."""
    row = list(range(len(other) + 1))
    for place, letter in enumerate(one, 1):
        diagonal, row[0] = row[0], place
        for column, wanted in enumerate(other, 1):
            diagonal, row[column] = (
                row[column],
                min(row[column] + 1, row[column - 1] + 1, diagonal + (letter != wanted)),
            )
    return row[-1]


def group_anagrams(given: list[str]) -> list[list[str]]:
    """Group words that have the same letters. Words keep their order within a group, groups stand in the order of their
    first words."""
    groups: dict[str, list[str]] = {}
    for word in given:
        groups.setdefault("".join(sorted(word)), []).append(word)
    return list(groups.values())


def caesar(text: str, shift: int) -> str:
    """Move each letter a-z and A-Z on in the alphabet by `shift` places, round the end; leave all else as it is."""
    moved = []
    for character in text:
        if character.isascii() and character.isalpha():
            first = ord("a" if character.islower() else "A")
            moved.append(chr((ord(character) - first + shift) % 26 + first))
        else:
            moved.append(character)
    return "".join(moved)


def common_prefix(given: list[str]) -> str:
    """Return the longest text that all the words begin with; an empty text if there are no words."""
    prefix = given[0] if given else ""
    for word in given:
        while not word.startswith(prefix):
            prefix = prefix[:-1]
    return prefix


def longest_without_repeat(text: str) -> int:
    """Return the length of the longest contiguous part in which no letter occurs twice."""
    last: dict[str, int] = {}
    start = best = 0
    for place, letter in enumerate(text):
        start = max(start, last.get(letter, -1) + 1)
        last[letter] = place
        best = max(best, place - start + 1)
    return best


def word_count(text: str) -> dict[str, int]:
    """Count the words of a text, which are separated by blanks, without regard to upper and lower case."""
    counts: dict[str, int] = {}
    for word in text.lower().split():
        counts[word] = counts.get(word, 0) + 1
    return counts


def matches(pattern: str, text: str) -> bool:
    """Tell whether a pattern matches a whole text: `?` stands for any one letter, `*` for any number of any letters."""
    ends = {0}
    for sign in pattern:
        if sign == "*":
            ends = set(range(min(ends, default=len(text) + 1), len(text) + 1))
        else:
            ends = {end + 1 for end in ends if end < len(text) and sign in ("?", text[end])}
    return len(text) in ends


def snake_case(name: str) -> str:
    """Turn a name such as `someLongName` into `some_long_name`: an underscore before each capital but a first one, and
    all letters small."""
    parts = [
        f"_{letter.lower()}" if letter.isupper() and place else letter.lower()
        for place, letter in enumerate(name)
    ]
    return "".join(parts)


TEXTS = (
    CodeProblem(run_lengths, lambda rng: [letters(rng, "aab")], [[""], ["zzzzzzzzzzz"]]),
    CodeProblem(
        balanced, lambda rng: [letters(rng, "()()[]x", 0, 5)], [[""], ["([]{})"], ["([)]"], ["a(b)c"]]
    ),
    CodeProblem(longest_palindrome, lambda rng: [letters(rng, "abc", 1)], [[""], ["abcd"]]),
    CodeProblem(
        edit_distance,
        lambda rng: [letters(rng, "abc", 0, 9), letters(rng, "abc", 0, 9)],
        [["", ""], ["abc", ""]],
    ),
    CodeProblem(group_anagrams, lambda rng: [words(rng)], [[[]], [["ab", "ba", "c"]]]),
    CodeProblem(caesar, lambda rng: [letters(rng, "abyzABYZ !"), whole(rng, -40, 40)], [["", 5], ["Zz", 1]]),
    CodeProblem(
        common_prefix,
        lambda rng: [
            (lambda start: [start + letters(rng, "ab", 0, 4) for _ in range(whole(rng, 1, 4))])(
                letters(rng, "abc", 0, 4)
            )
        ],
        [[[]], [["a", ""]]],
    ),
    CodeProblem(longest_without_repeat, lambda rng: [letters(rng, "abcde")], [[""], ["aaaa"]]),
    CodeProblem(word_count, lambda rng: [" ".join(words(rng, "aAb", 1, 8))], [[""], ["  a  A "]]),
    CodeProblem(
        matches,
        lambda rng: [letters(rng, "ab?*", 0, 5), letters(rng, "ab", 0, 6)],
        [["", ""], ["*", ""], ["a*b", "ab"]],
    ),
    CodeProblem(snake_case, lambda rng: [letters(rng, "abcDE", 1)], [[""], ["Already"]]),
)
