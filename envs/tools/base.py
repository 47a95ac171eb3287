"""Base of environments that are played by calling tools. Knows call formats, knows no tools of its own."""

import hashlib
import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

import gymnasium
from pydantic import Field

from rollgym.clients.protocol.spaces import UnicodeText
from rollgym.envs.core.kwargs import DeclaredKwargs, OneOf, RenderMode
from rollgym.envs.core.reset_options import checked_options
from rollgym.envs.tools.formats.calls import Reading, ToolCall, read_calls
from rollgym.envs.tools.formats.table import FORMATS, format_named
from rollgym.envs.tools.tool import Toolbox, ToolResult, shortened, text_of_tools

CallFormat = Annotated[str, OneOf(*FORMATS), Field(description="How the policy writes calls.")]
CallsPerTurn = Annotated[int, Field(ge=1, le=64, description="Calls that one reply may hold.")]
StepLimit = Annotated[int, Field(ge=1, le=1000, description="Steps after which an episode is truncated.")]


class ToolKwargs(TypedDict, total=False):
    """The kwargs that all environments with tools have beside their limits, as `ToolEnv` declares them."""

    call_format: str
    format_penalty: float
    describe_tools: bool
    result_role: str
    render_mode: str | None


@dataclass(frozen=True, slots=True)
class Heard:
    """What a reply without calls led to.

    Attributes:
        text: The observation.
        reward: Of the turn.
        terminated: Whether the task ended.
        success: Whether it is solved.
    """

    text: str
    reward: float = 0.0
    terminated: bool = False
    success: bool = False


class ToolEnv(DeclaredKwargs, gymnasium.Env[str, str]):
    """An environment whose actions are calls of tools, or text.

    A reply is read outside think tags. Where one of its calls cannot be read or makes no sense, none is run: the state
    stays as it is, the turn counts as a step, and the observation says what is wrong. A tool that cannot do what a good
    call asks for says so in its result.
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
        call_format: CallFormat = "hermes",
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
        self._expert = False
        self._steps = self._invalid_turns = self._calls = self._errors = 0
        self._shown = ""

    # -- what an environment implements ----------------------------------------------------------------------------

    @abstractmethod
    def _begin(self, options: Mapping[str, Any]) -> str:
        """Set an episode up from `self.np_random` and the reset's options; return the first observation."""

    @abstractmethod
    def _hear(self, text: str) -> Heard | str:
        """Take a reply that calls nothing; return a sentence on what is wrong where it means nothing here."""

    @abstractmethod
    def _facts(self) -> dict[str, Any]:
        """Return what `info` says of the state: `state`, `anchor` and the environment's own."""

    @abstractmethod
    def _rules(self) -> str:
        """Return the instruction, without tools and how to call them."""

    @abstractmethod
    def _expert_turn(self) -> ToolCall | str:
        """Return what the expert does: a call, or text."""

    def _run_call(self, call: ToolCall) -> ToolResult:
        """Run a call that has no fault; environments that watch their tools do it here."""
        return self.toolbox.run(call)

    def _after_calls(self) -> Heard | None:
        """Return how an episode ended that the calls of a turn have ended; None where it goes on."""
        return None

    # -- Gymnasium -------------------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode. All tool environments take the option `expert`."""
        super().reset(seed=seed)
        given = checked_options(self.metadata["reset_options"], options)
        self._expert = given.get("expert", False)
        self._steps = self._invalid_turns = self._calls = self._errors = 0
        self._shown = self._begin(given)
        info = self._info(success=False, valid=True, reward=0.0, penalty=0.0)
        if self._written_instruction is None:
            self._written_instruction = self._instruction()
        info["instruction"] = self._written_instruction
        info["rules"] = self._rules()
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
        heard = self._hear(reading.content)
        if isinstance(heard, str):
            return self._invalid_turn(heard, [{"role": "user", "content": heard}])
        return self._turn(heard, [{"role": "user", "content": heard.text}])

    def render(self) -> Any:
        """Return the last turn as text."""
        return f"step {self._steps}\n{self._shown}\n" if self.render_mode == "ansi" else None

    # -- turns -----------------------------------------------------------------------------------------------------

    def _run_calls(self, calls: Sequence[ToolCall]) -> tuple[str, float, bool, bool, dict[str, Any]]:
        results = []
        for call in calls:
            result = self._run_call(call)
            self._calls += 1
            self._errors += result.error
            results.append(shortened(result.text))
        messages = self._results(calls, results)
        text = "\n".join(
            self.call_format.show_result(call.name, result)
            for call, result in zip(calls, results, strict=True)
        )
        ended = self._after_calls()
        if ended is None:
            return self._turn(Heard(text), messages)
        if ended.text:
            text = f"{text}\n{ended.text}"
            messages.append({"role": "user", "content": ended.text})
        return self._turn(Heard(text, ended.reward, ended.terminated, ended.success), messages)

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
        return self._turn(Heard(text, self._penalty), messages, valid=False, penalty=self._penalty)

    def _turn(
        self, heard: Heard, messages: list[dict[str, Any]], *, valid: bool = True, penalty: float = 0.0
    ) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        self._shown = heard.text
        truncated = not heard.terminated and self._steps >= self._limit
        info = self._info(success=heard.success, valid=valid, reward=heard.reward - penalty, penalty=penalty)
        info["messages"] = messages
        return heard.text, heard.reward, heard.terminated, truncated, info

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
            **self._facts(),
        }
        if self._expert:
            turn = self._expert_turn()
            info["expert_action"] = turn if isinstance(turn, str) else self.call_format.write([turn])
        return info

    def _instruction(self) -> str:
        parts = [self._rules()]
        if self._describe_tools:
            parts.append(f"Tools, as JSON:\n{text_of_tools(self.toolbox.described())}")
        parts.append(self.call_format.explain(self.toolbox.schemas))
        if self._per_turn > 1:
            parts.append(f"One reply may hold up to {self._per_turn} calls.")
        return "\n\n".join(parts)


def digest(value: Any) -> str:
    """Return a short name for a state that JSON can hold: equal states have equal names, in every process."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


class Running:
    """A short name for texts by key that is kept as they change: a change costs as much as it is long."""

    def __init__(self) -> None:
        self._parts: dict[str, int] = {}
        self._sum = 0

    def put(self, key: str, text: str) -> None:
        """Have a text under a key, in place of what was there."""
        self.remove(key)
        self._parts[key] = int(digest([key, text]), 16)
        self._sum += self._parts[key]

    def remove(self, key: str) -> None:
        """Have nothing under a key."""
        self._sum -= self._parts.pop(key, 0)

    @property
    def name(self) -> str:
        """Equal texts under equal keys have equal names, in whatever order they came, and in every process."""
        return f"{self._sum:x}"
