"""Sessions that live through damage to the journal which they are in, and what has become of them."""

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
from ledger_model import Episode

ENV_ID = "Ledger-v0"
LEDGER = {
    "builtin": False,
    "env": [f"{ENV_ID}=benchmarks.soak.ledger:Ledger"],
    "isolation": {ENV_ID: "inline"},
    "workers": 1,
}
"""What a server has."""
_SESSIONS = 5
_LARGEST = 20_000
_PATIENCE_S = 120.0
_AGAIN_S = 0.1
_ENDS = frozenset({"session_gone", "unknown_session"})


@dataclass
class Seen:
    """What has become of one journal and its sessions.

    Attributes:
        kind: What was done to it.
        answers: How many sessions went on, and how the others have ended.
        faults: Sessions that are behind, or were closed and went on.
    """

    kind: str = ""
    answers: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


class Session:
    """A session over HTTP, and the model of its episode.

    Args:
        http: Where it is made.
        number: Which episode it plays.
    """

    def __init__(self, http: httpx.AsyncClient, number: int) -> None:
        self._episode = Episode(number, _LARGEST)
        self._expected = self._episode.answers()
        self._steps = 0
        self._http = http
        self._path = ""
        self.is_closed = False

    async def begin(self) -> None:
        """Make and reset it."""
        body = {
            "env_id": ENV_ID,
            "kwargs": {"length": self._episode.length},
            "reset": {"seed": self._episode.number},
        }
        made = await self._ask("POST", "/v1/sessions", body)
        self._path = f"/v1/sessions/{made['session_id']}"
        assert made["reset"]["observation"] == next(self._expected)[1][0]

    async def play(self, chance: random.Random) -> None:
        """Take some steps, not to the end of the episode."""
        for _ in range(chance.randrange(self._episode.length - 1)):
            action, expected = next(self._expected)
            # It names its place, so that it may be asked again while the machine is busy.
            body = {"action": action, "episode": 0, "step": self._steps}
            assert _of_step(await self._ask("POST", f"{self._path}/step", body)) == expected
            self._steps += 1

    async def close(self) -> None:
        """Close it."""
        await self._ask("DELETE", self._path)
        self.is_closed = True

    async def look(self, http: httpx.AsyncClient, seen: Seen) -> None:
        """Ask for its next step elsewhere, and note what comes of it."""
        action, expected = next(self._expected)
        status, answer = await self._next_step(http, action)
        what = f"{seen.kind}: a session of {self._steps} steps"
        if status == 200:
            seen.answers["goes on"] += 1
            if self.is_closed:
                seen.faults.append(f"{what} that was closed goes on")
            elif _of_step(answer) != expected:
                seen.faults.append(f"{what} answers {str(answer)[:200]}")
            return
        code = str(answer.get("code"))
        seen.answers[str(answer.get("reason", code))] += 1
        if code not in _ENDS:
            seen.faults.append(f"{what} is answered {status}: {str(answer)[:200]}")

    async def _next_step(self, http: httpx.AsyncClient, action: str) -> tuple[int, dict[str, Any]]:
        """A step that names no place, or names it where it is asked to."""
        body: dict[str, Any] = {"action": action}
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            answer = await http.post(f"{self._path}/step", json=body)
            if answer.status_code not in (502, 503) or time.monotonic() > deadline:
                return answer.status_code, answer.json()
            if answer.status_code == 502 and "name its episode" in answer.text:
                body |= {"episode": 0, "step": self._steps}
            await asyncio.sleep(_AGAIN_S)

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The good answer to a request, which is sent again while the server is not ready."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            answer = await self._http.request(method, path, json=body)
            if answer.status_code not in (502, 503) or time.monotonic() > deadline:
                answer.raise_for_status()
                return answer.json() if answer.content else None
            await asyncio.sleep(_AGAIN_S)


async def played(http: httpx.AsyncClient, chance: random.Random) -> list[Session]:
    """Sessions that were played for a while, one after the other and each in turn; some are closed."""
    sessions = [Session(http, chance.randrange(2**31)) for _ in range(_SESSIONS)]
    for session in sessions:
        await session.begin()
    await asyncio.gather(*(session.play(chance) for session in sessions))
    for session in sessions:
        if chance.random() < 0.3:
            await session.close()
    return sessions


def _of_step(answer: dict[str, Any]) -> list[Any]:
    return [answer[name] for name in ("observation", "reward", "terminated", "truncated")]
