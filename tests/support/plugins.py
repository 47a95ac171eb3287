"""Parts of a run as a user writes them, for settings that name `module:attr`."""

from rollgym.trainer.rollout.agent import play_episode
from rollgym.trainer.rollout.context import full_history
from rollgym.trainer.tasks.task import Task


def pay_valid_replies(trajectory):
    """One for every reply that could be read, whatever the environment paid."""
    return [float(turn.action_is_valid) for turn in trajectory.turns]


async def two_turn_agent(session, task, member, actor, max_turns, attempt):
    """Our agent, but never more than two turns."""
    return await play_episode(session, task, member, actor, min(max_turns, 2), attempt)


def forgetful(history, observation):
    """Show every second turn without its past."""
    return full_history(history if len(history) % 2 else [], observation)


class EvenSeeds:
    """Plays even seeds only."""

    def __init__(self, settings, seed):
        self._entry = settings.tasks[0]

    def task(self, index):
        return Task(index, self._entry.env_id, seed=2 * index, kwargs=self._entry.kwargs, domain="even")


class LakesOnly:
    """Names its environment itself, whatever the settings say."""

    def __init__(self, settings, seed):
        self._seed = seed

    def task(self, index):
        return Task(
            index, "FrozenLake-v0", seed=self._seed + index, kwargs={"size": 4, "max_episode_steps": 8}
        )
