"""Operations on sessions, many of which go in one frame for each I/O process, and the results of resets and steps."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from rollgym.clients.client.answers import reading
from rollgym.clients.net.caller import ServerCalls
from rollgym.clients.protocol.arrays import DecodeError
from rollgym.clients.protocol.errors import RETRY_LATER, ProblemError
from rollgym.clients.protocol.messages import MAX_SEED

if TYPE_CHECKING:
    from rollgym.clients.client.session import EnvSession


def wire_seed(seed: int) -> int:
    """Return a seed as the wire carries it.

    Raises:
        TypeError: It is not a whole number.
        ValueError: It is negative, or not below 2**53.
    """
    number = seed if isinstance(seed, bool) else operator.index(seed)
    if isinstance(number, bool):
        raise TypeError("a seed is a whole number, not a boolean")
    if not 0 <= number < MAX_SEED:
        shown = number if abs(number) < 2**64 else f"a number of {number.bit_length()} bits"
        raise ValueError(
            f"seed: {shown} is not from 0 to 2**53 - 1, the largest integer that every JSON reader takes"
        )
    return number


class ResetResult(NamedTuple):
    """The start of an episode: the return value of `Env.reset`."""

    observation: Any
    info: dict[str, Any]


class StepResult(NamedTuple):
    """The result of an action: the return value of `Env.step`."""

    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


class Operation(NamedTuple):
    """An operation on a session that is not sent yet, so that many can go in one frame.

    Attributes:
        session: The session.
        fields: The frame.
        take: Turns the server's answer (and whether it is plain data) into the result, and notes it in the record.
    """

    session: EnvSession
    fields: dict[str, Any]
    take: Callable[[dict[str, Any], bool], Any]


Answer = TypeVar("Answer")


async def wait_for_all(works: Iterable[Awaitable[Answer]]) -> list[Answer]:
    """Wait for all awaitables, even if one fails, so that none still runs when this returns.

    Returns:
        Their results, in the same order.

    Raises:
        BaseException: The first error among them, once all have ended.
    """
    answers: list[Answer] = []
    for ended in await asyncio.gather(*works, return_exceptions=True):
        if isinstance(ended, BaseException):
            raise ended
        answers.append(ended)
    return answers


class Batch:
    """Operations of several sessions, and the places for their results.

    Args:
        caller: How to reach the server.
        operations: At most one for each session.
    """

    def __init__(self, caller: ServerCalls, operations: Sequence[Operation]) -> None:
        self._caller = caller
        self._operations = operations
        self._results: list[Any] = [None] * len(operations)
        self._deadline = caller.deadline()

    async def run(self) -> list[Any]:
        """Run all operations; see `EnvClient.run_many`."""
        groups: dict[int, list[int]] = {}
        for position, operation in enumerate(self._operations):
            groups.setdefault(operation.session.process, []).append(position)
        size = self._caller.pool.max_batch
        chunks = [
            (process, positions[first : first + size])
            for process, positions in groups.items()
            for first in range(0, len(positions), size)
        ]
        if len(chunks) == 1:
            await self._run_chunk(*chunks[0])
        else:
            await wait_for_all(self._run_chunk(*chunk) for chunk in chunks)
        return self._results

    async def _run_chunk(self, process: int, positions: Sequence[int], attempt: int = 0) -> None:
        """Run some of the operations in one frame, or in several if one would be too large.

        Args:
            process: The I/O process that owns the sessions.
            positions: The operations.
            attempt: How often the server has refused them with a retry delay before.
        """
        frames = []
        for position in positions:
            operation = self._operations[position]
            operation.fields["session_id"] = operation.session.session_id
            frames.append(operation.fields)
        try:
            reply = await self._caller.call({"op": "batch", "ops": frames}, process, self._deadline)
        except ProblemError as problem:
            if problem.code != "too_large":
                raise
            if len(positions) == 1:
                operation = self._operations[positions[0]]
                self._results[positions[0]] = (
                    operation.session.broken_off(problem, operation.fields) or problem
                )
                return
            half = len(positions) // 2
            await self._run_chunk(process, positions[:half], attempt)
            await self._run_chunk(process, positions[half:], attempt)
            return
        answers = reply.payload
        if not isinstance(answers, list) or len(answers) != len(positions):
            # The answers cannot be matched to the operations.
            answers = [None] * len(positions)
        alone: list[int] = []
        later: list[int] = []
        asked: ProblemError | None = None
        for position, answer in zip(positions, answers, strict=True):
            said = self._take(position, answer, reply.plain)
            if said is None:
                continue
            if said.code in RETRY_LATER:
                later.append(position)
                asked = said if asked is None else max(asked, said, key=_retry_after)
            else:
                alone.append(position)
        works = [self._run_alone(position) for position in alone]
        if asked is not None:
            works.append(self._run_later(process, later, asked, attempt))
        if works:
            await wait_for_all(works)

    def _take(self, position: int, answer: Any, plain: bool) -> ProblemError | None:
        """Store one answer; return its problem if the operation can still be retried or rebuilt."""
        operation = self._operations[position]
        if not isinstance(answer, dict):
            answer = {}
        if "ok" in answer:
            self._note(position, answer["ok"], plain)
            return None
        problem = ProblemError.from_problem(answer.get("error"))
        problem = operation.session.broken_off(problem, operation.fields) or problem
        self._results[position] = problem
        if problem.code in RETRY_LATER or operation.session.can_rebuild(problem, operation.fields):
            return problem
        return None

    async def _run_later(
        self, process: int, positions: Sequence[int], problem: ProblemError, attempt: int
    ) -> None:
        """Retry the refused operations after the server's delay; past the deadline, its refusal is the result."""
        try:
            await self._caller.postpone(problem, attempt, self._deadline)
        except ProblemError:
            return
        if len(positions) == 1:
            await self._run_alone(positions[0])
        else:
            await self._run_chunk(process, positions, attempt + 1)

    async def _run_alone(self, position: int) -> None:
        """Run an operation that the batch could not: put off again, or in a session that is rebuilt."""
        operation = self._operations[position]
        try:
            reply = await operation.session.call(operation.fields, self._deadline)
        except ProblemError as problem:
            self._results[position] = problem
        else:
            self._note(position, reply.payload, reply.plain)

    def _note(self, position: int, payload: Any, plain: bool) -> None:
        """Store the server's result; an unreadable one fails its own operation only."""
        operation = self._operations[position]
        try:
            with reading(operation.fields["op"]):
                self._results[position] = operation.take(payload, plain)
        except DecodeError as error:
            self._results[position] = ProblemError("internal", str(error))


def _retry_after(problem: ProblemError) -> float:
    """The retry delay of a server's refusal, 0 if it names none."""
    asked = problem.extra.get("retry_after", 0)
    return float(asked)
