"""A crash that damages a journal, and whether any session is behind what it had answered afterwards."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.interleaving_clients import Http
from tests.support.journals import FILE_HEAD, offsets

KINDS = ("a bit", "a cut", "a page of zeros", "a record less", "a record twice", "two swapped")
"""How a file of records is damaged."""
_PAGE = 4096
_SESSIONS = 6
_IDLE_S = 5.0
_PATIENCE_S = 30.0
_AGAIN_S = 0.1
_ENDS = frozenset({"session_gone", "unknown_session"})


def damage(path: Path, chance: random.Random) -> str:
    """Damage a journal as disks and people do; gives how."""
    content = path.read_bytes()
    ends = offsets(content)
    if len(ends) < 4:
        return "nothing, since it is empty"
    kind, content = damaged(content, ends, chance, head=FILE_HEAD)
    path.write_bytes(content)
    return kind


def damaged(
    content: bytes, ends: Sequence[int], chance: random.Random, *, head: int = 0
) -> tuple[str, bytes]:
    """Damage a file of records.

    Args:
        content: The file.
        ends: Where its first record begins, and where each ends.
        chance: What damage.
        head: Bytes that stay as they are.

    Returns:
        How it is damaged, and what the file is then.
    """
    place = chance.randrange(ends[0], ends[-1])
    number = chance.randrange(len(ends) - 2)
    first, middle, last = ends[number : number + 3]
    kind = chance.choice(KINDS)
    if kind == "a bit":
        content = content[:place] + bytes([content[place] ^ 1 << chance.randrange(8)]) + content[place + 1 :]
    elif kind == "a cut":
        content = content[:place]
    elif kind == "a page of zeros":
        start = max(head, place // _PAGE * _PAGE)
        content = (content[:start] + bytes(_PAGE) + content[start + _PAGE :])[: len(content)]
    elif kind == "a record less":
        content = content[:first] + content[middle:]
    elif kind == "a record twice":
        content = content[:middle] + content[first:]
    else:
        content = content[:first] + content[middle:last] + content[first:middle] + content[last:]
    return kind, content


@dataclass
class _Kept:
    """A session, and what it has answered."""

    session_id: str
    steps: int = 0
    closed: bool = False

    @property
    def path(self) -> str:
        return f"/v1/sessions/{self.session_id}"


class Crash:
    """Sessions that live through a crash which damages the journal.

    Args:
        http: Where they are asked for.
        chance: What is done.
        journals: The directory of the journals.
    """

    def __init__(self, http: Http, chance: random.Random, journals: Path) -> None:
        self._http = http
        self._chance = chance
        self._journals = journals
        self.faults: list[str] = []
        self.answers: Counter[str] = Counter()

    async def happen(self, crash: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
        """Let it happen.

        Args:
            crash: Kills the server, calls what it is given, and starts the server again.
        """
        sessions = [await self._played() for _ in range(_SESSIONS)]
        sessions[0].closed = (await self._http.ask("DELETE", sessions[0].path))[0] == 204
        how: list[str] = []
        await crash(lambda: how.append(self._damage()))
        for session in sessions:
            await self._look_at(session, how[0])
        for session in sessions:
            await self._http.ask("DELETE", session.path)

    def _damage(self) -> str:
        return damage(self._chance.choice(sorted(self._journals.glob("journal-*.bin"))), self._chance)

    async def _played(self) -> _Kept:
        body: dict[str, object] = {
            "env_id": self._chance.choice(("Inline", "Threaded", "Child")),
            "kwargs": {"length": 1000},
            "reset": {"seed": 1},
            "idle_timeout_s": _IDLE_S,
        }
        session = _Kept(json.loads(await self._asked("/v1/sessions", body))["session_id"])
        for _ in range(self._chance.randint(1, 25)):
            await self._asked(f"{session.path}/step", {"action": "go"})
            session.steps += 1
        return session

    async def _asked(self, path: str, body: dict[str, object]) -> bytes:
        """The good answer to a request, which is sent again while the server works off what came before."""
        deadline = asyncio.get_running_loop().time() + _PATIENCE_S
        while True:
            status, _, answer = await self._http.ask("POST", path, body)
            if status != 503 or asyncio.get_running_loop().time() > deadline:
                assert status in (200, 201), answer
                return answer
            await asyncio.sleep(_AGAIN_S)

    async def _look_at(self, session: _Kept, how: str) -> None:
        status, problem, observation = await self._step(session)
        what = f"after {session.steps} steps and a crash with {how}, a session"
        if status == 200:
            self.answers[f"{how}: goes on"] += 1
            if session.closed:
                self.faults.append(f"{what} that was closed goes on")
            elif observation != f"{session.steps + 1} go":
                self.faults.append(f"{what} answers {observation!r}")
        else:
            self.answers[f"{how}: {problem}"] += 1
            if problem not in _ENDS:
                self.faults.append(f"{what} is answered {problem}")

    async def _step(self, session: _Kept) -> tuple[int, str, str]:
        """A step that names no place, or names it where it is asked to."""
        deadline = asyncio.get_running_loop().time() + _PATIENCE_S
        body: dict[str, object] = {"action": "go"}
        while True:
            status, _, content = await self._http.ask("POST", f"{session.path}/step", body)
            answer = json.loads(content)
            if status not in (502, 503) or asyncio.get_running_loop().time() > deadline:
                return status, str(answer.get("code")), str(answer.get("observation"))
            if status == 502:
                body = {"action": "go", "episode": 0, "step": session.steps}
            await asyncio.sleep(_AGAIN_S)
