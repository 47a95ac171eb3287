"""What an update was like: its optimizer steps, and how far the sampling policy was from the trained one."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rollgym.trainer.algorithms.corrections import mismatch_metrics
from rollgym.trainer.backends.base import StepReport, TrainRow
from rollgym.trainer.learn.batches import EpisodeBatch
from rollgym.trainer.learn.token_fields import PolicyFields

_LAGS = ("lag_0", "lag_1", "lag_2_up")
"""Names of parts of the mismatch: tokens of the version that is trained, of the one before it, and of all others."""


def step_metrics(name: str, steps: Sequence[StepReport]) -> dict[str, float]:
    """Describe the optimizer steps of one model."""
    if not steps:
        return {}
    norms = [taken.gradient_norm for taken in steps if taken.applied]
    numbers = {
        f"{name}/optimizer_steps": float(len(norms)),
        f"{name}/skipped_steps": float(len(steps) - len(norms)),
    }
    tokens = sum(taken.tokens.rows for taken in steps)
    if tokens:
        computed = sum(taken.tokens.computed for taken in steps)
        numbers[f"{name}/shared_prefixes"] = 1.0 - computed / tokens
    return numbers | ({f"{name}/gradient_norm": sum(norms) / len(norms)} if norms else {})


def mismatch(
    rows: Sequence[TrainRow],
    outputs: Sequence[Tensor],
    indices: Sequence[int],
    batch: EpisodeBatch,
    version: int,
) -> dict[str, float]:
    """Describe how far log-probabilities at the start of an update are from those at sampling.

    In all, by domain, and, where some tokens are of older versions, by how many updates they are behind. Tokens of
    structured outputs are left out: they were drawn from a part of the vocabulary.

    Args:
        rows: Rows of the update's first optimizer step.
        outputs: The log-probabilities of each.
        indices: Their indices in the batch.
        batch: The batch.
        version: The policy version that is trained.
    """
    old = torch.cat([line[row.mask] for row, line in zip(rows, outputs, strict=True)])
    behaviour = torch.cat([PolicyFields.of(row.fields).behaviour_logprobs[row.mask] for row in rows])
    if not bool((old - behaviour).isfinite().all()):
        return {}
    free = torch.cat([_free(row, batch, index) for row, index in zip(rows, indices, strict=True)])
    metrics = mismatch_metrics(old, behaviour, free)
    tokens = torch.tensor([int(row.mask.sum()) for row in rows])
    of_rows = batch.domains
    domains = [of_rows[index] for index in indices]
    names = sorted(set(domains))
    domain = torch.tensor([names.index(each) for each in domains]).repeat_interleave(tokens)
    parts = {f"domain/{name}": domain == index for index, name in enumerate(names)}
    sampled_by = [
        torch.tensor(batch.rows[index].versions)[row.mask] for row, index in zip(rows, indices, strict=True)
    ]
    behind = (version - torch.cat(sampled_by)).clamp(0, len(_LAGS) - 1)
    if bool(behind.any()):
        parts |= {name: behind == lag for lag, name in enumerate(_LAGS)}
    for name, part in parts.items():
        measured = mismatch_metrics(old, behaviour, part & free)
        metrics |= {f"{name}/{key}": value for key, value in measured.items()}
    return metrics


def _free(row: TrainRow, batch: EpisodeBatch, index: int) -> Tensor:
    """Return which of a row's trained tokens were drawn from the whole vocabulary."""
    own = batch.rows[index]
    turns = batch.trajectories[own.trajectory].turns
    structured = [number for number, turn in enumerate(turns) if turn.structured]
    drawn_in = torch.tensor(own.turn_index)[row.mask]
    return ~torch.isin(drawn_in, torch.tensor(structured, dtype=drawn_in.dtype))
