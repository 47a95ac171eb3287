"""Rewards that several verifiers have a part in: real servers, and a double of the judge's model."""

import asyncio
import json

import pytest

from rollgym.clients.client.client import EnvClient
from rollgym.clients.protocol.arrays import DecodeError
from rollgym.trainer.cli import main
from rollgym.trainer.config.data import DatasetSettings, EvaluationSetSettings
from rollgym.trainer.config.load import load_settings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.evaluation.evaluation_sets import build_evaluation_set
from rollgym.trainer.records.trajectory import TrajectoryOutcome
from rollgym.trainer.rollout.actors import ScriptedActor
from rollgym.trainer.rollout.agent import play_episode
from rollgym.trainer.rollout.environments import EnvironmentPool
from rollgym.trainer.rollout.episodes import play_in_session
from rollgym.trainer.run.judges import brought_to_judges
from rollgym.trainer.tasks.dataset import load_streams
from tests.support.judge_double import JudgeDouble, completion, honest
from tests.support.processes import env_server, read_lines

ROWS = [{"question": "What is 2 + 3?", "answer": "5"}]
REWARDS = [
    {
        "verifier": "Judge-v0",
        "name": "judge",
        "weight": 0.5,
        "fields": {"reference": "answer"},
        "task": {"template": "match"},
    },
    {"verifier": "QA-v0", "weight": -0.25, "task": {"metric": "contains", "answer": "maybe"}},
]
GATE = {"verifier": "QA-v0", "name": "has a five", "gate": 1, "task": {"metric": "contains"}}


@pytest.fixture(scope="module")
def judge():
    with JudgeDouble() as running:
        yield running


@pytest.fixture(scope="module")
def url(judge):
    kwargs = {"url": judge.url, "model": "double", "retries": 0, "timeout_s": 5}
    with env_server("--operator-kwargs", f"Judge-v0={json.dumps(kwargs)}") as url:
        yield url


@pytest.fixture(autouse=True)
def honest_judge(judge):
    judge.answer = honest
    judge.requests.clear()


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


async def played(url, rows, reply, rewards=REWARDS, **more):
    settings = DatasetSettings(path=str(rows), verifier="Arithmetic-v0", rewards=rewards, **more)
    task = load_streams(settings)[0].item(0, 0, 0)
    async with EnvironmentPool(url, None, "msgpack") as pool:

        async def play(session):
            return await play_episode(session, task, 0, ScriptedActor([reply]), 1)

        return await play_in_session(pool, task, play)


async def test_the_reward_is_the_weighted_sum_and_each_part_has_its_name(url, rows, judge):
    # The verifier reads the 5 in its tags; the judge compares the whole response, which is not the reference.
    trajectory = await played(url, rows, "<answer>5</answer>")
    turn = trajectory.turns[-1]
    assert turn.reward_parts == {"Arithmetic-v0": 1.0, "judge": 0.0, "QA-v0": 0.0}
    assert turn.reward == 1.0
    assert trajectory.outcome is TrajectoryOutcome.SOLVED
    trajectory = await played(url, rows, "5", reward_weight=2.0)
    parts = trajectory.turns[-1].reward_parts
    assert parts["judge"] == 0.5
    assert trajectory.turns[-1].reward == sum(parts.values())
    assert trajectory.metrics["reward/judge"] == 0.5
    asked = [body["messages"][1]["content"] for body, _ in judge.requests]
    assert any("What is 2 + 3?" in text for text in asked)


async def test_an_episode_that_is_played_again_from_its_record_is_paid_by_its_mixture(
    url, rows, tmp_path, capsys
):
    trajectory = await played(url, rows, "maybe")
    recording = tmp_path / "episodes.jsonl"
    recording.write_text(json.dumps(trajectory.as_record()) + "\n")
    words = [
        "rollout",
        "--policy",
        "recorded",
        "--recorded",
        str(recording),
        "--output",
        str(tmp_path / "again"),
    ]
    task = "tasks=[{env_id: FrozenLake-v0}]"
    assert await asyncio.to_thread(main, [*words, "--env-url", url, task, f"output_dir={tmp_path}/run"]) == 0
    (again,) = read_lines(tmp_path / "again")
    assert again["turns"][-1]["reward_parts"] == {"Arithmetic-v0": 0.0, "judge": 0.0, "QA-v0": -0.25}
    assert again["reward"] == -0.25


async def test_a_part_may_be_a_penalty(url, rows):
    trajectory = await played(url, rows, "maybe")
    assert trajectory.turns[-1].reward_parts == {"Arithmetic-v0": 0.0, "judge": 0.0, "QA-v0": -0.25}
    assert trajectory.turns[-1].reward == -0.25


async def test_behind_a_gate_that_is_shut_nobody_is_asked_and_nothing_is_paid(url, rows, judge):
    trajectory = await played(url, rows, "<answer>7</answer>", [REWARDS[0], GATE])
    assert trajectory.turns[-1].reward == 0.0
    assert set(trajectory.turns[-1].reward_parts.values()) == {0.0}
    assert not judge.requests
    trajectory = await played(url, rows, "5", [REWARDS[0], GATE])
    assert trajectory.turns[-1].reward_parts["judge"] == 0.5
    assert trajectory.turns[-1].reward_parts["has a five"] == 0.0, "a gate pays nothing by itself"


@pytest.mark.parametrize(
    "answer", [lambda _: (500, {}, b"{}"), lambda _: completion("I would rather not say.")]
)
async def test_a_judge_that_cannot_tell_is_a_failure_and_never_a_score(url, rows, judge, answer):
    judge.answer = answer
    trajectory = await played(url, rows, "six")
    assert trajectory.outcome in (TrajectoryOutcome.ENVIRONMENT_ERROR, TrajectoryOutcome.TIMEOUT)
    assert trajectory.detail.startswith("the verifier judge could not tell: ")
    assert not trajectory.turns[-1].reward_parts


async def test_a_sum_that_none_can_compute_with_is_an_outcome(url, rows):
    trajectory = await played(url, rows, "<answer>5</answer>", reward_weight=1e300)
    assert trajectory.outcome is TrajectoryOutcome.INVALID_NUMBER
    assert trajectory.detail.startswith("the weighted sum of an episode's scores is 1e+300")


async def test_a_verdict_that_cannot_be_read_is_an_outcome(url, rows, monkeypatch):
    async def garbage(client, verifier, items):
        raise DecodeError("the server gave 0 verdicts on 1 items")

    monkeypatch.setattr(EnvClient, "verify", garbage)
    trajectory = await played(url, rows, "5")
    assert trajectory.outcome is TrajectoryOutcome.ENVIRONMENT_ERROR
    assert trajectory.detail == "the server gave 0 verdicts on 1 items"


def test_a_run_learns_from_a_mixture_part_by_part(url, rows, tmp_path):
    words = [
        f"datasets=[{{path: {rows}, verifier: Arithmetic-v0, rewards: {json.dumps(REWARDS)}}}]",
        "steps=1",
        "algorithm={preset: gdpo, advantage: {weights: {Arithmetic-v0: 1, judge: 1}}}",
        "rollout={groups_per_step: 2, group_size: 2, max_turns: 1, max_new_tokens: 3}",
        "model={hidden_size: 16, layers: 1, heads: 2, max_length: 256}",
        "tracking={tensorboard: false}",
        "evaluation.every=0",
        "evaluation.sets={held_out: {episodes: 1, dataset: "
        f"{{path: {rows}, verifier: Arithmetic-v0, rewards: {json.dumps(REWARDS)}}}" + "}}",
    ]
    assert main([*words, "--env-url", url, f"output_dir={tmp_path / 'run'}"]) == 0
    episodes = read_lines(tmp_path / "run" / "episodes.jsonl")
    assert len(episodes) == 4
    assert all(
        set(turn["reward_parts"]) == {"Arithmetic-v0", "judge", "QA-v0"}
        for each in episodes
        for turn in each["turns"]
    )


async def test_an_evaluation_set_of_a_data_set_scores_by_its_mixture(url, rows):
    dataset = {"path": str(rows), "verifier": "Arithmetic-v0", "rewards": REWARDS}
    settings = EvaluationSetSettings.model_validate({"episodes": 1, "dataset": dataset})
    async with EnvironmentPool(url, None, "msgpack") as pool:
        evaluation_set = await build_evaluation_set("held_out", settings, pool)
    assert [part.name for part in evaluation_set.tasks[0].mixture_parts] == ["judge", "QA-v0"]


def test_a_resumed_run_is_told_of_another_mixture(rows):
    def digest(rewards, **more):
        settings = DatasetSettings(path=str(rows), verifier="Arithmetic-v0", rewards=rewards, **more)
        return load_streams(settings)[0].digest

    other = [{**REWARDS[0], "weight": 0.75}, REWARDS[1]]
    moved = [{**REWARDS[0], "url": "http://127.0.0.1:1"}, REWARDS[1]]
    assert len({digest([]), digest(REWARDS), digest(other), digest(REWARDS, reward_weight=2.0)}) == 4
    assert digest(moved) == digest(REWARDS), "the same judge elsewhere judges the same"


def test_a_verifier_that_nobody_serves_is_named_before_the_first_step(url, rows, tmp_path, capfd):
    words = [
        f"datasets=[{{path: {rows}, verifier: Arithmetic-v0, rewards: [{{verifier: Jugde-v0}}]}}]",
        "rollout={max_turns: 1}",
        "model={hidden_size: 16, layers: 1, heads: 2, max_length: 256}",
    ]
    assert main([*words, "--env-url", url, f"output_dir={tmp_path / 'run'}"]) == 2
    assert "the server has no environment 'Jugde-v0'; did you mean Judge-v0" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("{verifier: Judge-v0, task: {template: match}}", "Judge-v0 of rewards does not take a row"),
        ("{verifier: FrozenLake-v0}", "FrozenLake-v0 of rewards does not take a row"),
    ],
)
def test_a_verifier_that_lacks_a_field_is_named_before_the_first_step(url, rows, tmp_path, capfd, part, said):
    words = [
        f"datasets=[{{path: {rows}, verifier: Arithmetic-v0, rewards: [{part}]}}]",
        "rollout={max_turns: 1}",
        "model={hidden_size: 16, layers: 1, heads: 2, max_length: 256}",
    ]
    assert main([*words, "--env-url", url, f"output_dir={tmp_path / 'run'}"]) == 2
    assert said in capfd.readouterr().err


def test_a_judge_on_devices_of_its_own_is_asked_as_a_part(rows):
    settings = load_settings(
        None,
        [
            f"datasets=[{{path: {rows}, verifier: Arithmetic-v0, rewards: {json.dumps(REWARDS)}}}]",
            "cluster.roles.judges={Judge-v0: {devices: [1], model: m, command: [serve]}}",
        ],
    )
    brought = brought_to_judges(settings, {"Judge-v0": "http://127.0.0.1:1"})
    parts = brought.datasets[0].rewards
    assert [part.url for part in parts] == ["http://127.0.0.1:1", None]
    assert brought.datasets[0].url is None
    assert load_streams(brought.datasets[0])[0].item(0, 0, 0).mixture_parts[0].url == "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("rewards: [{verifier: A}, {verifier: A}]", "rewards names 'A' twice"),
        ("reward_weight: 2", "reward_weight is read with rewards only"),
        ("rewards: [{verifier: A, weight: .nan}]", "finite"),
        ("rewards: [{verifier: A, gate: 0}]", "greater than 0"),
    ],
)
def test_a_mixture_that_makes_no_sense_is_refused(rows, words, said):
    with pytest.raises(ConfigError, match=said):
        load_settings(None, [f"datasets=[{{path: {rows}, verifier: B, {words}}}]"])
