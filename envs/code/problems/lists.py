"""Problems about lists of numbers."""

from rollgym.envs.code.problems.problem import Problem, whole, wholes


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
    Problem(running_maximum, lambda rng: [wholes(rng, -20, 20)], [[[]], [[-3, -5]]]),
    Problem(rotate_right, lambda rng: [wholes(rng, 0, 9), whole(rng, -15, 15)], [[[], 3], [[1, 2, 3], 0]]),
    Problem(longest_run, lambda rng: [wholes(rng, 0, 2)], [[[]], [[4, 4, 4]]]),
    Problem(
        merge_intervals,
        lambda rng: [
            [[(start := whole(rng, 0, 30)), start + whole(rng, 0, 6)] for _ in range(whole(rng, 1, 7))]
        ],
        [[[]], [[[1, 4], [4, 5]]], [[[5, 6], [1, 9]]]],
    ),
    Problem(pairs_with_sum, lambda rng: [wholes(rng, 0, 8), whole(rng, 2, 14)], [[[], 0], [[2, 2, 2], 4]]),
    Problem(largest_sum, lambda rng: [wholes(rng, -9, 9)], [[[]], [[-4, -2, -7]]]),
    Problem(trapped_water, lambda rng: [wholes(rng, 0, 6)], [[[]], [[5]], [[3, 0, 3]]]),
    Problem(
        spiral,
        lambda rng: [
            (lambda width: [wholes(rng, 0, 99, width, width) for _ in range(whole(rng, 1, 4))])(
                whole(rng, 1, 4)
            )
        ],
        [[[]], [[[7]]]],
    ),
    Problem(
        fewest_coins,
        lambda rng: [sorted({whole(rng, 2, 12) for _ in range(3)}), whole(rng, 0, 40)],
        [[[5], 0], [[4, 6], 7]],
    ),
    Problem(
        islands,
        lambda rng: [
            (lambda width: [wholes(rng, 0, 1, width, width) for _ in range(whole(rng, 1, 5))])(
                whole(rng, 1, 5)
            )
        ],
        [[[]], [[[0, 0]]]],
    ),
    Problem(longest_increasing, lambda rng: [wholes(rng, 0, 15)], [[[]], [[5, 5, 5]]]),
    Problem(next_greater, lambda rng: [wholes(rng, 0, 9)], [[[]], [[9, 8, 7]]]),
)
