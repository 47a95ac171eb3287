"""Frames of the socket: reading their envelope, answering them."""

import logging
from typing import Any

from rollgym.clients.protocol.arrays import EncodeError
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.frames import dumps
from rollgym.env_server.messages.validation import invalid

_MAX_ID_TEXT = 128
_MAX_ID = 2**53
_log = logging.getLogger(__name__)

FrameId = int | str | None


def frame_id(frame: Any) -> FrameId:
    """The id of a frame, or None if it has no valid id."""
    if type(frame) is dict:
        found = frame.get("id")
        if type(found) is int and 0 <= found < _MAX_ID:
            return found
        if type(found) is str and len(found) <= _MAX_ID_TEXT:
            return found
    return None


def bad_frame(frame: Any) -> ProblemError:
    """The problem that a frame has no envelope."""
    if type(frame) is not dict:
        return invalid("", "a frame must be an object")
    return invalid(
        "id", "every frame needs an id: an integer from 0 below 2**53, or text of at most 128 characters"
    )


def as_problem(error: Exception) -> ProblemError:
    """The problem to answer with; anything but a problem is a defect of the server, and goes to its log."""
    if isinstance(error, ProblemError):
        return error
    if isinstance(error, EncodeError):
        # This server's own answers were encoded before.
        return ProblemError("upstream_error", f"the answer of a registered server {error}")
    _log.error("an operation failed inside the server", exc_info=error)
    return ProblemError("internal", "the server failed; its log says more")


def sendable(problem: ProblemError, *, binary: bool) -> dict[str, Any]:
    """A problem as an object, without members of a registered server that a frame cannot hold."""
    content = problem.to_problem()
    try:
        # As deep as it stands in an answer: in the results of a batch.
        dumps([[[content]]], binary=binary)
    except EncodeError:
        return ProblemError(problem.code, "what more there was to say cannot be sent").to_problem()
    return content
