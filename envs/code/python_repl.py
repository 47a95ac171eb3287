"""PythonRepl-v0: an interpreter that keeps its state, files, and a question about them."""

import json
from typing import Any, ClassVar

from rollgym.envs.code.answers import read_answers, whole_characters
from rollgym.envs.code.conversation import ProgramSession
from rollgym.envs.code.goals import Goal, same_answer
from rollgym.envs.code.inside import values
from rollgym.envs.code.repl_goals import draw_goal
from rollgym.envs.code.sessions import SessionEnv
from rollgym.envs.code.turns import cut
from rollgym.envs.core.splits import Split

_MARGIN_SECONDS = 10.0
_NOTES = {
    "late": "[the time was over; the interpreter was started anew, and all names are gone]",
    "ended": "[the interpreter ended and was started anew, and all names are gone]",
    "flooded": "[the output was too large; the interpreter was started anew, and all names are gone]",
}


class PythonReplEnv(SessionEnv):
    """Python statements run in a sandbox, turn by turn, until the question is answered."""

    metadata: dict[str, Any] = SessionEnv.metadata | {
        "reply": {"language": "python", "answer": True},
        "description": "A Python interpreter that keeps its state, and a question about files.",
    }
    _blocks: ClassVar[tuple[str, ...]] = ("python", "py", "python3")
    _program: ClassVar[str] = "candidate"

    def _draw(self, split: Split | None) -> Goal:
        self._interpreter = self._requests = 0
        return draw_goal(self.np_random, split)

    def _greet(self, session: ProgramSession) -> None:
        setup = {
            "units": [],
            "module": "__main__",
            "apart": False,
            "cpu_seconds": self._seconds * self._limit,
            "wall_seconds": self._seconds,
            # Each turn has its whole time, whatever became of those before it.
            "late": 0,
            "hurried": {},
            "patience": 1 << 30,
            "answer_bytes": values.MAX_CHARACTERS,
        }
        session.tell(setup)

    def _run(self, session: ProgramSession, text: str) -> str:
        self._requests += 1
        do = {"id": self._requests, "child": self._interpreter, "do": {"execute": text}}
        told = session.ask(do, self._seconds + _MARGIN_SECONDS)
        answer = read_answers(json.dumps(told).encode(), self._requests + 1)[self._requests]
        shown = _shown(answer.reply) if answer.status == "answered" else None
        if shown is None:
            # A process that was ended is not asked again.
            self._interpreter += 1
            return _NOTES.get(answer.status, _NOTES["ended"])
        return cut(shown, self._characters) or "[no output]"

    def _judge(self, session: ProgramSession, answer: str) -> bool:
        return same_answer(self._goal.answer, answer)

    def _instruction(self) -> str:
        return (
            "Answer the question. You have a Python interpreter: what stands in a block that begins with ```python is "
            "run, and its output shown; names are kept from turn to turn. When you know the answer, reply with it "
            f"alone, in answer tags: <answer>42</answer>. You have {self._limit} turns."
        )


def _shown(reply: str) -> str | None:
    """Return what the interpreter wrote; None if it wrote no such thing."""
    try:
        told = values.build(values.read_json(reply))
    except values.ValueRefusedError:
        return None
    if not isinstance(told, dict):
        return None
    parts = [told.get("output"), told.get("error")]
    if "output" not in told:
        return None
    return whole_characters("".join(part for part in parts if isinstance(part, str)))
