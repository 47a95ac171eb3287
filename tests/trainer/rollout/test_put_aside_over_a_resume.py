"""Groups that are put aside for a long round, with a rollout log, over a kill and a resume: nothing is drawn twice."""

import asyncio
from collections import Counter

import pytest

from rollgym.trainer.inference.base import GenerationRequest, GenerationResult, SamplingParams
from rollgym.trainer.records.checkpoint import RunState
from rollgym.trainer.records.group import GroupPlan
from rollgym.trainer.records.ledger import Ledger
from rollgym.trainer.records.rollout_log import EpisodeKey, RolloutLog
from rollgym.trainer.records.trajectory import Segment, Trajectory, TrajectoryOutcome
from rollgym.trainer.rollout.admission import AdmissionWindow
from rollgym.trainer.rollout.log_replay import LoggedClient, LogReplay, session_key
from rollgym.trainer.rollout.scheduler import RolloutScheduler
from rollgym.trainer.rollout.slots import EpisodeSlots
from rollgym.trainer.tasks.task import Task
from tests.support.virtual_time import run_virtually

GROUPS, ATTEMPTS, TURNS, SLOW = 2, 3, 4, 2
"""Of tasks that are played in groups of one, `SLOW` takes 100 s from its second reply on."""


FRESH = RunState(0, 0, 0, ())


class Source:
    def task(self, index):
        return Task(index, "Any-v0", seed=index)


class Engine:
    """Draws another token at every call, and knows of what."""

    def __init__(self, first):
        self.next = first
        self.drawn: dict[int, tuple[str, int]] = {}

    async def generate(self, request):
        task, turn = request.prompt_ids
        await asyncio.sleep(100.0 if task == SLOW and turn else 1.0)
        self.next += 1
        self.drawn[self.next] = (request.session_key, turn)
        return GenerationResult([self.next], [-0.5], [0])


class Process:
    """One process of a run: it plays and trains until it is killed."""

    def __init__(self, folder, *, first_token=0, state=FRESH):
        log = RolloutLog(folder, durable=False, say=pytest.fail)
        log.settle(state.next_task, state.untrained)()
        self.log_replay = LogReplay(log)
        self.engine = Engine(first_token)
        self.client = LoggedClient(self.engine, self.log_replay)
        self.trained: dict[int, Trajectory] = {}
        self.scheduler = RolloutScheduler(
            Source(),
            AdmissionWindow(
                GROUPS,
                0,
                start=state.next_task,
                reissue=state.untrained,
                aside=state.aside,
                long_round=state.long_round,
                extra=1,
            ),
            self.play,
            GroupPlan(1, 0, ATTEMPTS, 1e9),
            Ledger(),
            EpisodeSlots(),
            times_aside=self.log_replay.rounds(ATTEMPTS),
        )

    async def play(self, task, member, attempt):
        trajectory = Trajectory(task, member, attempt, outcome=TrajectoryOutcome.SOLVED)
        segment = Segment()
        name = session_key("train", task.index, member, attempt)
        with self.log_replay.playing(EpisodeKey(task.index, member, attempt)):
            for turn in range(TURNS):
                request = GenerationRequest("r", [task.index, turn], SamplingParams(1), 0, session_key=name)
                result = await self.client.generate(request)
                segment.append_action(result.token_ids, result.logprobs, [0], turn)
        trajectory.segments.append(segment)
        return trajectory

    async def train(self, first_version, until):
        """Take steps, each with a checkpoint, until something is so; return the version then."""
        version = first_version
        while not until(self):
            step = await self.scheduler.next_groups(version)
            for group in step.kept:
                self.trained[group.index] = group.trajectories[0]
                self.scheduler.release(group)
            window = self.scheduler.window
            self.log_replay.log.settle(
                window.next_index, window.untrained
            )()  # a virtual clock has no threads
            version += 1
        return version

    def of_slow(self, attempt):
        """The tokens drawn for the slow task in an attempt, in order."""
        name = session_key("train", SLOW, 0, attempt)
        return [token for token, (key, _) in self.engine.drawn.items() if key == name]


def is_aside(process):
    return process.scheduler.counters["groups_put_aside"] > 0


async def killed(tmp_path, until, seconds):
    """Play until something is so, take one more step, and kill the process so many seconds into it."""
    process = Process(tmp_path)
    version = await process.train(0, until)
    window = process.scheduler.window
    held = RunState(version, version, window.next_index, window.untrained, window.aside, window.long_round)
    stepping = asyncio.create_task(process.scheduler.next_groups(version))
    await asyncio.sleep(seconds)
    assert not stepping.done()
    stepping.cancel()
    await process.scheduler.close()
    process.log_replay.log.close()
    return process, held


async def resumed(tmp_path, first, held):
    process = Process(tmp_path, first_token=first.engine.next, state=held)
    await process.train(held.version, lambda each: SLOW in each.trained)
    await process.scheduler.close()
    return process


def test_a_long_round_goes_on_where_it_was_killed_and_takes_nothing_of_the_round_before(tmp_path):
    async def run():
        def both_aside(process):
            return process.scheduler.counters["groups_put_aside"] >= GROUPS

        first, held = await killed(tmp_path, both_aside, seconds=150.0)
        assert SLOW in held.untrained
        again = first.of_slow(ATTEMPTS)
        assert len(again) == 2, "one reply after a second, the other after a hundred more"
        second = await resumed(tmp_path, first, held)
        trajectory = second.trained[SLOW]
        assert trajectory.attempt == ATTEMPTS
        assert trajectory.segments[0].ids == [*again, *second.of_slow(ATTEMPTS)]
        drawn = Counter([*first.engine.drawn.values(), *second.engine.drawn.values()])
        assert drawn.most_common(1)[0][1] == 1, "no reply of an attempt was drawn twice"

    run_virtually(run())


def test_what_was_put_aside_and_not_yet_begun_anew_is_played_by_a_resumed_run(tmp_path):
    async def run():
        first, held = await killed(tmp_path, is_aside, seconds=0.5)
        assert SLOW in held.untrained
        assert len(first.of_slow(0)) == 1
        second = await resumed(tmp_path, first, held)
        trajectory = second.trained[SLOW]
        assert len(trajectory.segments[0].ids) == TURNS
        drawn = Counter([*first.engine.drawn.values(), *second.engine.drawn.values()])
        assert drawn.most_common(1)[0][1] == 1

    run_virtually(run())
