"""A task source of one's own: `rollout.task_source=examples.extensions.task_source:Growing`."""

from rollgym import Task, derive_seed


class Growing:
    """Lakes that grow with the run. Task i is a function of the seed and i alone, so a resumed run goes on with it.

    Args:
        settings: The run's settings.
        seed: Its seed.
    """

    def __init__(self, settings, seed):
        self.seed = seed

    def task(self, index):
        """Return the task at `index`."""
        size = 4 if index < 200 else 5
        kwargs = {"size": size, "split": "train", "max_episode_steps": 2 * size}
        seed = derive_seed(self.seed, "growing", index)
        return Task(index, "FrozenLake-v0", seed=seed, kwargs=kwargs, domain=f"lake of {size}")
