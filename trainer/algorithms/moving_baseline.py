"""A baseline without groups: the moving average of what a domain or task returned so far."""

from collections.abc import Mapping, Sequence


def moving_baseline_advantages(
    returns: Sequence[float], keys: Sequence[str], baselines: Mapping[str, float], decay: float = 0.95
) -> tuple[list[float], dict[str, float]]:
    """Return each episode's return less its key's average, and the averages after all of them.

    Role-conditioned advantage estimation (SPIRAL, arXiv:2506.24119, section 3.3): an episode is compared with the
    average before it takes part in it; averages begin at 0.

    Args:
        returns: Return of each episode, in the order in which averages take them in.
        keys: What each is averaged with: its domain, role, or task.
        baselines: The averages before.
        decay: What an average keeps at each episode.
    """
    averages = dict(baselines)
    advantages = []
    for value, key in zip(returns, keys, strict=True):
        before = averages.pop(key, 0.0)
        advantages.append(value - before)
        averages[key] = decay * before + (1 - decay) * value
    return advantages, averages
