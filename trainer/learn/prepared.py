"""Computes what an optimizer step needs of all its rows before they are split into micro-batches and ranks."""

from collections import Counter
from collections.abc import Sequence
from typing import assert_never

import torch
from torch import Tensor

from rollgym.trainer.algorithms.batch import StepTokens
from rollgym.trainer.algorithms.corrections import interpolated_logprobs
from rollgym.trainer.algorithms.objective import bounded_difference
from rollgym.trainer.algorithms.prepare import prepare_step
from rollgym.trainer.algorithms.ratio import elsewhere
from rollgym.trainer.algorithms.settings import AlgorithmSettings
from rollgym.trainer.backends.base import TrainBackend, TrainRow
from rollgym.trainer.backends.batching import pad_rows
from rollgym.trainer.learn.batches import EpisodeBatch
from rollgym.trainer.learn.token_fields import PolicyFields


def prepared_rows(
    policy: TrainBackend,
    settings: AlgorithmSettings,
    rows: Sequence[TrainRow],
    episodes: Sequence[int],
    updates: int,
    seed: int,
) -> tuple[list[TrainRow], dict[str, float]]:
    """Return the rows of an optimizer step with the weights of their tokens, and numbers of these.

    Args:
        policy: The policy.
        settings: The algorithm.
        rows: All rows of the step.
        episodes: The episode of each.
        updates: Optimizer steps of the batch before this one.
        seed: Seed for drawing tokens.
    """
    fields = PolicyFields.padded(rows)
    current = fields.old
    if updates and settings.prepares_from_current:
        current = pad_rows(policy.forward(rows))
    entropy = None
    if settings.selection.reads_entropy:
        entropy = pad_rows(policy.entropies(rows))
    made = prepare_step(
        settings,
        StepTokens(
            trajectory=torch.tensor(episodes),
            mask=pad_rows([row.mask for row in rows]),
            turn_index=fields.turn_index,
            advantages=fields.advantages,
            behaviour_logprobs=fields.behaviour_logprobs,
            old_logprobs=fields.old,
            current_logprobs=current,
            entropy=entropy,
        ),
        seed,
    )
    own = {"weights": made.weights}
    # Before the first update the policy is the base of the charges: rounding between two passes is not drift.
    if made.charges is not None and (updates or settings.proximal != "recomputed"):
        own["charges"] = made.charges
    lines = {name: unpadded(table, rows) for name, table in own.items()}
    complete = [
        row.with_fields({name: line[index] for name, line in lines.items()}) for index, row in enumerate(rows)
    ]
    return complete, made.metrics


def elsewhere_of(
    policy: TrainBackend,
    settings: AlgorithmSettings,
    rows: Sequence[TrainRow],
    episodes: Sequence[int],
    updates: int,
) -> Tensor | None:
    """Return what the other rows of each row's episode add to a ratio of sequences, `[2, rows]`.

    That is the sum of their log ratios, and the number of their tokens. Such rows may be in other micro-batches,
    whose losses do not know of each other, so they are computed once more for it. None if no ratio reads it, or
    every row is a whole episode.

    Args:
        policy: The policy.
        settings: The algorithm.
        rows: All rows of an optimizer step.
        episodes: The episode of each.
        updates: Optimizer steps of the batch before this one.
    """
    number = Counter(episodes)
    cut = [index for index, episode in enumerate(episodes) if number[episode] > 1]
    if settings.ratio.level not in ("sequence", "sequence_sum") or not cut:
        return None
    difference = torch.zeros(len(rows), dtype=torch.float64)
    # With recomputed ones the policy is at first the one that ratios start from: all are 1.
    if settings.proximal != "recomputed" or updates:
        outputs = policy.forward([rows[index] for index in cut])
        for index, logprobs in zip(cut, outputs, strict=True):
            row = rows[index]
            fields = PolicyFields.of(row.fields)
            start = _start(settings, fields, logprobs)
            moved = bounded_difference(settings, logprobs, start, fields.advantages)
            difference[index] = moved[row.mask].double().sum()
    tokens = torch.tensor([float(row.mask.sum()) for row in rows], dtype=torch.float64)
    episode = torch.tensor(episodes)
    return torch.stack([elsewhere(difference, episode), elsewhere(tokens, episode)]).float()


def _start(settings: AlgorithmSettings, fields: PolicyFields, logprobs: Tensor) -> Tensor:
    """Return the log-probabilities that ratios start from."""
    if settings.proximal == "recomputed":
        return fields.old
    behaviour = fields.behaviour_logprobs
    # Only ratios that start between two policies have shares.
    return behaviour if fields.shares is None else interpolated_logprobs(logprobs, behaviour, fields.shares)


def unpadded(table: Tensor, rows: Sequence[TrainRow]) -> list[Tensor]:
    """Return the lines of a padded table, each as long as its row."""
    return [table[index, : len(row.ids)] for index, row in enumerate(rows)]


def sequence_lengths(
    rows: Sequence[TrainRow], sequences: Sequence[tuple[int, int]]
) -> Counter[tuple[int, int]]:
    """Count the sampled tokens of each sequence, over all its rows."""
    lengths: Counter[tuple[int, int]] = Counter()
    for row, sequence in zip(rows, sequences, strict=True):
        lengths[sequence] += int(row.mask.sum())
    return lengths


def positive_tokens(settings: AlgorithmSettings, rows: Sequence[TrainRow], scores: Tensor) -> int:
    """Count the sampled tokens of the episodes that did well."""
    good = (scores > settings.positive_nll.score_threshold).tolist()
    return sum(int(row.mask.sum()) for row, each in zip(rows, good, strict=True) if each)


def sequences_of(settings: AlgorithmSettings, batch: EpisodeBatch) -> list[tuple[int, int]]:
    """Name the sequence of each row, for losses that average over sequences."""
    match settings.aggregation.unit:
        case "sequence":
            return [row.sequence for row in batch.rows]
        case "trajectory":
            return [(row.trajectory, 0) for row in batch.rows]
        case "group":
            return [(batch.episodes.groups[row.trajectory], 0) for row in batch.rows]
        case "row":
            return [(row.trajectory, index) for index, row in enumerate(batch.rows)]
        case _:
            assert_never(settings.aggregation.unit)
