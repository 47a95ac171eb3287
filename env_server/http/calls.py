"""The calls of the protocol over HTTP; each runs the operation of its name."""

from typing import Annotated, Any

from fastapi import Query, Response
from pydantic import BaseModel

from rollgym.clients.protocol.episode import PortableEpisode
from rollgym.clients.protocol.messages import (
    AnnounceReply,
    AnnounceRequest,
    CloseReply,
    CloseRequest,
    EnvInfo,
    EnvsReply,
    ForkReply,
    ForkRequest,
    HeartbeatReply,
    HeartbeatRequest,
    MakeRequest,
    RegisterReply,
    RegisterRequest,
    RenderReply,
    RenderRequest,
    ResetReply,
    ResetRequest,
    RestoreRequest,
    ServerInfo,
    SessionInfo,
    SessionReply,
    SessionsReply,
    StepReply,
    StepRequest,
    VerifyReply,
    VerifyRequest,
)
from rollgym.env_server.http.call_routes import Call, PathId, PlainRoute, call_router
from rollgym.env_server.http.openapi import MAKES, ON_SESSION, RUNS, SCORES, problems
from rollgym.env_server.operations.information import EnvsQuery, SessionsQuery
from rollgym.sandbox.remote.run_code import RunCodeReply, RunCodeRequest, SandboxReply

HOT_CALLS = call_router(route_class=PlainRoute)
"""The calls for each step, episode or score."""
CALLS = call_router()
"""The further calls of every server."""
REGISTRATION_CALLS = call_router("register")
"""The further calls of a gateway."""
RUN_CODE_CALLS = call_router()
"""The further calls of a server with a sandbox of its own."""

_SESSION = "/v1/sessions/{session_id}"
_REGISTRATION = "/v1/registrations/{registration_id}"


class SessionList(BaseModel):
    """The caller's sessions, one page; `after` is there when more follow."""

    sessions: list[SessionInfo]
    after: str | None = None


@HOT_CALLS.post(
    f"{_SESSION}/step",
    response_model=StepReply,
    responses=problems(*RUNS, "invalid_action", "episode_over", "step_mismatch"),
)
async def step(call: Call, session_id: PathId, request: StepRequest) -> Response:
    """Take one action in the session's episode."""
    return await call.run(request, session_id=session_id)


@HOT_CALLS.post(f"{_SESSION}/reset", response_model=ResetReply, responses=problems(*RUNS))
async def reset(call: Call, session_id: PathId, request: ResetRequest) -> Response:
    """Begin an episode in the session."""
    return await call.run(request, session_id=session_id)


@HOT_CALLS.post(
    "/v1/verify/{env_id}",
    response_model=VerifyReply,
    responses=problems(*SCORES),
)
async def verify(call: Call, env_id: PathId, request: VerifyRequest) -> Response:
    """Score responses without a session."""
    return await call.run(request, env_id=env_id)


@CALLS.post(f"{_SESSION}/render", response_model=RenderReply, responses=problems(*RUNS))
async def render(call: Call, session_id: PathId, request: RenderRequest) -> Response:
    """Render the environment's current state."""
    return await call.run(request, session_id=session_id)


@CALLS.post(
    f"{_SESSION}/cancel", status_code=202, response_model=dict[str, Any], responses=problems(*ON_SESSION)
)
async def cancel(call: Call, session_id: PathId) -> Response:
    """Give the running operation up."""
    return await call.run(session_id=session_id)


@CALLS.post(
    f"{_SESSION}/fork",
    status_code=201,
    response_model=ForkReply,
    responses=problems(*RUNS, "at_capacity", "fork_unsupported", "request_mismatch"),
)
async def fork(call: Call, session_id: PathId, request: ForkRequest) -> Response:
    """Copy a session at its point."""
    return await call.run(request, session_id=session_id)


@CALLS.get(f"{_SESSION}/episode", response_model=PortableEpisode, responses=problems(*ON_SESSION))
async def episode(call: Call, session_id: PathId) -> Response:
    """Export the episode in portable form."""
    return await call.run(session_id=session_id)


# Not by FastAPI, which would validate the longest episode in one go.
@HOT_CALLS.post(
    "/v1/sessions/restore",
    status_code=201,
    response_model=SessionReply,
    responses=problems(*MAKES, "unknown_env", "session_gone"),
)
async def restore(call: Call, request: RestoreRequest) -> Response:
    """Make a session from a portable episode."""
    return await call.run(request)


@CALLS.post("/v1/sessions/close", response_model=CloseReply, responses=problems("draining"))
async def close(call: Call, request: CloseRequest) -> Response:
    """Close many sessions in one call."""
    return await call.run(request)


@CALLS.post(
    "/v1/sessions",
    status_code=201,
    response_model=SessionReply | SessionsReply,
    responses=problems(*MAKES, "unknown_env"),
)
async def make(call: Call, request: MakeRequest) -> Response:
    """Make one session, or `count` of them."""
    return await call.run(request)


@CALLS.get("/v1/sessions", response_model=SessionList, responses=problems("draining"))
async def sessions(call: Call, query: Annotated[SessionsQuery, Query()]) -> Response:
    """List the caller's sessions, page by page."""
    return await call.run(query)


@CALLS.get(_SESSION, response_model=SessionInfo, responses=problems(*ON_SESSION))
async def session(call: Call, session_id: PathId) -> Response:
    """Describe one session of the caller."""
    return await call.run(session_id=session_id)


@CALLS.delete(_SESSION, name="close", status_code=204, responses=problems("draining"))
async def close_one(call: Call, session_id: PathId) -> Response:
    """Close one session, if it is there."""
    return await call.run(session_id=session_id)


@CALLS.get("/v1/envs", response_model=EnvsReply | EnvInfo, responses=problems("unknown_env", "draining"))
async def envs(call: Call, query: Annotated[EnvsQuery, Query()]) -> Response:
    """List the environments that are served."""
    return await call.run(query)


@CALLS.get(
    "/v1/envs/{env_id}", name="envs", response_model=EnvInfo, responses=problems("unknown_env", "draining")
)
async def envs_one(call: Call, env_id: PathId) -> Response:
    """Describe one environment by its id."""
    return await call.run(env_id=env_id)


@CALLS.get("/v1/info", response_model=ServerInfo, responses=problems("draining"))
async def info(call: Call) -> Response:
    """The server, its limits and capacity."""
    return await call.run()


@REGISTRATION_CALLS.post(
    "/v1/envs",
    status_code=201,
    response_model=RegisterReply,
    responses=problems("env_exists", "spec_mismatch", "probe_failed", "at_capacity", "draining"),
)
async def register(call: Call, request: RegisterRequest) -> Response:
    """Add an environment of another server."""
    return await call.run(request)


@REGISTRATION_CALLS.post("/v1/registrations", response_model=AnnounceReply, responses=problems("draining"))
async def announce(call: Call, request: AnnounceRequest) -> Response:
    """Register a server's environments, or renew them as a heartbeat."""
    return await call.run(request)


@REGISTRATION_CALLS.post(
    f"{_REGISTRATION}/heartbeat",
    response_model=HeartbeatReply,
    responses=problems("unknown_registration", "draining"),
)
async def heartbeat(call: Call, registration_id: PathId, request: HeartbeatRequest) -> Response:
    """Say that a registered server is there."""
    return await call.run(request, registration_id=registration_id)


@REGISTRATION_CALLS.delete(
    _REGISTRATION, status_code=204, responses=problems("unknown_registration", "draining")
)
async def unregister(call: Call, registration_id: PathId) -> Response:
    """End a registration; its sessions continue until they end."""
    return await call.run(registration_id=registration_id)


@RUN_CODE_CALLS.post(
    "/run_code", response_model=RunCodeReply, responses=problems("at_capacity", "draining", "overloaded")
)
async def run_code(call: Call, request: RunCodeRequest) -> Response:
    """Run a program in the sandbox (as SandboxFusion does)."""
    return await call.unless_gone(call.run(request))


@RUN_CODE_CALLS.get("/v1/sandbox", response_model=SandboxReply, responses=problems("draining"))
async def sandbox(call: Call) -> Response:
    """Return the guarantees and limits of the sandbox."""
    return await call.run()
