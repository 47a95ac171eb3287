"""Episodes that were cut off: the critic's value of the observation after the last action stands for the rest."""

import asyncio
import copy
import json

import pytest
import torch
from pydantic import ValidationError

from rollgym.trainer.algorithms.advantages import generalized_advantages
from rollgym.trainer.algorithms.presets import resolve_preset
from rollgym.trainer.backends.heads import PolicyHead, ValueHead
from rollgym.trainer.backends.torch_backend import Schedule, TorchBackend
from rollgym.trainer.config.load import load_settings
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.learn.batches import episode_batch, row_builder
from rollgym.trainer.learn.learner import Learner, Models
from rollgym.trainer.models.value_head import ValueModel
from rollgym.trainer.records.trajectory import Trajectory, TrajectoryOutcome
from rollgym.trainer.run.learning import learn
from tests.support.played_groups import sharp_groups
from tests.support.processes import env_server
from tests.support.tiny_models import sharp_model


def test_by_hand():
    mask = torch.tensor([[False, True, False, True, False]] * 2)
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0, 0.0]] * 2)
    values = torch.tensor([[9.0, 0.5, 9.0, 0.8, 9.0]] * 2)
    # Behind the first row stands 2: 1 + 0.9 * 2 - 0.8 = 2 at its last token; before it 0.9 * 0.8 - 0.5 = 0.22, and
    # 0.45 of the 2 behind. The second row has ended: 0.2 and 0.22 + 0.45 * 0.2.
    advantages, returns = generalized_advantages(
        rewards, values, mask, gamma=0.9, gae_lambda=0.5, last_values=torch.tensor([2.0, 0.0])
    )
    assert advantages[mask].tolist() == pytest.approx([1.12, 2.0, 0.31, 0.2])
    assert returns[mask].tolist() == pytest.approx([1.62, 2.8, 0.81, 1.0])
    assert not advantages[~mask].any()
    ended, _ = generalized_advantages(rewards, values, mask, gamma=0.9, gae_lambda=0.5)
    torch.testing.assert_close(ended[0], advantages[1])


def valued_critic():
    critic = ValueModel(sharp_model())
    torch.manual_seed(3)
    torch.nn.init.normal_(critic.head.weight)
    return critic


async def advantages_of(groups, rows, *, bootstrap):
    """Returns to come less values, with no decay: what is behind the end adds to all of them alike."""
    settings = resolve_preset("ppo", {"advantage": {"whiten": False, "bootstrap_truncated": bootstrap}})
    optimizer, schedule = OptimizerSettings(tokens_per_micro_batch=10_000), Schedule(1e-3, 0, 1, "constant")
    models = Models(
        TorchBackend(PolicyHead(sharp_model(), 1.0), optimizer, schedule),
        TorchBackend(ValueHead(valued_critic()), optimizer, schedule),
        None,
    )
    metrics = await Learner(settings, models, seed=1).update(episode_batch(groups, row_builder(rows)), 0)
    return [
        [value for turn in trajectory.turns for value in turn.advantages]
        for group in groups
        for trajectory in group.trajectories
    ], metrics


@pytest.mark.parametrize("rows", ["trajectory", "step"])
async def test_what_was_cut_off_has_the_value_of_its_next_prompt(rows):
    groups = sharp_groups()
    cut = [0, 3, 5]
    trajectories = [each for group in groups for each in group.trajectories]
    for index in cut:
        trajectories[index].next_prompt = [*trajectories[index].segments[0].ids, 7, 9, 4 + index]
    plain, metrics = await advantages_of(copy.deepcopy(groups), rows, bootstrap=False)
    assert "batch/bootstrapped" not in metrics
    found, metrics = await advantages_of(copy.deepcopy(groups), rows, bootstrap=True)
    assert metrics["batch/bootstrapped"] == 3.0
    critic = valued_critic()
    for index, (mine, without) in enumerate(zip(found, plain, strict=True)):
        behind = 0.0
        if index in cut:
            ids = torch.tensor([trajectories[index].next_prompt])
            with torch.no_grad():
                behind = float(critic(critic.body(input_ids=ids).last_hidden_state[0, -1]))
            assert abs(behind) > 1e-3
        assert mine == pytest.approx([value + behind for value in without], abs=1e-4)


def test_it_is_off_by_default_and_needs_rows_with_one_end():
    assert not resolve_preset("ppo", {}).bootstraps
    with pytest.raises((ConfigError, ValidationError), match="bootstrap_truncated needs gae_mask skip"):
        resolve_preset("ppo", {"advantage": {"bootstrap_truncated": True, "gae_mask": "none"}})


def test_a_next_prompt_is_in_the_record():
    trajectory = sharp_groups()[0].trajectories[0]
    assert "next_prompt" not in trajectory.as_record()
    trajectory.next_prompt = [5, 6, 7]
    assert Trajectory.from_record(json.loads(json.dumps(trajectory.as_record()))).next_prompt == [5, 6, 7]


def run_of(tmp_path, url, *more):
    words = [
        "tasks=[{env_id: FrozenLake-v0, kwargs: {size: 4, split: train, max_episode_steps: 2}}]",
        f"env_url={url}",
        f"output_dir={tmp_path}/run",
        "steps=1",
        "model={hidden_size: 16, layers: 1, heads: 2, max_length: 512}",
        "rollout={groups_per_step: 2, group_size: 2, max_turns: 8, max_new_tokens: 3}",
        "algorithm={preset: ppo, advantage: {bootstrap_truncated: true}}",
        "evaluation.every=0",
        "tracking={tensorboard: false, console: false}",
    ]
    return load_settings(None, [*words, *more])


def test_a_run_keeps_the_prompts_that_episodes_were_cut_off_at(tmp_path):
    with env_server() as url:
        asyncio.run(learn(run_of(tmp_path, url), "train"))
    lines = (tmp_path / "run" / "episodes.jsonl").read_text().splitlines()
    episodes = [Trajectory.from_record(json.loads(line)) for line in lines]
    cut = [each for each in episodes if each.outcome is TrajectoryOutcome.TRUNCATED]
    assert cut
    for each in episodes:
        assert bool(each.next_prompt) is (each.outcome is TrajectoryOutcome.TRUNCATED)
    for each in cut:
        ids = each.segments[-1].ids
        assert each.next_prompt[: len(ids)] == ids
        # A turn of the environment has tokens between two replies: the next prompt has one more of them.
        assert len(each.next_prompt) > len(ids) + 5
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (told,) = [line["batch/bootstrapped"] for line in metrics if "batch/bootstrapped" in line]
    assert told == len(cut)


def test_agents_of_the_users_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="bootstrap_truncated reads the prompt that would have come next"):
        run_of(tmp_path, "http://127.0.0.1:9", "rollout.agent=tests.support.played_groups:played_groups")
