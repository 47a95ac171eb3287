"""One environment, with each isolation, that leaves a file where it lives for as long as nobody has closed it."""

import itertools
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import gymnasium

from rollgym.clients.protocol.spaces import UnicodeText

DIRECTORY = "INTERLEAVED_ENVS"
"""The variable that names the directory of the files."""

_numbers = itertools.count()


def left_open(directory: Path) -> list[str]:
    """The environments of processes that run, and that were not closed; verifiers are kept."""
    names = [file.name for file in directory.iterdir() if not file.name.endswith("-Verdicts")]
    return [name for name in names if Path(f"/proc/{name.partition('-')[0]}").exists()]


class Inline(gymnasium.Env[str, str]):
    """Waits, fails and answers what cannot be sent, as its actions ask for.

    Attributes:
        longest_wait_s: Waits are no longer: what runs in the loop would keep everybody else waiting.
    """

    metadata: ClassVar[dict[str, Any]] = {
        "render_modes": ["ansi"],
        "inline": True,
        "deterministic": True,
        "forkable": True,
        "expert": True,
        "version": "1",
    }
    kwargs_schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"length": {"type": "integer"}, "wait": {"type": "number"}},
        "additionalProperties": False,
    }

    longest_wait_s: ClassVar[float] = 0.001

    def __init__(self, length: int = 5, wait: float = 0.0, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.action_space = UnicodeText()
        self.observation_space = UnicodeText()
        self._length = length
        self._steps = 0
        self._wait(wait)
        if length == 13:
            raise ValueError("thirteen brings bad luck")
        self._file = Path(os.environ[DIRECTORY], f"{os.getpid()}-{next(_numbers)}-{type(self).__name__}")
        self._file.touch()

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._do(str((options or {}).get("do", "")))
        self._steps = 0
        return "begin", {"dice": int(self.np_random.integers(1000))}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._do(action)
        self._steps += 1
        info = {"object": object()} if action == "object" else {"dice": int(self.np_random.integers(1000))}
        return f"{self._steps} {action}", 1.0, self._steps >= self._length, False, info

    def render(self) -> str:
        self._wait(0.002)
        return f"<{self._steps}>"

    def close(self) -> None:
        self._file.unlink()

    def _do(self, what: str) -> None:
        verb, _, rest = what.partition(" ")
        if verb == "raise":
            raise RuntimeError(rest)
        if verb == "wait":
            self._wait(float(rest))

    def _wait(self, seconds: float) -> None:
        time.sleep(min(seconds, self.longest_wait_s))


class Threaded(Inline):
    longest_wait_s: ClassVar[float] = 1.0
    metadata: ClassVar[dict[str, Any]] = Inline.metadata | {"inline": False, "thread": True}


class Pinned(Inline):
    longest_wait_s: ClassVar[float] = 1.0
    metadata: ClassVar[dict[str, Any]] = Inline.metadata | {"inline": False, "pinned_thread": True}


class Child(Inline):
    """Can take its process down."""

    longest_wait_s: ClassVar[float] = 1.0
    metadata: ClassVar[dict[str, Any]] = Inline.metadata | {"inline": False}

    def _do(self, what: str) -> None:
        if what == "exit":
            os._exit(3)
        super()._do(what)


class Verdicts(Child):
    """Stateless."""

    metadata: ClassVar[dict[str, Any]] = Child.metadata | {"kind": "stateless"}

    def score(self, response: str, task: Mapping[str, Any]) -> dict[str, Any]:
        self._do(response)
        return {"score": 1.0, "outcome": "correct", "detail": None}


EPISODIC = ("Inline", "Threaded", "Pinned", "Child")
SERVED = (
    *(part for name in (*EPISODIC, "Verdicts") for part in ("--env", f"{name}={__name__}:{name}")),
    *("--isolation", "Inline=inline", "--isolation", "Threaded=thread", "--isolation", "Pinned=thread"),
)
