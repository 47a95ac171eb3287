"""Converts messages of the Open Reward Standard to and from requests and answers of this server; no I/O."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from gymnasium import Space, spaces
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.frames import dumps
from rollgym.clients.protocol.free_form import FreeFields
from rollgym.clients.protocol.messages import Identifier, Seed
from rollgym.clients.protocol.spaces import UnicodeText, parse_space
from rollgym.env_server.common.requests import invalid
from rollgym.env_server.protocols.mcp_forms import STEP, begun_text, call_as_action, own_tools, seen_text
from rollgym.env_server.sessions.replies import Reply

TASKS = 10_000
"""How many tasks a split has: their seeds are 0 to 9,999. A task that a client writes itself may have any seed."""

SUBMIT = "submit"
"""The tool of environments that score one response."""

_SPLIT_TYPES: dict[str, Literal["train", "validation", "test"]] = {"train": "train", "test": "test"}
_CHUNK = 4096


class _Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class OrsOpening(BaseModel):
    """The body of a request for a session's name; all of it is ignored."""

    model_config = ConfigDict(extra="ignore")


class OrsTask(_Message):
    """One task: how an episode begins."""

    seed: Seed
    split: str | None = None
    kwargs: FreeFields | None = None
    options: FreeFields | None = None


class OrsCreate(_Message):
    """Make a session of a task, which is given itself or as one of a split."""

    env_name: Identifier | None = None
    task_spec: OrsTask | None = None
    split: str | None = None
    index: int | None = None
    toolset_name: str | None = Field(default=None, description="This server has none.")

    @model_validator(mode="after")
    def _one_task(self) -> "OrsCreate":
        if (self.split is None) != (self.index is None):
            raise ValueError("split and index come together")
        if (self.task_spec is None) == (self.split is None):
            raise ValueError("give task_spec, or split and index")
        return self


class OrsSplitRequest(_Message):
    """Ask about one split of an environment."""

    split: str


class OrsTaskRequest(OrsSplitRequest):
    """Ask for one task of a split."""

    index: int


class OrsRangeRequest(OrsSplitRequest):
    """Ask for the tasks of a slice, as Python has it."""

    start: int | None = None
    stop: int | None = None


class OrsCall(_Message):
    """Call a tool; `task_id` of a call that was answered in part asks for its answer again."""

    name: str
    input: FreeFields
    task_id: str | None = None


class OrsScoreGroup(BaseModel):
    """Compare completions, which no environment here does."""

    model_config = ConfigDict(extra="ignore")


class OrsSession(BaseModel):
    """The name of a session."""

    sid: str


class OrsStatus(BaseModel):
    """The answer that a session is alive."""

    status: str


class OrsVersion(BaseModel):
    """The version of this server."""

    version: str
    build_sha: str | None = None


class OrsSplit(BaseModel):
    """A split and its purpose."""

    name: str
    type: Literal["train", "validation", "test"]


class OrsTasks(BaseModel):
    """Tasks, as `create` takes them."""

    tasks: list[OrsTask]
    env_name: str


class OrsOneTask(BaseModel):
    """A task, as `create` takes it."""

    task: OrsTask
    env_name: str


class OrsCount(BaseModel):
    """How many tasks a split has."""

    num_tasks: int


class OrsBlock(BaseModel):
    """A block of text in a result."""

    text: str
    detail: dict[str, Any] | None = None
    type: Literal["text"] = "text"


class OrsMessage(BaseModel):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    blocks: list[OrsBlock]
    detail: dict[str, Any] | None = None


class OrsTool(BaseModel):
    """A tool and the JSON Schema of its input."""

    name: str
    description: str
    input_schema: dict[str, Any] | None


class OrsTerminalTool(BaseModel):
    """The tool that takes a plain message as the response."""

    name: str
    arg: str | None = None
    description: str = ""


class OrsTools(BaseModel):
    """All tools of an environment."""

    tools: list[OrsTool]
    terminal_tool: OrsTerminalTool | None = None
    supports_score_group: bool = False
    message_block_types: list[str] = ["text"]


# -- tasks ---------------------------------------------------------------------------------------------------------


def splits_of(described: Mapping[str, Any]) -> list[str]:
    """Return the splits of an environment: the values of its kwarg `split`, or `train` alone.

    Args:
        described: Its `EnvInfo`.
    """
    declared = described["kwargs_schema"].get("properties", {}).get("split")
    values = declared.get("enum") if isinstance(declared, Mapping) else None
    names = [each for each in values if isinstance(each, str)] if isinstance(values, list) else []
    return names or ["train"]


def split_payload(name: str) -> dict[str, str]:
    """A split in the standard's form."""
    return {"name": name, "type": _SPLIT_TYPES.get(name, "validation")}


def offered_split(described: Mapping[str, Any], split: str) -> str:
    """Return a split that the environment has.

    Raises:
        ProblemError: `invalid_request`, naming those that it has.
    """
    known = splits_of(described)
    if split not in known:
        raise invalid("split", f"{described['env_id']} has the splits {', '.join(known)}, not {split[:40]!r}")
    return split


def task_at(split: str, index: int) -> dict[str, Any]:
    """Return a task of a split; negative indices count from the end.

    Raises:
        ProblemError: `invalid_request`, if there is none.
    """
    if not -TASKS <= index < TASKS:
        raise invalid("index", f"a split has {TASKS:,} tasks; write a task_spec with a seed for others")
    return {"seed": index % TASKS, "split": split}


def tasks_between(split: str, start: int | None = None, stop: int | None = None) -> list[dict[str, Any]]:
    """Return the tasks of a slice."""
    return [{"seed": seed, "split": split} for seed in range(TASKS)[start:stop]]


def opening_requests(
    described: Mapping[str, Any], create: OrsCreate, idle_timeout_s: float
) -> dict[str, dict[str, Any]]:
    """Return the requests that make a session of a task (`make`) and begin its episode (`reset`).

    Args:
        described: The environment's `EnvInfo`.
        create: The request to create a session.
        idle_timeout_s: How long the session lives without a ping.

    Raises:
        ProblemError: `invalid_request`.
    """
    if create.toolset_name is not None:
        raise invalid("toolset_name", "this server has no toolsets")
    task = create.task_spec
    if task is None:
        assert create.split is not None
        assert create.index is not None
        split = offered_split(described, create.split)
        task = OrsTask(**task_at(split, create.index))
    kwargs = dict(task.kwargs or {})
    if task.split is not None:
        split = offered_split(described, task.split)
        if "split" in described["kwargs_schema"].get("properties", {}):
            kwargs.setdefault("split", split)
    return {
        "make": {"env_id": described["env_id"], "kwargs": kwargs, "idle_timeout_s": idle_timeout_s},
        "reset": {"seed": task.seed, "options": task.options},
    }


# -- what an agent sees --------------------------------------------------------------------------------------------


def text_block(text: str) -> dict[str, Any]:
    """Text in the standard's form."""
    return {"text": text, "detail": None, "type": "text"}


def prompt_payload(begun: Reply) -> list[dict[str, Any]]:
    """The text that an agent receives when an episode begins: the instruction and the first observation."""
    return [text_block(begun_text(begun))]


def messages_payload(begun: Reply) -> list[dict[str, Any]]:
    """The same as a conversation."""
    return [{"role": "user", "blocks": prompt_payload(begun), "detail": None}]


def has_own_tools(described: Mapping[str, Any]) -> bool:
    """Whether an episode of an environment may declare tools: its actions are text, and it takes more than one."""
    return described["kind"] != "stateless" and isinstance(_space(described), UnicodeText | spaces.Text)


def tools_payload(described: Mapping[str, Any], info: Mapping[str, Any]) -> dict[str, Any]:
    """The tools of an episode.

    Args:
        described: The environment's `EnvInfo`.
        info: The info of the reset; empty to leave out the environment's own tools.
    """
    own = own_tools(info)
    tools = [
        {"name": name, "description": tool["description"], "input_schema": tool["inputSchema"]}
        for name, tool in own.items()
    ]
    name, argument = acting_tool(described)
    means = str(described["metadata"].get("actions", ""))
    if own:
        means = "Reply in words, instead of calling another tool."
    elif name == SUBMIT:
        means = f"Submit the response, which is scored. {means}".strip()
    else:
        means = f"Take an action in the environment. {means}".strip()
    schema = {
        "type": "object",
        "properties": {
            argument: {"description": "The text." if own else means, **space_schema(_space(described))}
        },
        "required": [argument],
        "additionalProperties": False,
    }
    tools.append({"name": name, "description": means, "input_schema": schema})
    terminal = {"name": name, "arg": argument, "description": means} if name == SUBMIT else None
    return {
        "tools": tools,
        "terminal_tool": terminal,
        "supports_score_group": False,
        "message_block_types": ["text"],
    }


def acting_tool(described: Mapping[str, Any]) -> tuple[str, str]:
    """Return the tool that takes an action, and its argument."""
    return (SUBMIT, "response") if described["kind"] == "stateless" else (STEP, "action")


def _space(described: Mapping[str, Any]) -> Space[Any]:
    return parse_space(dict(described["action_space"]))


def space_schema(space: Space[Any]) -> dict[str, Any]:
    """Return the JSON Schema of a space's values, as our JSON encoding writes them."""
    match space:
        case spaces.Discrete():
            start = int(space.start)
            return {"type": "integer", "minimum": start, "maximum": start + int(space.n) - 1}
        case spaces.Box():
            return _array_schema(space.shape, _number_schema(space))
        case spaces.MultiBinary():
            return _array_schema(space.shape, {"type": "integer", "minimum": 0, "maximum": 1})
        case spaces.MultiDiscrete():
            return _array_schema(space.shape, {"type": "integer"}) | {
                "description": f"From {space.start.tolist()}, below {(space.start + space.nvec).tolist()}."
            }
        case spaces.Dict():
            return {
                "type": "object",
                "properties": {key: space_schema(part) for key, part in space.spaces.items()},
                "required": list(space.spaces),
                "additionalProperties": False,
            }
        case spaces.Tuple():
            return {
                "type": "array",
                "prefixItems": [space_schema(part) for part in space.spaces],
                "items": False,
                "minItems": len(space.spaces),
            }
        case spaces.OneOf():
            pairs = enumerate(space.spaces)
            return {
                "type": "array",
                "description": "A pair: which of the forms, and a value of it.",
                "anyOf": [
                    {"prefixItems": [{"const": number}, space_schema(part)], "items": False, "minItems": 2}
                    for number, part in pairs
                ],
            }
        case spaces.Sequence():
            return {"type": "array", "items": space_schema(space.feature_space)}
        case spaces.Graph():
            return {"type": "object", "required": ["nodes", "edges", "edge_links"]}
        case _:
            return {"type": "string"}


def _number_schema(box: spaces.Box) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer" if np.issubdtype(box.dtype, np.integer) else "number"}
    low = float(np.min(box.low.astype(np.float64), initial=np.inf))
    high = float(np.max(box.high.astype(np.float64), initial=-np.inf))
    if np.isfinite(low):
        schema["minimum"] = low
    if np.isfinite(high):
        schema["maximum"] = high
    return schema


def _array_schema(shape: Sequence[int], item: dict[str, Any]) -> dict[str, Any]:
    for length in reversed(shape):
        item = {"type": "array", "items": item, "minItems": length, "maxItems": length}
    return item


# -- calls ---------------------------------------------------------------------------------------------------------


class Refused(Exception):  # noqa: N818 - an answer to the agent, which the standard has a form for
    """A call that was refused: the agent receives the reason, and may make another call.

    Args:
        reason: The standard's name for the error.
        detail: A sentence.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def action_of(described: Mapping[str, Any], info: Mapping[str, Any], call: OrsCall) -> Any:
    """Return the action that a tool call stands for.

    Args:
        described: The environment's `EnvInfo`.
        info: The info of the reset.
        call: The call.

    Raises:
        Refused: The tool does not exist, or its input is invalid.
    """
    name, argument = acting_tool(described)
    if call.name == name:
        if call.input.keys() != {argument}:
            raise Refused("input_validation", f"the input of {name} is an object with {argument!r} alone")
        return call.input[argument]
    own = own_tools(info)
    if call.name not in own:
        known = ", ".join([*own, name])
        raise Refused("not_found", f"there is no tool {call.name[:100]!r}; there are {known}")
    try:
        return call_as_action(info, call.name, call.input)
    except ProblemError as problem:
        raise Refused("input_validation", problem.detail) from problem


def result_payload(reply: Reply) -> dict[str, Any]:
    """The result of a call, from the answer to the step that it was."""
    place = ("terminated", "truncated", "episode", "step", "info")
    return {
        "ok": True,
        "output": {
            "blocks": [text_block(seen_text(reply))],
            "metadata": {name: reply[name] for name in place},
            "reward": reply["reward"],
            "finished": reply["terminated"] or reply["truncated"],
        },
    }


def refused_payload(refused: Refused) -> dict[str, Any]:
    """The result of a call that could not be made."""
    return {"ok": False, "error": str(refused), "reason": refused.reason}


def call_id(episode: int, step: int) -> str:
    """Return the id of a call: its place in its session, so that retries do not repeat it."""
    return f"{episode}-{step}"


def parse_call_id(task_id: str) -> tuple[int, int]:
    """Return the episode and the step that a call's id names.

    Raises:
        ProblemError: `invalid_request`.
    """
    episode, _, step = task_id.partition("-")
    if not all(part.isascii() and part.isdigit() and len(part) < 16 for part in (episode, step)):
        raise invalid("task_id", "no call of this server has this id")
    return int(episode), int(step)


# -- events --------------------------------------------------------------------------------------------------------


def event(name: str, data: str = "") -> bytes:
    """One server-sent event; its data is one line."""
    return f"event: {name}\ndata: {' '.join(data.splitlines())}\n\n".encode()


PING = b": ping\n\n"
"""A comment that keeps a stream alive; clients ignore it."""


def result_events(payload: Mapping[str, Any], limit: int) -> Iterator[bytes]:
    """The events of a result: its JSON in parts that clients read as lines, which have a longest length there.

    Clients cut white space off the begin of a part. A part that begins with some begins with its escape instead, which
    can only be within a text.

    Raises:
        ProblemError: `too_large`.
        EncodeError: It cannot be written.
    """
    body = dumps(payload, binary=False)
    if len(body) > limit:
        raise ProblemError("too_large", f"the reply has {len(body)} bytes; the limit is {limit}", limit=limit)
    text = body.decode()
    for start in range(0, len(text), _CHUNK):
        part = text[start : start + _CHUNK]
        if part[0].isspace():
            part = f"\\u{ord(part[0]):04x}{part[1:]}"
        name = "end" if start + _CHUNK >= len(text) else "chunk"
        yield f"event: {name}\ndata: {part}\n\n".encode()
