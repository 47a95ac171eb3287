"""Whole runs that learn nothing: they say so at once, end, and are no success; what they recorded stays."""

import pytest
import torch

from rollgym.trainer.cli import main
from tests.support.processes import env_server, read_lines

RUN = (
    "tasks=[{env_id: Count, kwargs: {length: 2}}]",
    "prompt={context: single_turn, instruction: none}",
    "model={hidden_size: 16, layers: 1, heads: 2, max_length: 96}",
    "tracking={tensorboard: false}",
    "evaluation.every=0",
)


@pytest.fixture(scope="module")
def url():
    with env_server("--env", "Count=tests.support.served_envs:Count") as url:
        yield url


def run(url, folder, capsys, *settings, reward="varied", **rollout):
    played = {"groups_per_step": 2, "group_size": 2, "max_turns": 2, "max_new_tokens": 2, **rollout}
    words = ", ".join(f"{name}: {'null' if value is None else value}" for name, value in played.items())
    code = main(
        [
            *RUN,
            f"rollout={{{words}, reward: '{__name__}:{reward}'}}",
            "--env-url",
            url,
            f"output_dir={folder}",
            *settings,
        ]
    )
    said = capsys.readouterr()
    return code, " ".join((said.out + said.err).split())


def nothing(trajectory):
    return [0.0] * len(trajectory.turns)


def varied(trajectory):
    return [float(trajectory.member)] * len(trajectory.turns)


def keeps_none(groups, returns):
    return []


def chooses_none(batch):
    return [False] * len(batch)


def not_finite(inputs):
    return inputs.logprobs * torch.nan


@pytest.mark.parametrize(
    ("algorithm", "reward", "reason"),
    [
        (f"filter: {{kind: custom, function: '{__name__}:keeps_none'}}", "varied", "the filter kept none"),
        ("filter: {kind: zero_variance, refill: false}", "nothing", "the filter kept none"),
        (f"episodes: {{kind: custom, function: '{__name__}:chooses_none'}}", "varied", "no episode with"),
        (
            f"surrogate: {{kind: custom, function: '{__name__}:not_finite'}}",
            "varied",
            "every optimizer step was left out",
        ),
    ],
)
def test_a_run_without_any_optimizer_step_is_no_success(url, tmp_path, capsys, algorithm, reward, reason):
    settings = (f"algorithm={{preset: grpo, {algorithm}}}", "steps=3")
    code, said = run(url, tmp_path, capsys, *settings, reward=reward)
    assert code == 2
    assert f"health: step 1 had nothing to learn from: {reason}" in said
    assert (
        f"no optimizer step was taken in all 3 steps of this run, so the policy is what it was: {reason}"
        in said
    )
    assert ("an optimizer step of the policy was left out: the loss is not finite" in said) == (
        "surrogate" in algorithm
    )
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl") if "rollout/reward" in line] == [
        1,
        2,
        3,
    ]


def test_a_run_whose_episodes_are_all_paid_alike_ends_and_can_go_on(url, tmp_path, capsys):
    settings = ("algorithm=grpo", "steps=6")
    code, said = run(url, tmp_path, capsys, *settings, reward="nothing", max_steps_without_learning=3)
    assert code == 2
    assert "health: step 1 had nothing to learn from: every advantage is 0" in said
    assert "3 steps in a row had nothing to learn from" in said
    rows = [line for line in read_lines(tmp_path / "metrics.jsonl") if "rollout/reward" in line]
    assert [row["health/steps_without_learning"] for row in rows] == [1.0, 2.0, 3.0]
    assert {row["health/equal_groups"] for row in rows} == {1.0}
    # Its steps are saved, and whoever knows better has it go on.
    resumed = ("checkpoint.resume=auto", *settings)
    code, said = run(url, tmp_path, capsys, *resumed, reward="nothing", max_steps_without_learning=None)
    assert code == 0, said
    assert "health: steps 1 to 4 had nothing to learn from" in said


def without_gradient(inputs):
    return inputs.logprobs * 0.0


def of_another_weight(inputs):
    return torch.zeros_like(inputs.logprobs).requires_grad_()


def leaves_all_out(tokens):
    return torch.zeros(tokens.mask.shape)


@pytest.mark.parametrize(
    "algorithm",
    [
        f"surrogate: {{kind: custom, function: '{__name__}:without_gradient'}}",
        f"surrogate: {{kind: custom, function: '{__name__}:of_another_weight'}}",
        f"selection: {{kind: custom, function: '{__name__}:leaves_all_out'}}",
    ],
)
def test_a_run_whose_loss_has_no_gradient_ends(url, tmp_path, capsys, algorithm):
    settings = (f"algorithm={{preset: grpo, kl: {{coefficient: 0.0}}, {algorithm}}}", "steps=4")
    code, said = run(url, tmp_path, capsys, *settings, max_steps_without_learning=3)
    assert code == 2
    assert "health: step 1 had nothing to learn from: the gradient of the loss is 0" in said
    assert "3 steps in a row had nothing to learn from" in said


def test_a_learning_rate_that_is_too_high_is_noticed(url, tmp_path, capsys):
    settings = (
        "algorithm={preset: grpo, kl: {coefficient: 0.0}}",
        "steps=6",
        "optimizer={learning_rate: 0.5}",
    )
    code, said = run(url, tmp_path, capsys, *settings, reward="a_little", groups_per_step=4, group_size=4)
    assert "health: entropy fell from" in said, (code, said)
    assert "optimizer.learning_rate may be too high" in said


def a_little(trajectory):
    """Rewards differ, and say nothing of what is right."""
    return [0.1 * trajectory.member] * len(trajectory.turns)
