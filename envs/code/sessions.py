"""What the environments share whose turns happen in one lasting sandbox session."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from envs.code.boxes import operator_sandbox
from envs.code.goals import Goal
from envs.code.talks import Talk
from envs.code.turns import Turn, TurnEnv
from envs.replies import fenced_blocks, fenced_lines, last_tagged, spoken
from envs.splits import Split, checked_split
from sandbox.base import Sandbox

_MEMORY_MB = 512


class SessionEnv(TurnEnv):
    """Base of an interpreter or a shell with a goal.

    Args:
        max_turns: Turns after which the episode is truncated.
        seconds: How long one turn may run.
        output_characters: Most characters of an output that are shown.
        format_penalty: Added to the reward of a reply that cannot be read.
        split: Only goals of this split, by content.
        render_mode: "ansi".

    Raises:
        ValueError: If an argument makes no sense.
    """

    metadata: dict[str, Any] = TurnEnv.metadata | {
        # What is typed may depend on the time, on chance and on the machine.
        "deterministic": False,
        "max_episode_steps": 10,
    }
    kwargs_schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "max_turns": {"type": "integer", "minimum": 1, "maximum": 200},
            "seconds": {"type": "number", "exclusiveMinimum": 0, "maximum": 120},
            "output_characters": {"type": "integer", "minimum": 100, "maximum": 100000},
            "format_penalty": {"type": "number"},
            "split": {"enum": ["train", "valid", "test", None]},
            "render_mode": {"enum": ["ansi", None]},
        },
    }
    _blocks: ClassVar[tuple[str, ...]]
    _program: ClassVar[str]

    def __init__(
        self,
        *,
        max_turns: int = 10,
        seconds: float = 10.0,
        output_characters: int = 4000,
        format_penalty: float = 0.0,
        split: str | None = None,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(max_turns=max_turns, format_penalty=format_penalty, render_mode=render_mode)
        if not 0 < seconds <= 120:
            raise ValueError(f"seconds must be above 0 and at most 120, not {seconds}")
        if output_characters < 100:
            raise ValueError(f"output_characters must be at least 100, not {output_characters}")
        self._seconds = float(seconds)
        self._characters = output_characters
        self._split = checked_split(split)
        self._talk: Talk | None = None
        self._goal = Goal(question="", files={})

    # -- what an environment implements --------------------------------------------------------------------------

    @abstractmethod
    def _draw(self, split: Split | None) -> Goal:
        """Draw a goal from `self.np_random`."""

    @abstractmethod
    def _greet(self, talk: Talk) -> None:
        """Say to a new session what it needs to know."""

    @abstractmethod
    def _run(self, talk: Talk, text: str) -> str:
        """Run what is typed; return what is shown."""

    @abstractmethod
    def _judge(self, talk: Talk, answer: str) -> bool:
        """Tell whether the goal is reached."""

    # -- turns ---------------------------------------------------------------------------------------------------

    def _begin(self, options: Mapping[str, Any]) -> str:
        unknown = options.keys() - {"split"}
        if unknown:
            raise ValueError(f"there is no option {min(unknown)!r} here; the options are expert and split")
        self._goal = self._draw(checked_split(options.get("split", self._split)))
        self.close()
        return self._goal.question

    def _take(self, reply: str, *, last: bool) -> Turn:
        text = spoken(reply)
        blocks = [code for name, code in fenced_blocks(text) if name in self._blocks]
        # A person has but one line.
        blocks = blocks or [code for name, code in fenced_lines(text) if name in self._blocks]
        if blocks:
            return Turn(self._run(self._opened(), "\n".join(blocks)))
        answer = last_tagged(text, "answer")
        if answer is None:
            note = f"Your reply has neither a block that begins with ```{self._blocks[0]} nor an answer in answer tags."
            return Turn(note, valid=False)
        reached = self._judge(self._opened(), answer.strip())
        return Turn("Right." if reached else "Wrong.", float(reached), terminated=True, success=reached)

    def _opened(self) -> Talk:
        # Only when something is run: a session costs a process.
        if self._talk is None:
            sandbox: Sandbox = operator_sandbox()
            self._talk = Talk(sandbox, self._program, self._goal.files, _MEMORY_MB)
            self._greet(self._talk)
        return self._talk

    def close(self) -> None:
        """End the session."""
        if self._talk is not None:
            self._talk.close()
            self._talk = None

    def _state(self) -> dict[str, Any]:
        return {"question": self._goal.question, "turn": self._turns}

    def _expert_action(self) -> str:
        if self._turns < len(self._goal.solution):
            return f"```{self._blocks[0]}\n{self._goal.solution[self._turns]}\n```"
        return f"<answer>{self._goal.answer}</answer>"

    def _optimal_steps(self) -> int | None:
        return None
