"""GEM over HTTP, as ROCK's admin serves it: a sandbox is a session of this server, and has its id."""

from typing import Any

from fastapi import Response
from pydantic import BaseModel, ConfigDict

from rollgym.clients.protocol.free_form import FreeFields, FreeValue
from rollgym.clients.protocol.messages import Identifier, Seed
from rollgym.env_server.http.call_routes import Call, PlainRoute, call_router
from rollgym.env_server.http.openapi import MAKES, RUNS, problems
from rollgym.env_server.protocols.operating import operate, step_by_text
from rollgym.env_server.sessions.replies import Reply

PREFIX = "/apis/v1/envs/gem"
"""The path under which ROCK's clients expect it."""

GEM_CALLS = call_router(route_class=PlainRoute)


class _Fields(BaseModel):
    """Unknown fields are ignored, as ROCK does."""

    model_config = ConfigDict(strict=True, extra="ignore")


class GemMakeRequest(_Fields):
    """Make an environment; `kwargs` are ours, ROCK has none."""

    env_id: Identifier
    kwargs: FreeFields | None = None


class GemResetRequest(_Fields):
    """Begin an episode; `options` are ours, ROCK has none."""

    sandbox_id: Identifier
    seed: Seed | None = None
    options: FreeFields | None = None


class GemStepRequest(_Fields):
    """Take an action: text. If an environment's actions are not text, the action itself, or its JSON as text."""

    sandbox_id: Identifier
    action: FreeValue


class GemCloseRequest(_Fields):
    """End an environment; ending one that has ended already is not an error."""

    sandbox_id: Identifier


class GemListRequest(_Fields):
    """List the environments; `sandbox_id` may be left out, all sandboxes have the same ones."""

    sandbox_id: str | None = None


class GemSandboxReply(BaseModel):
    """The name of an environment that was made, or ended."""

    sandbox_id: str


class GemResetReply(BaseModel):
    """The begin of an episode."""

    observation: Any
    info: dict[str, Any]


class GemStepReply(BaseModel):
    """The result of an action."""

    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


class GemListReply(BaseModel):
    """The ids of the environments."""

    env_id: list[str]


@GEM_CALLS.post(
    f"{PREFIX}/step",
    response_model=GemStepReply,
    responses=problems(*RUNS, "invalid_action", "episode_over"),
)
async def gem_step(call: Call, request: GemStepRequest) -> Response:
    """GEM: take an action in an environment; at the limit of steps it is terminated, too, as GEM's own are."""
    reply = await step_by_text(call.services.operations, call.context, request.sandbox_id, request.action)
    # Who plays GEM's environments, as ROLL's managers do, looks at the termination alone.
    terminated = reply["terminated"] or reply["truncated"]
    return call.answer(_only(GemStepReply, reply) | {"terminated": terminated})


@GEM_CALLS.post(f"{PREFIX}/reset", response_model=GemResetReply, responses=problems(*RUNS))
async def gem_reset(call: Call, request: GemResetRequest) -> Response:
    """GEM: begin an episode in an environment."""
    begin = {"session_id": request.sandbox_id, "seed": request.seed, "options": request.options}
    reply = await operate(call.services.operations, call.context, "reset", begin)
    return call.answer(_only(GemResetReply, reply))


@GEM_CALLS.post(f"{PREFIX}/make", response_model=GemSandboxReply, responses=problems(*MAKES, "unknown_env"))
async def gem_make(call: Call, request: GemMakeRequest) -> Response:
    """GEM: make an environment and return its id."""
    wanted = {"env_id": request.env_id, "kwargs": request.kwargs}
    made = await operate(call.services.operations, call.context, "make", wanted)
    return call.answer({"sandbox_id": made["session_id"]})


@GEM_CALLS.post(f"{PREFIX}/close", response_model=GemSandboxReply, responses=problems("draining"))
async def gem_close(call: Call, request: GemCloseRequest) -> Response:
    """GEM: end an environment and free its session."""
    session_ids = [request.sandbox_id]
    await operate(call.services.operations, call.context, "close", {"session_ids": session_ids})
    return call.answer({"sandbox_id": request.sandbox_id})


@GEM_CALLS.post(f"{PREFIX}/list", response_model=GemListReply, responses=problems("draining"))
async def gem_list(call: Call, request: GemListRequest) -> Response:
    """GEM: list the environments that the server offers."""
    reply = await operate(call.services.operations, call.context, "envs", {})
    return call.answer({"env_id": [info["env_id"] for info in reply["envs"]]})


def _only(model: type[BaseModel], reply: Reply) -> Reply:
    """The fields of an answer that GEM has."""
    return {name: reply[name] for name in model.model_fields}
