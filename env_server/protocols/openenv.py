"""OpenEnv over HTTP: what it says of an environment, and calls that each have an environment of their own."""

from collections.abc import Mapping
from typing import Any

from env_server.access.context import Context
from env_server.http.calls import Call
from env_server.messages.validation import validate
from env_server.operations.operations import Calls
from env_server.protocols.openenv_forms import (
    OpenEnvHealth,
    OpenEnvMetadata,
    OpenEnvReply,
    OpenEnvResetRequest,
    OpenEnvSchemas,
    OpenEnvState,
    OpenEnvStepRequest,
    metadata_payload,
    observation_payload,
    schemas_payload,
)
from env_server.protocols.operating import operate
from env_server.sessions.replies import Reply

PREFIX = "/openenv/{env_id}"
"""The base URL of an environment for OpenEnv's clients."""

# The session of one call is closed when that is answered; were the process to die before, it would not stay long.
_ONE_CALL_S = 60.0


async def _reset(operations: Calls, context: Context, fields: Mapping[str, Any]) -> Reply:
    return await _once(operations, context, fields, validate(OpenEnvResetRequest, fields))


async def _step(operations: Calls, context: Context, fields: Mapping[str, Any]) -> Reply:
    request = validate(OpenEnvStepRequest, fields)
    step = {"action": request.action.action}
    if request.timeout_s is not None:
        step["timeout_s"] = request.timeout_s
    return await _once(operations, context, fields, request, step)


async def _once(
    operations: Calls,
    context: Context,
    fields: Mapping[str, Any],
    request: OpenEnvResetRequest,
    step: Mapping[str, Any] | None = None,
) -> Reply:
    """Begin an episode, take a step in it if there is one, and end the session."""
    made = await operate(
        operations,
        context,
        "make",
        {
            "env_id": fields["env_id"],
            "kwargs": request.kwargs,
            "reset": {"seed": request.seed, "options": request.options},
            "idle_timeout_s": _ONE_CALL_S,
        },
    )
    session_id, reply = made["session_id"], made["reset"]
    try:
        if step is not None:
            reply = await operate(operations, context, "step", {"session_id": session_id, **step})
    finally:
        operations.end(context, session_id)
    return observation_payload(reply, made["observation_space"]["type"])


async def _state(operations: Calls, context: Context, fields: Mapping[str, Any]) -> Reply:
    await _info(operations, context, fields)
    return OpenEnvState().model_dump()


async def _schemas(operations: Calls, context: Context, fields: Mapping[str, Any]) -> Reply:
    return schemas_payload(await _info(operations, context, fields))


async def _metadata(operations: Calls, context: Context, fields: Mapping[str, Any]) -> Reply:
    return metadata_payload(await _info(operations, context, fields))


async def _health(operations: Calls, context: Context, fields: Mapping[str, Any]) -> Reply:
    await _info(operations, context, fields)
    return {"status": "healthy"}


async def _info(operations: Calls, context: Context, fields: Mapping[str, Any]) -> Reply:
    return await operate(operations, context, "envs", {"env_id": fields["env_id"]})


OPENENV_CALLS: tuple[Call, ...] = (
    Call(
        *("POST", f"{PREFIX}/reset", "openenv_reset", "OpenEnv: how an episode begins"),
        request=OpenEnvResetRequest,
        replies=(OpenEnvReply,),
        handler=_reset,
    ),
    Call(
        *("POST", f"{PREFIX}/step", "openenv_step", "OpenEnv: the first step of an episode"),
        request=OpenEnvStepRequest,
        replies=(OpenEnvReply,),
        handler=_step,
    ),
    Call(
        *("GET", f"{PREFIX}/state", "openenv_state", "OpenEnv: the state of a session that has not begun"),
        replies=(OpenEnvState,),
        handler=_state,
    ),
    Call(
        *("GET", f"{PREFIX}/schema", "openenv_schema", "OpenEnv: what goes over the wire"),
        replies=(OpenEnvSchemas,),
        handler=_schemas,
    ),
    Call(
        *("GET", f"{PREFIX}/metadata", "openenv_metadata", "OpenEnv: what the environment is"),
        replies=(OpenEnvMetadata,),
        handler=_metadata,
    ),
    Call(
        *("GET", f"{PREFIX}/health", "openenv_health", "OpenEnv: whether the environment is served"),
        replies=(OpenEnvHealth,),
        handler=_health,
        role=None,
    ),
)
