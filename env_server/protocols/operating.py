"""The common part of all adapters: operations of this server's own protocol."""

from collections.abc import Mapping
from typing import Any

from rollgym.clients.protocol.arrays import DecodeError, EncodeError
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.frames import dumps, loads
from rollgym.env_server.access.context import Context
from rollgym.env_server.operations.operations import Calls
from rollgym.env_server.sessions.replies import Reply


async def operate(operations: Calls, context: Context, op: str, fields: Mapping[str, Any]) -> Reply:
    """Run an operation and wait for its answer.

    Raises:
        ProblemError: Any of the protocol's problems.
    """
    reply = operations.call(context, op, fields)
    return reply if isinstance(reply, dict) else await reply


async def step_by_text(
    operations: Calls,
    context: Context,
    session_id: str,
    action: Any,
    timeout_s: float | None = None,
    **place: int,
) -> Reply:
    """Take a step with an action that may be in another form than the action space's.

    A text may be the JSON of a value, and a value may stand for its JSON as text: some clients parse a reply such as
    `42` as JSON before they send it, even if the environment takes text.

    Args:
        operations: Carries the step out.
        context: The caller.
        session_id: The session.
        action: The action, or its JSON as text.
        timeout_s: How long the step may take; the server's limit if None.
        **place: `episode` and `step`, if the step may be retried.

    Raises:
        ProblemError: Any of a step's problems.
    """
    step = {"session_id": session_id, **place, **({} if timeout_s is None else {"timeout_s": timeout_s})}
    try:
        return await operate(operations, context, "step", {**step, "action": action})
    except ProblemError as problem:
        if problem.code != "invalid_action":
            raise
        try:
            other = loads(action, binary=False) if isinstance(action, str) else _as_text(action)
            return await operate(operations, context, "step", {**step, "action": other})
        except (DecodeError, EncodeError):
            raise problem from None
        except ProblemError as second:
            # The problem of the original action says more.
            raise problem if second.code == "invalid_action" else second from None


def _as_text(value: Any) -> str:
    return dumps(value, binary=False).decode()
