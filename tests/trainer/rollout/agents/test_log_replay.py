"""Episodes of agents taken up again: the agent starts anew, and what it asks again comes from the rollout log."""

import asyncio
import sys
import time
from array import array
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from rollgym.clients.client.session import EnvSession
from rollgym.clients.protocol.errors import ProblemError
from rollgym.trainer.inference.base import GenerationRequest, SamplingParams
from rollgym.trainer.records.rollout_log import Entry, EpisodeKey, RolloutLog
from rollgym.trainer.records.trajectory import TrajectoryOutcome
from rollgym.trainer.rollout.agents.black_box import open_black_box
from rollgym.trainer.rollout.agents.runners import AgentEnd, ProgramRunner
from rollgym.trainer.rollout.environments import EnvironmentPool
from rollgym.trainer.rollout.episodes import EpisodePlayer
from rollgym.trainer.rollout.log_replay import LoggedClient, LogReplay, _digest
from rollgym.trainer.tasks.task import Task
from tests.support.agent_policy import ScriptedPolicy, recorded_replies, service_of, tool_tokenizer

TOKENIZER = tool_tokenizer()
AGENTS = str(Path(__file__).parents[3] / "support" / "black_box_agents.py")
TASK = Task(0, "FrozenLake-v0", seed=5, kwargs={"map": ["SFF", "FHF", "FFG"]})
WINS = ["hello", "Right", "Right", "Down", "Down"]


@pytest.fixture
async def pool(url):
    async with EnvironmentPool(url, None, "msgpack", timeout_s=20.0) as environments:
        yield environments


class StandingStill:
    """An inference client that answers as long as a script goes, and then no more."""

    def __init__(self, policy, remaining, drawn, ended):
        self._policy, self._remaining = policy, remaining
        self._drawn, self._ended = drawn, ended

    async def generate(self, request):
        if not self._remaining:
            self._ended.set()
            await asyncio.Event().wait()
        result = await self._policy.generate(request)
        self._drawn.append(result.token_ids)
        return result


class AgentProcess:
    """One process of a run whose agents are `runner`'s; its policy says `script`, and stands still at its end."""

    def __init__(self, folder, script, runner):
        self.log = RolloutLog(folder, durable=False, say=pytest.fail)
        self.log_replay = LogReplay(self.log)
        self.drawn = []
        self.lost = []
        self.differed = []
        self.all_said = asyncio.Event()
        remaining = list(script)
        policy = ScriptedPolicy(TOKENIZER, lambda prompt: remaining.pop(0))

        engine = StandingStill(policy, remaining, self.drawn, self.all_said)
        self._service = service_of(LoggedClient(engine, self.log_replay), TOKENIZER)
        self._runner = runner

    @asynccontextmanager
    async def player(self, pool):
        options = {"host": "127.0.0.1", "port": 0, "public_url": None, "max_body_bytes": 1 << 20}
        async with open_black_box(self._service, self._runner, time.time, **options) as black_box:
            yield EpisodePlayer(
                pool,
                lambda: None,
                20,
                log_replay=self.log_replay,
                lost=lambda task, why: self.lost.append(why),
                black_box=black_box,
                differs=lambda task, how: self.differed.append(how),
            )

    async def play(self, pool):
        async with asyncio.timeout(60), self.player(pool) as player:
            trajectory = await player.play(TASK, 0, 0)
        self.log.close()
        return trajectory

    async def play_until_the_script_ends(self, pool):
        """Vanish in the middle of a reply."""
        async with asyncio.timeout(60), self.player(pool) as player:
            playing = asyncio.create_task(player.play(TASK, 0, 0))
            await self.all_said.wait()
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)
        self.log.close()


def program(what):
    return ProgramRunner([sys.executable, AGENTS, what], 4, {}, 5.0)


async def test_a_program_that_does_the_same_again_is_answered_from_the_log(pool, tmp_path):
    first = AgentProcess(tmp_path, WINS[:3], program("play"))
    await first.play_until_the_script_ends(pool)
    second = AgentProcess(tmp_path, WINS[3:], program("play"))
    assert second.log_replay.found == (1, 3, sum(map(len, first.drawn)))
    trajectory = await second.play(pool)
    assert (trajectory.outcome, trajectory.total_reward) == (TrajectoryOutcome.SOLVED, 1.0)
    assert [ids for _, ids, _, _ in recorded_replies(trajectory)] == first.drawn + second.drawn
    assert len(second.drawn) == 2, "nothing is drawn twice"
    assert second.log_replay.counters == {"replies": 3, "tokens": sum(map(len, first.drawn))}
    assert (second.lost, second.differed) == ([], [])
    third = AgentProcess(tmp_path, [], program("play"))
    again = await third.play(pool)
    assert [each.ids for each in again.segments] == [each.ids for each in trajectory.segments]
    assert [each.behaviour_logprobs for each in again.segments] == [
        each.behaviour_logprobs for each in trajectory.segments
    ]
    assert again.total_reward == 1.0, "an episode that had ended costs no token, and no step"


class Asking:
    """An agent in this process that asks what it is told to, by plain HTTP."""

    def __init__(self, plan):
        self._plan = plan
        self.answers = []

    async def run(self, task, session):
        async with httpx.AsyncClient(base_url=task.url, timeout=30) as http:
            await self._plan(self, http)
        return AgentEnd()

    async def ask(self, http, text, **fields):
        body = {"messages": [{"role": "user", "content": text}], **fields}
        answer = await http.post("v1/chat/completions", json=body)
        said = [choice["message"]["content"] for choice in answer.json().get("choices", [])]
        self.answers.append(said)
        return answer

    async def close(self):
        pass


def asking(*texts, **fields):
    async def plan(agent, http):
        for text in texts:
            await agent.ask(http, text, **fields)

    return Asking(plan)


async def test_where_an_agent_asks_otherwise_it_is_sampled_for_and_that_is_counted(pool, tmp_path):
    first = AgentProcess(tmp_path, ["a", "b", "c"], asking("one", "two", "three", "four"))
    await first.play_until_the_script_ends(pool)
    agent = asking("one", "other", "three")
    second = AgentProcess(tmp_path, ["new"], agent)
    trajectory = await second.play(pool)
    assert agent.answers == [["a"], ["new"], ["c"]]
    assert len(trajectory.turns) == 3
    tokens = len(first.drawn[1])
    assert second.log_replay.counters == {
        "replies": 2,
        "tokens": len(first.drawn[0]) + len(first.drawn[2]),
        "unasked_replies": 1,
        "unasked_tokens": tokens,
    }
    assert second.differed == [f"member 0: 1 replies ({tokens} tokens) were in vain"]


async def test_replies_to_one_prompt_go_where_they_went(pool, tmp_path):
    """Choices and repeated requests read the same; which of them an agent goes on with must not change."""

    async def plan(agent, http):
        await agent.ask(http, "same", n=3)
        await agent.ask(http, "same")
        await agent.ask(http, "wait")

    first = AgentProcess(tmp_path, ["x", "y", "z", "w"], Asking(plan))
    await first.play_until_the_script_ends(pool)
    again = Asking(plan)
    second = AgentProcess(tmp_path, ["end"], again)
    await second.play(pool)
    assert again.answers == [["x", "y", "z"], ["w"], ["end"]]
    assert len(second.drawn) == 1


async def test_an_environment_that_cannot_be_brought_back_begins_the_episode_again(
    pool, tmp_path, monkeypatch
):
    first = AgentProcess(tmp_path, WINS[:4], program("play"))
    await first.play_until_the_script_ends(pool)

    async def gone(self, portable, place):
        raise ProblemError("session_gone", "the session is gone")

    monkeypatch.setattr(EnvSession, "resume", gone)
    second = AgentProcess(tmp_path, WINS, program("play"))
    trajectory = await second.play(pool)
    assert (trajectory.outcome, trajectory.total_reward) == (TrajectoryOutcome.SOLVED, 1.0)
    assert len(second.drawn) == 5
    assert len(second.lost) == 1
    assert second.log_replay.counters["episodes"] == 1


def test_entries_without_a_seed_are_read_as_they_were_written(tmp_path):
    """Logs of the release before have none."""
    request = GenerationRequest("r", [1, 2], SamplingParams(4), seed=9)
    log = RolloutLog(tmp_path, durable=False, say=pytest.fail)
    key = EpisodeKey(0, 0, 0)
    ids, logprobs = array("q", [5]).tobytes(), array("d", [-0.5]).tobytes()
    log.append(Entry("reply", key, (_digest(request), ids, logprobs, [[3, 1]], "stop")))
    log.close()
    log_replay = LogReplay(RolloutLog(tmp_path, durable=False, say=pytest.fail))
    with log_replay.playing(key) as replay:
        found = replay.reply(request)
    assert found is not None
    assert (found.token_ids, found.logprobs, found.policy_versions) == ([5], [-0.5], [3])
