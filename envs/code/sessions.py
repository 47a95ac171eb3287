"""What the environments share whose turns happen in one lasting sandbox session."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import Field

from rollgym.clients.replies.marks import fenced_blocks, fenced_lines, last_tagged
from rollgym.clients.replies.thinking import strip_thinking
from rollgym.envs.code.conversation import ProgramSession, SandboxEndedError
from rollgym.envs.code.sandboxes import operator_sandbox
from rollgym.envs.code.turns import ReplyTurn, TurnEnv
from rollgym.envs.core.hooks import checked_options
from rollgym.envs.core.kwargs import RenderMode
from rollgym.envs.core.splits import Split, TaskSplit, checked_split
from rollgym.sandbox.core.base import Sandbox


@dataclass(frozen=True, slots=True)
class SessionGoal:
    """A task with its files and its solution.

    Attributes:
        question: What is asked.
        files: What lies in the working directory at first.
        answer: What is right; never part of a session.
        solution: What an expert types, turn by turn, before it answers.
        left: What files are to lie below `project` in the end, and whether each may be executed; None where only the
            answer counts.
    """

    question: str
    files: Mapping[str, bytes]
    answer: str = ""
    solution: Sequence[str] = ()
    left: Mapping[str, tuple[bytes, bool]] | None = field(default=None)


def same_answer(expected: str, given: str) -> bool:
    """Tell whether an answer is right: the same text but for case and quotes, or the same number to a hundredth."""
    one, two = (each.strip().strip("`'\"").strip().casefold() for each in (expected, given))
    if one == two:
        return True
    try:
        return abs(float(one) - float(two.replace(",", ""))) < 0.005 + 1e-9
    except (ValueError, OverflowError):
        return False


_MEMORY_MB = 512


class SessionEnv(TurnEnv):
    """Base of an interpreter or a shell with a goal.

    Raises:
        ValueError: If an argument makes no sense.
    """

    metadata: dict[str, Any] = TurnEnv.metadata | {
        "reset_options": ["expert", "split"],
        "observation": "The task; then what the last block printed.",
        "actions": "A fenced block, which is run; `<answer>...</answer>` ends the episode.",
        "reward": "1 where the answer is right or the files are as they should be, else 0.",
        # What is typed may depend on the time, on chance and on the machine.
        "deterministic": False,
        "max_episode_steps": 10,
    }
    _blocks: ClassVar[tuple[str, ...]]
    _program: ClassVar[str]

    def __init__(
        self,
        *,
        max_turns: Annotated[
            int, Field(ge=1, le=200, description="Turns after which the episode is truncated.")
        ] = 10,
        seconds: Annotated[float, Field(gt=0, le=120, description="How long one turn may run.")] = 10.0,
        output_characters: Annotated[
            int, Field(ge=100, le=100000, description="Most characters of an output that are shown.")
        ] = 4000,
        format_penalty: Annotated[
            float, Field(description="Added to the reward of a reply that cannot be read.")
        ] = 0.0,
        split: TaskSplit = None,
        render_mode: RenderMode = None,
    ) -> None:
        super().__init__(max_turns=max_turns, format_penalty=format_penalty, render_mode=render_mode)
        self._seconds = float(seconds)
        self._characters = output_characters
        self._split = checked_split(split)
        self._session: ProgramSession | None = None
        self._goal = SessionGoal(question="", files={})

    # -- what an environment implements --------------------------------------------------------------------------

    @abstractmethod
    def _draw(self, split: Split | None) -> SessionGoal:
        """Draw a goal from `self.np_random`."""

    @abstractmethod
    def _greet(self, session: ProgramSession) -> None:
        """Say to a new session what it needs to know."""

    @abstractmethod
    def _run(self, session: ProgramSession, text: str) -> str:
        """Run what is typed; return what is shown."""

    @abstractmethod
    def _judge(self, session: ProgramSession, answer: str) -> bool:
        """Tell whether the goal is reached."""

    # -- turns ---------------------------------------------------------------------------------------------------

    def _begin(self, options: Mapping[str, Any]) -> str:
        checked_options(self.metadata["reset_options"], options)
        self._goal = self._draw(checked_split(options.get("split", self._split)))
        self.close()
        return self._goal.question

    def _take(self, reply: str, *, last: bool) -> ReplyTurn:
        try:
            return self._done(reply)
        except SandboxEndedError as ended:
            # It is what the policy wanted, and no fault that would have the episode played again.
            self.close()
            return ReplyTurn(
                f"[what you ran has ended the sandbox, and the task with it: {ended}]", terminated=True
            )

    def _done(self, reply: str) -> ReplyTurn:
        text = strip_thinking(reply)
        blocks = [code for name, code in fenced_blocks(text) if name in self._blocks]
        # A person has but one line.
        blocks = blocks or [code for name, code in fenced_lines(text) if name in self._blocks]
        if blocks:
            return ReplyTurn(self._run(self._opened(), "\n".join(blocks)))
        answer = last_tagged(text, "answer")
        if answer is None:
            note = f"Your reply has neither a block that begins with ```{self._blocks[0]} nor an answer in answer tags."
            return ReplyTurn(note, valid=False)
        reached = self._judge(self._opened(), answer.strip())
        return ReplyTurn("Right." if reached else "Wrong.", float(reached), terminated=True, success=reached)

    def _opened(self) -> ProgramSession:
        # Only when something is run: a session costs a process.
        if self._session is None:
            sandbox: Sandbox = operator_sandbox()
            self._session = ProgramSession(sandbox, self._program, self._goal.files, _MEMORY_MB)
            self._greet(self._session)
        return self._session

    def close(self) -> None:
        """End the session."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _state(self) -> dict[str, Any]:
        return {"question": self._goal.question, "turn": self._turns}

    def _expert_action(self) -> str:
        if self._turns < len(self._goal.solution):
            return f"```{self._blocks[0]}\n{self._goal.solution[self._turns]}\n```"
        return f"<answer>{self._goal.answer}</answer>"

    def _optimal_steps(self) -> int | None:
        return None
