"""GEM over HTTP, as ROCK's admin serves it: a sandbox is a session of ours, and its id is the session's."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from clients.protocol.messages import Identifier, Seed
from env_server.access.context import Context
from env_server.http.calls import Call
from env_server.messages.validation import validate
from env_server.operations.operations import Calls
from env_server.protocols.operating import operate, step_by_text
from env_server.sessions.replies import Reply

PREFIX = "/apis/v1/envs/gem"
"""Where ROCK's clients look for it."""


class _Fields(BaseModel):
    """What ROCK does not know it does not look at."""

    model_config = ConfigDict(strict=True, extra="ignore")


class GemMakeRequest(_Fields):
    """Make an environment; `kwargs` are ours, ROCK has none."""

    env_id: Identifier
    kwargs: dict[str, Any] | None = None


class GemResetRequest(_Fields):
    """Begin an episode; `options` are ours, ROCK has none."""

    sandbox_id: Identifier
    seed: Seed | None = None
    options: dict[str, Any] | None = None


class GemStepRequest(_Fields):
    """Take an action: text. Where actions are no text, the action itself, or its JSON as text."""

    sandbox_id: Identifier
    action: Any


class GemCloseRequest(_Fields):
    """End an environment; one that is gone already is no error."""

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
    """What an action led to."""

    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


class GemListReply(BaseModel):
    """The ids of the environments."""

    env_id: list[str]


async def _make(operations: Calls, context: Context, fields: Mapping[str, Any]) -> Reply:
    request = validate(GemMakeRequest, fields)
    made = await operate(operations, context, "make", {"env_id": request.env_id, "kwargs": request.kwargs})
    return {"sandbox_id": made["session_id"]}


async def _reset(operations: Calls, context: Context, fields: Mapping[str, Any]) -> Reply:
    request = validate(GemResetRequest, fields)
    begin = {"session_id": request.sandbox_id, "seed": request.seed, "options": request.options}
    return _only(GemResetReply, await operate(operations, context, "reset", begin))


async def _step(operations: Calls, context: Context, fields: Mapping[str, Any]) -> Reply:
    request = validate(GemStepRequest, fields)
    return _only(GemStepReply, await step_by_text(operations, context, request.sandbox_id, request.action))


async def _close(operations: Calls, context: Context, fields: Mapping[str, Any]) -> Reply:
    request = validate(GemCloseRequest, fields)
    await operate(operations, context, "close", {"session_ids": [request.sandbox_id]})
    return {"sandbox_id": request.sandbox_id}


async def _list(operations: Calls, context: Context, fields: Mapping[str, Any]) -> Reply:
    validate(GemListRequest, fields)
    reply = await operate(operations, context, "envs", {})
    return {"env_id": [info["env_id"] for info in reply["envs"]]}


def _only(model: type[BaseModel], reply: Reply) -> Reply:
    """What GEM knows of an answer."""
    return {name: reply[name] for name in model.model_fields}


GEM_CALLS: tuple[Call, ...] = (
    Call(
        *("POST", f"{PREFIX}/step", "gem_step", "GEM: take an action"),
        request=GemStepRequest,
        replies=(GemStepReply,),
        handler=_step,
    ),
    Call(
        *("POST", f"{PREFIX}/reset", "gem_reset", "GEM: begin an episode"),
        request=GemResetRequest,
        replies=(GemResetReply,),
        handler=_reset,
    ),
    Call(
        *("POST", f"{PREFIX}/make", "gem_make", "GEM: make an environment"),
        request=GemMakeRequest,
        replies=(GemSandboxReply,),
        handler=_make,
    ),
    Call(
        *("POST", f"{PREFIX}/close", "gem_close", "GEM: end an environment"),
        request=GemCloseRequest,
        replies=(GemSandboxReply,),
        handler=_close,
    ),
    Call(
        *("POST", f"{PREFIX}/list", "gem_list", "GEM: list the environments"),
        request=GemListRequest,
        replies=(GemListReply,),
        handler=_list,
    ),
)
