"""OpenEnv over HTTP: what it says of an environment, and calls that each have an environment of their own."""

from collections.abc import Mapping
from typing import Any

from fastapi import Response

from rollgym.env_server.http.call_routes import Call, PathId, call_router
from rollgym.env_server.http.openapi import MAKES, problems
from rollgym.env_server.protocols.openenv_forms import (
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
from rollgym.env_server.protocols.operating import operate
from rollgym.env_server.sessions.replies import Reply

PREFIX = "/openenv/{env_id}"
"""The base URL of an environment for OpenEnv's clients."""

OPENENV_CALLS = call_router()
OPENENV_HEALTH = call_router(None)

_SAYS = problems("unknown_env", "draining")
# The session of one call is closed when that is answered; were the process to die before, it would not stay long.
_ONE_CALL_S = 60.0


@OPENENV_CALLS.post(f"{PREFIX}/reset", response_model=OpenEnvReply, responses=problems(*MAKES, "unknown_env"))
async def openenv_reset(call: Call, env_id: PathId, request: OpenEnvResetRequest) -> Response:
    """OpenEnv: how an episode begins."""
    return await _once(call, env_id, request)


@OPENENV_CALLS.post(
    f"{PREFIX}/step",
    response_model=OpenEnvReply,
    responses=problems(*MAKES, "unknown_env", "invalid_action"),
)
async def openenv_step(call: Call, env_id: PathId, request: OpenEnvStepRequest) -> Response:
    """OpenEnv: the first step of an episode."""
    step = {"action": request.action.action}
    if request.timeout_s is not None:
        step["timeout_s"] = request.timeout_s
    return await _once(call, env_id, request, step)


async def _once(
    call: Call, env_id: str, request: OpenEnvResetRequest, step: Mapping[str, Any] | None = None
) -> Response:
    """Begin an episode, take a step in it if there is one, and end the session."""
    operations, context = call.services.operations, call.context
    made = await operate(
        operations,
        context,
        "make",
        {
            "env_id": env_id,
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
    return call.answer(observation_payload(reply, made["observation_space"]["type"]))


@OPENENV_CALLS.get(f"{PREFIX}/state", response_model=OpenEnvState, responses=_SAYS)
async def openenv_state(call: Call, env_id: PathId) -> Response:
    """OpenEnv: the state of a session that has not begun."""
    await _info(call, env_id)
    return call.answer(OpenEnvState().model_dump())


@OPENENV_CALLS.get(f"{PREFIX}/schema", response_model=OpenEnvSchemas, responses=_SAYS)
async def openenv_schema(call: Call, env_id: PathId) -> Response:
    """OpenEnv: what goes over the wire."""
    return call.answer(schemas_payload(await _info(call, env_id)))


@OPENENV_CALLS.get(f"{PREFIX}/metadata", response_model=OpenEnvMetadata, responses=_SAYS)
async def openenv_metadata(call: Call, env_id: PathId) -> Response:
    """OpenEnv: what the environment is."""
    return call.answer(metadata_payload(await _info(call, env_id)))


@OPENENV_HEALTH.get(
    f"{PREFIX}/health", response_model=OpenEnvHealth, responses=_SAYS, openapi_extra={"security": []}
)
async def openenv_health(call: Call, env_id: PathId) -> Response:
    """OpenEnv: whether the environment is served."""
    await _info(call, env_id)
    return call.answer({"status": "healthy"})


async def _info(call: Call, env_id: str) -> Reply:
    return await operate(call.services.operations, call.context, "envs", {"env_id": env_id})
