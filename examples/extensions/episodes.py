"""A choice of episodes: `algorithm.episodes={kind: custom, function: examples.extensions.episodes:readable}`."""

from rollgym import TrajectoryBatch


def readable(batch: TrajectoryBatch) -> list[bool]:
    """Train on episodes of which the environment could read half of the replies.

    Args:
        batch: The episodes of the groups that are trained on.

    Returns:
        For each episode, whether it is kept.
    """
    kept = [sum(flags) * 2 >= len(flags) for flags in batch.valid]
    return kept if any(kept) else [True] * len(kept)
