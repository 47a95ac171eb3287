"""How an environment is announced: its id and where its class is."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """One environment that ships with the project.

    Attributes:
        id: Name without the Gymnasium namespace, such as `FrozenLake-v0`.
        entry_point: `module:Class`.
        max_episode_steps: Step limit of the defaults; None where there is none.
    """

    id: str
    entry_point: str
    max_episode_steps: int | None = None
