"""The interface of workers, which hold environment objects in different places."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import gymnasium
from gymnasium import Space

from rollgym.env_server.common.metrics import OperationTimes

if TYPE_CHECKING:
    # Children import this module, and need nothing of pydantic.
    from rollgym.clients.protocol.messages import Isolation

Spaces = tuple[Space[Any], Space[Any]]
"""An environment's action space and observation space."""

Verdict = dict[str, Any]
"""A verifier's judgement of one response: `score`, `outcome` and `detail`."""


@dataclass(frozen=True, slots=True)
class EnvSource:
    """How to build an environment, in any worker.

    Attributes:
        kind: Whether `target` is `module:Class`, a Gymnasium id, or an environment that other servers have.
        target: The entry point to build.
        env_id: The environment's id, for the log.
        operator_kwargs: Kwargs that the operator set; they win over a client's.
        pinned_thread: Whether all calls of one environment must come from one thread.
    """

    kind: Literal["class", "gymnasium", "registered"]
    target: str
    operator_kwargs: Mapping[str, Any] = field(default_factory=dict)
    pinned_thread: bool = False
    env_id: str = ""

    def build(self, kwargs: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
        """Build the environment. This runs code of its author: call it within `boundary` only."""
        merged = {**kwargs, **self.operator_kwargs}
        if self.kind == "gymnasium":
            # Gymnasium's checker would repeat at every first step the findings of `roll-env check`.
            return gymnasium.make(self.target, disable_env_checker=True, **merged)
        module_name, _, class_name = self.target.partition(":")
        try:
            env_class = getattr(importlib.import_module(module_name), class_name)
        except (ImportError, AttributeError) as error:
            raise ImportError(f"cannot import {self.target}: {error}") from error
        environment: gymnasium.Env[Any, Any] = env_class(**merged)
        return environment


class StepOutcome(NamedTuple):
    """An environment's answer to a step."""

    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]


class EnvironmentRaised(Exception):  # noqa: N818 - the name says what happened
    """Code of an environment raised an exception, or returned a value that breaks Gymnasium's API.

    Args:
        error_class: The name of the exception's class.
        message: Its text.
        builtin_bases: The names of Python's own exceptions that its class derives from, itself among them.
    """

    def __init__(self, error_class: str, message: str, builtin_bases: Sequence[str] = ()) -> None:
        super().__init__(error_class, message, builtin_bases)
        self.error_class = error_class
        self.message = message
        self.builtin_bases = tuple(builtin_bases)

    def is_one_of(self, names: Set[str]) -> bool:
        """Whether the exception is one of Python's own, or derives from one."""
        return self.error_class in names or not names.isdisjoint(self.builtin_bases)

    def __str__(self) -> str:
        return f"{self.error_class}: {self.message}"


class OptionsRefused(EnvironmentRaised):
    """An environment refused the values of the options that a reset gave it."""


class WorkerLost(Exception):  # noqa: N818 - the name says what happened
    """The environment is gone: the worker that held it died, or was ended.

    Args:
        message: What happened.
        at_fault: Whether this was the operation that ran when the worker died. The environments of the others died
            with it through no fault of theirs, so that trying them again is always safe.
    """

    def __init__(self, message: str, *, at_fault: bool = False) -> None:
        super().__init__(message)
        self.at_fault = at_fault


class ServerLost(WorkerLost):
    """A registered server failed, or none is there."""


class ServerFailed(Exception):  # noqa: N818 - the name says what happened
    """A registered server failed an operation, and has the environment still; whether it was done is not known."""


class OperationTimeout(Exception):  # noqa: N818 - the name says what happened
    """The operation did not finish in time; its environment is gone."""


class NoWorker(OperationTimeout):
    """Nothing could be had in time to run the operation in; that says nothing about its environment."""


class Worker(ABC):
    """Holds environments, each under a key.

    Operations on one key come one at a time. A time-out counts from when the operation begins to run. After
    `OperationTimeout`, `WorkerLost`, or when the awaiting task was cancelled, the environment under the key is gone,
    and `make` with the same key puts a new one there.
    """

    isolation: ClassVar["Isolation"]

    def __init__(self) -> None:
        self.times = OperationTimes()

    @property
    def trouble(self) -> str | None:
        """Why it can make no environment at present, for people; None if it can."""
        return None

    async def start(self) -> None:  # noqa: B027 - most workers have nothing to start
        """Get ready; called once before anything else."""

    @abstractmethod
    async def make(
        self, key: str, source: EnvSource, kwargs: Mapping[str, Any], *, timeout: float | None
    ) -> Spaces:
        """Build an environment under a key, in place of the one there, if any.

        Raises:
            EnvironmentRaised: Its constructor raised, or it could not be imported.
            OperationTimeout: It was not built in time.
            WorkerLost: The worker died while building it.
        """

    @abstractmethod
    async def reset(
        self, key: str, seed: int | None, options: dict[str, Any] | None, *, timeout: float | None
    ) -> tuple[Any, Mapping[str, Any]]:
        """Begin an episode; return the observation and the info. Raises like `make`."""

    @abstractmethod
    async def step(self, key: str, action: Any, *, timeout: float | None) -> StepOutcome:
        """Take a step. Raises like `make`."""

    @abstractmethod
    async def render(self, key: str, mode: str | None, *, timeout: float | None) -> Any:
        """Draw the state in one of the environment's modes (None: as it was made). Raises like `make`."""

    @abstractmethod
    async def reseed(self, key: str, seed: int, *, timeout: float | None) -> None:
        """Set a new seed for the environment's random generator in mid-episode. Raises like `make`."""

    @abstractmethod
    async def verify(
        self, source: EnvSource, items: Sequence[Mapping[str, Any]], *, timeout: float | None
    ) -> list[Verdict]:
        """Score responses, each with its task's fields and by itself, in their order.

        Args:
            source: The verifier.
            items: Each has the `response` and the fields of its task.
            timeout: For each item. One that takes longer has the outcome `timeout`; one that raises, `error`.
        """

    @abstractmethod
    async def close(self, key: str) -> None:
        """Let an environment go, if there is one under the key. One that is running ends with `WorkerLost`."""

    @abstractmethod
    async def shutdown(self) -> None:
        """End all environments and whatever they run in."""


class CallingWorker(Worker):
    """A worker whose environments are in other processes, which answer named operations."""

    async def step(self, key: str, action: Any, *, timeout: float | None) -> StepOutcome:
        """Take a step in the environment's process."""
        return StepOutcome(*await self._run(key, "step", action, timeout=timeout))

    async def render(self, key: str, mode: str | None, *, timeout: float | None) -> Any:
        """Render the state that the environment's process has."""
        return await self._run(key, "render", mode, timeout=timeout)

    async def reseed(self, key: str, seed: int, *, timeout: float | None) -> None:
        """Set a new seed for the random generator in the environment's process."""
        await self._run(key, "reseed", seed, timeout=timeout)

    @abstractmethod
    async def _run(self, key: str, op: str, *arguments: Any, timeout: float | None) -> Any:
        """Have the process of an environment do an operation, and return its result. Raises like `make`."""
