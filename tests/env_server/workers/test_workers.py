"""Environments that hang, crash, raise and answer nonsense cost their own session, and nobody else's."""

import asyncio
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollgym.env_server.cli import main as roll_serve
from tests.support.fragile_envs import INFOS, OUTCOMES, RAISED, SPACES, Beacon, ended, kill, nested
from tests.support.players import Player
from tests.support.processes import ROOT
from tests.support.wire import Server, Socket

MODULE = "tests.support.fragile_envs"
# One child and few threads: whatever one session does, the others are in the same place.
ARGUMENTS = (
    *("--env", f"Fragile={MODULE}:Fragile", "--env", f"Random={MODULE}:Random"),
    *("--env", f"Drifting={MODULE}:Drifting", "--env", f"Scores={MODULE}:Scores"),
    *("--env", f"Thread={MODULE}:Fragile", "--isolation", "Thread=thread"),
    *("--env", f"Pinned={MODULE}:Pinned", "--isolation", "Pinned=thread"),
    *("--env", f"Inline={MODULE}:Fragile", "--isolation", "Inline=inline"),
    *("--threads", "16", "--make-timeout-s", "4"),
)
OUT_OF_PROCESS = ("Fragile", "Thread", "Pinned")
EVERYWHERE = ("Fragile", "Thread", "Pinned", "Inline")
WORKERS = {"process": ("--workers", "1"), "ray": ("--workers", "ray", "--ray-max-actors", "1")}


@pytest.fixture(scope="module", params=["process", pytest.param("ray", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        # Ray would leave one in the home directory.
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        started = Server(*ARGUMENTS, *WORKERS[request.param])
    with started as running:
        yield running
        assert "failed inside the server" not in running.log()
        assert running.stop() == 0, "threads that hang do not keep it from ending"


async def crowd(socket: Socket) -> list[Player]:
    """Sessions that something is about to happen beside: in mid-episode, everywhere."""
    players = [await Player.begin(socket, env_id) for env_id in EVERYWHERE]
    for player in players:
        await player.step("before")
    return players


async def check_unharmed(players: list[Player]) -> None:
    for player in players:
        await player.step("after")
        player.check()


# -- hanging -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("env_id", OUT_OF_PROCESS)
async def test_a_step_that_hangs_costs_only_its_session(server: Server, beacon: Beacon, env_id: str) -> None:
    async with server.socket() as socket:
        others = await crowd(socket)
        resting = await Player.begin(socket)
        episode = (await resting.ask("episode"))["ok"]
        hanging = await Player.begin(socket, env_id)
        step = await hanging.send(f"hang {beacon.path}", timeout_s=0.6)
        await beacon.wait()
        # These are waiting, or on their way, while the other one hangs.
        beginning = [
            await socket.send("make", env_id="Fragile", count=3, reset={"seed": 1}),
            await socket.send("fork", session_id=resting.session_id, count=2, reseed=3),
            await socket.send("restore", episode=episode),
        ]
        meanwhile = [await player.send("meanwhile") for player in others]
        for number in beginning:
            answer = await socket.answer(number)
            assert "ok" in answer, answer
        for player, number in zip(others, meanwhile, strict=True):
            await player.take(number, "meanwhile")
        assert (await socket.answer(step))["error"]["code"] == "step_timeout"
        await check_unharmed(others)
        await hanging.check_begins_anew()


@pytest.mark.parametrize("env_id", ["Thread", "Pinned"])
async def test_a_thread_that_hangs_is_not_waited_for(server: Server, beacon: Beacon, env_id: str) -> None:
    async with server.socket() as socket:
        others = await crowd(socket)
        hanging = await Player.begin(socket, env_id)
        step = await hanging.send(f"hang {beacon.path}")
        await beacon.wait()
        await check_unharmed(others)
        assert (await hanging.ask("step", action="more", step=1))["error"]["code"] == "busy", "it still hangs"
        await hanging.ask("cancel")
        assert (await socket.answer(step))["error"]["code"] == "step_timeout"
        await hanging.check_begins_anew()


@pytest.mark.parametrize("env_id", OUT_OF_PROCESS)
async def test_a_reset_that_hangs_can_be_given_up(server: Server, beacon: Beacon, env_id: str) -> None:
    async with server.socket() as socket:
        others = await crowd(socket)
        made = (await socket.call("make", env_id=env_id))["session_id"]
        reset = await socket.send("reset", session_id=made, options={"hang": str(beacon.path)})
        await beacon.wait()
        await socket.call("cancel", session_id=made)
        assert (await socket.answer(reset))["error"]["code"] == "step_timeout"
        assert "ok" in await socket.ask("reset", session_id=made)
        await check_unharmed(others)


async def test_makes_and_resets_that_hang_time_out(server: Server, beacon: Beacon) -> None:
    async with server.socket() as socket:
        others = await crowd(socket)
        before = (await socket.call("info"))["capacity"]["sessions"]
        made = (await socket.call("make", env_id="Thread"))["session_id"]
        hang = str(beacon.path)
        asked = [await socket.send("make", env_id=env_id, kwargs={"hang": hang}) for env_id in OUT_OF_PROCESS]
        asked.append(await socket.send("reset", session_id=made, options={"hang": hang}))
        for number in asked:
            assert (await socket.answer(number))["error"]["code"] == "step_timeout"
        assert len(beacon.pending()) == len(asked)
        assert "ok" in await socket.ask("reset", session_id=made)
        assert (await socket.call("info"))["capacity"]["sessions"] <= before + 1, "none that hung was kept"
        await check_unharmed(others)


# -- crashing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["exit", "signal", "null", "leave"])
async def test_a_step_that_crashes_costs_only_its_session(server: Server, beacon: Beacon, way: str) -> None:
    async with server.socket() as socket:
        others = await crowd(socket)
        crashing = await Player.begin(socket)
        await crashing.step("before")
        action = f"{way} {beacon.path}"
        problem = await crashing.fails(action)
        assert (problem["code"], problem["error_class"]) == ("env_error", "WorkerLost")
        places = beacon.pending()
        assert len(places) == 2, "it was tried once more, and given up"
        for pid in places:
            await ended(pid)
        assert await crashing.fails(action) == problem, "asked again, it is answered by the same problem"
        assert beacon.pending() == []
        await check_unharmed(others)
        await crashing.check_begins_anew()


async def test_a_worker_that_loses_its_connection_is_replaced(server: Server, beacon: Beacon) -> None:
    async with server.socket() as socket:
        others = await crowd(socket)
        crashing = await Player.begin(socket)
        assert (await crashing.fails(f"closes {beacon.path}"))["error_class"] == "WorkerLost"
        for pid in beacon.pending():
            await ended(pid)
        await check_unharmed(others)


async def test_an_episode_goes_on_when_its_worker_is_killed(server: Server, beacon: Beacon) -> None:
    async with server.socket() as socket:
        players = await crowd(socket)
        for _ in range(3):
            await players[0].step(f"tell {beacon.path}")
            child = await beacon.wait()
            await kill(child)
            await check_unharmed(players)
            beacon.pending()  # What the replay told.
        players[0].check()


async def test_a_step_goes_on_when_its_worker_is_killed(
    server: Server, beacon: Beacon, tmp_path: Path
) -> None:
    async with server.socket() as socket:
        others, player = await crowd(socket), await Player.begin(socket)
        action = f"hold {beacon.path} {tmp_path / 'flag'}"
        step = await player.send(action)
        first = await beacon.wait()
        queued = [await other.send("queued") for other in others]
        await kill(first)
        second = await beacon.wait()
        assert second != first
        (tmp_path / "flag").touch()
        await player.take(step, action)
        for other, number in zip(others, queued, strict=True):
            await other.take(number, "queued")
        await player.step("on")
        await check_unharmed([player, *others])


async def test_copies_and_ended_episodes_survive_a_kill(server: Server, beacon: Beacon) -> None:
    async with server.socket() as socket:
        player = await Player.begin(socket)
        await player.step(f"tell {beacon.path}")
        child = await beacon.wait()
        copies = (await player.ask("fork", count=2, reseed=5))["ok"]["session_ids"]
        [twin] = (await player.ask("fork", count=1, reseed=5))["ok"]["session_ids"]
        expected = await socket.call("step", session_id=twin, action="on")
        short = await Player.begin(socket, kwargs={"length": 1})
        await short.step("end")
        await kill(child)
        assert await socket.call("step", session_id=copies[0], action="on") == expected
        assert await socket.call("step", session_id=copies[1], action="on") != expected
        await player.step("on")
        player.check()
        assert (await short.ask("step", action="end", step=0))["ok"] == short.replies[1]
        assert (await short.ask("step", action="on"))["error"]["code"] == "episode_over"
        assert (await short.ask("render"))["ok"]["frame"].startswith("<")
        assert (await short.ask("reset", seed=1))["ok"] == {**short.replies[0], "episode": 1}


async def test_a_session_that_cannot_be_rebuilt_is_lost(server: Server, beacon: Beacon) -> None:
    async with server.socket() as socket:
        others = await crowd(socket)
        lost = await Player.begin(socket, "Random")
        idle = (await socket.call("make", env_id="Random"))["session_id"]
        ready = (await socket.call("make", env_id="Random"))["session_id"]
        await lost.step(f"tell {beacon.path}")
        await kill(await beacon.wait())
        for _ in range(2):
            problem = await lost.fails("on")
            assert (problem["code"], problem["status"], problem["reason"]) == ("session_gone", 410, "lost")
        problem = (await lost.ask("reset"))["error"]
        assert (problem["code"], problem["reason"]) == ("session_gone", "lost")
        assert "ok" in await socket.ask("reset", session_id=idle), "without an episode nothing was lost"
        assert (await socket.ask("step", session_id=ready, action="a"))["error"]["code"] == "not_reset"
        assert "ok" in await socket.ask("reset", session_id=ready)
        await check_unharmed(others)


async def test_a_reset_needs_no_episode_to_be_rebuilt(server: Server, beacon: Beacon) -> None:
    async with server.socket() as socket:
        player = await Player.begin(socket, "Random")
        await player.step(f"tell {beacon.path}")
        await kill(await beacon.wait())
        begun = (await player.ask("reset", seed=1))["ok"]
        assert begun == {**player.replies[0], "episode": 1}


async def test_an_environment_that_diverges_is_never_silently_another(server: Server, beacon: Beacon) -> None:
    async with server.socket() as socket:
        others, drifting = await crowd(socket), await Player.begin(socket, "Drifting")
        await drifting.step(f"tell {beacon.path}")
        await drifting.step("on")
        await kill(await beacon.wait())
        for _ in range(2):
            problem = await drifting.fails("on")
            assert (problem["code"], problem["reason"]) == ("session_gone", "replay_diverged")
        await check_unharmed(others)


async def test_a_replay_that_crashes_is_given_up(server: Server, beacon: Beacon, tmp_path: Path) -> None:
    async with server.socket() as socket:
        others, trapped = await crowd(socket), await Player.begin(socket)
        await trapped.step(f"trap {beacon.path} {tmp_path / 'flag'}")
        await kill(await beacon.wait())
        problem = await trapped.fails("on")
        assert (problem["code"], problem.get("error_class")) == ("env_error", "WorkerLost"), problem
        assert len(beacon.pending()) == 2, "its replay was tried twice"
        await check_unharmed(others)
        await trapped.check_begins_anew()


# -- raising and answering nonsense ------------------------------------------------------------------------------


@pytest.mark.parametrize("env_id", EVERYWHERE)
async def test_whatever_is_raised_is_the_environments_error(server: Server, env_id: str) -> None:
    async with server.socket() as socket:
        other = await Player.begin(socket)
        await other.step(f"tell {'/dev/null'}")
        for name in RAISED:
            player = await Player.begin(socket, env_id)
            await player.step("before")
            problem = await player.fails(f"raise {name}")
            assert (problem["code"], problem["error_class"]) == ("env_error", name), problem
            assert "secret" not in str(problem)
            await player.check_begins_anew()
            assert (await player.ask("close"))["ok"] == {"closed": 1}
        await check_unharmed([other])


@pytest.mark.parametrize("binary", [False, True], ids=["json", "msgpack"])
@pytest.mark.parametrize("env_id", EVERYWHERE)
async def test_an_answer_that_cannot_be_sent_is_the_environments_error(
    server: Server, env_id: str, binary: bool
) -> None:
    async with server.socket(binary=binary) as socket:
        other = await Player.begin(socket)
        for action in (*(f"info {name}" for name in INFOS), *(f"answer {name}" for name in OUTCOMES)):
            player = await Player.begin(socket, env_id)
            problem = await player.fails(action)
            assert problem["code"] == "env_error", (action, problem)
            assert await player.fails(action) == problem, "asked again, it is answered by the same problem"
            await player.check_begins_anew()
        await check_unharmed([other])


@pytest.mark.parametrize("env_id", EVERYWHERE)
async def test_a_space_that_cannot_be_described_is_the_environments_error(
    server: Server, env_id: str
) -> None:
    async with server.socket() as socket:
        other = await Player.begin(socket)
        before = (await socket.call("info"))["capacity"]["sessions"]
        for space in (*SPACES, "none"):
            answer = await socket.ask("make", env_id=env_id, kwargs={"any": {"space": space}}, reset={})
            assert answer["error"]["code"] in ("env_error", "invalid_kwargs"), (space, answer)
        assert (await socket.call("info"))["capacity"]["sessions"] <= before
        await check_unharmed([other])


def test_an_environment_without_spaces_is_told_what_to_set_and_no_stack_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "spaceless.py").write_text(
        "import gymnasium\n\n\nclass Spaceless(gymnasium.Env):\n    pass\n\n\n"
        "class Broken(gymnasium.Env):\n    @property\n    def action_space(self):\n        return self.nothing\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    said = {}
    for name in ("Spaceless", "Broken"):
        with pytest.raises(SystemExit) as ended:
            roll_serve(["--no-builtin", "--port", "0", "--env", f"spaceless:{name}"])
        assert ended.value.code == 2
        said[name] = capfd.readouterr().err
    assert said["Spaceless"].splitlines()[-1] == (
        "roll-serve: Spaceless cannot be made without kwargs: AttributeError: it has no action_space: set it in "
        "`__init__`, to a space of Gymnasium or `rollgym.UnicodeText()`"
    )
    assert "Traceback" not in said["Spaceless"]
    # What the author's own code raises is shown with its place.
    assert "has no attribute 'nothing'" in said["Broken"].splitlines()[-1]
    assert "spaceless.py" in said["Broken"]


@pytest.mark.parametrize("env_id", ["Fragile", "Random"])
async def test_a_result_that_cannot_be_put_together_again_is_the_environments_error(
    server: Server, env_id: str
) -> None:
    """A hashable mapping comes out of a child as a plain one, which the set that it was in cannot hold."""
    async with server.socket() as socket:
        other, player = await Player.begin(socket), await Player.begin(socket, env_id)
        await other.step("before")
        async with asyncio.timeout(20):
            problem = await player.fails("frozen")
        assert (problem["code"], problem["error_class"]) == ("env_error", "TypeError")
        await player.check_begins_anew()
        await check_unharmed([other])


async def test_a_step_that_comes_back_twice_leaves_nobody_without_an_answer(server: Server) -> None:
    async with server.socket() as socket, asyncio.timeout(30):
        for _ in range(4):
            players = [await Player.begin(socket, "Random") for _ in range(4)]
            numbers = [
                await player.send(action) for player, action in zip(players, ("fork", *"abc"), strict=True)
            ]
            for number in numbers:
                await socket.answer(number)
        await (await Player.begin(socket)).step("on")


async def test_what_is_nested_too_deeply_is_refused(server: Server) -> None:
    async with server.socket() as socket:
        deep = {"a": nested(240)}
        refused = await socket.ask("make", env_id="Inline", kwargs={"any": deep})
        assert refused["error"]["code"] == "invalid_kwargs"
        refused = await socket.ask("make", env_id="Inline", reset={"options": deep})
        assert refused["error"]["code"] == "invalid_request"
        made = await socket.call("make", env_id="Inline", kwargs={"any": nested(190)}, reset={})
        episode = await socket.call("episode", session_id=made["session_id"])
        assert "ok" in await socket.ask("restore", episode=episode)


# -- scoring -----------------------------------------------------------------------------------------------------


async def test_a_response_that_hangs_or_crashes_costs_only_itself(server: Server, beacon: Beacon) -> None:
    async with server.socket() as socket:
        others = await crowd(socket)
        items = [{"response": "good", "answer": str(number)} for number in range(6)]
        items[1]["response"] = f"hang {beacon.path}"
        items[3]["response"] = f"signal {beacon.path}"
        items[4]["response"] = "raise Unprintable"
        results = (await socket.call("verify", env_id="Scores", items=items, timeout_s=1))["results"]
        assert [result["outcome"] for result in results] == [
            *("correct", "timeout", "correct", "error", "error", "correct")
        ]
        assert [result["detail"] for result in results if result["outcome"] == "correct"] == [*"025"]
        await check_unharmed(others)


async def test_responses_that_are_scored_together_do_not_harm_each_other(
    server: Server, beacon: Beacon
) -> None:
    """Once the verifier has shown to be quick, many responses go to a child at a time."""
    async with server.socket() as socket:
        quick = [{"response": "good", "answer": str(number)} for number in range(200)]
        for _ in range(2):
            results = (await socket.call("verify", env_id="Scores", items=quick))["results"]
            assert [result["detail"] for result in results] == [str(number) for number in range(200)]
        items = [dict(item) for item in quick[:60]]
        items[7]["response"] = f"hang {beacon.path}"
        items[20]["response"] = "raise Unprintable"
        items[40]["response"] = f"signal {beacon.path}"
        results = (await socket.call("verify", env_id="Scores", items=items, timeout_s=2))["results"]
        odd = {
            number: result["outcome"]
            for number, result in enumerate(results)
            if result["outcome"] != "correct"
        }
        assert odd == {7: "timeout", 20: "error", 40: "error"}
        for number, result in enumerate(results):
            assert number in odd or result["detail"] == str(number)


async def test_callers_whose_responses_are_scored_together_do_not_notice_each_other(
    server: Server, beacon: Beacon
) -> None:
    """Single responses that come at once go to a child together; one hangs, and one caller leaves."""
    async with server.socket() as socket, server.socket() as leaver:
        quick = [{"response": "good", "answer": str(number)} for number in range(200)]
        await socket.call("verify", env_id="Scores", items=quick)
        hanging = {"response": f"hang {beacon.path}", "answer": "never"}
        await leaver.send("verify", env_id="Scores", items=[hanging, *quick[:3]], timeout_s=2)
        numbers = [await socket.send("verify", env_id="Scores", items=[item], timeout_s=2) for item in quick]
        await leaver.connection.close()
        async with asyncio.timeout(60):
            for number, item in zip(numbers, quick, strict=True):
                (verdict,) = (await socket.answer(number))["ok"]["results"]
                assert (verdict["outcome"], verdict["detail"]) == ("correct", item["answer"])


def test_a_child_imports_nothing_that_it_does_not_need() -> None:
    # Every worker process pays for it, in memory and in the time of its start.
    code = (
        "import sys, rollgym.env_server.workers.child as child\n"
        "print(sorted({'pydantic', 'fastapi', 'starlette', 'uvicorn', 'yaml', 'httpx'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
