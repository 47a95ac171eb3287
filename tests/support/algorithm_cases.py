"""Random batches for the algorithms, laid out as a row per trajectory, per turn, or per part of any length."""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from rollgym.trainer.algorithms.batch import LossInputs, RowBatch, StepTokens, TrajectoryBatch
from rollgym.trainer.algorithms.objective import bounded_difference
from rollgym.trainer.algorithms.prepare import prepare_step
from rollgym.trainer.algorithms.ratio import elsewhere
from rollgym.trainer.algorithms.settings import AlgorithmSettings

FIELDS = ("logprobs", "old", "behaviour", "reference", "entropy", "values", "squares")


@dataclass(frozen=True)
class Case:
    """Episodes with numbers for each sampled token: `tokens[trajectory][turn][field]` is a list."""

    batch: TrajectoryBatch
    tokens: list[list[dict[str, list[float]]]]

    def rows(
        self, layout: str | int = "trajectory", *, padding: int = 0, garbage: float = math.nan
    ) -> "Rows":
        """Lay the tokens out, with observation tokens between turns; all outside the mask is `garbage`.

        Args:
            layout: "trajectory", "step", or the seed of random cuts between turns.
            padding: Columns behind the longest row.
            garbage: What lies outside the mask.
        """
        laid = [
            (trajectory, part)
            for trajectory, turns in enumerate(self.tokens)
            for part in _cut(list(enumerate(turns)), layout, trajectory)
        ]
        gap = 2
        width = padding + max(sum(gap + len(turn["values"]) for _, turn in turns) for _, turns in laid)
        shape = (len(laid), width)
        mask = torch.zeros(shape, dtype=torch.bool)
        turn_index = torch.full(shape, -1)
        numbers = {field: torch.full(shape, garbage) for field in FIELDS}
        for row, (_, turns) in enumerate(laid):
            place = 0
            for turn, fields in turns:
                place += gap
                end = place + len(fields["values"])
                mask[row, place:end] = True
                turn_index[row, place:end] = turn
                for field in FIELDS:
                    numbers[field][row, place:end] = torch.tensor(fields[field])
                place = end
        return Rows(torch.tensor([trajectory for trajectory, _ in laid]), mask, turn_index, numbers)


@dataclass(frozen=True)
class Rows:
    """One layout of a case as tensors."""

    trajectory: torch.Tensor
    mask: torch.Tensor
    turn_index: torch.Tensor
    numbers: dict[str, torch.Tensor]

    def row_batch(self) -> RowBatch:
        return RowBatch(
            self.trajectory,
            self.mask,
            self.turn_index,
            values=self.numbers["values"],
            old_logprobs=self.numbers["old"],
            reference_logprobs=self.numbers["reference"],
            squared_probabilities=self.numbers["squares"],
        )

    def lengths(self) -> torch.Tensor:
        """Sampled tokens of each row's trajectory."""
        tokens = self.mask.sum(dim=1)
        return tokens + elsewhere(tokens, self.trajectory)

    def inputs(
        self,
        advantages: torch.Tensor,
        scores: torch.Tensor | None = None,
        *,
        algorithm: AlgorithmSettings | None = None,
    ) -> LossInputs:
        """Return what a loss reads; with an algorithm, rows of a trajectory know of each other."""
        whole = {}
        if algorithm is not None:
            start = self.numbers["behaviour" if algorithm.proximal == "behaviour" else "old"]
            moved = bounded_difference(algorithm, self.numbers["logprobs"], start, advantages)
            difference = torch.where(self.mask, moved, 0.0).sum(dim=1)
            whole = {
                "elsewhere_difference": elsewhere(difference, self.trajectory),
                "elsewhere_tokens": elsewhere(self.mask.sum(dim=1), self.trajectory),
                "lengths": self.lengths(),
            }
            if algorithm.prepares:
                prepared = prepare_step(algorithm, self.step_tokens(advantages), seed=3)
                whole |= {"weights": prepared.weights, "charges": prepared.charges}
        return LossInputs(
            logprobs=self.numbers["logprobs"],
            behaviour_logprobs=self.numbers["behaviour"],
            advantages=advantages,
            mask=self.mask,
            turn_index=self.turn_index,
            old_logprobs=self.numbers["old"],
            reference_logprobs=self.numbers["reference"],
            entropy=self.numbers["entropy"],
            scores=scores,
            **whole,
        )

    def step_tokens(self, advantages: torch.Tensor) -> StepTokens:
        """Return what the preparation of an optimizer step on these rows reads."""
        return StepTokens(
            self.trajectory,
            self.mask,
            self.turn_index,
            advantages,
            behaviour_logprobs=self.numbers["behaviour"],
            old_logprobs=self.numbers["old"],
            current_logprobs=self.numbers["logprobs"],
            entropy=self.numbers["entropy"],
        )

    def permuted(self, order: torch.Tensor) -> "Rows":
        return replace(
            self,
            trajectory=self.trajectory[order],
            mask=self.mask[order],
            turn_index=self.turn_index[order],
            numbers={field: values[order] for field, values in self.numbers.items()},
        )


def _cut(turns: list, layout: str | int, trajectory: int) -> list[list]:
    """Cut the turns of a trajectory into rows."""
    if layout == "trajectory":
        return [turns]
    if layout == "step":
        return [[turn] for turn in turns]
    draws = np.random.default_rng((int(layout), trajectory))
    rows = [[turns[0]]]
    for turn in turns[1:]:
        if draws.random() < 0.5:
            rows.append([])
        rows[-1].append(turn)
    return rows


def random_case(seed: int, *, groups: int = 3, members: int = 4, turns: int = 4, tokens: int = 4) -> Case:
    """Return a batch of `groups * members` episodes of up to `turns` turns of up to `tokens` tokens."""
    rng = np.random.default_rng(seed)
    data, rewards, penalties, valid, anchors, counts = [], [], [], [], [], []
    for _ in range(groups * members):
        episode = []
        for _ in range(rng.integers(1, turns + 1)):
            length = int(rng.integers(1, tokens + 1))
            logprobs = -rng.exponential(1.0, length)
            episode.append(
                {
                    "logprobs": logprobs.tolist(),
                    "old": (logprobs + rng.normal(0, 0.2, length)).tolist(),
                    "behaviour": (logprobs + rng.normal(0, 0.3, length)).tolist(),
                    "reference": (logprobs + rng.normal(0, 0.5, length)).tolist(),
                    "entropy": rng.uniform(0, 2, length).tolist(),
                    "values": rng.normal(0, 1, length).tolist(),
                    # At least what the token itself adds, and at most 1.
                    "squares": np.clip(np.exp(2 * logprobs) + 0.1, 0, 1).tolist(),
                }
            )
        data.append(episode)
        readable = [bool(rng.random() > 0.2) for _ in episode]
        valid.append(readable)
        penalties.append([0.0 if flag else -0.05 for flag in readable])
        rewards.append([float(rng.choice([0.0, 0.0, 1.0])) + penalty for penalty in penalties[-1]])
        anchors.append([str(rng.choice(["a", "b", "c"])) for _ in episode])
        counts.append([len(turn["values"]) for turn in episode])
    ids = [group for group in range(groups) for _ in range(members)]
    names = [str(group) for group in ids]
    batch = TrajectoryBatch(
        ids,
        rewards,
        penalties,
        valid,
        anchors,
        counts,
        parts=[[{"whole": value, "half": value / 2 - 0.1} for value in turns] for turns in rewards],
        tasks=names,
        domains=names,
        greedy=greedy_batch(range(groups), [float(rng.integers(2)) for _ in range(groups)]),
    )
    return Case(batch, data)


def greedy_batch(groups, returns) -> TrajectoryBatch:
    """Return a greedy episode of one turn for each group."""
    ids = list(groups)
    alone = [[0.0] for _ in ids]
    return TrajectoryBatch(
        ids,
        [[value] for value in returns],
        alone,
        [[True] for _ in ids],
        [[None] for _ in ids],
        [[1] for _ in ids],
    )
