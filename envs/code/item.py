"""A problem with its tests, whatever form it came in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollgym.envs.code.inside import values
from rollgym.sandbox.core.base import Language

if TYPE_CHECKING:
    from rollgym.envs.code.suites import Suite


class ItemError(ValueError):
    """An item is not of the form that its fields announce."""


@dataclass(frozen=True, slots=True)
class ProgramCall:
    """A call of the program, and what it should answer.

    Attributes:
        name: The function, or a method of the class Solution.
        args: Positional arguments.
        accepted: The answers that are right.
    """

    name: str
    args: Sequence[Any]
    accepted: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Stream:
    """A run of the program: what it reads, and what it should write."""

    stdin: str
    accepted: Sequence[str]


@dataclass(frozen=True, slots=True)
class Reference:
    """Inputs whose answers are those of a reference program, which runs apart from the one that is tested.

    Attributes:
        source: The reference program.
        name: The function that is called.
        inputs: Positional arguments of each call.
        tolerance: How far numbers may be apart; None if they must be equal.
    """

    source: str
    name: str
    inputs: Sequence[Sequence[Any]]
    tolerance: float | None


@dataclass(frozen=True, kw_only=True)
class Item:
    """A problem with its tests. One of `calls`, `streams`, `suite` and `reference` holds them.

    Attributes:
        form: Its source, in a word.
        question: What the policy is asked.
        starter: Code that the policy is given to begin with.
        entry: The function that is called; None for a program that reads and writes.
        before: Source that runs before the program, in the same module.
        prompt: Text that a program may continue instead of defining the entry itself.
        visible: How many of the tests may be shown, from the first on.
        seconds: Time of one test, where the item says so.
        memory_mb: MiB of memory, where the item says so.
        loose: Whether answers are compared as JSON knows them: a tuple is a list.
    """

    form: str
    question: str
    starter: str = ""
    entry: str | None = None
    before: str = ""
    prompt: str = ""
    calls: Sequence[ProgramCall] = ()
    streams: Sequence[Stream] = ()
    suite: Suite | None = None
    reference: Reference | None = None
    visible: int = 0
    seconds: float | None = None
    memory_mb: int | None = None
    loose: bool = False
    language: Language = "python"

    @property
    def tests(self) -> int:
        """How many tests there are."""
        if self.suite is not None:
            return self.suite.tests
        if self.reference is not None:
            return len(self.reference.inputs)
        return len(self.calls) + len(self.streams)


def sent_arguments(args: Sequence[Any]) -> Any:
    """Return arguments as they are sent.

    Raises:
        ItemError: One cannot be sent.
    """
    try:
        return values.plain(list(args))
    except values.ValueRefusedError as error:
        raise ItemError(f"an input of the item cannot be passed on: {error}") from None
