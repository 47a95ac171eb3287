"""Problems about numbers."""

from rollgym.envs.code.problems.problem import Problem, whole, wholes


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
    Problem(digit_sum, lambda rng: [whole(rng, -99999, 99999)], [[0], [-70]]),
    Problem(prime_factors, lambda rng: [whole(rng, 2, 3000)], [[2], [97], [1024]]),
    Problem(to_roman, lambda rng: [whole(rng, 1, 3999)], [[4], [3999], [1944]]),
    Problem(in_base, lambda rng: [whole(rng, -5000, 5000), whole(rng, 2, 16)], [[0, 2], [-255, 16]]),
    Problem(collatz_steps, lambda rng: [whole(rng, 1, 500)], [[1], [27]]),
    Problem(
        ways_up,
        lambda rng: [whole(rng, 1, 14), sorted({whole(rng, 1, 5) for _ in range(3)})],
        [[0, [1, 2]], [3, [2]]],
    ),
    Problem(last_standing, lambda rng: [whole(rng, 1, 40), whole(rng, 1, 9)], [[1, 3], [5, 1]]),
    Problem(
        add_fractions,
        lambda rng: [[whole(rng, -9, 9), whole(rng, 1, 12)], [whole(rng, -9, 9), whole(rng, 1, 12)]],
        [[[1, 2], [-1, 2]], [[0, 5], [0, 7]]],
    ),
    Problem(
        weekday,
        lambda rng: [whole(rng, 1900, 2100), whole(rng, 1, 12), whole(rng, 1, 28)],
        [[2000, 2, 29], [2024, 12, 31]],
    ),
    Problem(mean_without_extremes, lambda rng: [wholes(rng, 0, 50)], [[[]], [[1, 2]], [[5, 5, 5]]]),
)
