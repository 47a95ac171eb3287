"""Every preset learns a small game, with a table for a policy: signs and parts are right end to end."""

import pytest
import torch

from trainer.algorithms.aggregation import Denominators
from trainer.algorithms.batch import LossInputs, RowBatch, TrajectoryBatch
from trainer.algorithms.objective import compute_advantages, critic_loss, policy_loss, select_groups
from trainer.algorithms.presets import PRESETS

GROUPS, MEMBERS, TURNS, ACTIONS = 4, 8, 2, 4


def play(logits, generator):
    """Play a lock: in turn t of lock g the right digit is (g + t) % ACTIONS; the first wrong one ends the episode."""
    actions, rewards = [], []
    probabilities = logits.softmax(-1)
    for group in range(GROUPS):
        for _ in range(MEMBERS):
            taken, earned = [], []
            for turn in range(TURNS):
                action = int(torch.multinomial(probabilities[group, turn], 1, generator=generator))
                right = action == (group + turn) % ACTIONS
                taken.append(action)
                earned.append(1.0 if right and turn == TURNS - 1 else 0.0)
                if not right:
                    break
            actions.append(taken)
            rewards.append(earned)
    return actions, rewards


def as_batch(ids, rewards):
    return TrajectoryBatch(
        groups=ids,
        rewards=rewards,
        format_penalties=[[0.0] * len(turns) for turns in rewards],
        valid=[[True] * len(turns) for turns in rewards],
        anchors=[[f"turn {turn}" for turn in range(len(turns))] for turns in rewards],
        tokens=[[1] * len(turns) for turns in rewards],
    )


def success_rate(logits):
    group, turn = torch.meshgrid(torch.arange(GROUPS), torch.arange(TURNS), indexing="ij")
    right = logits.softmax(-1)[group, turn, (group + turn) % ACTIONS]
    return right.prod(dim=1).mean().item()


@pytest.mark.parametrize("name", PRESETS)
def test_preset_learns(name):
    algorithm = PRESETS[name]
    generator = torch.Generator().manual_seed(0)
    logits = torch.zeros(GROUPS, TURNS, ACTIONS, requires_grad=True)
    values = torch.zeros(GROUPS, TURNS, requires_grad=True)
    optimizer = torch.optim.Adam([logits, values], lr=0.1)
    reference = logits.detach().clone().log_softmax(-1)
    before = success_rate(logits)
    for _ in range(50):
        actions, rewards = play(logits.detach(), generator)
        ids = [index // MEMBERS for index in range(len(actions))]
        kept = set(select_groups(algorithm, as_batch(ids, rewards)).kept)
        chosen = [index for index, group in enumerate(ids) if group in kept]
        if not chosen:
            continue
        group = torch.tensor([ids[index] for index in chosen])[:, None]
        turn = torch.arange(TURNS)[None].expand(len(chosen), TURNS)
        taken = torch.tensor([actions[index] + [0] * (TURNS - len(actions[index])) for index in chosen])
        mask = turn < torch.tensor([len(actions[index]) for index in chosen])[:, None]
        old = logits.detach().log_softmax(-1)[group, turn, taken]
        old_values = values.detach()[group, turn]
        result = compute_advantages(
            algorithm,
            as_batch([ids[index] for index in chosen], [rewards[index] for index in chosen]),
            RowBatch(
                torch.arange(len(chosen)),
                mask,
                turn,
                values=old_values,
                old_logprobs=old,
                reference_logprobs=reference[group, turn, taken],
            ),
        )
        for part in torch.randperm(len(chosen), generator=generator).chunk(algorithm.minibatches):
            here = (group[part], turn[part])
            table = logits.log_softmax(-1)[here]
            inputs = LossInputs(
                logprobs=table.gather(-1, taken[part][..., None])[..., 0],
                behaviour_logprobs=old[part],
                advantages=result.advantages[part],
                mask=mask[part],
                turn_index=turn[part],
                old_logprobs=old[part],
                reference_logprobs=reference[(*here, taken[part])],
                entropy=-(table.exp() * table).sum(-1),
                scores=result.scores[part],
            )
            denominators = Denominators.from_mask(mask[part])
            loss, _ = policy_loss(algorithm, inputs, denominators)
            if algorithm.critic is not None:
                loss = (
                    loss
                    + critic_loss(
                        algorithm,
                        values[here],
                        old_values[part],
                        result.returns[part],
                        mask[part],
                        denominators,
                    )[0]
                )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert before < 0.07
    assert success_rate(logits) > 0.5, success_rate(logits)
