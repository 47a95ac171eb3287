"""ToolUse-v0: generated questions, and tools that find the answers out."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from envs.replies import last_tagged
from envs.splits import checked_split, split_of_text
from envs.tools.base import TOOL_KWARGS, Heard, ToolEnv, digest
from envs.tools.calculator import CALCULATOR
from envs.tools.calls import ToolCall
from envs.tools.dates import DATE_TOOLS
from envs.tools.search import Corpus
from envs.tools.store import Store
from envs.tools.tasks import KINDS, Task, answers_agree
from envs.tools.tool import Tool, Toolbox, ToolResult

TOOL_GROUPS = ("calculator", "search", "store", "dates")
_TRIES = 1_000


class ToolUseEnv(ToolEnv):
    """Questions about arithmetic, a made-up world, dates, and a store that may have to be changed.

    The answer stands in `<answer>` tags of a reply without calls, and ends the episode: reward 1 where it is right and
    the store holds what it should, else 0.

    Args:
        tools: Groups of tools that are there.
        kinds: Kinds of tasks that are drawn; None for all that the tools are enough for.
        split: Only tasks of this split, by content.
        call_format: How the policy writes calls.
        max_calls_per_turn: Calls that one reply may hold.
        max_episode_steps: Steps after which an episode is truncated.
        format_penalty: Added to the reward of a reply that cannot be read.
        describe_tools: Whether the instruction lists the tools; `info["tools"]` always does.
        result_role: Role of results in `info["messages"]`; `user` for chat templates that know no tools.
        render_mode: "ansi".

    Raises:
        ValueError: If an argument makes no sense.
    """

    metadata: dict[str, Any] = ToolEnv.metadata | {
        "description": "Answer generated questions with a calculator, search, a key-value store and dates.",
        "max_episode_steps": 16,
    }
    groups: ClassVar[tuple[str, ...]] = TOOL_GROUPS
    kwargs_schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "tools": {
                "type": "array",
                "items": {"enum": list(TOOL_GROUPS)},
                "minItems": 1,
                "uniqueItems": True,
            },
            "kinds": {
                "type": ["array", "null"],
                "items": {"enum": [name for name, kind in KINDS.items() if kind.needs <= set(TOOL_GROUPS)]},
                "minItems": 1,
                "uniqueItems": True,
            },
            "split": {"enum": ["train", "valid", "test", None]},
            **TOOL_KWARGS,
        },
    }

    def __init__(
        self,
        *,
        tools: Sequence[str] | None = None,
        kinds: Sequence[str] | None = None,
        split: str | None = None,
        call_format: str = "hermes",
        max_calls_per_turn: int = 8,
        max_episode_steps: int = 16,
        format_penalty: float = 0.0,
        describe_tools: bool = True,
        result_role: str = "tool",
        render_mode: str | None = None,
    ) -> None:
        chosen = self.groups if tools is None else tuple(tools)
        if not chosen or set(chosen) - set(self.groups):
            raise ValueError(f"tools must be some of {', '.join(self.groups)}, not {list(chosen)}")
        self._kinds = _checked_kinds(kinds, frozenset(chosen))
        self._split = checked_split(split)
        self._store = Store()
        self._corpus = Corpus()
        self._task = Task("", "", "", ())
        self._found: dict[str, str] = {}
        super().__init__(
            Toolbox([tool for group in self.groups if group in chosen for tool in self._group(group)]),
            call_format=call_format,
            max_calls_per_turn=max_calls_per_turn,
            max_episode_steps=max_episode_steps,
            format_penalty=format_penalty,
            describe_tools=describe_tools,
            result_role=result_role,
            render_mode=render_mode,
        )

    def _group(self, name: str) -> Sequence[Tool]:
        """Return the tools of a group."""
        if name == "calculator":
            return (CALCULATOR,)
        if name == "search":
            return (self._corpus.tool(),)
        return self._store.tools() if name == "store" else DATE_TOOLS

    # -- the episode -----------------------------------------------------------------------------------------------

    def _begin(self, options: Mapping[str, Any]) -> str:
        split = checked_split(options.get("split", self._split))
        for _ in range(_TRIES):
            kind = self._kinds[int(self.np_random.integers(len(self._kinds)))]
            task = KINDS[kind].draw(self.np_random)
            if split is None or split_of_text(task.question) == split:
                break
        else:
            raise ValueError(f"no task of split {split} in {_TRIES} tries")
        self._task = task
        self._store.fill(task.stored)
        self._corpus.fill(task.documents)
        self._found = {}
        return task.question

    def _run_call(self, call: ToolCall) -> ToolResult:
        result = self.toolbox.run(call)
        self._found[digest([call.name, dict(call.arguments)])] = result.text
        return result

    def _hear(self, text: str) -> Heard | str:
        answer = last_tagged(text, "answer")
        if answer is None:
            return "error: there is neither a call of a tool nor an answer in answer tags, such as <answer>42</answer>."
        right = answers_agree(answer, self._task.answer)
        kept = self._store.texts == dict(sorted(self._task.wanted.items()))
        if right and kept:
            return Heard("The answer is right.", 1.0, terminated=True, success=True)
        if right:
            return Heard("The answer is right, but the store does not hold what it should.", terminated=True)
        return Heard("The answer is wrong.", terminated=True)

    def _facts(self) -> dict[str, Any]:
        return {
            "state": {"kind": self._task.kind, "question": self._task.question, "store": self._store.texts},
            # Two turns of one task are alike where the store is, and where the same is known.
            "anchor": digest([self._store.texts, self._found]),
        }

    def _rules(self) -> str:
        return (
            "Answer the question with the help of tools. What the encyclopedia and the store say cannot be known "
            "without them. Once you know the answer, and the store holds what it should, reply without a call and with "
            "the answer in answer tags, for example <answer>42</answer>: a number as digits, else the word or name "
            "alone."
        )

    def _expert_turn(self) -> ToolCall | str:
        for call in self._task.plan:
            if digest([call.name, dict(call.arguments)]) not in self._found:
                return call
        stored, wanted = self._store.texts, self._task.wanted
        for key in stored:
            if key not in wanted:
                return ToolCall("store_delete", {"key": key})
        for key, text in wanted.items():
            if stored.get(key) != text:
                return ToolCall("store_set", {"key": key, "value": text})
        return f"<answer>{self._task.answer}</answer>"


def _checked_kinds(kinds: Sequence[str] | None, tools: frozenset[str]) -> tuple[str, ...]:
    possible = tuple(name for name, kind in KINDS.items() if kind.needs <= tools)
    if kinds is None:
        return possible
    for name in kinds:
        if name not in KINDS:
            raise ValueError(f"kinds must be some of {', '.join(KINDS)}, not {name!r}")
        if name not in possible:
            needed = ", ".join(sorted(KINDS[name].needs))
            raise ValueError(f"tasks of the kind {name!r} need the tools {needed}; add them to tools")
    if not kinds:
        raise ValueError("kinds must name at least one kind, or be None for all")
    return tuple(kinds)
