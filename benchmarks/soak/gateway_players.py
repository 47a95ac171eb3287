"""Who plays through gateways under fire, and the same episodes where nothing disturbs them."""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import httpx
from gateway_fleet import GAMES
from progress import Progress
from run import ACTIONS, LONGEST, digest_of

from rollgym.clients.client.client import EnvClient
from rollgym.clients.protocol.errors import ProblemError
from rollgym.envs.games.frozen_lake import FrozenLakeEnv

IDLE_S = 45.0
Pause = Callable[[], float]
"""How long a player thinks before a step, in seconds."""


def actions_of(number: int) -> list[str]:
    return random.Random(number).choices(ACTIONS, k=LONGEST)


class BrokenError(Exception):
    """A session was not what it has to be."""


class UnknownError(Exception):
    """Whether a step was taken is not known."""


class HttpPlayer:
    """Plays over plain HTTP, and asks again what may be asked again."""

    def __init__(self, http: httpx.AsyncClient, progress: Progress, *, names_places: bool) -> None:
        self._http = http
        self._progress = progress
        self._names_places = names_places

    async def play(self, game: str, number: int, pause: "Pause | None") -> list[Any]:
        body = {
            "env_id": game,
            "kwargs": GAMES[game],
            "idle_timeout_s": IDLE_S,
            "reset": {"seed": number},
            "request_id": f"make-{number}",
        }
        made = await self._ask("POST", "/v1/sessions", body)
        path = f"/v1/sessions/{made['session_id']}"
        seen = [made["reset"]["observation"]]
        for index, action in enumerate(actions_of(number)):
            if pause is not None:
                await asyncio.sleep(pause())
            begun = time.monotonic()
            step = await self._step(path, action, index)
            self._progress.slowest_step_s = max(self._progress.slowest_step_s, time.monotonic() - begun)
            if (step["episode"], step["step"]) != (0, index + 1):
                raise BrokenError(f"step {index} is answered as {step['episode']}.{step['step']}")
            seen.append([step["observation"], step["reward"], step["terminated"], step["truncated"]])
            self._progress.steps += 1
            if step["terminated"] or step["truncated"]:
                break
        await self._ask("DELETE", path)
        return seen

    async def _step(self, path: str, action: str, index: int) -> Any:
        named = {"action": action, "episode": 0, "step": index}
        if self._names_places:
            return await self._ask("POST", f"{path}/step", named)
        try:
            return await self._ask("POST", f"{path}/step", {"action": action}, may_be_done=False)
        except UnknownError:
            # As the answer says: name the place, and ask again.
            return await self._ask("POST", f"{path}/step", named)

    async def _ask(self, method: str, path: str, body: Any = None, *, may_be_done: bool = True) -> Any:
        deadline = time.monotonic() + 120
        while True:
            try:
                answer = await self._http.request(method, path, json=body)
            except httpx.TransportError as error:
                code, detail = 502, repr(error)
            else:
                if answer.status_code < 400:
                    return answer.json() if answer.content else None
                code, detail = answer.status_code, answer.text
            if method == "DELETE" and code in (404, 410):
                return None
            if code == 502 and not may_be_done:
                raise UnknownError
            if code not in (502, 503) or time.monotonic() > deadline:
                raise BrokenError(f"{method} {path} is answered {code}: {detail}")
            self._progress.asked_again += 1
            await asyncio.sleep(0.2)


async def play_with_client(
    client: EnvClient, progress: Progress, number: int, game: str, pause: Pause
) -> list[Any]:
    """The same through our client, whose sessions must stay the same."""
    session = await client.make(game, GAMES[game], idle_timeout_s=IDLE_S)
    name = session.session_id
    seen: list[Any] = [(await session.reset(seed=number)).observation]
    for action in actions_of(number):
        await asyncio.sleep(pause())
        begun = time.monotonic()
        step = await session.step(action)
        progress.slowest_step_s = max(progress.slowest_step_s, time.monotonic() - begun)
        seen.append([step.observation, step.reward, step.terminated, step.truncated])
        progress.steps += 1
        if step.terminated or step.truncated:
            break
    progress.mended_by_client += session.session_id != name
    await session.close()
    return seen


async def player(
    number: int,
    client: EnvClient,
    http: httpx.AsyncClient,
    progress: Progress,
    until: float,
    longest_pause_s: float,
) -> None:
    """Play one episode after the other. Of four players one names no places, and one has our client's sockets."""
    chance = random.Random(f"{progress.seed} {number}")

    def pause() -> float:
        return chance.uniform(0.0, longest_pause_s)

    episode = sum(each.startswith(f"{number}.") for each in progress.played)
    games = list(GAMES)
    while time.monotonic() < until:
        seed = 100_000 * number + episode
        game = games[(number // 4 + episode) % len(games)]
        try:
            if number % 4 == 3:
                seen = await play_with_client(client, progress, seed, game, pause)
            else:
                seen = await HttpPlayer(http, progress, names_places=number % 4 != 2).play(game, seed, pause)
        except (BrokenError, ProblemError, ConnectionError, TimeoutError) as error:
            progress.lost.append(f"{number}.{episode}: {error}")
        else:
            progress.played[f"{number}.{episode}"] = f"{game} {seed} {digest_of(seen)}"
        episode += 1


def undisturbed(progress: Progress) -> list[str]:
    """The episodes that are different where the environment is played in this process."""
    return [
        f"{name}: {played}"
        for name, played in progress.played.items()
        if digest_of(played_here(*played.split()[:2])) != played.split()[2]
    ]


def played_here(game: str, number: str) -> list[Any]:
    environment = FrozenLakeEnv(**GAMES[game])
    seen: list[Any] = [environment.reset(seed=int(number))[0]]
    for action in actions_of(int(number)):
        observation, reward, terminated, truncated, _ = environment.step(action)
        seen.append([observation, float(reward), terminated, truncated])
        if terminated or truncated:
            break
    return seen
