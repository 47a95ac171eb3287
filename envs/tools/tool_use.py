"""ToolUse-v0: generated questions, and tools that find the answers out."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Unpack

from pydantic import Field

from rollgym.clients.protocol.tool_calls import ToolCall
from rollgym.clients.replies.marks import last_tagged
from rollgym.envs.core.kwargs import SomeOf
from rollgym.envs.core.splits import TaskSplit, checked_split, split_of_text
from rollgym.envs.tools.base import (
    CallsPerTurn,
    RunningDigest,
    StepLimit,
    ToolEnv,
    ToolKwargs,
    TurnResult,
    state_digest,
)
from rollgym.envs.tools.basic_tools import CALCULATOR, DATE_TOOLS, Corpus
from rollgym.envs.tools.tasks import KINDS, ToolTask, answers_agree
from rollgym.envs.tools.tool import Tool, Toolbox, ToolError, ToolResult, tool_parameters

TOOL_GROUPS = ("calculator", "search", "store", "dates")
_TRIES = 1_000


class ToolUseKwargs(ToolKwargs, total=False):
    """The kwargs of `ToolUseEnv` that those made from it have, too, but for the tools and the kinds of tasks."""

    split: str | None
    max_calls_per_turn: int
    max_episode_steps: int


class ToolUseEnv(ToolEnv):
    """Questions about arithmetic, a made-up world, dates, and a store that may have to be changed.

    The answer stands in `<answer>` tags of a reply without calls, and ends the episode: reward 1 if it is right and
    the store holds what it should, else 0.

    Raises:
        ValueError: If an argument is invalid.
    """

    metadata: dict[str, Any] = ToolEnv.metadata | {
        "reset_options": ["expert", "split"],
        "reply": {"answer": True},
        "description": "Answer generated questions with a calculator, search, a key-value store and dates.",
        "observation": "The question; then the results of the calls.",
        "actions": (
            "Calls of tools in the `call_format`; `<answer>...</answer>` without a call ends the episode."
        ),
        "reward": "1 where the answer is right and the store holds what it should, else 0.",
        "max_episode_steps": 16,
        "baselines": {"random": 0, "constant action": 0, "blind": 0, "expert": 1},
    }
    groups: ClassVar[tuple[str, ...]] = TOOL_GROUPS

    def __init__(
        self,
        *,
        tools: Annotated[
            Sequence[str] | None, SomeOf(*TOOL_GROUPS), Field(description="Groups of tools that are there.")
        ] = None,
        kinds: Annotated[
            Sequence[str] | None,
            SomeOf(*[name for name, kind in KINDS.items() if kind.needs <= set(TOOL_GROUPS)]),
            Field(description="Kinds of tasks that are drawn; null for all that the tools are enough for."),
        ] = None,
        split: TaskSplit = None,
        max_calls_per_turn: CallsPerTurn = 8,
        max_episode_steps: StepLimit = 16,
        **common: Unpack[ToolKwargs],
    ) -> None:
        chosen = self.groups if tools is None else tuple(tools)
        self._kinds = _checked_kinds(kinds, frozenset(chosen))
        self._split = checked_split(split)
        self._store = Store()
        self._corpus = Corpus()
        self._task = ToolTask("", "", "", ())
        self._found: set[str] = set()
        self._known = RunningDigest()
        super().__init__(
            Toolbox([tool for group in self.groups if group in chosen for tool in self._group(group)]),
            max_calls_per_turn=max_calls_per_turn,
            max_episode_steps=max_episode_steps,
            **common,
        )

    def _group(self, name: str) -> Sequence[Tool]:
        """Return the tools of a group."""
        if name == "calculator":
            return (CALCULATOR,)
        if name == "search":
            return (self._corpus.tool(),)
        return self._store.tools() if name == "store" else DATE_TOOLS

    # -- the episode -----------------------------------------------------------------------------------------------

    def start_episode(self, options: Mapping[str, Any]) -> str:
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
        self._found = set()
        self._known = RunningDigest()
        return task.question

    def run_call(self, call: ToolCall) -> ToolResult:
        result = self.toolbox.run(call)
        name = state_digest([call.name, dict(call.arguments)])
        self._found.add(name)
        self._known.put(name, result.text)
        return result

    def on_message(self, text: str) -> TurnResult | str:
        answer = last_tagged(text, "answer")
        if answer is None:
            return "error: there is neither a call of a tool nor an answer in answer tags, such as <answer>42</answer>."
        right = answers_agree(answer, self._task.answer)
        kept = self._store.texts == dict(sorted(self._task.wanted.items()))
        if right and kept:
            return TurnResult("The answer is right.", 1.0, terminated=True, success=True)
        if right:
            return TurnResult(
                "The answer is right, but the store does not hold what it should.", terminated=True
            )
        return TurnResult("The answer is wrong.", terminated=True)

    def state_info(self) -> dict[str, Any]:
        # What is asked for may lie in the store.
        store = {"store": self._store.texts} if self.shows_expert else {}
        return {
            "state": {"kind": self._task.kind, "question": self._task.question, **store},
            # Two turns of one task are alike if the store is equal, and the known facts are.
            "anchor": state_digest([self._store.name, self._known.name]),
        }

    def describe_rules(self) -> str:
        return (
            "Answer the question with the help of tools. What the encyclopedia and the store say cannot be known "
            "without them. Once you know the answer, and the store holds what it should, reply without a call and with "
            "the answer in answer tags, for example <answer>42</answer>: a number as digits, else the word or name "
            "alone."
        )

    def expert_turn(self) -> ToolCall | str:
        for call in self._task.plan:
            if state_digest([call.name, dict(call.arguments)]) not in self._found:
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
    if not possible:
        raise ValueError(
            f"the tools {', '.join(sorted(tools))} are enough for no kind of task; add others to tools"
        )
    if kinds is None:
        return possible
    for name in kinds:
        if name not in possible:
            needed = ", ".join(sorted(KINDS[name].needs))
            raise ValueError(f"tasks of the kind {name!r} need the tools {needed}; add them to tools")
    return tuple(kinds)


_KEY = {"type": "string", "minLength": 1, "maxLength": 100}
_VALUE = {"type": "string", "maxLength": 10_000}
_MOST_KEYS = 1_000


class Store:
    """A key-value store of texts, read and changed by tools."""

    def __init__(self) -> None:
        self.fill({})

    def fill(self, texts: Mapping[str, str]) -> None:
        """Replace the whole content by `texts`."""
        self._texts = dict(texts)
        self._running = RunningDigest()
        for key, text in texts.items():
            self._running.put(key, text)

    @property
    def name(self) -> str:
        """A short name of what is stored."""
        return self._running.name

    @property
    def texts(self) -> dict[str, str]:
        """Return the stored texts, sorted by key."""
        return dict(sorted(self._texts.items()))

    def tools(self) -> tuple[Tool, ...]:
        """Return the tools that read and change it."""
        return (
            Tool("store_list", "List the keys of the store.", tool_parameters(), self._list),
            Tool("store_get", "Return the value of a key.", tool_parameters(["key"], key=_KEY), self._get),
            Tool(
                "store_set",
                "Store a value under a key; what was there is replaced.",
                tool_parameters(["key", "value"], key=_KEY, value=_VALUE),
                self._set,
            ),
            Tool(
                "store_delete",
                "Remove a key and its value.",
                tool_parameters(["key"], key=_KEY),
                self._delete,
            ),
        )

    def _list(self) -> list[str]:
        return sorted(self._texts)

    def _get(self, key: str) -> str:
        self._require(key)
        return self._texts[key]

    def _set(self, key: str, value: str) -> str:
        if key not in self._texts and len(self._texts) >= _MOST_KEYS:
            raise ToolError(f"the store is full: it holds {_MOST_KEYS} keys")
        self._texts[key] = value
        self._running.put(key, value)
        return "stored"

    def _delete(self, key: str) -> str:
        self._require(key)
        del self._texts[key]
        self._running.remove(key)
        return "deleted"

    def _require(self, key: str) -> None:
        if key not in self._texts:
            raise ToolError(f"there is no key {key!r}; store_list gives those that are there")
