"""Episodes against a real server: what is recorded, what is replaced, what is loud."""

import pytest

from rollgym.clients.protocol.errors import ProblemError
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.seeding import generator
from rollgym.trainer.evaluation.play import play_tasks, score, with_expert
from rollgym.trainer.records.trajectory import TrajectoryOutcome
from rollgym.trainer.rollout.actors import ExpertActor, RandomActor, ScriptedActor
from rollgym.trainer.rollout.agent import EpisodeMetrics
from rollgym.trainer.rollout.environments import EnvironmentPool
from rollgym.trainer.tasks.task import Task
from tests.support.processes import env_server

MAP = ["SFF", "FHF", "FFG"]


@pytest.fixture(scope="module")
def url():
    with env_server("--allow-expert", "--gymnasium", "CartPole-v1") as address:
        yield address


@pytest.fixture
async def pool(url):
    async with EnvironmentPool(url, None, "msgpack") as environments:
        yield environments


def task(**kwargs) -> Task:
    return Task(0, "FrozenLake-v0", seed=5, kwargs={"map": MAP, **kwargs})


async def test_a_solved_episode_is_recorded_turn_by_turn(pool):
    script = ["Right", "Right", "nonsense", "<answer>down</answer>", "Down"]
    (trajectory,) = await play_tasks([task(format_penalty=-0.5)], lambda _: ScriptedActor(script), pool, 20)
    assert trajectory.outcome is TrajectoryOutcome.SOLVED
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0, -0.5, 0.0, 1.0]
    assert [turn.action_is_valid for turn in trajectory.turns] == [True, True, False, True, True]
    assert trajectory.turns[2].format_penalty == -0.5
    assert trajectory.total_reward == 0.5
    # The anchor is that of the state in which the reply was given.
    anchors = [turn.anchor for turn in trajectory.turns]
    assert anchors[2] == anchors[3] != anchors[0]
    assert trajectory.metrics == {"steps": 5.0, "invalid_replies": 1.0}


async def test_holes_fail_and_limits_truncate(pool):
    tasks = [task(), task(max_episode_steps=2), task()]
    scripts = {id(tasks[0]): ["Right", "Down"], id(tasks[1]): ["Left"], id(tasks[2]): ["Left"]}
    played = await play_tasks(tasks, lambda each: ScriptedActor(scripts[id(each)]), pool, max_turns=4)
    assert [trajectory.outcome for trajectory in played] == [
        TrajectoryOutcome.FAILED,
        TrajectoryOutcome.TRUNCATED,
        TrajectoryOutcome.TRUNCATED,
    ]
    assert played[2].detail == "max_turns 4 reached"
    assert score(played).success.value == 0.0


async def test_the_expert_solves_over_the_wire(pool):
    tasks = [Task(index, "FrozenLake-v0", seed=index, kwargs={"split": "test"}) for index in range(20)]
    played = await play_tasks(
        with_expert(tasks), lambda _: ExpertActor("<answer>{action}</answer>"), pool, 40
    )
    assert all(trajectory.success for trajectory in played)


async def test_random_play_is_reproducible(pool):
    def actor(each: Task) -> RandomActor:
        return RandomActor(generator(1, "random", each.index), lambda: "")

    tasks = [Task(index, "FrozenLake-v0", seed=index) for index in range(5)]
    first, second = [await play_tasks(tasks, actor, pool, 30) for _ in range(2)]
    replies = [
        [[turn.reply for turn in trajectory.turns] for trajectory in played] for played in (first, second)
    ]
    assert replies[0] == replies[1]


async def test_what_replaying_cannot_mend_is_raised(pool):
    with pytest.raises(ProblemError) as caught:
        await play_tasks([Task(0, "FrozenLake-v9", seed=0)], lambda _: ScriptedActor(["Up"]), pool, 3)
    assert caught.value.code == "unknown_env"


async def test_environments_that_take_numbers_are_refused_with_the_remedy(pool):
    with pytest.raises(ValueError, match="roll-serve --gymnasium-text ID"):
        await play_tasks([Task(0, "CartPole-v1", seed=0)], lambda _: ScriptedActor(["0"]), pool, 3)


async def test_sessions_are_used_again(pool, url):
    tasks = [Task(index, "FrozenLake-v0", seed=index) for index in range(30)]
    client = await pool.client(url)
    before = (await client.info()).capacity.sessions
    await play_tasks(tasks, lambda _: ScriptedActor(["Left"]), pool, 2, concurrency=4)
    assert (await client.info()).capacity.sessions <= before + 4
    await pool.shrink()
    assert (await client.info()).capacity.sessions == before


async def test_a_verifier_that_could_not_tell_gives_no_result(pool):
    fields = {"question": "Expand (x+1)^2.", "answer": "x^2+2x+1"}
    tasks = [Task(0, "Math-v0", seed=0, kwargs={"backend": "none"}, options=fields)]
    (unknown,) = await play_tasks(tasks, lambda _: ScriptedActor(["\\boxed{(1+x)^2}"]), pool, 1)
    assert unknown.outcome is TrajectoryOutcome.ENVIRONMENT_ERROR
    assert not unknown.outcome.is_result
    assert unknown.detail.startswith("the verifier could not tell: needs_math_verify")
    (known,) = await play_tasks(tasks, lambda _: ScriptedActor(["\\boxed{x^2+2x+1}"]), pool, 1)
    assert known.outcome is TrajectoryOutcome.SOLVED


HOW = {"fuel": "sum", "speed": "mean", "best": "max", "worst": "min", "place": "last"}


def test_each_aggregates_as_the_environment_says():
    metrics = EpisodeMetrics(HOW)
    for value in (3, 1.0, 2):
        metrics.add({"metrics": dict.fromkeys([*HOW, "unnamed"], value)})
    expected = {"fuel": 6.0, "speed": 2.0, "best": 3.0, "worst": 1.0, "place": 2.0, "unnamed": 2.0}
    assert metrics.totals() == expected


def test_only_numbers_count_and_only_where_they_came():
    metrics = EpisodeMetrics({})
    for info in (
        {},
        {"metrics": None},
        {"metrics": {"a": "x", "b": None, "hit": True}},
        {"metrics": {"late": 1}},
    ):
        metrics.add(info)
    assert metrics.totals() == {"hit": 1.0, "late": 1.0}


def test_an_unknown_way_is_told():
    with pytest.raises(
        ValueError, match="'speed' aggregates by 'median'; known are last, sum, mean, max, min"
    ):
        EpisodeMetrics({"speed": "median"})


@pytest.mark.parametrize("how", [["fuel"], "last", 5, {"fuel": ["last"]}, {"fuel": None}])
def test_ways_that_are_none_are_told(how):
    with pytest.raises(ConfigError, match=r"metadata\['metrics'\] must name how|'fuel' aggregates by"):
        EpisodeMetrics(how)
