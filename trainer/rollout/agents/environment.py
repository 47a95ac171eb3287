"""The environment of an agent's episode: its steps, whose rewards go to its turns, and its tools over MCP.

Tools of the Model Context Protocol are called over streamable HTTP without streams. The agent's session is in the URL,
so the protocol's own session ids are not needed, and its episode has begun: there is no tool that begins another one.
Of MCP, messages are read and built here; nothing does I/O.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollgym.clients.protocol.arrays import DecodeError, EncodeError
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.tool_calls import ToolCall, call_format_of
from rollgym.clients.replies.formats.calls import UnwritableCallError
from rollgym.clients.replies.formats.table import declared_tools, written_calls
from rollgym.trainer.core.errors import ConfigError, InvalidNumberError, TrainerError
from rollgym.trainer.records.trajectory import Phase, Trajectory, TrajectoryOutcome, Turn
from rollgym.trainer.rollout.agent import (
    EpisodeMetrics,
    Session,
    note_result,
    outcome_of_end,
    step_phase,
    view_of,
)
from rollgym.trainer.rollout.agents.errors import ApiError
from rollgym.trainer.rollout.context import pictures_of
from rollgym.trainer.rollout.log_replay import EpisodeLostError
from rollgym.version import __version__

FAILURES = (ProblemError, DecodeError, InvalidNumberError)
"""Errors of a step that end its episode alone."""


@dataclass(frozen=True, slots=True)
class Observed:
    """The agent's view of its environment.

    Attributes:
        text: The observation as text.
        messages: The observation as messages.
        reward: Reward of the step; 0.0 after the reset.
        terminated: Whether the episode has come to its end.
        truncated: Whether it was ended from outside.
        valid: Whether the environment could read the action.
    """

    text: str
    messages: Sequence[Mapping[str, Any]]
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    valid: bool = True

    @property
    def over(self) -> bool:
        """Whether the episode is over: no further steps are taken."""
        return self.terminated or self.truncated

    def as_body(self) -> dict[str, Any]:
        """Return the view as plain data."""
        return {
            "observation": self.text,
            "messages": [dict(message) for message in self.messages],
            "reward": self.reward,
            "terminated": self.terminated,
            "truncated": self.truncated,
            "action_is_valid": self.valid,
        }


class EpisodeEnvironment:
    """One episode of an environment that an agent acts in, beside its calls of the policy.

    Args:
        session: The environment's session, used by this episode alone.
        trajectory: Records the rewards and the end.
        failed: Called once the episode can no longer have a result.

    Attributes:
        info: The environment's latest `info`.
        seen: The agent's latest view.
        steps: Steps that were taken.
        failure: The error that ended the episode without a result, or that ends the run; None without one.
    """

    def __init__(
        self, session: Session, trajectory: Trajectory, failed: Callable[[], None] = lambda: None
    ) -> None:
        self._session = session
        self._trajectory = trajectory
        self._failed = failed
        self._metrics = EpisodeMetrics(session.env.metadata.get("metrics", {}))
        self._stepping = asyncio.Lock()
        self._paid: Turn | None = None
        self._closed = False
        self.begun: Mapping[str, Any] = {}
        self.info: Mapping[str, Any] = {}
        self.seen = Observed("", ())
        self.steps = 0
        self.failure: Exception | None = None

    async def reset(self) -> None:
        """Begin the episode.

        Raises:
            ProblemError: The server or the environment refuses.
            ConfigError: It shows pictures.
        """
        task = self._trajectory.task
        options = dict(task.options) if task.options is not None else None
        with self._trajectory.timeline.during(Phase.ENVIRONMENT):
            observation, info = await self._session.reset(seed=task.seed, options=options)
        view = view_of(0, observation, info)
        if pictures_of(view.messages):
            raise ConfigError(
                f"{self.env_id} shows pictures, and the agents' endpoint takes text only: have it show text, or take "
                "an agent of ours, or a coroutine"
            )
        self.begun = self.info = info
        self.seen = Observed(view.text, view.messages)

    @property
    def env_id(self) -> str:
        """Return the id of the environment."""
        return self._trajectory.task.env_id

    @property
    def instruction(self) -> str:
        """Return the environment's instruction; with tools, without the part about writing calls."""
        told = self.begun.get("rules", self.begun.get("instruction"))
        return told if isinstance(told, str) else ""

    @property
    def tools(self) -> list[Mapping[str, Any]]:
        """Return the tools that the environment declares."""
        declared = self.begun.get("tools")
        return (
            [each for each in declared if isinstance(each, Mapping)]
            if isinstance(declared, list | tuple)
            else []
        )

    async def step(self, action: str) -> Observed:
        """Send an action to the environment. Its reward goes to the last turn of the policy before it.

        Raises:
            ApiError: The episode is over, or failed.
        """
        async with self._stepping:
            if self._closed:
                raise ApiError(410, "the episode of this session has ended", "session_ended")
            if self.failure is not None:
                raise _failed(self.failure)
            if self.seen.over:
                raise ApiError(409, "the environment's episode is over", "episode_over")
            turn, anchor = self._last_turn(), self.info.get("anchor")
            try:
                self.seen = await self._stepped(action, turn, anchor)
            except (*FAILURES, EpisodeLostError, TrainerError, ConnectionError, TimeoutError) as error:
                self.failure = error
                self._failed()
                raise _failed(error) from error
            except EncodeError as error:
                raise ApiError(400, str(error), "invalid_action", "action") from error
            return self.seen

    async def close(self) -> None:
        """Refuse further steps. A step in flight is answered first, even if its caller has gone."""
        self._closed = True
        async with self._stepping:
            pass

    async def _stepped(self, action: str, turn: Turn, anchor: Any) -> Observed:
        with self._trajectory.timeline.during(step_phase(self._session)):
            observation, reward, terminated, truncated, self.info = await self._session.step(action)
        self.steps += 1
        before = replace(turn)
        note_result(turn, anchor, reward, self.info)
        view = view_of(self.steps, observation, self.info)
        seen = Observed(view.text, view.messages, turn.reward, terminated, truncated, turn.action_is_valid)
        if turn is self._paid:
            _add_up(before, turn)
        self._paid = turn
        self._metrics.add(self.info)
        self._trajectory.metrics = self._metrics.totals()
        if seen.over:
            outcome_of_end(self._trajectory, self._session, self.info, terminated=terminated)
        return seen

    def _last_turn(self) -> Turn:
        if not self._trajectory.turns:
            # What an agent does by itself is nothing that the policy could learn from.
            raise ApiError(409, "ask the policy first: a step's reward goes to its last reply", "no_turn_yet")
        return self._trajectory.turns[-1]

    def ended(self) -> bool:
        """Whether the environment's episode has its outcome."""
        return self.seen.over and self._trajectory.outcome is not TrajectoryOutcome.ENVIRONMENT_ERROR


def _add_up(earlier: Turn, turn: Turn) -> None:
    """Write the results of all its steps into a turn: several may follow one reply, given in the state of the first."""
    turn.reward += earlier.reward
    turn.format_penalty += earlier.format_penalty
    turn.anchor = earlier.anchor
    turn.action_is_valid = turn.action_is_valid and earlier.action_is_valid
    parts = turn.reward_parts
    turn.reward_parts = earlier.reward_parts | {
        name: earlier.reward_parts.get(name, 0.0) + part for name, part in parts.items()
    }


def _failed(error: Exception) -> ApiError:
    return ApiError(502, f"the environment failed: {error}", "environment_failed")


VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26")
"""The revisions that are spoken, the newest first."""
STEP = "step"
_INVALID_REQUEST, _METHOD_NOT_FOUND, _INVALID_PARAMS, _INTERNAL = -32600, -32601, -32602, -32603
_ACTION = {
    "type": "object",
    "properties": {"action": {"type": "string"}},
    "required": ["action"],
    "additionalProperties": False,
}


class McpError(Exception):
    """A request that is refused, with the code that JSON-RPC has for it."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


async def mcp_answer(environment: EpisodeEnvironment, message: object) -> dict[str, Any] | None:
    """Answer one message; None if no answer is expected."""
    if not isinstance(message, Mapping) or message.get("jsonrpc") != "2.0":
        return _error(None, _INVALID_REQUEST, "a message is a JSON-RPC 2.0 object")
    identifier = message.get("id")
    if identifier is None or "method" not in message:
        return None
    if isinstance(identifier, bool) or not isinstance(identifier, str | int):
        return _error(None, _INVALID_REQUEST, "the id of a request is text or a whole number")
    params = message.get("params")
    try:
        result = await _result(environment, message["method"], params if isinstance(params, Mapping) else {})
    except McpError as error:
        return _error(identifier, error.code, str(error))
    except ApiError as error:
        if error.status >= 500:
            return _error(identifier, _INTERNAL, error.message)
        result = _said(error.message, failed=True)  # the agent can do otherwise
    return {"jsonrpc": "2.0", "id": identifier, "result": result}


def _error(identifier: str | int | None, code: int, text: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": identifier, "error": {"code": code, "message": text}}


async def _result(
    environment: EpisodeEnvironment, method: object, params: Mapping[str, Any]
) -> dict[str, Any]:
    match method:
        case "initialize":
            return _initialized(environment, params)
        case "ping":
            return {}
        case "tools/list":
            return {"tools": listed_tools(environment)}
        case "tools/call":
            return await _called(environment, params)
    raise McpError(_METHOD_NOT_FOUND, "there is no such method here")


def _initialized(environment: EpisodeEnvironment, params: Mapping[str, Any]) -> dict[str, Any]:
    asked = params.get("protocolVersion")
    told = [environment.instruction, environment.seen.text]
    return {
        "protocolVersion": asked if asked in VERSIONS else VERSIONS[0],
        "capabilities": {"tools": {"listChanged": False}},
        "serverInfo": {"name": "rollgym", "title": environment.env_id, "version": __version__},
        "instructions": "\n\n".join(filter(None, told)),
    }


def listed_tools(environment: EpisodeEnvironment) -> list[dict[str, Any]]:
    """Return `step`, and the environment's own tools if calls of them can be written in its format."""
    own = [tool for name, tool in _own_tools(environment).items() if name != STEP]
    meaning = "Say something to the environment that is no call of a tool." if own else "Take an action."
    return [{"name": STEP, "description": meaning, "inputSchema": _ACTION}, *own]


def _own_tools(environment: EpisodeEnvironment) -> dict[str, dict[str, Any]]:
    return {
        tool.name: {
            "name": tool.name,
            "description": tool.description,
            "inputSchema": dict(tool.parameters),
        }
        for tool in declared_tools(environment.begun)
    }


async def _called(environment: EpisodeEnvironment, params: Mapping[str, Any]) -> dict[str, Any]:
    name, arguments = params.get("name"), params.get("arguments") or {}
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise McpError(_INVALID_PARAMS, "tools/call takes a name and an object of arguments")
    if name == STEP:
        if not isinstance(arguments.get("action"), str):
            raise McpError(_INVALID_PARAMS, "step takes an action, which is text")
        return _shown(await environment.step(arguments["action"]))
    if name not in _own_tools(environment):
        raise McpError(_INVALID_PARAMS, f"there is no tool {name[:100]!r}")
    schemas = {tool.name: tool.parameters for tool in declared_tools(environment.begun)}
    call = ToolCall(name, arguments)
    try:
        action = written_calls(call_format_of(environment.begun), [call], schemas=schemas)
    except UnwritableCallError as error:
        return _said(f"{error}. Nothing was run.", failed=True)
    return _shown(await environment.step(action))


def _shown(seen: Observed) -> dict[str, Any]:
    texts = [message.get("content") for message in seen.messages if message.get("role") == "tool"]
    # Tool results without the marks of a format.
    bare = len(texts) == len(seen.messages) > 0 and all(isinstance(text, str) for text in texts)
    text = "\n".join(map(str, texts)) if bare else seen.text
    if seen.over:
        text += "\n\n[The episode has ended.]"
    return _said(text, failed=not seen.valid)


def _said(text: str, *, failed: bool) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}], "isError": failed}
