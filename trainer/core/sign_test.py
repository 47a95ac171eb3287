"""How many of some differences may be on the wrong side before chance no longer explains it."""

from math import comb

CHANCE = 1e-7
"""How often a sign test may refuse what is right."""


def least_by_no_chance(count: int) -> int:
    """Return how many of some tokens are further away by no chance; more than there are if that cannot be said.

    If each is further away with a probability of at most a half, as many or more are with one of at most `CHANCE`.

    Args:
        count: Number of tokens.
    """
    tail = 0.0
    for further in range(count, -1, -1):
        tail += comb(count, further) / 2.0**count
        if tail > CHANCE:
            return further + 1
    return 0
