"""Converts OpenEnv's messages to and from requests and answers of this server; no I/O.

A task is a seed, in one of the environment's splits.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from gymnasium import spaces
from pydantic import BaseModel, ConfigDict, Field

from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.free_form import WHOLE, FreeFields, FreeValue
from rollgym.clients.protocol.messages import Identifier, Seed
from rollgym.clients.protocol.spaces import parse_space
from rollgym.env_server.common.requests import invalid, sendable
from rollgym.env_server.sessions.replies import Reply

TASKS_PER_SPLIT = 10_000
"""The number of tasks that a split reports. Environments draw a task from each seed, so any number would do."""

_TYPES = {"train": "train", "valid": "validation", "validation": "validation", "test": "test"}
_ONLY = "train"
TEXT_SPACES = frozenset({"Text", "UnicodeText"})
"""The described types of the spaces whose observations go to the field `text`."""
_OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": True}
_METADATA: dict[str, Any] = {**_OBJECT, "default": {}, "description": "Not looked at."}
# Problems of capacity; OpenEnv's clients do not wait for a token's rate or for a server that ends.
_OF_CAPACITY = frozenset({"at_capacity", "overloaded"})
META = "rollgym/answer"
"""The key of a tool's result that holds the whole answer of this server's own protocol."""
ACT = "take_action"
"""The tool that takes any action; OpenEnv reserves the names `reset`, `step`, `state` and `close`."""
# Titles by which clients know the classes of OpenEnv's own environments.
_TAKEN = frozenset({"", "CallTool", "ListTools"})
_VERSION = re.compile(r"-v\d+$")
_WORD = re.compile(r"[A-Za-z0-9]+")
EpisodeId = Annotated[str, Field(max_length=255)]


@dataclass(frozen=True, slots=True)
class SeedTasks:
    """The tasks of one environment: those of its kwarg `split`, or those of one split `train` if it has no such kwarg.

    Attributes:
        splits: The names of the splits.
        has_kwarg: Whether the environment takes the split as a kwarg.
    """

    splits: tuple[str, ...]
    has_kwarg: bool

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> "SeedTasks":
        """The tasks of an environment, from its `EnvInfo`."""
        properties = described["kwargs_schema"].get("properties")
        schema = properties.get("split") if isinstance(properties, Mapping) else None
        named = schema.get("enum") if isinstance(schema, Mapping) else None
        names = tuple(name for name in named if isinstance(name, str)) if isinstance(named, list) else ()
        return cls(names or (_ONLY,), bool(names))

    def described(self) -> list[dict[str, str]]:
        """The splits, each with its purpose."""
        return [{"name": name, "type": _TYPES.get(name, "validation")} for name in self.splits]

    def task(self, split: str, index: int) -> dict[str, Any]:
        """One task: the fields of a reset that begins it.

        Raises:
            ProblemError: `invalid_request`, if the task does not exist.
        """
        self.check(split)
        if not 0 <= index < TASKS_PER_SPLIT:
            raise invalid("index", f"the split {split} has tasks 0 to {TASKS_PER_SPLIT - 1}")
        task: dict[str, Any] = {"task_id": f"{split}-{index}", "split": split, "index": index, "seed": index}
        return {**task, "kwargs": {"split": split}} if self.has_kwarg else task

    def range(self, split: str, start: int | None, stop: int | None) -> list[dict[str, Any]]:
        """The tasks from `start` to before `stop`, as a slice of a list has them.

        Raises:
            ProblemError: `invalid_request`, if the split does not exist.
        """
        self.check(split)
        return [self.task(split, index) for index in range(TASKS_PER_SPLIT)[start:stop]]

    def check(self, split: str) -> None:
        """Refuse a split that the environment does not have.

        Raises:
            ProblemError: `invalid_request`.
        """
        if split not in self.splits:
            raise invalid("split", f"{split[:100]!r} is none of {', '.join(self.splits)}")


_SERVER_ERROR, _INVALID_PARAMS = -32000, -32602


class OpenEnvResetRequest(BaseModel):
    """Begin an episode. Other fields are ignored, as OpenEnv ignores those that an environment's reset lacks.

    `options` and `kwargs` are those of our own protocol; if `kwargs` differ from the session's, the session is made
    again.
    """

    model_config = ConfigDict(strict=True, extra="ignore")

    seed: Seed | None = None
    episode_id: EpisodeId | None = None
    options: FreeFields | None = None
    kwargs: FreeFields | None = None
    split: str | None = Field(
        default=None, description="With `index`: of the task that the episode is to be."
    )
    index: Annotated[int, WHOLE] | None = Field(
        default=None, description="Of a task in its split; `seed` and `kwargs` come from it."
    )

    def of_task(self, described: Mapping[str, Any]) -> "OpenEnvResetRequest":
        """The request with the seed and the kwargs of its task filled in, unless it sets its own.

        Args:
            described: The environment's `EnvInfo`.

        Raises:
            ProblemError: `invalid_request`, if the task does not exist.
        """
        if self.index is None:
            return self
        tasks = SeedTasks.of(described)
        task = tasks.task(tasks.splits[0] if self.split is None else self.split, self.index)
        seed = task["seed"] if self.seed is None else self.seed
        kwargs = task.get("kwargs") if self.kwargs is None else self.kwargs
        return self.model_copy(update={"seed": seed, "kwargs": kwargs})


class OpenEnvCallTool(BaseModel):
    """The action that calls a tool."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["call_tool"]
    tool_name: str
    arguments: FreeFields = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict, description="Not looked at.")


class OpenEnvListTools(BaseModel):
    """The action that lists the tools."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["list_tools"]
    metadata: dict[str, Any] = Field(default_factory=dict, description="Not looked at.")


class OpenEnvSessionCreate(BaseModel):
    """The parameters of `openenv/session/create`; OpenEnv has none, these are ours."""

    model_config = ConfigDict(strict=True, extra="ignore")

    kwargs: FreeFields | None = None
    seed: Seed | None = None


class OpenEnvSessionClose(BaseModel):
    """The parameters of an `openenv/session/close` message."""

    model_config = ConfigDict(strict=True, extra="ignore")

    session_id: Identifier


class OpenEnvAction(BaseModel):
    """An action: text, or whatever the action space holds."""

    model_config = ConfigDict(strict=True, extra="forbid")

    action: FreeValue
    metadata: dict[str, Any] = Field(default_factory=dict, description="Not looked at.")


class OpenEnvStepRequest(OpenEnvResetRequest):
    """Take the first action of an episode that begins as in a reset: over HTTP, OpenEnv keeps no session."""

    action: OpenEnvAction
    timeout_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class OpenEnvReply(BaseModel):
    """The result of a reset or a step."""

    observation: dict[str, Any] = Field(
        description="`text` (or `value`, where observations are no text), `info`, `metadata`."
    )
    reward: float | None
    done: bool
    metadata: dict[str, Any]


class _TaskRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    split: str = Field(description="The name of a split.")


class OpenEnvSplitRequest(_TaskRequest):
    """Ask for the tasks of a split, or how many there are."""


class OpenEnvTaskRequest(_TaskRequest):
    """Ask for one task of a split."""

    index: Annotated[int, WHOLE]


class OpenEnvTaskRangeRequest(_TaskRequest):
    """Ask for some tasks of a split."""

    start: Annotated[int, WHOLE] | None = Field(default=None, description="The first one.")
    stop: Annotated[int, WHOLE] | None = Field(default=None, description="The one after the last one.")


class OpenEnvSplit(BaseModel):
    """A split of an environment's tasks."""

    name: str
    type: Literal["train", "validation", "test"]


class OpenEnvTask(BaseModel):
    """A task: a reset with its members begins it."""

    task_id: str
    split: str
    index: int
    seed: int
    kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Where the environment has splits of its own."
    )


class OpenEnvTasksReply(BaseModel):
    """The first tasks of a split; `num_tasks` says how many there are."""

    tasks: list[OpenEnvTask]
    env_name: str


class OpenEnvTaskCount(BaseModel):
    """How many tasks a split has."""

    num_tasks: int


class OpenEnvTaskReply(BaseModel):
    """One task, as OpenEnv describes it."""

    task: OpenEnvTask


class OpenEnvTaskRange(BaseModel):
    """Some tasks of a split."""

    tasks: list[OpenEnvTask]


class OpenEnvState(BaseModel):
    """The state of a session, as OpenEnv reports it."""

    model_config = ConfigDict(strict=True, extra="allow")

    episode_id: str | None = None
    step_count: int = 0


class OpenEnvSchemas(BaseModel):
    """JSON Schemas of the messages."""

    action: dict[str, Any]
    observation: dict[str, Any]
    reset_observation: dict[str, Any]
    state: dict[str, Any]


class OpenEnvMetadata(BaseModel):
    """Name, description and version of an environment."""

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
    """The field of OpenEnv's observation that holds this server's."""
    return "text" if observation_type in TEXT_SPACES else "value"


def state_payload(described: Mapping[str, Any], episode_id: str | None) -> dict[str, Any]:
    """The state of a session, from its description; `episode_id` is the client's id of the episode."""
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
    field, name = observation_field(info["observation_space"]["type"]), class_name(info["env_id"])
    observation: dict[str, Any] = {
        "type": "object",
        "title": f"{name}Observation",
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
        "title": f"{name}Action",
        "properties": {"metadata": _METADATA, "action": value_schema(info["action_space"])},
        "required": ["action"],
        "additionalProperties": False,
    }
    return {
        "action": action,
        "observation": observation,
        "reset_observation": observation,
        "state": {**OpenEnvState.model_json_schema(), "title": f"{name}State"},
    }


def class_name(env_id: str) -> str:
    """The prefix of OpenEnv's class names of an environment: `FrozenLake` for `FrozenLake-v0`.

    Clients go by the titles of schemas: an `Action` or a `CallToolAction` is a call of a tool to them.
    """
    words = _WORD.findall(_VERSION.sub("", env_id))
    name = "".join(word[0].upper() + word[1:] for word in words)
    return f"Env{name}" if name in _TAKEN or name[0].isdigit() else name


def act_tool(described: Mapping[str, Any], *, has_tools: bool) -> dict[str, Any]:
    """The tool that takes any action, as MCP describes tools.

    Args:
        described: The environment's `EnvInfo`.
        has_tools: Whether the environment has tools of its own.
    """
    other = "Reply in words, or in any way that the environment understands and that is no call of a tool."
    return {
        "name": ACT,
        "description": other if has_tools else "Take an action in the environment.",
        "inputSchema": {
            "type": "object",
            "properties": {"action": value_schema(described["action_space"])},
            "required": ["action"],
            "additionalProperties": False,
        },
    }


def tools_payload(tools: list[dict[str, Any]]) -> dict[str, Any]:
    """The observation that answers `list_tools`."""
    return {"observation": {"tools": tools, "metadata": {}}, "reward": None, "done": False, "metadata": {}}


def called_payload(name: str, text: str, reply: Reply) -> dict[str, Any]:
    """The observation that answers `call_tool`, from the answer to the step that it was."""
    payload = observation_payload(reply, "")
    metadata = {**payload["metadata"], "info": reply["info"]}
    observation = {
        "tool_name": name,
        "result": {**tool_result(text, reply), "meta": None},
        "error": None,
        "metadata": metadata,
    }
    return {**payload, "observation": observation, "metadata": metadata}


def uncalled_payload(name: str, error_type: str, reason: str) -> dict[str, Any]:
    """The observation that answers a `call_tool` which called no tool; the episode is unchanged."""
    error = {"error_type": error_type, "message": reason}
    observation = {"tool_name": name, "result": None, "error": error, "metadata": {}}
    return {"observation": observation, "reward": None, "done": False, "metadata": {}}


def is_failed_call(info: Mapping[str, Any]) -> bool:
    """Whether the call that a step was could not be run, or its tool says that it failed."""
    failed = info.get("failed_calls")
    return info.get("action_is_valid") is False or (isinstance(failed, int) and failed > 0)


def tool_result(text: str, reply: Reply) -> dict[str, Any]:
    """The result of a tool in the form that OpenEnv's servers take from FastMCP, with `isError` as MCP has it.

    Args:
        text: The output of the tool.
        reply: The answer of this server's protocol to the step of the call, for programs.
    """
    is_error = is_failed_call(reply["info"])
    return {
        "content": [{"type": "text", "text": text}],
        "structured_content": None,
        "meta": {META: reply},
        "data": text,
        "is_error": is_error,
        "isError": is_error,
    }


def rpc_problem(message_id: Any, problem: ProblemError) -> dict[str, Any]:
    """A problem of our protocol as OpenEnv's JSON-RPC errors are."""
    wrong_params = problem.status in (404, 410, 422)
    error = {
        "code": _INVALID_PARAMS if wrong_params else _SERVER_ERROR,
        "message": problem.detail,
        "data": sendable(problem, binary=False),
    }
    return {"jsonrpc": "2.0", "id": message_id, "error": error}


def metadata_payload(info: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of an environment, from its `EnvInfo`."""
    metadata = OpenEnvMetadata(name=info["env_id"], description=info["description"], version=info["version"])
    return metadata.model_dump()


def error_payload(problem: ProblemError, *, opening: bool = False) -> dict[str, Any]:
    """A problem in OpenEnv's form, together with the original.

    Args:
        problem: The original problem.
        opening: Whether the session could not be made.
    """
    ours = sendable(problem, binary=False)
    data: dict[str, Any] = {
        "message": ours["detail"],
        "code": _opening_code(problem) if opening else _code(problem),
        "problem": ours,
    }
    errors = ours.get("errors")
    # A registered server may use that name for anything.
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


def _code(problem: ProblemError) -> str:
    if problem.code in _OF_CAPACITY:
        return "CAPACITY_REACHED"
    if problem.kind.session_is_gone:
        return "SESSION_ERROR"
    return "VALIDATION_ERROR" if problem.kind.fault in ("values", "action") else "EXECUTION_ERROR"


def _opening_code(problem: ProblemError) -> str:
    if problem.code in _OF_CAPACITY:
        return "CAPACITY_REACHED"
    # A registered environment is made by its server.
    is_of_factory = problem.kind.fault == "environment" or problem.code == "upstream_error"
    return "FACTORY_ERROR" if is_of_factory else "SESSION_ERROR"


def wire_error(code: str, message: str) -> dict[str, Any]:
    """The answer to a message that is none of OpenEnv's."""
    return {"type": "error", "data": {"message": message, "code": code}}


def value_schema(described: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON Schema of a space; `x-space` has the rest, as this server's protocol describes spaces."""
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
