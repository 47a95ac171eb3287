"""Messages between an I/O process and a Ray actor: several operations in one call, several answers in one reply.

As between an I/O process and its children, replies may contain only plain data and arrays.
"""

import pickle
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from rollgym.env_server.workers.base import EnvironmentRaised, OperationTimeout, WorkerLost
from rollgym.env_server.workers.wire import (
    RAISED,
    RESULT,
    FrameReader,
    dump_request,
    dump_result,
    frame,
    load_request,
    load_result,
)

TIMED_OUT = 3
"""The operation took too long; the body holds the message."""
LOST = 4
"""The environment is gone; the body holds the message, and whether the operation is to blame."""

UNANSWERED = 0
"""The number of operations whose result is discarded."""

Failure = EnvironmentRaised | OperationTimeout | WorkerLost


class Request(NamedTuple):
    """An operation that is sent to an actor.

    Attributes:
        number: The number of its answer, or `UNANSWERED`.
        op: A method of a worker, or `cancel`.
        arguments: The arguments of the call.
        timeout: The time-out of the operation, in seconds.
    """

    number: int
    op: str
    arguments: tuple[Any, ...]
    timeout: float | None


class Answer(NamedTuple):
    """The result of an operation."""

    number: int
    result: Any
    failure: Failure | None


def dump_requests(requests: Iterable[Request]) -> bytes:
    """Write requests. They are an I/O process's own."""
    return dump_request([tuple(request) for request in requests])


def load_requests(body: bytes) -> Iterator[Request]:
    """Read requests, in their order."""
    return map(Request._make, load_request(body))


def dump_answer(number: int, result: Any) -> bytes:
    """Write a result. It came from a child process, so that it is plain data."""
    return frame(number, RESULT, dump_result(result))


def dump_failure(number: int, failure: Failure) -> bytes:
    """Encode why an operation has no result."""
    if isinstance(failure, EnvironmentRaised):
        return frame(
            number, RAISED, dump_result((failure.error_class, failure.message, failure.builtin_bases))
        )
    if isinstance(failure, OperationTimeout):
        return frame(number, TIMED_OUT, dump_result((str(failure),)))
    return frame(number, LOST, dump_result((str(failure), failure.at_fault)))


def load_answers(body: bytes) -> Iterator[Answer]:
    """Read the answers of one reply."""
    for number, status, content in FrameReader().feed(body):
        try:
            read = load_result(content)
        except pickle.UnpicklingError as error:
            yield Answer(number, None, EnvironmentRaised("TypeError", str(error)))
            continue
        if status == RESULT:
            yield Answer(number, read, None)
        else:
            yield Answer(number, None, _failure(status, read))


def _failure(status: int, content: tuple[Any, ...]) -> Failure:
    if status == RAISED:
        return EnvironmentRaised(*content)
    if status == TIMED_OUT:
        return OperationTimeout(*content)
    message, at_fault = content
    return WorkerLost(message, at_fault=at_fault)
