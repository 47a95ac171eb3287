"""What a user can mend. These errors end a command with one line; what is none of them is a defect."""

from typing import Any


class TrainerError(Exception):
    """Base of the errors whose message is all that a user needs."""


class ConfigError(TrainerError, ValueError):
    """The settings cannot be used; the message says where and what to do."""


class RunError(TrainerError, RuntimeError):
    """A run cannot go on; the message says why and what to do."""


class RoleDiedError(RunError):
    """A process of a role is no more; the run can go on from its last checkpoint.

    Attributes:
        role: What the settings call it, such as `actor_train`.
    """

    def __init__(self, role: str, what: str) -> None:
        super().__init__(what)
        self.role = role

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how it is made again in another process."""
        return type(self), (self.role, str(self))


class PluginError(TrainerError):
    """Code of the user's failed or broke its contract; the message names it, with file and line where it failed."""


class InvalidNumberError(Exception):
    """What should be a number is not finite, not a number at all, or too large to compute with."""
