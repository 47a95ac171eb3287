"""What all adapters are made of: operations of our own protocol."""

from collections.abc import Mapping
from typing import Any

from rollgym.clients.protocol.arrays import DecodeError
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.frames import loads
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
    operations: Calls, context: Context, session_id: str, action: Any, **place: int
) -> Reply:
    """Take a step whose action may have come as text whatever the action space: its JSON then counts, too.

    Args:
        operations: What takes it.
        context: On whose behalf.
        session_id: The session.
        action: The action, or its JSON as text.
        **place: `episode` and `step`, where the same step may be asked for again.

    Raises:
        ProblemError: Any of a step's problems.
    """
    fields = {"session_id": session_id, **place}
    try:
        return await operate(operations, context, "step", {**fields, "action": action})
    except ProblemError as problem:
        if problem.code != "invalid_action" or not isinstance(action, str):
            raise
        try:
            action = loads(action, binary=False)
        except DecodeError:
            raise problem from None
    return await operate(operations, context, "step", {**fields, "action": action})
