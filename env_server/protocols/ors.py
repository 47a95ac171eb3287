"""The Open Reward Standard: an environment's tasks are seeds, its tools are calls that take steps, over HTTP.

The openreward client takes the root of a URL only, so its calls are at the root: `/{env_id}/tools`, and `/tools` of the
environment that the header `X-Deployment` names. A session has the name that `/create_session` gave, which is in
`X-Session-ID`; nothing is made before `/create`. Answers may come as server-sent events: the first at once, the last
when the work behind them is done.
"""

import asyncio
import inspect
import re
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from importlib.metadata import version
from typing import Any

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.messages import IDENTIFIER
from rollgym.env_server.common.io_process import going_away
from rollgym.env_server.common.requests import as_problem, invalid
from rollgym.env_server.http.call_routes import HEADERS, SERVICES, Call, CallRoute, PathId, call_router
from rollgym.env_server.http.openapi import MAKES, RUNS, problems
from rollgym.env_server.operations.operations import CLOSE_NAMED, FIND_NAMED, OPEN_NAMED
from rollgym.env_server.protocols.operating import operate, step_by_text
from rollgym.env_server.protocols.ors_forms import (
    PING,
    TASKS,
    OrsBlock,
    OrsCall,
    OrsCount,
    OrsCreate,
    OrsMessage,
    OrsOneTask,
    OrsOpening,
    OrsRangeRequest,
    OrsScoreGroup,
    OrsSession,
    OrsSplit,
    OrsSplitRequest,
    OrsStatus,
    OrsTaskRequest,
    OrsTasks,
    OrsTools,
    OrsVersion,
    Refused,
    action_of,
    call_id,
    event,
    has_own_tools,
    messages_payload,
    offered_split,
    opening_requests,
    parse_call_id,
    prompt_payload,
    refused_payload,
    result_events,
    result_payload,
    split_payload,
    splits_of,
    task_at,
    tasks_between,
    tools_payload,
)
from rollgym.env_server.sessions.replies import Reply

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_PING_S = 10.0
_SESSION = "x-session-id"
_DEPLOYMENT = "x-deployment"
_KEY = "x-api-key"
_NAME = re.compile(IDENTIFIER)
_LONGEST_ID = 128
# As long as the standard's own server waits for a ping.
_IDLE_S = 900.0
_SESSION_BYTES = 16
_PARAMETER = {
    "name": "X-Session-ID",
    "in": "header",
    "required": True,
    "schema": {"type": "string", "pattern": IDENTIFIER, "description": "As `POST /create_session` gave it."},
}
_OF_SESSION = {"parameters": [_PARAMETER]}
_SAYS = problems("unknown_env", "draining")
_Endpoint = Callable[..., Awaitable[Response]]


class OrsEventStream(Response):
    """A stream of events.

    If the client disconnects, its operation continues without it, and the client may ask for the result again.

    Args:
        first: The first event, sent before anything is done.
        work: Runs the operation, and returns the other events.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, work: Callable[[], Awaitable[Iterable[bytes]]]) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._first = first
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as a response."""
        services = scope[SERVICES]
        task = services.unanswered.enter()
        working = asyncio.ensure_future(self._events(scope))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send(scope, send, self._first)
            while not working.done():
                await asyncio.wait({working, gone}, timeout=_PING_S, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    return
                if not working.done():
                    await self._send(scope, send, PING)
            for each in working.result():
                await self._send(scope, send, each)
            await send({"type": "http.response.body", "body": b""})
        except asyncio.CancelledError:
            # The server ends and waits for this answer no longer.
            await send({"type": "http.response.body", "body": event("error", going_away().detail)})
        except OSError:
            # uvicorn says in this way that the client went away.
            return
        finally:
            working.cancel()
            gone.cancel()
            services.unanswered.leave(task)

    async def _events(self, scope: Scope) -> Iterable[bytes]:
        try:
            return list(await self._work())
        except Exception as error:  # noqa: BLE001 - a defect of ours costs this call, not the server
            problem = as_problem(error)
        scope[SERVICES].metrics.problems[problem.code] += 1
        return [event("error", f"{problem.code}: {problem.detail}")]

    @staticmethod
    async def _send(scope: Scope, send: Send, content: bytes) -> None:
        scope[SERVICES].metrics.http_sent += len(content)
        await send({"type": "http.response.body", "body": content, "more_body": True})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "`task_id`, then `chunk` and `end`, whose data are the parts of a JSON text, or `error`",
        "content": {
            OrsEventStream.media_type: {
                "schema": {
                    "type": "object",
                    "properties": {
                        "event": {"enum": ["task_id", "chunk", "end", "error"]},
                        "data": {"type": "string"},
                    },
                    "required": ["event"],
                }
            }
        },
    }
}


class OrsRoute(CallRoute):
    """A call whose token may be in `X-API-Key`, where the openreward client puts it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler, which also reads the token from `X-API-Key`."""
        respond = super().get_route_handler()

        async def handle(request: Request) -> Response:
            headers = request.scope[HEADERS]
            if headers.get(_KEY) and "authorization" not in headers:
                request.scope[HEADERS] = {**headers, "authorization": f"Bearer {headers[_KEY]}"}
            return await respond(request)

        return handle


ORS_CALLS = call_router(route_class=OrsRoute)


def _of_environment(method: str, path: str, **described: Any) -> Callable[[_Endpoint], _Endpoint]:
    """Route a call of an environment: at the environment's path, and at the root for the one that the header names."""

    def add(endpoint: _Endpoint) -> _Endpoint:
        async def at_root(**given: Any) -> Response:
            return await endpoint(env_id=None, **given)

        signature = inspect.signature(endpoint)
        kept = [each for each in signature.parameters.values() if each.name != "env_id"]
        at_root.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        at_root.__name__, at_root.__doc__ = f"{endpoint.__name__}_at_root", endpoint.__doc__
        ORS_CALLS.add_api_route(f"/{{env_id}}{path}", endpoint, methods=[method], **described)
        ORS_CALLS.add_api_route(path, at_root, methods=[method], include_in_schema=False, **described)
        return endpoint

    return add


# -- what there is -------------------------------------------------------------------------------------------------


@ORS_CALLS.get("/version", response_model=OrsVersion, responses=problems("draining"))
async def ors_version(call: Call) -> Response:
    """ORS: the version of the server."""
    return call.answer({"version": version("rollgym"), "build_sha": None})


@ORS_CALLS.get("/list_environments", response_model=list[str], responses=problems("draining"))
async def ors_environments(call: Call) -> Response:
    """ORS: the ids of the environments."""
    return _say(call, [each["env_id"] for each in (await _operate(call, "envs", {}))["envs"]])


@_of_environment("GET", "/splits", response_model=list[OrsSplit], responses=_SAYS)
async def ors_splits(call: Call, env_id: PathId) -> Response:
    """ORS: the splits of an environment."""
    described = await _described(call, env_id)
    return _say(call, [split_payload(name) for name in splits_of(described)])


@_of_environment("POST", "/num_tasks", response_model=OrsCount, responses=_SAYS)
async def ors_num_tasks(call: Call, env_id: PathId, request: OrsSplitRequest) -> Response:
    """ORS: how many tasks a split has."""
    offered_split(await _described(call, env_id), request.split)
    return call.answer({"num_tasks": TASKS})


@_of_environment("POST", "/tasks", response_model=OrsTasks, responses=_SAYS)
async def ors_tasks(call: Call, env_id: PathId, request: OrsSplitRequest) -> Response:
    """ORS: the tasks of a split."""
    described = await _described(call, env_id)
    tasks = tasks_between(offered_split(described, request.split))
    return call.answer({"tasks": tasks, "env_name": described["env_id"]})


@_of_environment("POST", "/task_range", response_model=OrsTasks, responses=_SAYS)
async def ors_task_range(call: Call, env_id: PathId, request: OrsRangeRequest) -> Response:
    """ORS: some tasks of a split."""
    described = await _described(call, env_id)
    tasks = tasks_between(offered_split(described, request.split), request.start, request.stop)
    return call.answer({"tasks": tasks, "env_name": described["env_id"]})


@_of_environment("POST", "/task", response_model=OrsOneTask, responses=_SAYS)
async def ors_task(call: Call, env_id: PathId, request: OrsTaskRequest) -> Response:
    """ORS: one task of a split."""
    described = await _described(call, env_id)
    task = task_at(offered_split(described, request.split), request.index)
    return call.answer({"task": task, "env_name": described["env_id"]})


@_of_environment("GET", "/tools", response_model=OrsTools, responses=problems(*MAKES, "unknown_env"))
async def ors_tools(call: Call, env_id: PathId) -> Response:
    """ORS: the tools of an environment; those of an episode of its first task, if only episodes declare them."""
    described = await _described(call, env_id)
    info: dict[str, Any] = {}
    if has_own_tools(described):
        wanted = {"env_id": described["env_id"], "reset": {"seed": 0}, "idle_timeout_s": _IDLE_S}
        made = await _operate(call, "make", wanted)
        call.services.operations.end(call.context, made["session_id"])
        info = made["reset"]["info"]
    return call.answer(tools_payload(described, info))


# -- sessions ------------------------------------------------------------------------------------------------------


@ORS_CALLS.post(
    "/create_session",
    response_class=OrsEventStream,
    status_code=200,
    responses=_EVENTS | problems("draining"),
)
async def ors_create_session(call: Call, request: OrsOpening) -> Response:
    """ORS: a name for a session that `create` will make, in the event `task_id`."""

    async def end() -> Iterable[bytes]:
        return [event("end")]

    return OrsEventStream(event("task_id", secrets.token_hex(_SESSION_BYTES)), end)


@ORS_CALLS.post(
    "/create",
    response_model=OrsSession,
    responses=problems(*MAKES, "unknown_env"),
    openapi_extra=_OF_SESSION,
)
async def ors_create(call: Call, request: OrsCreate) -> Response:
    """ORS: make a session of a task; the same call again changes nothing."""
    name = _named(call)
    described = await _described(call, request.env_name)
    wanted = opening_requests(described, request, _IDLE_S)
    await _operate(call, OPEN_NAMED, {"name": name, **wanted})
    return call.answer({"sid": name})


# The openreward client joins its path to a base URL that may end in a slash.
@ORS_CALLS.post("//ping", response_model=OrsStatus, include_in_schema=False)
@ORS_CALLS.post("/ping", response_model=OrsStatus, responses=problems(*RUNS), openapi_extra=_OF_SESSION)
async def ors_ping(call: Call) -> Response:
    """ORS: keep a session alive."""
    session_id = await _session_id(call)
    # Wherever the session is, this is use of it, and changes nothing.
    await _begun(call, session_id)
    return call.answer({"status": "ok"})


@ORS_CALLS.post(
    "/delete", response_model=OrsSession, responses=problems("draining"), openapi_extra=_OF_SESSION
)
async def ors_delete(call: Call) -> Response:
    """ORS: end a session, if it is there."""
    return await _delete(call)


@ORS_CALLS.post(
    "/delete_session", response_model=OrsSession, responses=problems("draining"), openapi_extra=_OF_SESSION
)
async def ors_delete_session(call: Call) -> Response:
    """ORS: give the name of a session back, and end the session if it is there."""
    return await _delete(call)


@_of_environment(
    "GET", "/task_tools", response_model=OrsTools, responses=problems(*RUNS), openapi_extra=_OF_SESSION
)
async def ors_task_tools(call: Call, env_id: PathId) -> Response:
    """ORS: the tools of a session's episode."""
    session_id, place = await _session(call, env_id)
    described = await _described(call, place["env_id"])
    return call.answer(tools_payload(described, (await _begun(call, session_id))["info"]))


@_of_environment(
    "GET", "/prompt", response_model=list[OrsBlock], responses=problems(*RUNS), openapi_extra=_OF_SESSION
)
async def ors_prompt(call: Call, env_id: PathId) -> Response:
    """ORS: the instruction and the first observation of a session's episode."""
    session_id, _ = await _session(call, env_id)
    return _say(call, prompt_payload(await _begun(call, session_id)))


@_of_environment(
    "GET", "/messages", response_model=list[OrsMessage], responses=problems(*RUNS), openapi_extra=_OF_SESSION
)
async def ors_messages(call: Call, env_id: PathId) -> Response:
    """ORS: the same as a conversation."""
    session_id, _ = await _session(call, env_id)
    return _say(call, messages_payload(await _begun(call, session_id)))


@_of_environment(
    "POST",
    "/call",
    response_class=OrsEventStream,
    status_code=200,
    responses=_EVENTS | problems(*RUNS),
    openapi_extra=_OF_SESSION,
)
async def ors_call(call: Call, env_id: PathId, request: OrsCall) -> Response:
    """ORS: call a tool; its result is the data of the events `chunk` and `end`."""
    session_id, place = await _session(call, env_id)
    if place["episode"] is None:
        raise ProblemError("not_reset", "the session has no episode")
    asked = None if request.task_id is None else parse_call_id(request.task_id)
    episode, step = asked or (place["episode"], place["step"])
    described = await _described(call, place["env_id"])
    info = (await _begun(call, session_id))["info"]
    over = asked is None and (place["terminated"] or place["truncated"])

    async def take() -> Iterable[bytes]:
        limit = call.services.settings.max_reply_bytes
        try:
            if over:
                raise Refused("episode_finished", "the episode has ended; create a session for another")
            action = action_of(described, info, request)
            reply = await _step(call, session_id, action, episode, step)
        except Refused as refused:
            return result_events(refused_payload(refused), limit)
        return result_events(result_payload(reply), limit)

    return OrsEventStream(event("task_id", call_id(episode, step)), take)


@_of_environment(
    "POST",
    "/score_group",
    response_class=OrsEventStream,
    status_code=200,
    responses=_EVENTS | problems(*RUNS, "not_found"),
    openapi_extra=_OF_SESSION,
)
async def ors_score_group(call: Call, env_id: PathId, request: OrsScoreGroup) -> Response:
    """ORS: compare completions with each other, which no environment here does."""
    _, place = await _session(call, env_id)
    raise ProblemError("not_found", f"{place['env_id']} does not implement score_group")


# -- how it is done ------------------------------------------------------------------------------------------------


async def _operate(call: Call, op: str, fields: dict[str, Any]) -> Reply:
    # Answers are looked into here.
    call.context.fragments = False
    return await operate(call.services.operations, call.context, op, fields)


def _say(call: Call, content: Any) -> Response:
    return call.answer(content)


def _named(call: Call) -> str:
    """The name of the session that a call is about.

    Raises:
        ProblemError: `invalid_request`.
    """
    name: str = call.scope[HEADERS].get(_SESSION, "").strip()
    if not _NAME.fullmatch(name):
        raise invalid("X-Session-ID", "this header names the session; POST /create_session gives it a name")
    return name


async def _described(call: Call, env_id: str | None) -> Reply:
    """The `EnvInfo` of the environment that a path or a body names, or else the header, or else of the only one.

    Raises:
        ProblemError: `unknown_env`.
    """
    if env_id is not None:
        return await _operate(call, "envs", {"env_id": env_id})
    env_id = str(call.scope[HEADERS].get(_DEPLOYMENT, "")).rpartition("/")[2]
    served = (await _operate(call, "envs", {}))["envs"]
    for described in served:
        if described["env_id"] == env_id or len(served) == 1:
            return dict(described)
    raise ProblemError(
        "unknown_env",
        f"there is no environment {env_id[:_LONGEST_ID]!r}; name one of GET /list_environments: "
        "environments.get(NAME), or OpenRewardSpec(..., env_name=NAME)",
    )


async def _session_id(call: Call) -> str:
    return str((await _operate(call, FIND_NAMED, {"name": _named(call)}))["session_id"])


async def _session(call: Call, env_id: str | None) -> tuple[str, Reply]:
    """The id of a call's session, and its location.

    Raises:
        ProblemError: `unknown_session`, also if the session is of another environment than the path names, or
            `session_gone`.
    """
    session_id = await _session_id(call)
    place = await _operate(call, "session", {"session_id": session_id})
    if env_id is not None and place["env_id"] != env_id:
        raise ProblemError("unknown_session", f"the session is not one of {env_id[:_LONGEST_ID]}")
    return session_id, place


async def _begun(call: Call, session_id: str) -> Reply:
    """How the session's episode began, wherever it is now."""
    return await _operate(call, "reset", {"session_id": session_id, "again": True})


async def _step(call: Call, session_id: str, action: Any, episode: int, step: int) -> Reply:
    operations, context = call.services.operations, call.context
    try:
        return await step_by_text(operations, context, session_id, action, episode=episode, step=step)
    except ProblemError as problem:
        if problem.code in ("invalid_action", "invalid_request"):
            raise Refused("input_validation", problem.detail) from problem
        if problem.code in ("busy", "step_mismatch"):
            raise Refused("input_validation", f"another call is running: {problem.detail}") from problem
        if problem.code == "episode_over":
            raise Refused("episode_finished", problem.detail) from problem
        raise


async def _delete(call: Call) -> Response:
    name = _named(call)
    await _operate(call, CLOSE_NAMED, {"name": name})
    return call.answer({"sid": name})
