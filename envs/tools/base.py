"""Base of environments that are played by calling tools. Knows call formats, knows no tools of its own."""

import hashlib
import json
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

import gymnasium
from pydantic import Field

from rollgym.clients.protocol.spaces import UnicodeText
from rollgym.clients.protocol.tool_calls import DEFAULT_CALL_FORMAT, ToolCall
from rollgym.clients.replies.formats.calls import (
    Reading,
    read_calls,
)
from rollgym.clients.replies.formats.table import FORMATS, format_named
from rollgym.envs.core.hooks import bridge_old_names, checked_options, complete_metadata, overrides
from rollgym.envs.core.kwargs import DeclaredKwargs, OneOf, RenderMode
from rollgym.envs.tools.tool import Toolbox, ToolResult, shortened_result, text_of_tools

CallFormatName = Annotated[str, OneOf(*FORMATS), Field(description="How the policy writes calls.")]
CallsPerTurn = Annotated[int, Field(ge=1, le=64, description="Calls that one reply may hold.")]
StepLimit = Annotated[int, Field(ge=1, le=1000, description="Steps after which an episode is truncated.")]


class ToolKwargs(TypedDict, total=False):
    """The kwargs that all environments with tools have beside their limits, as `ToolEnv` declares them."""

    call_format: str
    format_penalty: float
    describe_tools: bool
    result_role: str
    render_mode: str | None


# The old names of the hooks.
_RENAMED = {
    "_begin": "start_episode",
    "_hear": "on_message",
    "_facts": "state_info",
    "_rules": "describe_rules",
    "_expert_turn": "expert_turn",
    "_run_call": "run_call",
    "_after_calls": "after_calls",
}


@dataclass(frozen=True, slots=True)
class TurnResult:
    """The result of a turn.

    Attributes:
        text: The observation.
        reward: Reward of the turn.
        terminated: Whether the task ended.
        success: Whether it is solved.
    """

    text: str
    reward: float = 0.0
    terminated: bool = False
    success: bool = False


class ToolEnv(DeclaredKwargs, gymnasium.Env[str, str]):
    """An environment whose actions are calls of tools, or text.

    A subclass passes a `Toolbox` to the constructor and overrides the hooks `start_episode` and `describe_rules`. One
    of `on_message` and `after_calls` ends episodes. The other hooks are optional, and so is an expert.

        class Counter(ToolEnv):
            metadata = {"description": "Count to a number.", "max_episode_steps": 10}

            def __init__(self, *, max_episode_steps: int = 10, render_mode: str | None = None) -> None:
                add = Tool("add", "Add to the counter.", tool_parameters(["n"], n={"type": "integer"}), self.add)
                super().__init__(
                    Toolbox([add]), max_calls_per_turn=1, max_episode_steps=max_episode_steps, render_mode=render_mode
                )

            def add(self, n):
                if abs(n) > 9:
                    raise ToolError("add at most 9 at a time")
                self.count += n
                return self.count

            def start_episode(self, options):
                self.count, self.goal = 0, int(self.np_random.integers(10, 30))
                return f"Count to {self.goal}, then say done."

            def on_message(self, text):
                solved = self.count == self.goal
                return TurnResult("Right." if solved else "Wrong.", float(solved), terminated=True, success=solved)

            def describe_rules(self):
                return "Use the tool to reach the number."

    A reply is read outside think tags. If one of its calls cannot be read or does not fit the tool's schema, none is
    run: the state stays as it is, the turn counts as a step, and the observation says what is wrong. A tool that cannot
    do what a well-formed call asks for raises `ToolError`, whose message is the result. Any other exception is an error
    of the environment.

    What a subclass's `metadata` leave out is taken from the base class's. `metadata["expert"]` says by itself whether
    `expert_turn` is overridden.

    Attributes:
        toolbox: The tools.
        call_format: The policy's format of tool calls.
        shows_expert: Whether the reset asked for the expert, which a server allows operators only: `info` may then hold
            what a policy must not see.
    """

    metadata: dict[str, Any] = {
        "reset_options": ["expert"],
        "observation": "The results of the calls, or what a reply without calls led to.",
        "actions": "Calls of tools in the `call_format`, or text.",
        "reward": (
            "1 where the task is done as it should be, else 0; `format_penalty` for a reply that "
            "cannot be read."
        ),
        "render_modes": ["ansi"],
        "render_fps": 1,
        "kind": "episodic",
        "inline": True,
        "deterministic": True,
        "forkable": True,
        "expert": True,
        "metrics": {"steps": "last", "invalid_replies": "last", "tool_calls": "last", "tool_errors": "last"},
        "version": "0",
    }

    def __init__(
        self,
        toolbox: Toolbox,
        *,
        max_calls_per_turn: CallsPerTurn,
        max_episode_steps: StepLimit,
        call_format: CallFormatName = DEFAULT_CALL_FORMAT,
        format_penalty: Annotated[
            float, Field(description="Added to the reward of a reply that cannot be read.")
        ] = 0.0,
        describe_tools: Annotated[
            bool, Field(description='Whether the instruction lists the tools; `info["tools"]` always does.')
        ] = True,
        result_role: Annotated[
            str,
            OneOf("tool", "user"),
            Field(
                description='Role of results in `info["messages"]`; `user` for chat templates that know no tools.'
            ),
        ] = "tool",
        render_mode: RenderMode = None,
    ) -> None:
        self.action_space = UnicodeText()
        self.observation_space = UnicodeText()
        self.render_mode = render_mode
        self.call_format = format_named(call_format)
        self.toolbox = toolbox
        self._per_turn = max_calls_per_turn
        self._limit = max_episode_steps
        self._penalty = float(format_penalty)
        self._describe_tools = describe_tools
        self._result_role = result_role
        self._written_instruction: str | None = None
        self.shows_expert = False
        self._steps = self._invalid_turns = self._calls = self._errors = 0
        self._shown = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Accept the old names of hooks, and complete the metadata."""
        super().__init_subclass__(**kwargs)
        bridge_old_names(cls, _RENAMED)
        complete_metadata(cls, expert=overrides(cls, {"expert_turn"}, __name__))

    # -- hooks -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def start_episode(self, options: Mapping[str, Any]) -> str:
        """Set up an episode and return its first observation.

        Draw whatever is random from `self.np_random`, which the reset has seeded.

        Args:
            options: The options of the reset, each one of `metadata["reset_options"]`.

        Raises:
            ValueError: If an option makes no sense; the caller gets the message.
        """

    @abstractmethod
    def describe_rules(self) -> str:
        """Return the instruction for the policy, without the tools and how to call them."""

    def on_message(self, text: str) -> TurnResult | str:
        """Handle a reply that calls no tool, such as an answer or a question to the user.

        Without this hook every reply has to call a tool.

        Args:
            text: The reply outside think tags. It may be any text: empty, long, not ASCII.

        Returns:
            What it led to; or, if such a reply makes no sense here, a sentence that says so. The turn then is invalid,
            and costs `format_penalty`.
        """
        return "error: the reply calls no tool."

    def state_info(self) -> dict[str, Any]:
        """Return the entries of `info` that describe the state.

        Two of them have a meaning: `state`, a mapping that JSON can hold, and `anchor`, a text that is equal for equal
        states of one task, by which algorithms such as GiGPO compare steps (`state_digest` makes one). You may add
        others. Clients see all of it, so keep the solution out unless `self.shows_expert`.
        """
        return {}

    def expert_turn(self) -> ToolCall | str:
        """Return what an expert would do now: a call, or text. Override it if there is an expert."""
        raise NotImplementedError(f"{type(self).__name__} has no expert")

    def run_call(self, call: ToolCall) -> ToolResult:
        """Run a call that fits its tool's schema. Override it to observe calls, or to answer in a tool's place."""
        return self.toolbox.run(call)

    def after_calls(self) -> TurnResult | None:
        """Return how the episode ended if the calls of the turn have ended it, else None.

        The `text` is shown after the results of the calls.
        """
        return None

    # -- Gymnasium -------------------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode. All tool environments take the option `expert`."""
        super().reset(seed=seed)
        given = checked_options(self.metadata["reset_options"], options)
        self.shows_expert = given.get("expert", False)
        if self.shows_expert and not self.metadata["expert"]:
            raise ValueError(f"{type(self).__name__} has no expert: reset it without the option 'expert'")
        self._steps = self._invalid_turns = self._calls = self._errors = 0
        self._shown = self.start_episode(given)
        info = self._info(success=False, valid=True, reward=0.0, penalty=0.0)
        if self._written_instruction is None:
            self._written_instruction = self._instruction()
        info["instruction"] = self._written_instruction
        info["rules"] = self.describe_rules()
        info["tools"] = self.toolbox.described()
        info["messages"] = [{"role": "user", "content": self._shown}]
        return self._shown, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Run the calls of a reply; one without calls is text to the environment."""
        reading = read_calls(action, self.call_format, self.toolbox.schemas, self._per_turn)
        if reading.faults or reading.calls:
            faults = self.toolbox.faults(reading.calls)
            if reading.faults or any(faults):
                return self._refused(reading, faults)
            return self._run_calls(reading.calls)
        result = self.on_message(reading.content)
        if isinstance(result, str):
            return self._invalid_turn(result, [{"role": "user", "content": result}])
        return self._turn(result, [{"role": "user", "content": result.text}])

    def render(self) -> Any:
        """Return the last turn as text."""
        return f"step {self._steps}\n{self._shown}\n" if self.render_mode == "ansi" else None

    # -- turns -----------------------------------------------------------------------------------------------------

    def _run_calls(self, calls: Sequence[ToolCall]) -> tuple[str, float, bool, bool, dict[str, Any]]:
        results = []
        failed = 0
        for call in calls:
            result = self.run_call(call)
            self._calls += 1
            failed += result.error
            results.append(shortened_result(result.text))
        self._errors += failed
        messages = self._results(calls, results)
        text = "\n".join(
            self.call_format.show_result(call.name, result)
            for call, result in zip(calls, results, strict=True)
        )
        ended = self.after_calls()
        if ended is None:
            return self._turn(TurnResult(text), messages, failed=failed)
        if ended.text:
            text = f"{text}\n{ended.text}"
            messages.append({"role": "user", "content": ended.text})
        ending = TurnResult(text, ended.reward, ended.terminated, ended.success)
        return self._turn(ending, messages, failed=failed)

    def _refused(
        self, reading: Reading, faults: Sequence[str | None]
    ) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Answer a reply with a call that cannot be run."""
        said = [*reading.faults, *(fault for fault in faults if fault is not None)]
        text = "error: " + "; ".join(said) + ". Nothing was run."
        if reading.faults or not reading.calls:
            return self._invalid_turn(text, [{"role": "user", "content": text}])
        other = "not run: another call of the reply makes no sense"
        results = [other if fault is None else f"error: {fault}" for fault in faults]
        return self._invalid_turn(text, self._results(reading.calls, results))

    def _invalid_turn(
        self, text: str, messages: list[dict[str, Any]]
    ) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._invalid_turns += 1
        return self._turn(TurnResult(text, self._penalty), messages, valid=False, penalty=self._penalty)

    def _turn(
        self,
        result: TurnResult,
        messages: list[dict[str, Any]],
        *,
        valid: bool = True,
        penalty: float = 0.0,
        failed: int = 0,
    ) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        self._shown = result.text
        truncated = not result.terminated and self._steps >= self._limit
        info = self._info(
            success=result.success, valid=valid, reward=result.reward - penalty, penalty=penalty
        )
        info["messages"] = messages
        info["failed_calls"] = failed
        return result.text, result.reward, result.terminated, truncated, info

    def _results(self, calls: Sequence[ToolCall], results: Sequence[str]) -> list[dict[str, Any]]:
        if self._result_role == "user":
            texts = [
                self.call_format.show_result(call.name, text)
                for call, text in zip(calls, results, strict=True)
            ]
            return [{"role": "user", "content": "\n".join(texts)}]
        return [
            {
                "role": "tool",
                "tool_call_id": call.id or f"call_{self._steps}_{number}",
                "name": call.name,
                "content": text,
            }
            for number, (call, text) in enumerate(zip(calls, results, strict=True))
        ]

    def _info(self, *, success: bool, valid: bool, reward: float, penalty: float) -> dict[str, Any]:
        info = {
            "success": success,
            "action_is_valid": valid,
            "format_penalty": penalty,
            "env_reward": reward,
            "call_format": self.call_format.name,
            "metrics": {
                "steps": self._steps,
                "invalid_replies": self._invalid_turns,
                "tool_calls": self._calls,
                "tool_errors": self._errors,
            },
            **self.state_info(),
        }
        if self.shows_expert:
            turn = self.expert_turn()
            if not isinstance(turn, str):
                turn = self.call_format.write([turn], schemas=self.toolbox.schemas)
            info["expert_action"] = turn
        return info

    def _instruction(self) -> str:
        parts = [self.describe_rules()]
        if self._describe_tools:
            parts.append(f"Tools, as JSON:\n{text_of_tools(self.toolbox.described())}")
        parts.append(self.call_format.explain(self.toolbox.schemas))
        if self._per_turn > 1:
            parts.append(f"One reply may hold up to {self._per_turn} calls.")
        return "\n\n".join(parts)


bridge_old_names(ToolEnv, _RENAMED)


def __getattr__(name: str) -> Any:
    """Find `TurnResult` by its old name, too."""
    if name != "Heard":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("Heard is now TurnResult", DeprecationWarning, stacklevel=2)
    return TurnResult


def state_digest(value: Any) -> str:
    """Return a short text for a value that JSON can hold: equal values have equal texts, in every process."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


class RunningDigest:
    """A short name for texts by key that is kept as they change: a change costs as much as it is long."""

    def __init__(self) -> None:
        self._parts: dict[str, int] = {}
        self._sum = 0

    def put(self, key: str, text: str) -> None:
        """Store a text under a key, and replace any earlier one."""
        self.remove(key)
        self._parts[key] = int(state_digest([key, text]), 16)
        self._sum += self._parts[key]

    def remove(self, key: str) -> None:
        """Delete a key, if it is there."""
        self._sum -= self._parts.pop(key, 0)

    @property
    def name(self) -> str:
        """Equal texts under equal keys have equal names, in any order of insertion, and in every process."""
        return f"{self._sum:x}"
