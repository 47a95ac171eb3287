"""The numbers of a training step: what they count, and that the parts of a time are the whole of it."""

import asyncio
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.trainer.core.run_metric import number_of_domain
from rollgym.trainer.learn.step_metrics import (
    StepTimes,
    divided,
    domain_metrics,
    episode_times,
    memory_metrics,
    outcome_metrics,
    response_metrics,
    rollout_metrics,
    step_times,
    token_rates,
)
from rollgym.trainer.records.group import Group
from rollgym.trainer.records.run_metrics import RUN_METRICS
from rollgym.trainer.records.trajectory import Phase, Segment, Timeline, Trajectory, TrajectoryOutcome, Turn
from rollgym.trainer.tasks.task import Task


class Clock:
    """Shows what it is set to."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def timeline(*spans: tuple[float, float, Phase]) -> Timeline:
    """A timeline that is over, with these phases one after the other."""
    made = Timeline(clock=Clock(spans[0][0]))
    made.marks = [(start, phase) for start, _, phase in spans]
    made.ended = spans[-1][1]
    return made


def episode(
    *replies: tuple[int, str],
    domain="",
    outcome=TrajectoryOutcome.FAILED,
    reward=0.0,
    metrics=None,
    spent=None,
) -> Trajectory:
    """An episode with replies of so many tokens, each ended for a reason."""
    trajectory = Trajectory(Task(0, "Any-v0", 0, domain=domain), 0, outcome=outcome, metrics=metrics or {})
    segment = Segment()
    for number, (length, reason) in enumerate(replies):
        segment.append_context([1])
        start = len(segment.ids)
        segment.append_action([2] * length, [-0.5] * length, [0] * length, number)
        trajectory.turns.append(
            Turn(0, start, len(segment.ids), "board", "Up", reward=reward, finish_reason=reason)
        )
    trajectory.segments.append(segment)
    trajectory.timeline = Timeline.from_seconds(spent or {})
    return trajectory


def group(*trajectories: Trajectory, domain="", failures=None) -> Group:
    return Group(0, Task(0, "Any-v0", 0, domain=domain), 0, list(trajectories), failures or {})


def test_phases_follow_one_another_and_sum_to_the_whole():
    clock = Clock(10.0)
    made = Timeline(clock=clock)
    clock.now = 11.0
    with made.during(Phase.GENERATE):
        clock.now = 14.0
    clock.now = 14.5
    with made.during(Phase.ENVIRONMENT):
        clock.now = 20.5
    made.queued(since=8.0, until=9.5)
    made.end()
    clock.now = 99.0
    made.end()
    assert made.seconds() == {"generate": 3.0, "verify": 0.0, "environment": 6.0, "queue": 1.5, "agent": 2.0}
    assert sum(made.seconds().values()) == 20.5 - 8.0


def test_where_waits_overlap_each_moment_counts_once():
    clock = Clock()
    made = Timeline(clock=clock)
    environment, generation = made.during(Phase.ENVIRONMENT), made.during(Phase.GENERATE)
    environment.__enter__()
    clock.now = 2.0
    generation.__enter__()
    with made.during(Phase.GENERATE):
        clock.now = 5.0
    environment.__exit__(None, None, None)
    clock.now = 7.0
    generation.__exit__(None, None, None)
    clock.now = 8.0
    made.end()
    assert made.seconds() == {"generate": 5.0, "verify": 0.0, "environment": 2.0, "queue": 0.0, "agent": 1.0}


async def test_an_episode_that_is_cancelled_waits_for_nothing_any_more():
    made = Timeline()

    async def wait():
        with made.during(Phase.ENVIRONMENT):
            await asyncio.sleep(600)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert made.marks[-1][1] is Phase.AGENT


def test_a_timeline_comes_back_from_its_seconds():
    seconds = {"generate": 1.25, "verify": 0.0, "environment": 0.5, "queue": 0.0, "agent": 0.125}
    assert Timeline.from_seconds(seconds).seconds() == seconds
    assert sum(Timeline.from_seconds({}).seconds().values()) == 0.0


_MOMENT = st.floats(min_value=0.0, max_value=100.0)
_TIMELINES = st.lists(
    st.tuples(
        st.lists(_MOMENT, min_size=2, max_size=6, unique=True).map(sorted),
        st.lists(st.sampled_from(list(Phase)), min_size=5, max_size=5),
    ).map(
        lambda drawn: timeline(
            *(zip(drawn[0], drawn[0][1:], drawn[1], strict=False))  # as many phases as there are spans
        )
    ),
    max_size=5,
)


@settings(max_examples=100)
@given(timelines=_TIMELINES, cuts=st.lists(_MOMENT, min_size=5, max_size=5).map(sorted))
def test_the_parts_of_a_step_sum_to_the_step(timelines, cuts):
    times = StepTimes(*cuts, last_ended=cuts[0] - 1.5)
    metrics = step_times(times, timelines)
    parts = ("generate", "environment", "verify", "wait", "train", "sync", "record")
    assert math.isclose(
        sum(metrics[f"time/{part}_s"] for part in parts), metrics["time/step_s"], abs_tol=1e-9
    )
    assert math.isclose(
        sum(metrics[f"time/{part}_s"] for part in parts[:4]), metrics["time/rollout_s"], abs_tol=1e-9
    )
    assert all(metrics[f"time/{part}_s"] >= -1e-9 for part in parts)
    assert metrics["time/outside_s"] == pytest.approx(1.5)


@settings(max_examples=50)
@given(timelines=_TIMELINES, start=_MOMENT, middle=_MOMENT, end=_MOMENT)
def test_a_wait_in_two_parts_is_divided_as_the_whole(timelines, start, middle, end):
    start, middle, end = sorted((start, middle, end))
    whole = divided(start, end, timelines)
    first, second = divided(start, middle, timelines), divided(middle, end, timelines)
    for phase in Phase:
        assert math.isclose(whole[phase], first[phase] + second[phase], abs_tol=1e-9)


def test_a_wait_belongs_to_those_who_are_not_over_yet():
    """One straggler in its environment makes the wait the environment's, however many others generated before."""
    quick = [timeline((0.0, 2.0, Phase.GENERATE)) for _ in range(3)]
    slow = timeline((0.0, 2.0, Phase.ENVIRONMENT), (2.0, 10.0, Phase.ENVIRONMENT), (10.0, 11.0, Phase.AGENT))
    shares = divided(0.0, 12.0, [*quick, slow])
    assert shares[Phase.GENERATE] == pytest.approx(1.5)
    assert shares[Phase.ENVIRONMENT] == pytest.approx(0.5 + 8.0)
    assert shares[Phase.AGENT] == pytest.approx(1.0)
    assert sum(shares.values()) == pytest.approx(11.0), "nobody plays in the last second"


def test_what_an_episode_did_before_the_wait_is_no_part_of_it():
    assert divided(5.0, 6.0, [timeline((0.0, 5.0, Phase.GENERATE))]) == dict.fromkeys(Phase, 0.0)
    metrics = step_times(StepTimes(5.0, 6.0, 8.0, 8.5, 8.75), [])
    assert metrics["time/wait_s"] == 1.0
    assert metrics["time/train_s"] == 2.0
    assert metrics["time/sync_s"] == 0.5
    assert metrics["time/record_s"] == 0.25
    assert "time/outside_s" not in metrics


def test_replies_are_counted_each_once():
    long = episode(*[(4, "stop")] * 18, (10, "length"))
    metrics = response_metrics([long, episode((4, "stop"))])
    assert metrics["response/tokens_mean"] == pytest.approx((19 * 4 + 10) / 20)
    assert metrics["response/tokens_p95"] == pytest.approx(
        4.3
    )  # numpy's linear rule: between the 19th and the 20th
    assert metrics["response/clipped"] == pytest.approx(1 / 20)


def test_players_that_only_speak_text_have_no_response_lengths():
    spoken = Trajectory(Task(0, "Any-v0", 0), 0)
    spoken.turns.append(Turn(segment=-1, start=0, end=0, observation="board", reply="Up"))
    assert response_metrics([spoken]) == {}


def test_outcomes_are_those_of_all_attempts():
    trained = group(
        episode((1, "stop"), outcome=TrajectoryOutcome.SOLVED),
        episode((1, "stop"), outcome=TrajectoryOutcome.TRUNCATED),
        failures={"timeout": 1},
    )
    dropped = group(episode((1, "stop"), outcome=TrajectoryOutcome.SOLVED), failures={"environment_error": 4})
    rates = outcome_metrics([trained, dropped])
    counted = {"solved": 2 / 8, "truncated": 1 / 8, "timeout": 1 / 8, "environment_error": 4 / 8}
    assert rates == {
        f"outcome/{outcome.value}": counted.get(outcome.value, 0.0) for outcome in TrajectoryOutcome
    }
    assert sum(rates.values()) == 1.0
    assert outcome_metrics([]) == {}


def test_domains_are_told_apart():
    easy = group(
        episode(
            (2, "stop"), domain="easy", outcome=TrajectoryOutcome.SOLVED, reward=1.0, metrics={"pushes": 3.0}
        ),
        domain="easy",
    )
    hard = group(episode((6, "length"), domain="hard", spent={"generate": 2.0, "agent": 1.0}), domain="hard")
    broken = group(domain="broken", failures={"timeout": 3})
    metrics = domain_metrics([easy, hard], [broken])
    assert metrics["domain/easy/success"] == metrics["domain/easy/reward"] == 1.0
    assert metrics["domain/easy/pushes"] == 3.0
    assert metrics["domain/hard/success"] == 0.0
    assert metrics["domain/hard/response/clipped"] == 1.0
    assert metrics["domain/hard/episode/seconds_mean"] == 3.0
    assert metrics["domain/broken/outcome/timeout"] == 1.0
    assert "domain/broken/success" not in metrics, "no episode of it ended with a result"
    # How far the engine is from the trainer is measured by the update, of the domain's tokens.
    headings = {f"domain/hard/{number_of_domain(each.name)}" for each in RUN_METRICS if each.of_domains}
    assert headings - metrics.keys() == {"domain/hard/mismatch/k3"}


def test_an_episode_s_phases_sum_to_its_time():
    played = [
        episode(spent={"generate": 2.0, "environment": 1.0, "agent": 0.5}),
        episode(spent={"generate": 1.0, "queue": 4.0}),
    ]
    metrics = episode_times(played)
    assert metrics["episode/seconds_mean"] == pytest.approx(8.5 / 2)
    assert sum(metrics[f"episode/{phase.value}_s"] for phase in Phase) == pytest.approx(
        metrics["episode/seconds_mean"]
    )
    assert metrics["episode/queue_s"] == 2.0
    assert episode_times([]) == {}


def test_means_are_over_episodes():
    one = group(
        episode((3, "stop"), (1, "stop"), outcome=TrajectoryOutcome.SOLVED, reward=0.5), episode((2, "stop"))
    )
    metrics = rollout_metrics([one], [], version=4)
    assert metrics["rollout/success"] == 0.5
    assert metrics["rollout/reward"] == 0.5
    assert metrics["rollout/turns"] == 1.5
    assert metrics["rollout/action_tokens"] == 3.0
    assert metrics["rollout/lag_max"] == 4.0
    assert metrics["rollout/groups_kept"] == 0.0


def test_tokens_by_time():
    rates = token_rates(600, 90, StepTimes(0.0, 3.0, 4.5, 5.0, 6.0))
    assert rates == {"time/tokens_per_s": 100.0, "time/trained_tokens_per_s": 60.0}


def test_memory_is_what_the_process_has():
    before = memory_metrics()["memory/rss_peak_gib"]
    block = bytearray(200 * 2**20)
    after = memory_metrics()
    assert block
    assert after["memory/rss_peak_gib"] >= max(before, after["memory/rss_gib"] * 0.99)
    assert after["memory/rss_gib"] >= 200 / 1024
