"""Who plays the ledger through gateways under fire, and compares each answer with the model."""

import asyncio
import json
import random
import time
from collections.abc import Callable
from typing import Any

import httpx
from failover_fleet import GAMES
from failover_progress import FailoverProgress, Use
from ledger_model import Episode

from rollgym.clients.client.client import EnvClient
from rollgym.clients.protocol.errors import CODES, ProblemError

IDLE_S = 60.0
_PATIENCE_S = 180.0
_AGAIN_S = 0.2
_FAILED_S = 5.0
Pause = Callable[[], float]
"""How long a player thinks before a step, in seconds."""


class BrokenError(Exception):
    """A session was not what it has to be."""


class LostError(Exception):
    """A session has ended as `lost`."""


class _UnknownError(Exception):
    """Whether a step was taken is not known."""


class HttpPlayer:
    """Plays one episode over plain HTTP, and asks again what may be asked again.

    Args:
        http: Plain HTTP.
        progress: What has happened.
        episode: What is played.
        use: When the session was used.
        names_places: Whether its steps say which ones they are.
    """

    def __init__(
        self,
        http: httpx.AsyncClient,
        progress: FailoverProgress,
        episode: Episode,
        use: Use,
        *,
        names_places: bool,
    ) -> None:
        self._http = http
        self._progress = progress
        self._episode = episode
        self._use = use
        self._names_places = names_places

    async def play(self, game: str, pause: Pause) -> None:
        """Play it to its end.

        Raises:
            BrokenError: An answer is not what it has to be.
            LostError: The session was lost.
        """
        episode = self._episode
        answers = episode.answers()
        made = await self._ask(
            "POST",
            "/v1/sessions",
            {
                "env_id": game,
                "kwargs": {"length": episode.length},
                "idle_timeout_s": IDLE_S,
                "reset": {"seed": episode.number},
                "request_id": f"make-{episode.number}-{time.monotonic_ns()}",
            },
        )
        path = f"/v1/sessions/{made['session_id']}"
        compare(next(answers)[1][:1], [made["reset"]["observation"]], path)
        for index, (action, expected) in enumerate(answers):
            await asyncio.sleep(pause())
            begun = time.monotonic()
            step = await self._step(path, action, index)
            self._progress.slowest_step_s = max(self._progress.slowest_step_s, time.monotonic() - begun)
            place = [step[name] for name in ("episode", "step")]
            compare([0, index + 1], place, path)
            found = [step[name] for name in ("observation", "reward", "terminated", "truncated")]
            compare(expected, found, path)
            self._progress.steps += 1
        await self._ask("DELETE", path)

    async def _step(self, path: str, action: str, index: int) -> Any:
        named = {"action": action, "episode": 0, "step": index}
        if self._names_places:
            return await self._ask("POST", f"{path}/step", named)
        try:
            return await self._ask("POST", f"{path}/step", {"action": action}, may_be_done=False)
        except _UnknownError:
            # As the answer says: name the place, and ask again.
            return await self._ask("POST", f"{path}/step", named)

    async def _ask(self, method: str, path: str, body: Any = None, *, may_be_done: bool = True) -> Any:
        content = None if body is None else json.dumps(body, ensure_ascii=False).encode()
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            begun = time.monotonic()
            try:
                answer = await self._http.request(
                    method, path, content=content, headers={"Content-Type": "application/json"}
                )
            except httpx.TransportError as error:
                status, text = 502, repr(error)
            else:
                if answer.status_code < 400:
                    self._use.called(begun)
                    return answer.json() if answer.content else None
                status, text = answer.status_code, answer.text
            self._use.called(begun)
            self._look_at(status, text, path)
            if method == "DELETE" and status in (404, 410):
                return None
            if status == 410 and json.loads(text)["reason"] == "lost":
                raise LostError(f"{path}: {text}")
            if status == 502 and not may_be_done:
                raise _UnknownError
            if status not in (429, 502, 503) or time.monotonic() > deadline:
                raise BrokenError(f"{method} {path} is answered {status}: {text[:300]}")
            self._progress.asked_again += 1
            await asyncio.sleep(_AGAIN_S)

    def _look_at(self, status: int, text: str, path: str) -> None:
        """Look whether a problem is one of the protocol's; the proxy's own 502 has no text."""
        if status == 502 and (not text or not text.startswith("{")):
            return
        problem = json.loads(text) if text.startswith("{") else {}
        if problem.get("code") not in CODES or problem["code"] == "internal":
            self._progress.untyped.append(f"{path} is answered {status}: {text[:300]}")


async def play_with_client(
    client: EnvClient, progress: FailoverProgress, episode: Episode, game: str, pause: Pause, use: Use
) -> bool:
    """The same through our client; whether its session has stayed the same."""
    session = await client.make(game, {"length": episode.length}, idle_timeout_s=IDLE_S)
    name = session.session_id
    answers = episode.answers()
    begun = time.monotonic()
    observation, _ = await session.reset(seed=episode.number)
    use.called(begun)
    compare(next(answers)[1][:1], [observation], name)
    for action, expected in answers:
        await asyncio.sleep(pause())
        begun = time.monotonic()
        step = await session.step(action)
        use.called(begun)
        progress.slowest_step_s = max(progress.slowest_step_s, time.monotonic() - begun)
        compare(expected, [step.observation, step.reward, step.terminated, step.truncated], name)
        progress.steps += 1
    stayed = session.session_id == name
    await session.close()
    return stayed


def compare(expected: list[Any], found: list[Any], where: str) -> None:
    """Look whether an answer is what the model says.

    Raises:
        BrokenError: It is not.
    """
    if expected != found:
        raise BrokenError(f"{where}: {str(found)[:200]} is not {str(expected)[:200]}")


class Player:
    """Plays one episode after the other. Of four one names no places, and one has our client's sockets.

    Args:
        number: Which one it is.
        client: Our client.
        http: Plain HTTP.
        progress: What has happened.
        longest_pause_s: How long it thinks at most.
        largest: Bytes that no episode passes.
    """

    def __init__(
        self,
        number: int,
        client: EnvClient,
        http: httpx.AsyncClient,
        progress: FailoverProgress,
        *,
        longest_pause_s: float,
        largest: int,
    ) -> None:
        self._number = number
        self._client = client
        self._http = http
        self._progress = progress
        self._longest_pause_s = longest_pause_s
        self._largest = largest
        self._chance = random.Random(f"{progress.seed} {number}")

    async def play_until(self, until: float) -> None:
        """Play, and note what comes of it."""
        progress = self._progress
        count = sum(each.startswith(f"{self._number}.") for each in progress.played)
        while time.monotonic() < until:
            episode = Episode(1000 * self._number + count + 1_000_000 * progress.seed, self._largest)
            name = f"{self._number}.{count}"
            use = Use()
            try:
                await self._play_one(episode, use)
            except LostError as error:
                self._lost(f"{name}: {error}", use)
                continue
            except (BrokenError, ProblemError, ConnectionError, TimeoutError) as error:
                progress.different.append(f"{name}: {error!r}"[:1000])
                await asyncio.sleep(_FAILED_S)
            else:
                sizes = [len(action.encode()) for action in episode.actions()]
                progress.played_one(name, f"{sum(sizes)} bytes, {len(sizes)} steps", sizes)
            count += 1

    async def _play_one(self, episode: Episode, use: Use) -> None:
        game = GAMES[(self._number // 4 + episode.number) % len(GAMES)]
        if self._number % 4 == 3:
            if not await play_with_client(self._client, self._progress, episode, game, self._pause, use):
                self._restored(use)
        else:
            names_places = self._number % 4 != 2
            player = HttpPlayer(self._http, self._progress, episode, use, names_places=names_places)
            await player.play(game, self._pause)

    def _lost(self, what: str, use: Use) -> None:
        if self._progress.may_be_lost(use):
            self._progress.lost_by_failover += 1
        else:
            self._progress.lost.append(what)

    def _restored(self, use: Use) -> None:
        if self._progress.may_be_lost(use):
            self._progress.restored_by_client += 1
        else:
            self._progress.mended_by_client += 1

    def _pause(self) -> float:
        return self._chance.uniform(0.0, self._longest_pause_s)
