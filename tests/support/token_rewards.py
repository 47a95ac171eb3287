"""Rewards of runs by the tokens that were sampled."""


def even_tokens(trajectory) -> list[float]:
    """A reward that a model of random weights earns, too."""
    replies = [trajectory.segments[turn.segment].ids[turn.start : turn.end] for turn in trajectory.turns]
    return [float(sum(token % 2 == 0 for token in reply)) for reply in replies]
