"""Shell-v0: a shell that keeps its state, a tree of files, and something to find or to bring about."""

import hashlib
from typing import Any, ClassVar

from rollgym.envs.code.conversation import ProgramSession
from rollgym.envs.code.goals import Goal, same_answer
from rollgym.envs.code.sessions import SessionEnv
from rollgym.envs.code.shell_goals import draw_goal
from rollgym.envs.code.turns import cut
from rollgym.envs.core.splits import Split

_MARGIN_SECONDS = 10.0


class ShellEnv(SessionEnv):
    """Shell commands run in a sandbox, turn by turn, until the goal is reached."""

    metadata: dict[str, Any] = SessionEnv.metadata | {
        "reply": {"language": "bash", "answer": True},
        "description": "A shell that keeps its state, and a goal in a tree of files.",
    }
    _blocks: ClassVar[tuple[str, ...]] = ("bash", "sh", "shell")
    _program: ClassVar[str] = "shell"

    def _draw(self, split: Split | None) -> Goal:
        return draw_goal(self.np_random, split)

    def _greet(self, session: ProgramSession) -> None:
        pass

    def _run(self, session: ProgramSession, text: str) -> str:
        request = {"command": text, "seconds": self._seconds, "characters": 8 * self._characters}
        told = session.ask(request, self._seconds + _MARGIN_SECONDS)
        output = str(told.get("output", ""))
        if left_out := told.get("left_out"):
            output += f"\n[... {left_out} bytes are left out ...]"
        shown = cut(output, self._characters)
        if told.get("status") == "late":
            return f"{shown}\n[the time was over; the shell was started anew]".lstrip()
        if told.get("status") != "done":
            return f"{shown}\n[the shell ended and was started anew]".lstrip()
        code = told.get("exit")
        return f"{shown}\n[exit code {code}]".lstrip() if code else shown or "[no output]"

    def _judge(self, session: ProgramSession, answer: str) -> bool:
        if self._goal.left is None:
            return same_answer(self._goal.answer, answer)
        files = session.ask({"snapshot": "project"}, _MARGIN_SECONDS).get("files")
        wanted = {
            path: [hashlib.sha256(content).hexdigest(), executable]
            for path, (content, executable) in self._goal.left.items()
        }
        return files == wanted

    def _instruction(self) -> str:
        return (
            "Reach the goal. You have a bash shell: what stands in a block that begins with ```bash is run in the "
            "working directory, and its output shown; variables and the directory are kept from turn to turn. When you "
            "are done, reply with the answer alone, in answer tags: <answer>42</answer>. "
            f"You have {self._limit} turns."
        )
