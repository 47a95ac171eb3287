"""OpenEnv's messages, built from answers of ours and read into requests of ours; no I/O."""

from collections.abc import Mapping
from typing import Annotated, Any

from gymnasium import spaces
from pydantic import BaseModel, ConfigDict, Field

from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.messages import Seed
from rollgym.clients.protocol.spaces import parse_space
from rollgym.env_server.messages.envelope import sendable
from rollgym.env_server.sessions.replies import Reply

TEXT_SPACES = frozenset({"Text", "UnicodeText"})
"""The types of space, as they are described, whose observations are in the field `text`."""

_OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": True}
_METADATA: dict[str, Any] = {**_OBJECT, "default": {}, "description": "Not looked at."}
_OPENING_CODES = {
    "at_capacity": "CAPACITY_REACHED",
    "env_error": "FACTORY_ERROR",
    "step_timeout": "FACTORY_ERROR",
    "upstream_error": "FACTORY_ERROR",
}
_CODES = {
    "invalid_request": "VALIDATION_ERROR",
    "invalid_action": "VALIDATION_ERROR",
    "invalid_kwargs": "VALIDATION_ERROR",
    "too_large": "VALIDATION_ERROR",
    "at_capacity": "CAPACITY_REACHED",
    "session_gone": "SESSION_ERROR",
    "unknown_session": "SESSION_ERROR",
}

EpisodeId = Annotated[str, Field(max_length=255)]


class OpenEnvResetRequest(BaseModel):
    """Begin an episode. What else a client sends is ignored, as OpenEnv ignores what an environment's reset lacks.

    `options` and `kwargs` are those of our own protocol; `kwargs` that differ from the session's make it anew.
    """

    model_config = ConfigDict(strict=True, extra="ignore")

    seed: Seed | None = None
    episode_id: EpisodeId | None = None
    options: dict[str, Any] | None = None
    kwargs: dict[str, Any] | None = None


class OpenEnvAction(BaseModel):
    """An action: text, or whatever the action space holds."""

    model_config = ConfigDict(strict=True, extra="forbid")

    action: Any
    metadata: dict[str, Any] = Field(default_factory=dict, description="Not looked at.")


class OpenEnvStepRequest(OpenEnvResetRequest):
    """Take the first action of an episode that begins as in a reset: over HTTP, OpenEnv keeps no session."""

    action: OpenEnvAction
    timeout_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class OpenEnvReply(BaseModel):
    """What a reset or a step led to."""

    observation: dict[str, Any] = Field(
        description="`text` (or `value`, where observations are no text), `info`, `metadata`."
    )
    reward: float | None
    done: bool
    metadata: dict[str, Any]


class OpenEnvState(BaseModel):
    """Where a session is."""

    model_config = ConfigDict(strict=True, extra="allow")

    episode_id: str | None = None
    step_count: int = 0


class OpenEnvSchemas(BaseModel):
    """JSON Schemas of what goes over the wire."""

    action: dict[str, Any]
    observation: dict[str, Any]
    reset_observation: dict[str, Any]
    state: dict[str, Any]


class OpenEnvMetadata(BaseModel):
    """What an environment is."""

    name: str
    description: str
    readme_content: str | None = None
    version: str | None = None
    author: str | None = None
    documentation_url: str | None = None


class OpenEnvHealth(BaseModel):
    """Whether the server serves the environment."""

    status: str


def observation_payload(reply: Reply, observation_type: str) -> dict[str, Any]:
    """A reset's or a step's answer in OpenEnv's form.

    Args:
        reply: Our answer.
        observation_type: The type of the observation space.
    """
    terminated, truncated = reply.get("terminated", False), reply.get("truncated", False)
    metadata = {
        "terminated": terminated,
        "truncated": truncated,
        "episode": reply["episode"],
        "step": reply["step"],
    }
    if "seed" in reply:
        metadata["seed"] = reply["seed"]
    observation = {
        observation_field(observation_type): reply["observation"],
        "info": reply["info"],
        "metadata": metadata,
    }
    return {
        "observation": observation,
        "reward": reply.get("reward"),
        "done": terminated or truncated,
        "metadata": metadata,
    }


def observation_field(observation_type: str) -> str:
    """Which field of OpenEnv's observation holds ours."""
    return "text" if observation_type in TEXT_SPACES else "value"


def state_payload(described: Mapping[str, Any], episode_id: str | None) -> dict[str, Any]:
    """The state of a session, from its description; `episode_id` is what the client called the episode."""
    episode = described["episode"]
    if episode_id is None and episode is not None:
        episode_id = f"{described['session_id']}.{episode}"
    kept = ("session_id", "env_id", "seed", "terminated", "truncated")
    return {
        "episode_id": episode_id,
        "step_count": described["step"] or 0,
        **{name: described[name] for name in kept},
    }


def schemas_payload(info: Mapping[str, Any]) -> dict[str, Any]:
    """The schemas of an environment, from its `EnvInfo`."""
    field = observation_field(info["observation_space"]["type"])
    observation: dict[str, Any] = {
        "type": "object",
        "title": "Observation",
        "properties": {
            "done": {"type": "boolean", "default": False},
            "reward": {"anyOf": [{"type": "number"}, {"type": "null"}], "default": None},
            "metadata": {**_METADATA, "description": "`terminated`, `truncated`, `episode`, `step`, `seed`."},
            field: value_schema(info["observation_space"]),
            "info": {**_OBJECT, "description": "What Gymnasium calls info."},
        },
        "required": [field, "info"],
        "additionalProperties": False,
    }
    action = {
        "type": "object",
        "title": "Action",
        "properties": {"metadata": _METADATA, "action": value_schema(info["action_space"])},
        "required": ["action"],
        "additionalProperties": False,
    }
    return {
        "action": action,
        "observation": observation,
        "reset_observation": observation,
        "state": OpenEnvState.model_json_schema(),
    }


def metadata_payload(info: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of an environment, from its `EnvInfo`."""
    metadata = OpenEnvMetadata(name=info["env_id"], description=info["description"], version=info["version"])
    return metadata.model_dump()


def error_payload(problem: ProblemError, *, opening: bool = False) -> dict[str, Any]:
    """A problem in OpenEnv's form, with ours beside it.

    Args:
        problem: What went wrong.
        opening: Whether it was the session that could not be made.
    """
    codes, otherwise = (_OPENING_CODES, "SESSION_ERROR") if opening else (_CODES, "EXECUTION_ERROR")
    ours = sendable(problem, binary=False)
    data: dict[str, Any] = {
        "message": ours["detail"],
        "code": codes.get(problem.code, otherwise),
        "problem": ours,
    }
    errors = ours.get("errors")
    # A registered server may call by that name what it likes.
    if isinstance(errors, list) and all(isinstance(error, Mapping) for error in errors):
        data["errors"] = [
            {
                "type": "value_error",
                "loc": str(error.get("field", "")).split("."),
                "msg": str(error.get("reason", "")),
            }
            for error in errors
        ]
    return {"type": "error", "data": data}


def wire_error(code: str, message: str) -> dict[str, Any]:
    """The answer to a message that is none of OpenEnv's."""
    return {"type": "error", "data": {"message": message, "code": code}}


def value_schema(described: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON Schema of a space; what JSON Schema cannot say is in `x-space`, as our protocol describes spaces."""
    if described["type"] in TEXT_SPACES:
        return {"type": "string"}
    space = parse_space(dict(described))
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        return {
            "type": "integer",
            "minimum": start,
            "maximum": start + int(space.n) - 1,
            "x-space": described,
        }
    return {"description": "As rollgym's protocol writes it in JSON.", "x-space": described}
