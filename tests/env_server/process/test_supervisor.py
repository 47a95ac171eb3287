"""An I/O process that is killed comes back, and its sessions go on or say why not."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.client_server import ServerProcess
from tests.support.fragile_envs import Beacon, ended, kill
from tests.support.patient_calls import Caller, calls, open_socket
from tests.support.wire import Socket

MODULE = "tests.support.fragile_envs"
ALIKE = ("Inline", "Thread", "Fragile")
ARGUMENTS = (
    *("--env", f"Inline={MODULE}:Fragile", "--isolation", "Inline=inline"),
    *("--env", f"Thread={MODULE}:Fragile", "--isolation", "Thread=thread"),
    *("--env", f"Fragile={MODULE}:Fragile", "--env", f"Random={MODULE}:Random"),
    *("--env", f"Drifting={MODULE}:Drifting", "--env", f"Scores={MODULE}:Scores"),
    *("--processes", "2", "--workers", "1", "--log-level", "error"),
)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of two I/O processes, which the tests kill in turns."""
    state = tmp_path_factory.mktemp("state")
    with ServerProcess([*ARGUMENTS, "--state-dir", str(state)]) as running:
        yield running


async def pid_of(caller: Caller, owner: int, beacon: Beacon) -> int:
    """The I/O process that owns sessions of an index."""
    witness = await caller.begin("Inline", owner)
    await witness.step(f"tell {beacon.path}")
    await caller.call("DELETE", f"/v1/sessions/{witness.session_id}")
    return await beacon.wait()


async def test_episodes_go_on_when_their_process_is_killed(wide: ServerProcess, beacon: Beacon) -> None:
    async with calls(wide) as caller:
        players = [await caller.begin(env_id, owner) for env_id in ALIKE for owner in (0, 1)]
        for player in players:
            for action in ("a", "ä", ""):
                await player.step(action)
        await players[4].step(f"tell {beacon.path}")
        child = await beacon.wait()
        before = [await player.look() for player in players]
        await kill(await pid_of(caller, 0, beacon))
        await ended(child)
        # All at once: they share the one that is started anew.
        await asyncio.gather(*(player.step("after") for player in players))
        for player, was in zip(players, before, strict=True):
            player.check()
            now = await player.look()
            ignored = {"step": 0, "idle_s": 0}
            assert {**now, **ignored} == {**was, **ignored}
            episode = await player.look("/episode")
            assert episode["actions"] == player.actions
            restored = await caller.call("POST", "/v1/sessions/restore", episode=episode)
            assert restored["step"] == len(player.actions), "the digests are good"


@pytest.mark.parametrize("env_id", ["Thread", "Fragile"])
async def test_a_step_whose_process_is_killed_is_taken_once(
    wide: ServerProcess, beacon: Beacon, tmp_path: Path, env_id: str
) -> None:
    owner = ALIKE.index(env_id) % 2
    async with calls(wide) as caller:
        player, other = await caller.begin(env_id, owner), await caller.begin(env_id, 1 - owner)
        await player.step("before")
        victim = await pid_of(caller, owner, beacon)
        action = f"hold {beacon.path} {tmp_path / 'flag'}"
        # Some of these go to the process that is killed, and some are forwarded to it.
        asked = [asyncio.ensure_future(player.ask("step", action=action, step=1)) for _ in range(6)]
        place = await beacon.wait()
        await kill(victim)
        await ended(place)
        assert await beacon.wait() != place, "tried anew"
        (tmp_path / "flag").touch()
        first, *others = await asyncio.gather(*asked)
        assert [each for each in others if each != first] == []
        player.actions.append(action)
        player.replies.append(first)
        await player.step("after")
        player.check()
        await other.step("unharmed")
        other.check()


async def test_what_a_killed_process_cannot_rebuild_is_gone(wide: ServerProcess, beacon: Beacon) -> None:
    async with calls(wide) as caller:
        lost, drifting = await caller.begin("Random", 1), await caller.begin("Drifting", 1)
        elsewhere = await caller.begin("Random", 0)
        for player in (lost, drifting, elsewhere):
            await player.step("before")
        assert (await drifting.look("/episode"))["actions"] == ["before"]
        before = await caller.sessions()
        await kill(await pid_of(caller, 1, beacon))
        assert await lost.gone() == "lost"
        assert await drifting.gone() == "replay_diverged"
        assert await caller.sessions() == before - 2, "they give their places back"
        assert (await elsewhere.step("after"))["step"] == 2


async def test_scores_do_not_notice_a_killed_process(wide: ServerProcess, beacon: Beacon) -> None:
    async with calls(wide) as caller:
        victim = await pid_of(caller, 0, beacon)
        items = [{"response": f"tell {beacon.path}", "answer": str(number)} for number in range(3)]
        asked = [
            asyncio.ensure_future(caller.call("POST", "/v1/verify/Scores", items=items)) for _ in range(8)
        ]
        await beacon.wait()
        await kill(victim)
        for answer in await asyncio.gather(*asked):
            assert [result["detail"] for result in answer["results"]] == ["0", "1", "2"]


@asynccontextmanager
async def socket_on(server: ServerProcess, index: int) -> AsyncIterator[Socket]:
    """A socket to one of the processes."""
    while True:
        async with open_socket(server) as socket:
            # Another process may be starting again still.
            answer = await socket.ask("make", env_id="Inline", reset={"seed": 1})
            made = answer.get("ok", {}).get("session_id", "none")
            await socket.ask("close", session_id=made)
            if made.startswith(f"{index}."):
                yield socket
                return


async def test_what_may_not_be_done_twice_is_not(wide: ServerProcess, beacon: Beacon, tmp_path: Path) -> None:
    async with calls(wide) as caller, socket_on(wide, 1) as socket:
        player = await caller.begin("Thread", 0)
        victim = await pid_of(caller, 0, beacon)
        action = f"hold {beacon.path} {tmp_path / 'flag'}"
        # Without its index, nobody knows whether the step was taken.
        step = await socket.send("step", session_id=player.session_id, action=action)
        await beacon.wait()
        await kill(victim)
        assert (await socket.answer(step))["error"]["code"] == "upstream_error"
        assert (await player.look())["step"] == 0
        assert beacon.pending() == []


@pytest.mark.slow
async def test_a_step_that_takes_processes_down_is_given_up(wide: ServerProcess, beacon: Beacon) -> None:
    async with calls(wide) as caller, socket_on(wide, 0) as socket:
        player, other = await caller.begin("Inline", 1), await caller.begin("Inline", 1)
        action = f"exit {beacon.path}"
        answer = await socket.ask("step", session_id=player.session_id, action=action, step=0)
        assert answer["error"]["code"] == "draining"
        assert len(beacon.pending()) == 3
        for each in (player, other):
            await each.step("after")
            each.check()
