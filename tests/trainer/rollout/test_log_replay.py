"""Episodes taken up again: nothing is sampled twice, the environment is where it was, or the episode begins again."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rollgym.clients.client.client import EnvClient
from rollgym.clients.protocol.errors import ProblemError
from rollgym.trainer.core.plugins import load_plugin
from rollgym.trainer.core.run_files import WriteError
from rollgym.trainer.inference.base import GenerationRequest, GenerationResult, SamplingParams
from rollgym.trainer.records.rollout_log import RolloutLog
from rollgym.trainer.records.trajectory import Trajectory, TrajectoryOutcome, Turn
from rollgym.trainer.rollout.actors import View
from rollgym.trainer.rollout.environments import EnvironmentPool
from rollgym.trainer.rollout.episodes import EpisodePlayer
from rollgym.trainer.rollout.log_replay import LoggedClient, LogReplay, session_key
from rollgym.trainer.rollout.recorder import Recorder
from rollgym.trainer.tasks.task import Task
from tests.support.processes import env_server

MOVES = ["Left", "Down", "Right", "Up"]
LAKE = Task(5, "FrozenLake-v0", 7, {"size": 8, "max_episode_steps": 9})
DICE = Task(6, "NoisyEcho", 7)
WIDE = Task(
    8, "FrozenLake-v0", 7, {"map": ["S" + 7 * "F", *[8 * "F"] * 6, 7 * "F" + "G"], "max_episode_steps": 9}
)


class Engine:
    """An inference client that draws another reply at every call, and counts them."""

    def __init__(self, first: int = 0) -> None:
        self.drawn = first
        self.stop_after: int | None = None

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        if self.stop_after == 0:
            await asyncio.Event().wait()
        if self.stop_after is not None:
            self.stop_after -= 1
        self.drawn += 1
        return GenerationResult(
            [self.drawn % 4, self.drawn], [-1 / self.drawn, -0.1], [self.drawn, self.drawn]
        )

    async def generate_together(self, requests: list[GenerationRequest]) -> list[GenerationResult]:
        return [await self.generate(request) for request in requests]


class Actor:
    """Asks an engine with the turn's number and what it sees as the prompt."""

    def __init__(self, client: LoggedClient) -> None:
        self.client = client

    def begin(self, info: object) -> None:
        pass

    def cut_off(self, trajectory: Trajectory, see: object) -> None:
        pass

    async def act(self, trajectory: Trajectory, view: View) -> Turn:
        recorder = Recorder(trajectory)
        prompt = [100 + view.turn, *view.text.encode()]
        index = recorder.place(prompt)
        task = trajectory.task
        name = session_key("train", task.index, trajectory.member, trajectory.attempt)
        result = await self.client.generate(
            GenerationRequest("r", prompt, SamplingParams(4), 0, (task.index, 0, view.turn), name)
        )
        start, end = recorder.record(index, result, view.turn)
        return Turn(index, start, end, view.text, MOVES[result.token_ids[0]])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with env_server("--env", "NoisyEcho=tests.support.recall_envs:NoisyEcho") as address:
        yield address


@pytest.fixture
async def pool(url: str) -> AsyncIterator[EnvironmentPool]:
    async with EnvironmentPool(url, None, "msgpack", timeout_s=20.0) as pool:
        yield pool


class Process:
    """One process of a run: a log, an engine, and episodes that are played until it is killed."""

    def __init__(
        self,
        folder: Path,
        pool: EnvironmentPool,
        first: int = 0,
        agent: str | None = None,
        engine: type[Engine] = Engine,
    ) -> None:
        self.log = RolloutLog(folder, durable=False, say=lambda text: pytest.fail(text))
        self.log_replay = LogReplay(self.log)
        self.engine = engine(first)
        self.lost: list[tuple[int, str]] = []
        client = LoggedClient(self.engine, self.log_replay)
        self.player = EpisodePlayer(
            pool,
            lambda: Actor(client),
            max_turns=9,
            agent=None if agent is None else load_plugin(agent, "rollout.agent"),
            log_replay=self.log_replay,
            lost=lambda task, why: self.lost.append((task, why)),
        )

    async def play(self, task: Task = LAKE, attempt: int = 0) -> Trajectory:
        return await asyncio.wait_for(self.player.play(task, 0, attempt), 30)

    async def play_until(self, turns: int, task: Task = LAKE) -> None:
        """Play so many turns, and vanish in the middle of the next one."""
        self.engine.stop_after = turns
        playing = asyncio.ensure_future(self.player.play(task, 0, 0))
        while self.engine.stop_after and not playing.done():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        self.log.close()


def ids_of(trajectory: Trajectory) -> list[int]:
    return [
        token
        for turn in trajectory.turns
        for token in trajectory.segments[turn.segment].ids[turn.start : turn.end]
    ]


async def test_an_episode_goes_on_from_its_tokens_and_its_state(tmp_path, pool):
    undisturbed = await Process(tmp_path / "whole", pool).play()
    first = Process(tmp_path / "log", pool)
    await first.play_until(3)
    second = Process(tmp_path / "log", pool, first=3)
    assert second.log_replay.found == (1, 3, 6)
    trajectory = await second.play()
    assert trajectory == undisturbed, "rewards, observations, log-probabilities and all"
    assert second.engine.drawn == first.engine.drawn + len(trajectory.turns) - 3, (
        "three turns were not drawn again"
    )
    assert second.log_replay.counters == {"replies": 3, "tokens": 6}
    assert second.lost == []
    second.log.close()
    # And again: all of it is in the log by now, and nothing is drawn at all.
    third = Process(tmp_path / "log", pool, first=999)
    assert await third.play() == undisturbed
    assert third.engine.drawn == 999


class AlwaysRight(Engine):
    """Replies of which no two differ in what they do."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        result = await super().generate(request)
        return replace(result, token_ids=[MOVES.index("Right"), *result.token_ids[1:]])


async def test_an_answer_that_a_disk_has_lost_is_not_taken_from_a_later_step(tmp_path, pool):
    """A machine that ends leaves files that lack their ends, whatever later files have."""

    folder = tmp_path / "log"
    undisturbed = await Process(tmp_path / "whole", pool, engine=AlwaysRight).play(WIDE)
    first = Process(folder, pool, engine=AlwaysRight)
    await first.play_until(3, WIDE)
    kinds = [entry.kind for entry in RolloutLog(folder, durable=False, say=pytest.fail).read()]
    assert kinds == ["reset", *["reply", "step"] * 3]
    second = Process(folder, pool, engine=AlwaysRight)
    await second.play(WIDE)
    second.log.close()
    file = min(folder.glob("*.log"))
    os.truncate(file, file.stat().st_size - 1)  # the last step cannot be read any more
    trajectory = await Process(folder, pool, engine=AlwaysRight).play(WIDE)
    assert [turn.observation for turn in trajectory.turns] == [turn.observation for turn in undisturbed.turns]
    assert trajectory.total_reward == undisturbed.total_reward
    assert trajectory.outcome is undisturbed.outcome


async def test_killed_again_and_again_it_still_goes_on(tmp_path, pool):
    undisturbed = await Process(tmp_path / "whole", pool).play()
    drawn = 0
    while drawn < 4:
        process = Process(tmp_path / "log", pool, first=drawn)
        await process.play_until(1)
        drawn = process.engine.drawn
    assert drawn == 4
    last = Process(tmp_path / "log", pool, first=drawn)
    assert await last.play() == undisturbed


async def test_an_environment_that_another_server_brings_back_goes_on_there(tmp_path, pool, url):
    first = Process(tmp_path / "log", pool)
    await first.play_until(3)
    with env_server() as other:  # the one that had the session is gone
        async with EnvironmentPool(other, None, "msgpack", timeout_s=20.0) as elsewhere:
            second = Process(tmp_path / "log", elsewhere, first=3)
            trajectory = await second.play()
    assert trajectory == await Process(tmp_path / "whole", pool).play()
    assert second.lost == []


async def test_a_session_that_is_still_there_is_taken_over_where_it_cannot_be_rebuilt(tmp_path, url):
    """An environment whose chances nobody can repeat: only the very session can go on."""
    async with EnvironmentPool(url, None, "msgpack", timeout_s=20.0) as pool:
        async with pool.session(DICE) as held:  # what is lent here keeps the socket, as a lingering one would
            session_id, process = held.session_id, held.process
            await held.reset(seed=7)
            seen = [(await held.step(move)).observation for move in MOVES[:2]]
            state = held.episode, held.seed
        async with EnvClient(url) as client:
            other = await client.make(DICE.env_id)
            episode = portable_of(other, state, MOVES[:2])
            await other.resume(episode, (session_id, process))
            assert other.session_id == session_id
            assert other.step_index == 2
            result = await other.step("Left")
            assert result.observation.startswith(seen[-1]), "its state is the very one"


def portable_of(session, state, actions):
    from rollgym.clients.protocol.episode import PortableEpisode

    return PortableEpisode(
        env_id=session.env_id,
        env_version=session.env.version,
        episode=state[0],
        seed=state[1],
        reset_digest="0" * 16,
        actions=list(actions),
        digests=["0" * 16] * len(actions),
    )


async def test_a_session_that_cannot_be_resumed_is_as_new(url):
    async with EnvClient(url) as client:
        for env_id, reason in (("NoisyEcho", "lost"), ("FrozenLake-v0", "replay_diverged")):
            session = await client.make(env_id)
            with pytest.raises(ProblemError) as refused:
                await session.resume(portable_of(session, (0, 7), ["Left"]), ("0.nobody", 0))
            assert refused.value.extra.get("reason") == reason
            assert (session.episode, session.step_index) == (-1, 0)
            await session.reset(seed=3)
            assert (await session.step("Left")).observation


async def test_where_the_environment_is_gone_the_episode_begins_again_and_says_so(tmp_path, pool, url):
    first = Process(tmp_path / "log", pool)
    await first.play_until(2, DICE)
    with env_server("--env", "NoisyEcho=tests.support.recall_envs:NoisyEcho") as other:
        async with EnvironmentPool(other, None, "msgpack", timeout_s=20.0) as elsewhere:
            second = Process(tmp_path / "log", elsewhere, first=50)
            trajectory = await second.play(DICE)
            ((task, why),) = second.lost
            assert task == DICE.index
            assert "not deterministic" in why
            assert ids_of(trajectory)[1] == 51, "sampled from its start"
            assert second.log_replay.counters["episodes"] == 1
            second.log.close()
            third = Process(tmp_path / "log", elsewhere, first=999)
            assert await third.play(DICE) == trajectory, "what was void stays void"
            assert third.engine.drawn == 999


async def test_attempts_that_failed_are_not_taken_up_again(tmp_path, pool):
    first = Process(tmp_path / "log", pool)
    broken = Task(8, "NoisyEcho", 7, {"breaks_at": 2})
    failed = await first.play(broken)
    assert failed.outcome is TrajectoryOutcome.ENVIRONMENT_ERROR
    await first.play(LAKE, attempt=1)
    first.log.close()
    second = Process(tmp_path / "log", pool)
    again = await second.play(broken)
    assert (again.outcome, again.detail, again.turns) == (failed.outcome, failed.detail, [])
    assert (await second.play(LAKE)).outcome is TrajectoryOutcome.TIMEOUT, "a later attempt is in the log"
    assert second.engine.drawn == 0
    assert (await second.play(LAKE, attempt=1)).outcome.is_result
    assert second.engine.drawn == 0


async def test_only_a_prompt_that_is_the_same_is_answered_from_the_log(tmp_path, pool):
    first = Process(tmp_path / "log", pool)
    await first.play_until(3)
    second = Process(tmp_path / "log", pool, first=70)
    elsewhere = Task(LAKE.index, LAKE.env_id, 8, LAKE.kwargs)  # as if the stream had changed
    trajectory = await second.play(elsewhere)
    assert 71 in ids_of(trajectory)
    assert second.log_replay.counters["replies"] == 0


async def test_a_disk_that_is_full_ends_the_episode_before_its_turn_goes_out(tmp_path, pool, monkeypatch):
    process = Process(tmp_path / "log", pool)
    real, writes = os.write, 0

    def full(descriptor: int, content: bytes) -> int:
        nonlocal writes
        writes += 1
        if writes > 3:  # the file's beginning, the reset, one reply
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, content)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(WriteError, match="No space left"):
        await process.play()


async def test_an_agent_of_the_users_is_played_again_by_its_own_code(tmp_path, pool):
    agent = "tests.support.recall_envs:patient_agent"
    undisturbed = await Process(tmp_path / "whole", pool, agent=agent).play()
    first = Process(tmp_path / "log", pool, agent=agent)
    await first.play_until(3)
    second = Process(tmp_path / "log", pool, first=3, agent=agent)
    assert await second.play() == undisturbed
    assert second.engine.drawn == len(undisturbed.turns)


async def test_a_batch_that_the_log_has_in_part_is_computed_whole_and_changes_nothing_logged(tmp_path):
    def request(task: int, purpose: str = "train") -> GenerationRequest:
        return GenerationRequest(
            str(task), [task], SamplingParams(4), 0, (task,), session_key(purpose, task, 0, 0)
        )

    def process(first: int) -> tuple[Engine, LogReplay, LoggedClient]:
        log_replay = LogReplay(RolloutLog(tmp_path, durable=False, say=pytest.fail))
        engine = Engine(first)
        return engine, log_replay, LoggedClient(engine, log_replay)

    from rollgym.trainer.records.rollout_log import EpisodeKey

    _, log_replay, client = process(0)
    with log_replay.playing(EpisodeKey(0, 0, 0)), log_replay.playing(EpisodeKey(1, 0, 0)):
        before = await client.generate_together([request(0), request(1), request(2, "evaluate")])
    log_replay.log.close()
    engine, log_replay, client = process(10)
    with log_replay.playing(EpisodeKey(0, 0, 0)), log_replay.playing(EpisodeKey(3, 0, 0)):
        after = await client.generate_together([request(0), request(3)])
    assert after[0] == before[0]
    assert after[1].token_ids == [12 % 4, 12], "computed in the batch of two"
    with log_replay.playing(EpisodeKey(1, 0, 0)):
        assert await client.generate_together([request(1)]) == before[1:2]
    assert engine.drawn == 12
