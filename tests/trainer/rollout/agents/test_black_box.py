"""Agents as programs and as services, in episodes of a real environment server: every end has its outcome."""

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollgym.trainer.records.trajectory import TrajectoryOutcome
from rollgym.trainer.rollout.agents import process_reaper, runners
from rollgym.trainer.rollout.agents.black_box import open_black_box
from rollgym.trainer.rollout.agents.http import serve_app
from rollgym.trainer.rollout.agents.runners import AgentTask, ProgramRunner, ServiceRunner
from rollgym.trainer.rollout.episodes import EpisodePlayer
from rollgym.trainer.rollout.prompts import ChatRenderer
from rollgym.trainer.tasks.task import Task
from tests.support.agent_policy import ScriptedPolicy, assert_recorded, service_of, tool_tokenizer

TOKENIZER = tool_tokenizer()
MAP = ["SFF", "FHF", "FFG"]
AGENTS = str(Path(__file__).parents[3] / "support" / "black_box_agents.py")
WINS = ["hello", "Right", "Right", "Down", "Down"]


def program(what: str, grace_s=5.0, **variables) -> ProgramRunner:
    return ProgramRunner([sys.executable, AGENTS, what], 4, variables, grace_s)


@asynccontextmanager
async def playing(pool, runner, script, max_turns=20, gate=None, **service):
    policy = ScriptedPolicy(TOKENIZER, script, gate=gate)
    options = {"host": "127.0.0.1", "port": 0, "public_url": None, "max_body_bytes": 1 << 20}
    async with open_black_box(
        service_of(policy, TOKENIZER, **service), runner, time.time, **options
    ) as black_box:
        player = EpisodePlayer(pool, lambda: None, max_turns, black_box=black_box)

        async def play(member=0):
            return await player.play(Task(0, "FrozenLake-v0", seed=5, kwargs={"map": MAP}), member, 0)

        yield play, policy, black_box


async def played(pool, what, script, **options):
    async with playing(pool, program(what), script, **options) as (play, policy, black_box):
        trajectory = await play()
        assert len(black_box.table) == 0
        if trajectory.turns:
            assert_recorded(trajectory, policy.log)
        return trajectory


async def test_a_program_plays_and_the_environment_pays(pool):
    trajectory = await played(pool, "play", WINS)
    assert trajectory.outcome is TrajectoryOutcome.SOLVED
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert [turn.anchor is not None for turn in trajectory.turns] == [False, True, True, True, True]
    assert len(trajectory.segments) == 5, "each of its prompts was a conversation of its own"
    assert trajectory.metrics["agent_calls"] == 5.0
    assert trajectory.metrics["steps"] == 4.0


async def test_the_environments_end_stands_whatever_the_agent_does_then(pool):
    assert (await played(pool, "play-then-crash", WINS)).outcome is TrajectoryOutcome.SOLVED
    assert (
        await played(pool, "play-then-crash", ["hi", "Right", "Down"])
    ).outcome is TrajectoryOutcome.FAILED


@pytest.mark.parametrize(
    ("what", "outcome", "detail"),
    [
        ("crash", TrajectoryOutcome.AGENT_ERROR, "ended with code 3: something broke"),
        ("silent", TrajectoryOutcome.AGENT_ERROR, "the agent ended without an answer of the policy"),
        ("nan", TrajectoryOutcome.INVALID_NUMBER, "the agent posted a reward that is no number"),
        ("hello", TrajectoryOutcome.TRUNCATED, "the agent ended before its environment's episode did"),
        ("chatty", TrajectoryOutcome.TRUNCATED, "the agent ended before"),
        ("flood", TrajectoryOutcome.AGENT_ERROR, "printed more than 64 MiB, and was ended"),
        ("reward", TrajectoryOutcome.SOLVED, "as the agent posted"),
        ("done", TrajectoryOutcome.FAILED, "as the agent posted"),
    ],
)
async def test_every_end_has_its_outcome(pool, what, outcome, detail):
    async with playing(pool, program(what, grace_s=0.1), ["hello"]) as (play, _, _):
        trajectory = await play()
    assert trajectory.outcome is outcome
    assert detail in trajectory.detail
    rewards = {"reward": [0.5], "done": [0.25]}
    if what in rewards:
        assert [turn.reward for turn in trajectory.turns] == rewards[what]


async def test_who_prints_too_much_is_ended_whatever_lies_in_its_pipe(pool, monkeypatch):
    monkeypatch.setattr(runners, "_MOST_OUTPUT", 1 << 20)
    words = [sys.executable, "-IS", "-c", "while True: print('x' * 1_000_000)"]
    runner = ProgramRunner(words, 4, {}, grace_s=0.1)
    async with playing(pool, runner, []) as (play, _, _), asyncio.timeout(60):
        trajectories = await asyncio.gather(*map(play, range(8)))
    assert {trajectory.detail for trajectory in trajectories} == {
        "the agent's program printed more than 1 MiB, and was ended"
    }


async def test_turns_end_an_episode(pool):
    trajectory = await played(pool, "greedy", lambda prompt: "hello", max_turns=3)
    assert trajectory.outcome is TrajectoryOutcome.TRUNCATED
    assert trajectory.detail == "max_turns 3 reached"
    assert len(trajectory.turns) == 3


async def test_a_prompt_without_room_is_the_policys_result(pool):
    hello = ChatRenderer(TOKENIZER).prompt([{"role": "user", "content": "hello"}])
    trajectory = await played(pool, "play", ["hello"], max_length=len(hello) + 512)
    assert trajectory.outcome is TrajectoryOutcome.CONTEXT_OVERFLOW
    assert len(trajectory.turns) == 1


async def test_an_engine_that_fails_ends_the_run(pool):
    def broken(prompt):
        raise RuntimeError("out of memory")

    async with playing(pool, program("play"), broken) as (play, _, _):
        with pytest.raises(RuntimeError, match="out of memory"):
            await play()


async def test_a_number_that_is_none_from_the_engine_is_an_outcome(pool):
    class Broken(ScriptedPolicy):
        async def generate(self, request):
            result = await super().generate(request)
            result.logprobs[0] = math.nan
            return result

    policy = Broken(TOKENIZER, ["hello"])
    options = {"host": "127.0.0.1", "port": 0, "public_url": None, "max_body_bytes": 1 << 20}
    async with open_black_box(
        service_of(policy, TOKENIZER), program("hello"), time.time, **options
    ) as black_box:
        player = EpisodePlayer(pool, lambda: None, 5, black_box=black_box)
        trajectory = await player.play(Task(0, "FrozenLake-v0", seed=5, kwargs={"map": MAP}), 0, 0)
    assert trajectory.outcome is TrajectoryOutcome.INVALID_NUMBER
    assert not trajectory.turns


async def _until(condition, seconds=20.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_a_cancelled_episode_leaves_no_process(pool, tmp_path):
    pids = tmp_path / "pids"
    async with playing(pool, program("orphans", PIDS=str(pids)), ["hello"]) as (play, _, black_box):
        episode = asyncio.create_task(play())
        await _until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
        started = [int(each) for each in pids.read_text().split()]
        assert all(map(_alive, started))
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        assert not any(map(_alive, started))
        assert len(black_box.table) == 0


def test_a_killed_trainer_leaves_no_agent(tmp_path):
    pids = tmp_path / "pids"
    child = "import os,sys,time; open(sys.argv[1],'w').write(str(os.getpid())); time.sleep(600)"
    owner = (
        "import os,subprocess,sys,time\n"
        "held, wanted = os.pipe()\n"
        f"subprocess.Popen([sys.executable,'-IS',{process_reaper.__file__!r},str(held),sys.executable,'-c',sys.argv[1],"
        "sys.argv[2]], pass_fds=(held,), start_new_session=True)\n"
        "os.close(held)\ntime.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", owner, child, str(pids)])
    try:
        deadline = time.monotonic() + 20
        while not (pids.exists() and pids.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        agent = int(pids.read_text())
        assert _alive(agent)
        os.kill(process.pid, signal.SIGKILL)
        while _alive(agent) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not _alive(agent)
    finally:
        process.kill()
        process.wait()


# -- services ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def agent_service(answer):
    """A service that answers each task as it is told, with what it was given."""

    async def handle(request):
        return await answer(await request.json())

    async with serve_app(Starlette(routes=[Route("/play", handle, methods=["POST"])]), "127.0.0.1", 0) as url:
        yield f"{url}/play"


async def _says_hello(task):
    import openai

    async with openai.AsyncOpenAI(base_url=task["base_url"], api_key=task["api_key"]) as agent:
        await agent.chat.completions.create(
            model=task["model"], messages=[{"role": "user", "content": "hello"}]
        )


async def test_a_service_plays_and_answers_with_its_reward(pool):
    async def answer(task):
        await _says_hello(task)
        assert task["task"]["env_id"] == "FrozenLake-v0"
        assert "kwargs" not in json.dumps(task)
        return JSONResponse({"reward": 0.75, "success": True})

    async with agent_service(answer) as url, playing(pool, ServiceRunner(url, 4), ["hello"]) as (play, _, _):
        trajectory = await play()
    assert (trajectory.outcome, trajectory.total_reward) == (TrajectoryOutcome.SOLVED, 0.75)


async def test_no_connection_is_kept_that_a_service_may_close_at_the_moment_of_its_use(pool):
    ports = set()

    async def handle(request):
        ports.add(request.client.port)
        return Response()

    app = Starlette(routes=[Route("/play", handle, methods=["POST"])])
    async with (
        serve_app(app, "127.0.0.1", 0) as url,
        playing(pool, ServiceRunner(f"{url}/play", 4), []) as (play, _, _),
    ):
        for member in range(3):
            await play(member)
    assert len(ports) == 3


async def test_a_service_may_answer_at_once_and_be_done_later(pool):
    import httpx

    later = []

    async def answer(task):
        async def work():
            await _says_hello(task)
            async with httpx.AsyncClient() as http:
                await http.post(task["end_url"], json={"reward": 2.0})

        later.append(asyncio.create_task(work()))
        return Response(status_code=202)

    async with agent_service(answer) as url, playing(pool, ServiceRunner(url, 4), ["hello"]) as (play, _, _):
        trajectory = await play()
    await asyncio.gather(*later)
    assert (trajectory.outcome, trajectory.total_reward) == (TrajectoryOutcome.FAILED, 2.0)


@pytest.mark.parametrize(
    ("answer", "outcome", "detail"),
    [
        (Response("no place", 503), TrajectoryOutcome.AGENT_ERROR, "answered 503: no place"),
        (
            JSONResponse({"reward": "much"}),
            TrajectoryOutcome.INVALID_NUMBER,
            "the reward that the agent answered",
        ),
        (Response("not json"), TrajectoryOutcome.TRUNCATED, "before its environment's episode did"),
        (JSONResponse([1]), TrajectoryOutcome.TRUNCATED, "before its environment's episode did"),
        (Response(b"x" * (1 << 21)), TrajectoryOutcome.AGENT_ERROR, "answered with more than 1024 KiB"),
    ],
)
async def test_every_answer_of_a_service_has_its_outcome(pool, answer, outcome, detail):
    async def say(task):
        await _says_hello(task)
        return answer

    async with agent_service(say) as url, playing(pool, ServiceRunner(url, 4), ["hello"]) as (play, _, _):
        trajectory = await play()
    assert trajectory.outcome is outcome
    assert detail in trajectory.detail


async def test_a_service_that_is_gone_is_an_outcome(pool):
    async with playing(pool, ServiceRunner("http://127.0.0.1:9/play", 4), []) as (play, _, _):
        trajectory = await play()
    assert trajectory.outcome is TrajectoryOutcome.AGENT_ERROR
    assert "cannot be reached" in trajectory.detail


# -- the environment as tools ------------------------------------------------------------------------------------------


async def test_the_environment_is_offered_over_mcp(pool):
    mcp = pytest.importorskip("mcp")

    async def answer(task):
        await _says_hello(task)
        async with mcp.Client(task["mcp_url"]) as client:
            tools = await client.list_tools()
            assert [tool.name for tool in tools.tools] == ["step"]
            assert "P__" in client.instructions
            for action in ("Right", "Right", "Down"):
                await client.call_tool("step", {"action": action})
            result = await client.call_tool("step", {"action": "Down"})
            assert "The episode has ended" in result.content[0].text
            assert (await client.call_tool("step", {"action": "Up"})).is_error
        return Response()

    async with agent_service(answer) as url, playing(pool, ServiceRunner(url, 4), ["hello"]) as (play, _, _):
        trajectory = await play()
    assert (trajectory.outcome, trajectory.total_reward) == (TrajectoryOutcome.SOLVED, 1.0)


# -- what an agent is told ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["program", "service"])
async def test_what_an_environment_has_put_into_its_tools_is_told_as_json(kind):
    tools = [{"name": "look", "far": np.zeros(2), "near": math.nan, "half": "\ud800"}]
    task = AgentTask("http://127.0.0.1:9/s/key", "key", "policy", {"index": 3, "tools": tools})
    heard = []

    async def answer(body):
        heard.append(body["task"])
        return Response()

    if kind == "program":
        script = "import json, sys; print(json.load(sys.stdin)['index']); sys.exit(7)"
        end = await ProgramRunner([sys.executable, "-IS", "-c", script], 1, {}, 0.1).run(task, _never_ends())
        assert end.failure == "the agent's program ended with code 7: 3"
        return
    async with agent_service(answer) as url:
        runner = ServiceRunner(url, 1)
        assert (await runner.run(task, _never_ends())).failure == ""
        await runner.close()
    assert heard[0]["index"] == 3


def _never_ends():
    return SimpleNamespace(ended=asyncio.Event())
