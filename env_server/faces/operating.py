"""What all faces are made of: operations of our own protocol."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from env_server.context import Context
from env_server.operations import Calls
from env_server.replies import Reply

FaceHandler = Callable[[Calls, Context, Mapping[str, Any]], Awaitable[Reply]]
"""Answers a call of another protocol: with which operations, on whose behalf, and the call's fields."""


async def operate(operations: Calls, context: Context, op: str, fields: Mapping[str, Any]) -> Reply:
    """Run an operation and wait for its answer.

    Raises:
        ProblemError: Any of the protocol's problems.
    """
    reply = operations.call(context, op, fields)
    return reply if isinstance(reply, dict) else await reply
