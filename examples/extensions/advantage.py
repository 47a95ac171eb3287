"""An advantage of one's own: `algorithm.advantage={kind: custom, function: examples.extensions.advantage:later}`."""

from rollgym import TrajectoryBatch


def later(batch: TrajectoryBatch) -> list[list[float]]:
    """What follows a turn, less the mean of what follows the same turn in all episodes.

    Args:
        batch: The episodes of an update: groups, and rewards, anchors and more of each turn.

    Returns:
        For each episode, one number for each turn.
    """
    returns = []
    for rewards in batch.rewards:
        left = [sum(rewards[place:]) for place in range(len(rewards))]
        returns.append(left)
    longest = max(len(each) for each in returns)
    at = [[each[place] for each in returns if place < len(each)] for place in range(longest)]
    means = [sum(values) / len(values) for values in at]
    return [[value - means[place] for place, value in enumerate(each)] for each in returns]
