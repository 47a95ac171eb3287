"""OpenEnv: descriptions of an environment and calls over HTTP, each of which makes an environment of its own."""

from fastapi import Response

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.http.call_routes import Call, PathId, call_router
from rollgym.env_server.http.openapi import MAKES, problems
from rollgym.env_server.protocols.openenv_forms import (
    TASKS_PER_SPLIT,
    OpenEnvHealth,
    OpenEnvMetadata,
    OpenEnvReply,
    OpenEnvResetRequest,
    OpenEnvSchemas,
    OpenEnvSplit,
    OpenEnvSplitRequest,
    OpenEnvState,
    OpenEnvStepRequest,
    OpenEnvTaskCount,
    OpenEnvTaskRange,
    OpenEnvTaskRangeRequest,
    OpenEnvTaskReply,
    OpenEnvTaskRequest,
    OpenEnvTasksReply,
    SeedTasks,
    metadata_payload,
    observation_payload,
    schemas_payload,
)
from rollgym.env_server.protocols.operating import operate, step_by_text
from rollgym.env_server.sessions.replies import Reply

PREFIX = "/openenv/{env_id}"
"""The base URL of an environment for OpenEnv's clients."""

OPENENV_CALLS = call_router()
OPENENV_HEALTH = call_router(None)

_SAYS = problems("unknown_env", "draining")
_TASKS = f"{PREFIX}/{{env_name}}"
_PREVIEW = 1000
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
    return await _once(call, env_id, request, request)


async def _once(
    call: Call, env_id: str, request: OpenEnvResetRequest, step: OpenEnvStepRequest | None = None
) -> Response:
    """Begin an episode, take a step in it if there is one, and end the session."""
    operations, context = call.services.operations, call.context
    if request.index is not None:
        request = request.of_task(await _info(call, env_id))
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
            action = step.action.action
            reply = await step_by_text(operations, context, session_id, action, step.timeout_s)
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
    """OpenEnv: the JSON Schemas of its messages."""
    return call.answer(schemas_payload(await _info(call, env_id)))


@OPENENV_CALLS.get(f"{PREFIX}/metadata", response_model=OpenEnvMetadata, responses=_SAYS)
async def openenv_metadata(call: Call, env_id: PathId) -> Response:
    """OpenEnv: the metadata of an environment."""
    return call.answer(metadata_payload(await _info(call, env_id)))


@OPENENV_HEALTH.get(
    f"{PREFIX}/health", response_model=OpenEnvHealth, responses=_SAYS, openapi_extra={"security": []}
)
async def openenv_health(call: Call, env_id: PathId) -> Response:
    """OpenEnv: whether the environment is served."""
    await _info(call, env_id)
    return call.answer({"status": "healthy"})


# -- tasks -------------------------------------------------------------------------------------------------------------


@OPENENV_CALLS.get(f"{PREFIX}/list_environments", response_model=list[str], responses=_SAYS)
async def openenv_list_environments(call: Call, env_id: PathId) -> Response:
    """OpenEnv: the environments at this base URL, which is one."""
    return call.answer([(await _info(call, env_id))["env_id"]])


@OPENENV_CALLS.get(f"{_TASKS}/splits", response_model=list[OpenEnvSplit], responses=_SAYS)
async def openenv_splits(call: Call, env_id: PathId, env_name: PathId) -> Response:
    """OpenEnv: the splits of the tasks."""
    return call.answer((await _tasks(call, env_id, env_name)).described())


@OPENENV_CALLS.post(f"{_TASKS}/tasks", response_model=OpenEnvTasksReply, responses=_SAYS)
async def openenv_tasks(
    call: Call, env_id: PathId, env_name: PathId, request: OpenEnvSplitRequest
) -> Response:
    """OpenEnv: the first tasks of a split."""
    tasks = (await _tasks(call, env_id, env_name)).range(request.split, 0, _PREVIEW)
    return call.answer({"tasks": tasks, "env_name": env_id})


@OPENENV_CALLS.post(f"{_TASKS}/num_tasks", response_model=OpenEnvTaskCount, responses=_SAYS)
async def openenv_num_tasks(
    call: Call, env_id: PathId, env_name: PathId, request: OpenEnvSplitRequest
) -> Response:
    """OpenEnv: how many tasks a split has."""
    (await _tasks(call, env_id, env_name)).check(request.split)
    return call.answer({"num_tasks": TASKS_PER_SPLIT})


@OPENENV_CALLS.post(f"{_TASKS}/task", response_model=OpenEnvTaskReply, responses=_SAYS)
async def openenv_task(call: Call, env_id: PathId, env_name: PathId, request: OpenEnvTaskRequest) -> Response:
    """OpenEnv: one task by its index."""
    return call.answer({"task": (await _tasks(call, env_id, env_name)).task(request.split, request.index)})


@OPENENV_CALLS.post(f"{_TASKS}/task_range", response_model=OpenEnvTaskRange, responses=_SAYS)
async def openenv_task_range(
    call: Call, env_id: PathId, env_name: PathId, request: OpenEnvTaskRangeRequest
) -> Response:
    """OpenEnv: some tasks of a split."""
    tasks = await _tasks(call, env_id, env_name)
    return call.answer({"tasks": tasks.range(request.split, request.start, request.stop)})


async def _tasks(call: Call, env_id: str, env_name: str) -> SeedTasks:
    """The tasks of the environment, by its name below its own base URL."""
    described = await _info(call, env_id)
    if env_name.lower() != env_id.lower():
        raise ProblemError("unknown_env", f"the environment here is {env_id}, not {env_name[:100]!r}")
    return SeedTasks.of(described)


async def _info(call: Call, env_id: str) -> Reply:
    return await operate(call.services.operations, call.context, "envs", {"env_id": env_id})
