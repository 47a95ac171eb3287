"""A filter of groups: `algorithm.filter={kind: custom, function: examples.extensions.filter:mixed}`."""

from collections.abc import Sequence


def mixed(groups: Sequence[int], returns: Sequence[float]) -> list[int]:
    """Keep groups whose episodes differ, and the first group where none does.

    Args:
        groups: The group of each episode.
        returns: The return of each episode.

    Returns:
        The numbers of the groups to train on.
    """
    found: dict[int, set[float]] = {}
    for group, value in zip(groups, returns, strict=True):
        found.setdefault(group, set()).add(value)
    return [group for group, values in found.items() if len(values) > 1] or list(groups[:1])
