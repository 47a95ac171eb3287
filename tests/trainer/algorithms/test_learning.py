"""Every preset learns a small game, with a table for a policy: signs and parts are right end to end."""

from dataclasses import replace

import pytest
import torch

from rollgym.trainer.algorithms.aggregation import Denominators
from rollgym.trainer.algorithms.batch import LossInputs, RowBatch, StepTokens, TrajectoryBatch
from rollgym.trainer.algorithms.credit import after_update, compute_advantages, select_groups
from rollgym.trainer.algorithms.objective import critic_loss, policy_loss
from rollgym.trainer.algorithms.prepare import prepare_step
from rollgym.trainer.algorithms.presets import PRESETS
from rollgym.trainer.algorithms.state import AlgorithmState
from tests.support.algorithm_cases import greedy_batch

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


def greedy_returns(logits):
    best = logits.argmax(-1)
    right = (torch.arange(GROUPS)[:, None] + torch.arange(TURNS)) % ACTIONS
    return (best == right).all(dim=1).float().tolist()


def as_batch(ids, rewards, greedy=(0.0,) * GROUPS):
    return TrajectoryBatch(
        groups=ids,
        rewards=rewards,
        format_penalties=[[0.0] * len(turns) for turns in rewards],
        valid=[[True] * len(turns) for turns in rewards],
        anchors=[[f"turn {turn}" for turn in range(len(turns))] for turns in rewards],
        tokens=[[1] * len(turns) for turns in rewards],
        parts=[[{"earned": value} for value in turns] for turns in rewards],
        tasks=[str(group) for group in ids],
        domains=[str(group) for group in ids],
        greedy=greedy_batch(range(GROUPS), greedy),
    )


def success_rate(logits):
    group, turn = torch.meshgrid(torch.arange(GROUPS), torch.arange(TURNS), indexing="ij")
    right = logits.softmax(-1)[group, turn, (group + turn) % ACTIONS]
    return right.prod(dim=1).mean().item()


def prepared(algorithm, part, mask, turn, result, old, table, taken):
    """Return the weights of an optimizer step's tokens, where the algorithm makes any."""
    if not algorithm.prepares:
        return {}
    distribution = table.detach()
    made = prepare_step(
        algorithm,
        StepTokens(
            part,
            mask[part],
            turn[part],
            result.advantages[part],
            old[part],
            old[part],
            distribution.gather(-1, taken[part][..., None])[..., 0],
            entropy=-(distribution.exp() * distribution).sum(-1),
        ),
    )
    return {"weights": made.weights, "charges": made.charges}


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_preset_learns(name):
    algorithm = PRESETS[name]
    generator = torch.Generator().manual_seed(0)
    logits = torch.zeros(GROUPS, TURNS, ACTIONS, requires_grad=True)
    values = torch.zeros(GROUPS, TURNS, requires_grad=True)
    optimizer = torch.optim.Adam([logits, values], lr=0.1)
    reference = logits.detach().clone().log_softmax(-1)
    before, state = success_rate(logits), AlgorithmState()
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
        squares = logits.detach().softmax(-1).square().sum(-1)[group, turn]
        old_values = values.detach()[group, turn]
        result = compute_advantages(
            algorithm,
            batch := as_batch(
                [ids[index] for index in chosen],
                [rewards[index] for index in chosen],
                greedy_returns(logits.detach()),
            ),
            RowBatch(
                torch.arange(len(chosen)),
                mask,
                turn,
                values=old_values,
                old_logprobs=old,
                reference_logprobs=reference[group, turn, taken],
                squared_probabilities=squares,
            ),
            state,
        )
        state = after_update(algorithm, state, batch, moved=0.05)
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
                **prepared(algorithm, part, mask, turn, result, old, table, taken),
            )
            good = result.scores[part] > algorithm.positive_nll.score_threshold
            denominators = replace(
                Denominators.from_mask(mask[part]), positive_tokens=int(mask[part][good].sum())
            )
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
