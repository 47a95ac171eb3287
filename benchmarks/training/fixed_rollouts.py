"""Rollouts that are there already, drawn at random, in our form and in TRL's."""

from dataclasses import dataclass

import numpy as np
import torch

from rollgym.trainer.algorithms.batch import RowBatch
from rollgym.trainer.algorithms.credit import compute_advantages
from rollgym.trainer.algorithms.presets import resolve_preset
from rollgym.trainer.backends.base import TrainRow
from rollgym.trainer.backends.torch_backend import TorchBackend
from rollgym.trainer.learn.batches import EpisodeBatch, episode_batch, row_builder
from rollgym.trainer.records.group import Group
from rollgym.trainer.records.trajectory import Segment, Trajectory, TrajectoryOutcome, Turn
from rollgym.trainer.tasks.task import Task

GROUPS, MEMBERS = 4, 8
ALGORITHM = resolve_preset("grpo", {"proximal": "behaviour"})
"""Ratios start from recorded log-probabilities, as TRL's from those that it is given: neither computes them again."""


@dataclass(frozen=True)
class Rollouts:
    """A prompt for each group, a completion and a reward for each of its members."""

    prompts: list[list[int]]
    completions: list[list[list[int]]]
    rewards: list[list[float]]

    @property
    def rows(self) -> list[tuple[list[int], list[int]]]:
        pairs = zip(self.prompts, self.completions, strict=True)
        return [(prompt, completion) for prompt, members in pairs for completion in members]


def draw(case: str, vocabulary: int, prompt: int, completion: int) -> Rollouts:
    """Draw random ids; lengths are equal, or log-normal with half the longest as their median."""
    draws = np.random.default_rng(0)

    def length(longest: int) -> int:
        if case == "equal":
            return longest
        return int(np.clip(longest * np.exp(0.6 * draws.standard_normal()) / 4, 4, longest))

    def ids(longest: int) -> list[int]:
        return draws.integers(10, vocabulary, length(longest)).tolist()

    return Rollouts(
        prompts=[ids(prompt) for _ in range(GROUPS)],
        completions=[[ids(completion) for _ in range(MEMBERS)] for _ in range(GROUPS)],
        rewards=[draws.integers(0, 2, MEMBERS).astype(float).tolist() for _ in range(GROUPS)],
    )


def our_batch(rollouts: Rollouts, backend: TorchBackend) -> EpisodeBatch:
    """Return the rollouts as episodes, with the log-probabilities that the policy gives them."""
    groups = []
    for index, prompt in enumerate(rollouts.prompts):
        group = Group(index, Task(index, "Any-v0", seed=index), 0)
        for member, completion in enumerate(rollouts.completions[index]):
            trajectory = Trajectory(group.task, member, outcome=TrajectoryOutcome.FAILED)
            segment = Segment()
            segment.append_context(prompt)
            mask = torch.tensor([False] * len(prompt) + [True] * len(completion))
            known = backend.forward([TrainRow(torch.tensor(prompt + completion), mask)])[0][mask]
            # As if a policy had drawn them that has moved since: the loss is not 0, and some ratios are clipped.
            drawn = (known + 0.2 * torch.randn(len(completion))).tolist()
            segment.append_action(completion, drawn, [0] * len(completion), 0)
            reward = rollouts.rewards[index][member]
            trajectory.turns.append(Turn(0, len(prompt), len(segment.ids), "", "", reward=reward))
            trajectory.segments.append(segment)
            group.trajectories.append(trajectory)
        groups.append(group)
    return episode_batch(groups, row_builder("trajectory"))


def advantages_of(batch: EpisodeBatch) -> torch.Tensor:
    """Return the advantage of each row: GRPO has one for an episode."""
    turn = torch.zeros(batch.mask.shape, dtype=torch.int64)
    rows = RowBatch(torch.tensor([row.trajectory for row in batch.rows]), batch.mask, turn)
    result = compute_advantages(ALGORITHM, batch.episodes, rows).advantages
    return torch.stack([line[mask][0] for line, mask in zip(result, batch.mask, strict=True)])


def trl_inputs(
    rollouts: Rollouts, batch: EpisodeBatch, advantages: torch.Tensor, pad: int
) -> dict[str, torch.Tensor]:
    """Return what TRL makes of generated completions: prompts padded on the left, completions on the right."""
    prompts, completions = zip(*rollouts.rows, strict=True)
    widths = max(map(len, prompts)), max(map(len, completions))
    shapes = [(len(prompts), width) for width in widths]
    tables = [torch.full(shape, pad) for shape in shapes]
    masks = [torch.zeros(shape, dtype=torch.int64) for shape in shapes]
    old = torch.zeros(shapes[1])
    for row, (prompt, completion) in enumerate(rollouts.rows):
        tables[0][row, widths[0] - len(prompt) :] = torch.tensor(prompt)
        masks[0][row, widths[0] - len(prompt) :] = 1
        tables[1][row, : len(completion)] = torch.tensor(completion)
        masks[1][row, : len(completion)] = 1
        old[row, : len(completion)] = torch.tensor(batch.rows[row].behaviour_logprobs[len(prompt) :])
    return {
        "prompt_ids": tables[0],
        "prompt_mask": masks[0],
        "completion_ids": tables[1],
        "completion_mask": masks[1],
        "old_per_token_logps": old,
        "advantages": advantages.clone(),
        "num_items_in_batch": masks[1].sum(),
    }
