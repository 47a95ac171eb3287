"""Problems about texts."""

from rollgym.envs.code.problems.problem import Problem, letters, whole, words


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
    Problem(run_lengths, lambda rng: [letters(rng, "aab")], [[""], ["zzzzzzzzzzz"]]),
    Problem(balanced, lambda rng: [letters(rng, "()()[]x", 0, 5)], [[""], ["([]{})"], ["([)]"], ["a(b)c"]]),
    Problem(longest_palindrome, lambda rng: [letters(rng, "abc", 1)], [[""], ["abcd"]]),
    Problem(
        edit_distance,
        lambda rng: [letters(rng, "abc", 0, 9), letters(rng, "abc", 0, 9)],
        [["", ""], ["abc", ""]],
    ),
    Problem(group_anagrams, lambda rng: [words(rng)], [[[]], [["ab", "ba", "c"]]]),
    Problem(caesar, lambda rng: [letters(rng, "abyzABYZ !"), whole(rng, -40, 40)], [["", 5], ["Zz", 1]]),
    Problem(
        common_prefix,
        lambda rng: [
            (lambda start: [start + letters(rng, "ab", 0, 4) for _ in range(whole(rng, 1, 4))])(
                letters(rng, "abc", 0, 4)
            )
        ],
        [[[]], [["a", ""]]],
    ),
    Problem(longest_without_repeat, lambda rng: [letters(rng, "abcde")], [[""], ["aaaa"]]),
    Problem(word_count, lambda rng: [" ".join(words(rng, "aAb", 1, 8))], [[""], ["  a  A "]]),
    Problem(
        matches,
        lambda rng: [letters(rng, "ab?*", 0, 5), letters(rng, "ab", 0, 6)],
        [["", ""], ["*", ""], ["a*b", "ab"]],
    ),
    Problem(snake_case, lambda rng: [letters(rng, "abcDE", 1)], [[""], ["Already"]]),
)
