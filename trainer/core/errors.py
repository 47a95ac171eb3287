"""Errors that a user can correct. They end a command with one line; any other exception is an internal error."""

from functools import partial
from typing import Any


class TrainerError(Exception):
    """Base of the errors whose message is all that a user needs."""


class ConfigError(TrainerError, ValueError):
    """The settings cannot be used; the message says where and what to do."""


class UnplayableTaskError(ConfigError):
    """One task cannot be played, and a retry cannot help; other tasks may be playable."""


class CheckpointError(TrainerError):
    """A checkpoint is missing or damaged, or belongs to another run."""


class RunError(TrainerError, RuntimeError):
    """A run cannot continue; the message says why and what to do."""


class RoleDiedError(RunError):
    """A process of a role has died; its work can be restarted.

    Attributes:
        role: Its name in the settings, such as `actor_train`.
        node: Its machine, for people; empty if it was beside the driver.
        killed: Whether it was killed, as the system does when memory runs out.
        with_its_node: Whether its whole machine has failed.
    """

    def __init__(
        self, role: str, what: str, *, node: str = "", killed: bool = False, with_its_node: bool = False
    ) -> None:
        super().__init__(what)
        self.role = role
        self.node = node
        self.killed = killed
        self.with_its_node = with_its_node

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how it is made again in another process."""
        return partial(type(self), **self.circumstances()), (self.role, str(self))

    def circumstances(self) -> dict[str, Any]:
        """Return the place and manner of its death, as the keyword arguments of its constructor."""
        return {"node": self.node, "killed": self.killed, "with_its_node": self.with_its_node}


class RoleLostError(RunError):
    """A process of a role died repeatedly, and the run cannot continue; the message says why and what to do.

    Attributes:
        role: Its name in the settings.
        node: Its last machine; empty if it was beside the driver.
    """

    def __init__(self, role: str, node: str, what: str) -> None:
        super().__init__(what)
        self.role = role
        self.node = node

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how it is made again in another process."""
        return type(self), (self.role, self.node, str(self))


class PluginError(TrainerError):
    """The user's code failed or broke its contract; the message names it, with file and line of the failure."""


class InvalidNumberError(Exception):
    """A value that should be a number is not finite, not a number at all, or too large to compute with."""
