"""Several gateways under fire: python benchmarks/soak/gateways.py [--minutes 20] [--kills 60] [--seed 0] [--out FILE].

Three gateways that share a journal stand before four nodes, and a proxy gives each request to one of them at random.
Gateways and nodes are killed (SIGKILL) at random, and with `--journal-kills` the journal's server, too. Players step
over plain HTTP, most of them with the place of the step, some without it, and others through our client's sockets,
which is not to restore anything. Every answer must be the one that follows the last one, afterwards the same episodes
are played in this process, where nothing disturbs them: all digests must be equal, and no copy of a session may be
left.

What was played is kept in FILE as it goes. Started again with the same FILE, the run goes on where it was.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from run import ACTIONS, LONGEST, ROOT, Server, digest_of, left_at
from spreading_proxy import SpreadingProxy

from clients.client.client import EnvClient
from clients.protocol.errors import ProblemError
from envs.games.frozen_lake import FrozenLakeEnv

GAMES: dict[str, dict[str, Any]] = {"FrozenLake-v0": {}, "Slippery-v0": {"is_slippery": True}}
SERVED = (
    *("--no-builtin", "--env", "FrozenLake-v0=envs.games.frozen_lake:FrozenLakeEnv"),
    *("--env", "Slippery-v0=envs.games.frozen_lake:FrozenLakeEnv", "--isolation", "Slippery-v0=process"),
)
GATEWAYS, NODES = 3, 4
IDLE_S = 45.0
SAVE_EVERY_S = 10.0
_MOST_STARTS = 60


class Journal(Server):
    """A Redis server that writes everything to disk before it answers."""

    def __init__(self, place: str) -> None:
        super().__init__([])
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            raise SystemExit("this needs redis-server (apt-get install redis-server)")
        self.command = [
            program,
            "--dir",
            place,
            "--save",
            "",
            "--appendonly",
            "yes",
            "--appendfsync",
            "always",
        ]

    def start(self) -> "Journal":
        if not self.port:
            with socket.create_server(("127.0.0.1", 0)) as free:
                self.port = free.getsockname()[1]
        command = [*self.command, "--port", str(self.port), "--bind", "127.0.0.1"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, text=True, start_new_session=True)
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return self
            except ConnectionError:
                time.sleep(0.02)


@dataclass
class Progress:
    """What has happened, which is kept in a file.

    Attributes:
        seed: Of everything that is random.
        seconds: How long it has run.
        kills: What was killed, and how often.
        played: The digest of each episode, by its player and number.
        steps: Steps that were answered.
        asked_again: Requests that were answered with something retryable, or not at all.
        lost: Answers that did not follow from the last one, and other ends of sessions.
        mended_by_client: Sessions that our client restored.
        slowest_step_s: The longest time from a step to its answer, all tries together.
        left_at_nodes: Sessions at the nodes when all were closed and had their idle time-out.
    """

    seed: int
    seconds: float = 0.0
    kills: dict[str, int] = field(default_factory=dict)
    played: dict[str, str] = field(default_factory=dict)
    steps: int = 0
    asked_again: int = 0
    lost: list[str] = field(default_factory=list)
    mended_by_client: int = 0
    slowest_step_s: float = 0.0
    left_at_nodes: int = 0

    @classmethod
    def load(cls, path: Path | None, seed: int) -> "Progress":
        if path is None or not path.exists():
            return cls(seed)
        found = cls(**json.loads(path.read_text())["progress"])
        if found.seed != seed:
            raise SystemExit(f"{path} is of a run with seed {found.seed}")
        return found

    def save(self, path: Path | None, about: dict[str, Any]) -> None:
        if path is not None:
            fresh = path.with_suffix(".new")
            fresh.write_text(json.dumps({**about, "progress": asdict(self)}, indent=1) + "\n")
            fresh.replace(path)


Pause = Callable[[], float]
"""How long a player thinks before a step, in seconds."""


def actions_of(number: int) -> list[str]:
    return random.Random(number).choices(ACTIONS, k=LONGEST)


class BrokenError(Exception):
    """A session was not what it has to be."""


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


class UnknownError(Exception):
    """Whether a step was taken is not known."""


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


class Fleet:
    """The servers, and what is done to them."""

    def __init__(self, place: str) -> None:
        self.journal = Journal(place).start()
        shared = ("--gateway", "--allow-network", "loopback", "--linger-s", "5")
        url = f"redis://127.0.0.1:{self.journal.port}/0"
        self.gateways = [
            Server([*shared, "--journal-url", url, "--state-dir", f"{place}/gateway-{number}"])
            for number in range(GATEWAYS)
        ]
        with ThreadPoolExecutor() as starting:
            list(starting.map(Server.start, self.gateways))
            register = [part for gateway in self.gateways for part in ("--register", gateway.url)]
            # Half of the nodes come back with what they had, and half with nothing.
            states = [
                ("--state-dir", f"{place}/node-{number}") if number % 2 else () for number in range(NODES)
            ]
            self.nodes = [Server([*SERVED, *register, *state, "--workers", "1"]) for state in states]
            list(starting.map(Server.start, self.nodes))

    def stop(self) -> None:
        for server in (*self.nodes, *self.gateways, self.journal):
            with contextlib.suppress(AssertionError):
                server.kill(signal.SIGKILL)

    async def whole(self) -> None:
        """Wait until all nodes are registered with all gateways."""
        async with httpx.AsyncClient() as http:
            for gateway in self.gateways:
                while True:
                    with contextlib.suppress(httpx.TransportError, KeyError):
                        found = (await http.get(f"{gateway.url}/v1/envs")).json()["envs"]
                        if [env["replicas"] for env in found] == [NODES] * len(GAMES):
                            break
                    await asyncio.sleep(0.1)

    async def fire(self, options: argparse.Namespace, progress: Progress) -> None:
        """Kill at random times, evenly spread over the whole run, and start what was killed again."""
        chance = random.Random(progress.seed)
        kinds = ["gateway"] * GATEWAYS + ["node"] * NODES
        plan = [
            (
                60 * options.minutes * (number + chance.random()) / options.kills,
                chance.choice(kinds),
                chance.random(),
            )
            for number in range(options.kills)
        ]
        plan += [
            (60 * options.minutes * (number + chance.random()) / options.journal_kills, "journal", 0.0)
            for number in range(options.journal_kills)
        ]
        begun = time.monotonic() - progress.seconds
        coming_back: dict[Server, asyncio.Task[None]] = {}
        for at_s, kind, which in sorted(plan):
            if at_s < progress.seconds:
                continue
            await asyncio.sleep(max(0.0, begun + at_s - time.monotonic()))
            # One whose start takes long is not there yet: killed in it, it would be started twice on one port.
            able = [each for each in self._of(kind) if each not in coming_back or coming_back[each].done()]
            if not able:
                continue
            victim = able[int(which * len(able))]
            victim.kill()
            victim.process = None
            progress.kills[kind] = progress.kills.get(kind, 0) + 1
            pause = min(chance.uniform(0.0, 5.0), 6 * options.minutes)
            coming_back[victim] = asyncio.create_task(_back(victim, pause))
        await asyncio.gather(*coming_back.values())

    def _of(self, kind: str) -> list[Server]:
        return {"gateway": self.gateways, "node": self.nodes, "journal": [self.journal]}[kind]


async def _back(victim: Server, pause_s: float) -> None:
    await asyncio.sleep(pause_s)
    for _ in range(_MOST_STARTS):
        try:
            await asyncio.to_thread(victim.start)
        except ValueError:
            # Another process may have been given its port for a connection while it was away.
            print(f"the server on port {victim.port} did not start; trying again", flush=True)
            await asyncio.sleep(1.0)
        else:
            return
    raise RuntimeError(f"the server on port {victim.port} does not start")


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


async def run(options: argparse.Namespace, progress: Progress, about: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        fleet = await asyncio.to_thread(Fleet, place)
        try:
            await fleet.whole()
            chance = random.Random(progress.seed + 1)
            ports = [gateway.port for gateway in fleet.gateways]
            async with SpreadingProxy(ports, chance) as proxy:
                await play_all(options, progress, about, fleet, proxy)
            for server in (*fleet.gateways, *fleet.nodes, fleet.journal):
                if server.process is None:
                    await asyncio.to_thread(server.start)
            await fleet.whole()
            left = sum(await left_at(fleet.nodes, options.settle_s))
            # Of a request that was repeated through another gateway, one session lasts until its idle time-out.
            progress.left_at_nodes = left if options.settle_s > IDLE_S else 0
        finally:
            fleet.stop()
    different = undisturbed(progress)
    return {
        **{name: value for name, value in asdict(progress).items() if name != "played"},
        "episodes": len(progress.played),
        "different": different,
    }


async def play_all(
    options: argparse.Namespace,
    progress: Progress,
    about: dict[str, Any],
    fleet: Fleet,
    proxy: SpreadingProxy,
) -> None:
    begun = time.monotonic() - progress.seconds
    until = begun + 60 * options.minutes
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with (
        EnvClient(proxy.url, reconnect_timeout_s=120) as client,
        httpx.AsyncClient(base_url=proxy.url, timeout=90, limits=limits) as http,
    ):
        playing = [
            asyncio.create_task(player(number, client, http, progress, until, options.pause))
            for number in range(options.players)
        ]
        firing = asyncio.create_task(fleet.fire(options, progress))
        try:
            while not all(each.done() for each in playing):
                await asyncio.wait(playing, timeout=SAVE_EVERY_S)
                progress.seconds = min(time.monotonic() - begun, 60 * options.minutes)
                progress.save(options.out, about)
                row = {"minute": round(progress.seconds / 60, 1), "episodes": len(progress.played)}
                print(
                    row,
                    "kills",
                    progress.kills,
                    "steps",
                    progress.steps,
                    "lost",
                    len(progress.lost),
                    flush=True,
                )
            await asyncio.gather(*playing, firing)
        finally:
            for task in (*playing, firing):
                task.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--kills", type=int, default=60, help="Of gateways and nodes, in all.")
    parser.add_argument("--journal-kills", type=int, default=0, help="Of the journal's server, beside those.")
    parser.add_argument("--pause", type=float, default=0.6, help="Players think so long at most, in seconds.")
    parser.add_argument("--players", type=int, default=32)
    parser.add_argument(
        "--settle-s",
        type=float,
        default=IDLE_S + 30,
        help="How long nodes may take to have no session left; less than an idle time-out: not looked at.",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="Where progress and results are kept.")
    options = parser.parse_args()
    # Servers in groups of their own are ended by this program, also where it is told to stop.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.strip()
    about = {"about": {"command": "python " + " ".join(sys.argv), "commit": commit, "cores": os.cpu_count()}}
    progress = Progress.load(options.out, options.seed)
    result = asyncio.run(run(options, progress, about))
    print(json.dumps(result, indent=1))
    progress.save(options.out, {**about, "result": result})
    if result["lost"] or result["different"] or result["mended_by_client"] or result["left_at_nodes"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
