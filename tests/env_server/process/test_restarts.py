"""A server that is killed and started again with the same state directory goes on where it was."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.client_server import ServerProcess
from tests.support.fragile_envs import Beacon, ended, undisturbed
from tests.support.journals import killed_before, offsets
from tests.support.metrics import scrape, value
from tests.support.patient_calls import calls, open_socket
from tests.support.processes import ROOT

MODULE = "tests.support.fragile_envs"
# Without child processes, a server starts in no time.
LIGHT = (
    *("--env", f"Inline={MODULE}:Fragile", "--isolation", "Inline=inline"),
    *("--env", f"Random={MODULE}:Random", "--isolation", "Random=inline"),
    *("--env", f"Drifting={MODULE}:Drifting", "--isolation", "Drifting=inline"),
    *("--env", f"Thread={MODULE}:Fragile", "--isolation", "Thread=thread"),
    *("--workers", "1", "--log-level", "error"),
)


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def server(state: Path) -> Iterator[ServerProcess]:
    """A server that the tests kill, and leave as it was."""
    with ServerProcess([*LIGHT, "--state-dir", str(state)]) as running:
        yield running


def start_anew(server: ServerProcess) -> None:
    """End the server as a crash would, and start it again."""
    server.kill()
    server.start()


async def test_every_session_is_where_it_was(server: ServerProcess) -> None:
    async with calls(server) as caller:
        playing = await caller.begin("Inline", kwargs={"length": 4}, idle_timeout_s=50)
        await playing.step("a")
        over = await caller.begin("Inline", kwargs={"length": 1})
        await over.step("end")
        fresh = await caller.begin("Inline")
        chosen = await caller.begin("Inline")
        chosen.replies = [
            await chosen.ask("reset", seed=7, options={"start": 5, "x": {"__nd__": ["int8", [1], "AA=="]}})
        ]
        await chosen.step("b")
        idle = [
            (await caller.call("POST", "/v1/sessions", env_id=each))["session_id"]
            for each in ("Inline", "Random")
        ]
        closed = await caller.begin("Inline")
        await caller.call("DELETE", f"/v1/sessions/{closed.session_id}")
        [copy] = (await playing.ask("fork", count=1, reseed=3))["session_ids"]
        twin = (await playing.ask("fork", count=1, reseed=3))["session_ids"][0]
        expected = await caller.call("POST", f"/v1/sessions/{twin}/step", action="c")
        kept = [playing, over, fresh, chosen]
        before = [await player.look() for player in kept]
        count = await caller.sessions()
        start_anew(server)
        assert await caller.sessions() == count
        for player, was in zip(kept, before, strict=True):
            assert {**await player.look(), "idle_s": 0} == {**was, "idle_s": 0}
        assert await over.again() == over.replies[-1]
        assert (await over.ask("step", action="more", step=1))["code"] == "episode_over"
        for player in (playing, fresh, chosen):
            await player.step("c")
        playing.check(length=4)
        fresh.check()
        chosen.replies[0]["episode"] = 0
        assert [reply["observation"] for reply in chosen.replies] == [
            reply["observation"] for reply in undisturbed(chosen.actions, seed=7, options={"start": 5})
        ]
        assert await caller.call("POST", f"/v1/sessions/{copy}/step", action="c") == expected
        for session_id in idle:
            assert (await caller.call("POST", f"/v1/sessions/{session_id}/step", action="a"))[
                "code"
            ] == "not_reset"
            assert (await caller.call("POST", f"/v1/sessions/{session_id}/reset", seed=1))["episode"] == 0
        assert await closed.gone() == "closed"


async def test_the_last_answer_is_given_again(server: ServerProcess) -> None:
    async with calls(server) as caller:
        player, ending = await caller.begin("Inline"), await caller.begin("Inline", kwargs={"length": 2})
        for action in ("a", "b"):
            await player.step(action)
            await ending.step(action)
        start_anew(server)
        for each in (player, ending):
            assert await each.again() == each.replies[-1]
            other = await each.ask("step", action="x", step=1)
            assert (other["code"], other["step"]) == ("step_mismatch", 2)
            assert (await each.look("/episode"))["actions"] == ["a", "b"]
        early = await player.ask("step", action="a", step=0)
        assert (early["code"], early["step"]) == ("step_mismatch", 2)
        await player.step("c")
        player.check()


async def test_a_step_that_began_an_episode_is_answered_again(server: ServerProcess) -> None:
    async with calls(server) as caller:
        step = {"action": "end", "episode": 0, "step": 0, "autoreset": True}
        players = [await caller.begin(env_id, kwargs={"length": 1}) for env_id in ("Inline", "Thread")]
        first = [await player.ask("step", **step) for player in players]
        for _ in range(2):
            start_anew(server)
            for player, answer in zip(players, first, strict=True):
                assert (answer["terminated"], answer["reset"]["episode"]) == (True, 1)
                assert await player.ask("step", **step) == answer
                assert (await player.look())["episode"] == 1
        for player in players:
            assert (await player.ask("step", action="end", episode=1, step=0))["terminated"]
            assert (await player.ask("step", **step))["code"] == "step_mismatch"


async def test_a_reset_is_answered_again(server: ServerProcess) -> None:
    async with calls(server) as caller:
        players = [await caller.begin(env_id) for env_id in ("Inline", "Thread")]
        first = [await player.ask("reset", request_id="r") for player in players]
        for player in players:
            await player.ask("step", action="a")
        [copy] = (await players[0].ask("fork", count=1))["session_ids"]
        start_anew(server)
        for player, answer in zip(players, first, strict=True):
            again = await asyncio.gather(*(player.ask("reset", request_id="r") for _ in range(3)))
            assert again == [answer] * 3
            assert (await player.look())["step"] == 1, "the episode went on"
            assert (await player.ask("reset", request_id="s"))["episode"] == 2
        reset = await caller.call("POST", f"/v1/sessions/{copy}/reset", request_id="r")
        assert reset["episode"] == 2, "it was not the copy that was asked before"


async def test_an_episode_that_a_step_was_to_begin_is_begun(server: ServerProcess) -> None:
    async with calls(server) as caller:
        player = await caller.begin("Inline", kwargs={"length": 1})
        await player.step("end")
        start_anew(server)
        # As if the process had died between the step and the reset.
        step = {"action": "end", "episode": 0, "step": 0, "autoreset": True, "reset": {"seed": 5}}
        first = await player.ask("step", **step)
        assert {**player.replies[-1], "reset": first["reset"]} == first
        assert (first["reset"]["episode"], first["reset"]["seed"]) == (1, 5)
        assert await player.ask("step", **step) == first
        assert (await player.look())["episode"] == 1


async def test_crash_follows_crash(server: ServerProcess) -> None:
    async with calls(server) as caller:
        players = [await caller.begin("Inline") for _ in range(4)]
        for number in range(3):
            for player in players[number:]:
                await player.step(str(number))
            start_anew(server)
        for player in players:
            player.check()
            await player.step("on")
            player.check()


async def test_a_drained_server_leaves_its_sessions_to_the_next(server: ServerProcess) -> None:
    async with calls(server) as caller:
        player = await caller.begin("Inline")
        await player.step("a")
        server.stop()
        server.start()
        await player.step("b")
        player.check()


async def test_a_record_that_was_cut_costs_one_step(server: ServerProcess, state: Path) -> None:
    journal = state / "journal-0.bin"
    async with calls(server) as caller:
        player = await caller.begin("Inline")
        await player.step("first")
        await player.step("second")
        server.kill()
        content = journal.read_bytes()
        last, end = offsets(content)[-2:]
        # The head says last of all that a record is whole.
        journal.write_bytes(killed_before(content, last)[: end - 3])
        server.start()
        assert (await player.look())["step"] == 1
        assert await player.again() == player.replies[-1], "taken anew, with the same answer"
        await player.step("third")
        player.check()


async def test_damage_is_told_and_no_session_goes_back(tmp_path: Path) -> None:
    journal = tmp_path / "journal-0.bin"
    arguments = [*LIGHT, "--state-dir", str(tmp_path)]
    with ServerProcess(arguments) as server:
        async with calls(server) as caller:
            closed, concerned, later = [await caller.begin("Inline") for _ in range(3)]
            await concerned.step("first")
            await caller.call("DELETE", f"/v1/sessions/{closed.session_id}")
            content = journal.read_bytes()
            at = offsets(content)[-1] - 5
            await later.step("goes on")
            server.kill()
            content = journal.read_bytes()
            journal.write_bytes(content[:at] + b"\xff" + content[at + 1 :])
            server.start()
            # What was damaged is that it was closed.
            assert await closed.gone() == "lost"
            assert await concerned.gone() == "lost"
            assert (await later.look())["step"] == 1
            await later.step("on and on")
            later.check()
        assert value(await scrape(server.url), "rollgym_journal_damage_total") == 1


async def test_what_an_operator_changes(tmp_path: Path) -> None:
    with ServerProcess([*LIGHT, "--state-dir", str(tmp_path / "state")]) as server:
        async with calls(server) as caller:
            moved, drifting = await caller.begin("Inline"), await caller.begin("Drifting")
            older, fresh = await caller.begin("Thread"), await caller.begin("Drifting")
            dropped = await caller.begin("Random")
            for player in (moved, drifting, older):
                await player.step("a")
            server.kill()
            state = server.arguments[-2:]
            server.arguments = [
                *("--env", f"Inline={MODULE}:Fragile", "--isolation", "Inline=thread"),
                *("--env", f"Thread={MODULE}:Newer", "--isolation", "Thread=inline"),
                *("--env", f"Drifting={MODULE}:Drifting", "--isolation", "Drifting=inline"),
                *state,
            ]
            server.start()
            await moved.step("b")
            moved.check()
            assert await older.gone() == "replay_diverged", "it is of another version"
            assert await drifting.gone() == "replay_diverged"
            assert await dropped.gone() == "lost", "nobody serves it any more"
            assert (await fresh.step("a"))["step"] == 1, "its reset does not differ"
            assert await caller.sessions() == 2


async def test_nobody_is_sent_away_while_the_server_starts(tmp_path: Path, beacon: Beacon) -> None:
    slow = ["--env", f"Slow={MODULE}:SlowStart", "--isolation", "Slow=thread"]
    state = ["--state-dir", str(tmp_path / "state")]
    with ServerProcess([*LIGHT, *state]) as server:
        async with calls(server) as caller, httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            player = await caller.begin("Inline")
            path = f"/v1/sessions/{player.session_id}"
            server.kill()
            flag = tmp_path / "flag"
            kwargs = f'Slow={{"hold": "{beacon.path} {flag}"}}'
            server.arguments += [*slow, "--operator-kwargs", kwargs]
            starting = asyncio.ensure_future(asyncio.to_thread(server.start))
            await beacon.wait()
            for method, target in (
                *(("POST", f"{path}/step"), ("POST", f"{path}/reset"), ("GET", path), ("DELETE", path)),
                *(("GET", "/v1/sessions"), ("GET", "/v1/envs"), ("GET", "/v1/info")),
                *(("POST", "/v1/sessions"), ("POST", "/v1/verify/Scores")),
            ):
                content = {"action": "a"} if target.endswith("step") else None
                answer = await client.request(method, target, json=content)
                assert (answer.status_code, answer.json()["code"]) == (503, "draining"), target
                assert int(answer.headers["retry-after"]) > 0
            assert (await client.get("/ready")).status_code == 503
            assert (await client.get("/health")).status_code == 200
            flag.touch()
            await starting
            await player.step("a")
            player.check()


async def test_sessions_of_sockets_wait_for_their_sockets(tmp_path: Path) -> None:
    """They were made on sockets that died with the server, and end unless another socket uses them."""
    arguments = [*LIGHT, "--state-dir", str(tmp_path / "state"), "--linger-s", "1"]
    with ServerProcess(arguments) as server:
        async with open_socket(server) as socket:
            left, used = await socket.make("Inline"), await socket.make("Inline")
        start_anew(server)
        async with calls(server) as caller, open_socket(server) as socket:
            assert (await socket.call("step", session_id=used, action="a"))["step"] == 1
            async with asyncio.timeout(20):
                while await caller.sessions() == 2:
                    await asyncio.sleep(0.05)
            assert (await socket.ask("session", session_id=left))["error"]["reason"] == "evicted"
            assert (await socket.call("step", session_id=used, action="b"))["step"] == 2


# -- what a server does not start on -----------------------------------------------------------------------------


def refused(state: Path, *arguments: str) -> str:
    """What a server says that does not start."""
    ended = subprocess.run(
        [sys.executable, "-m", "rollgym.env_server", "--port", "0", "--state-dir", str(state), *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert ended.returncode == 2, ended
    assert "Traceback" not in ended.stderr
    return ended.stderr


@pytest.mark.slow
async def test_a_state_directory_has_one_server(server: ServerProcess, state: Path) -> None:
    async with calls(server) as caller:
        player = await caller.begin("Inline")
        await player.step("a")
        others = [
            asyncio.to_thread(refused, state, *LIGHT, "--processes", processes) for processes in ("1", "2")
        ]
        for text in await asyncio.gather(*others):
            assert "another server uses" in text
        start_anew(server)
        await player.step("b")
        player.check()


@pytest.mark.slow
def test_a_server_that_is_refused_leaves_what_processes_share_as_it_is(tmp_path: Path) -> None:
    with ServerProcess((*LIGHT, "--processes", "2", "--state-dir", str(tmp_path))):
        shared = {each.name: each.stat().st_ino for each in tmp_path.iterdir() if "ready" not in each.name}
        assert "quota_counters" in shared
        text = refused(tmp_path, *LIGHT, "--processes", "2")
        assert "another server uses" in text
        left = {each.name: each.stat().st_ino for each in tmp_path.iterdir()}
        assert shared.items() <= left.items()


def test_a_file_that_is_no_journal_is_left_alone(tmp_path: Path) -> None:
    journal = tmp_path / "journal-0.bin"
    journal.write_bytes(b"somebody's diary")
    assert "is not a journal" in refused(tmp_path, *LIGHT)
    assert journal.read_bytes() == b"somebody's diary"


@pytest.mark.slow
async def test_two_processes_outlive_their_supervisor_in_their_journals(tmp_path: Path) -> None:
    arguments = [*LIGHT, "--processes", "2", "--state-dir", str(tmp_path / "state")]
    with ServerProcess(arguments) as server:
        async with calls(server) as caller:
            players = [await caller.begin("Inline", owner) for owner in (0, 1)]
            for player in players:
                await player.step("a")
            processes = server.children()
            server.kill()
            for pid in processes:
                await ended(pid)
            server.start()
            for player in players:
                await player.step("b")
                player.check()
