"""One update of the policy: rows, advantages once for the whole batch, then optimizer steps."""

import asyncio
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.algorithms.aggregation import Denominators
from trainer.algorithms.batch import LossInputs, RowBatch
from trainer.algorithms.corrections import mismatch_metrics
from trainer.algorithms.metrics import Metrics, means, merge
from trainer.algorithms.objective import compute_advantages, critic_loss, policy_loss
from trainer.algorithms.ratio import elsewhere
from trainer.algorithms.settings import AlgorithmSettings
from trainer.backends.base import Digest, MicroBatch, Scorer, StepReport, TrainBackend, TrainRow
from trainer.backends.skipping import SkippedSteps
from trainer.core.errors import InvalidNumberError, TrainerError
from trainer.core.numbers import not_finite
from trainer.core.seeding import generator
from trainer.learn.batches import EpisodeBatch, padded, padded_tensors

_LAGS = ("lag_0", "lag_1", "lag_2_up")
"""Names of parts of the mismatch: tokens of the version that is trained, of the one before it, and of all others."""


@dataclass(frozen=True, slots=True)
class Models:
    """What an update trains and reads.

    Attributes:
        policy: The policy.
        critic: The value model, where the algorithm has one.
        reference: The policy as the run began, where the algorithm has a KL penalty.
    """

    policy: TrainBackend
    critic: TrainBackend | None = None
    reference: Scorer | None = None

    def state_dicts(self) -> dict[str, Any]:
        """Return what a checkpoint holds of each model."""
        return {name: model.state_dict() for name, model in self._named()}

    def load_state_dicts(self, states: Mapping[str, Any]) -> None:
        """Take up what a checkpoint held.

        Raises:
            ValueError: If it is of other models.
        """
        for name, model in self._named():
            if name not in states:
                raise ValueError(f"it holds no {name}")
            try:
                model.load_state_dict(states[name])
            except TrainerError:
                raise  # a rank that died is no state of another shape
            except (RuntimeError, KeyError, TypeError, ValueError) as error:
                raise ValueError(f"its {name} is of another shape") from error

    def digest(self, into: Digest) -> None:
        """Add all that is trained to a digest."""
        for model in (self.policy, self.critic):
            if model is not None:
                model.digest(into)

    def _named(self) -> list[tuple[str, Scorer]]:
        models: dict[str, Scorer | None] = {
            "policy": self.policy,
            "critic": self.critic,
            "reference": self.reference,
        }
        return [(name, model) for name, model in models.items() if model is not None]


class Learner:
    """Updates the policy (and critic) on batches of episodes.

    Args:
        settings: The algorithm.
        models: What is trained and read.
        seed: The run's seed; minibatches are drawn from a stream below it.
        max_skipped_steps: Optimizer steps in a row that may be left out because loss or gradient is not finite.
        truncated: Whether tokens were drawn from a part of the vocabulary. Their log-probabilities then cannot be
            compared with the policy's, and no mismatch is reported.
    """

    def __init__(
        self,
        settings: AlgorithmSettings,
        models: Models,
        seed: int,
        *,
        max_skipped_steps: int = 8,
        truncated: bool = False,
    ) -> None:
        self._settings = settings
        self._policy_steps = SkippedSteps("policy", max_skipped_steps)
        self._critic_steps = SkippedSteps("critic", max_skipped_steps)
        self._truncated = truncated
        self._models = models
        self._seed = seed

    async def update(self, batch: EpisodeBatch, step: int, version: int | None = None) -> dict[str, float]:
        """Take the optimizer steps of one batch and return their metrics, while the event loop goes on.

        Args:
            batch: Episodes and their rows.
            step: Training step, which names the stream that minibatches are drawn from.
            version: The policy version that is trained, by which tokens are told apart that older ones sampled; the
                step if absent.

        Returns:
            The metrics. `policy/optimizer_steps` says how many steps were taken, `policy/skipped_steps` how many were
            left out because something was not finite.

        Raises:
            RunError: If too many in a row were left out.
            PluginError: If code of the user's fails.
        """
        return await asyncio.to_thread(self._update, batch, step, step if version is None else version)

    def _update(self, batch: EpisodeBatch, step: int, version: int) -> dict[str, float]:
        if not batch.rows:
            return {"batch/rows": 0.0}
        settings = self._settings
        rows = [_train_row(row.ids, row.mask, {"behaviour": row.logprobs}, row.experts) for row in batch.rows]
        old = self._models.policy.forward(rows) if settings.needs_old_logprobs else None
        # Other models have routers of their own.
        free = [replace(row, experts=None) for row in rows]
        reference = self._forward(self._models.reference, free) if settings.needs_reference else None
        values = self._forward(self._models.critic, free) if settings.estimates_values else None
        turn_index = padded([[float(turn) for turn in row.turn_index] for row in batch.rows]).long()
        row_batch = RowBatch(
            trajectory=torch.tensor([row.trajectory for row in batch.rows]),
            mask=batch.mask,
            turn_index=turn_index,
            values=_padded_or_none(values),
            old_logprobs=_padded_or_none(old),
            reference_logprobs=_padded_or_none(reference),
        )
        try:
            result = compute_advantages(settings, batch.episodes, row_batch)
        except InvalidNumberError as error:
            return self._left_out(str(error))
        if wrong := list(not_finite({"old log-probabilities": old, "advantages": result.advantages})):
            return self._left_out(f"{wrong[0]} are not finite")
        extra: dict[str, Sequence[Tensor] | None] = {
            "advantages": _unpadded(result.advantages, rows),
            "turn": _unpadded(turn_index.float(), rows),
            "old": old,
            "reference": reference,
            "values": values,
            "returns": None if result.returns is None else _unpadded(result.returns, rows),
        }
        complete = [
            TrainRow(
                row.ids,
                row.mask,
                {**row.fields, **{name: part[place] for name, part in extra.items() if part is not None}},
                row.experts,
            )
            for place, row in enumerate(rows)
        ]
        batch.note_advantages(result.advantages)
        metrics = self._optimize(complete, batch, result.scores, step, version)
        return metrics | result.metrics | {"batch/rows": float(len(rows))}

    def _left_out(self, why: str) -> dict[str, float]:
        """Note that no step of an update can be taken."""
        for _ in range(self._settings.updates):
            self._policy_steps.note(applied=False, why=why)
        return {"policy/optimizer_steps": 0.0, "policy/skipped_steps": float(self._settings.updates)}

    def _optimize(
        self, rows: list[TrainRow], batch: EpisodeBatch, scores: Tensor, step: int, version: int
    ) -> dict[str, float]:
        settings = self._settings
        sequences = [row.sequence for row in batch.rows]
        episodes = [row.trajectory for row in batch.rows]
        # What a ratio is taken over stays in one optimizer step.
        units: Sequence[Hashable] = episodes if settings.ratio.level == "sequence" else sequences
        lengths = _lengths(rows, sequences)
        updates = 0
        policy_steps: list[StepReport] = []
        critic_steps: list[StepReport] = []
        mismatch: dict[str, float] = {}
        for epoch in range(settings.epochs):
            for places in self._minibatches(units, step, epoch):
                chosen = [rows[place] for place in places]
                rest = self._elsewhere(chosen, [episodes[place] for place in places], updates)
                counts = Denominators.from_lengths(
                    lengths[each] for each in {sequences[place] for place in places}
                )
                totals = torch.tensor([lengths[sequences[place]] for place in places])
                taken = self._models.policy.step(
                    chosen,
                    partial(
                        _policy_share,
                        settings=settings,
                        scores=scores[places],
                        lengths=totals,
                        rest=rest,
                        counts=counts,
                    ),
                    entropy="gradient" if settings.needs_entropy else "metric",
                    # Only before the first step is the policy still the one that the update began with.
                    keep_outputs=updates == 0 and not self._truncated,
                )
                if taken.outputs is not None:
                    mismatch = _mismatch(chosen, taken.outputs, places, batch, version)
                updates += 1
                self._policy_steps.note(applied=taken.applied, why=taken.broken)
                policy_steps.append(taken)
                if self._models.critic is not None:
                    taken = self._models.critic.step(
                        chosen, partial(_critic_share, settings=settings, lengths=totals, counts=counts)
                    )
                    self._critic_steps.note(applied=taken.applied, why=taken.broken)
                    critic_steps.append(taken)
        numbers = means(merge(taken.metrics for taken in [*policy_steps, *critic_steps]))
        numbers |= _step_metrics("policy", policy_steps) | _step_metrics("critic", critic_steps)
        numbers["policy/learning_rate"] = self._models.policy.learning_rate
        return numbers | mismatch

    def _elsewhere(self, rows: Sequence[TrainRow], episodes: Sequence[int], updates: int) -> Tensor | None:
        """Return what the other rows of each row's episode add to a ratio of sequences, `[2, rows]`.

        That is the sum of their log ratios, and the number of their tokens. Such rows may be in other micro-batches,
        whose losses do not know of each other, so they are computed once more for it. None where no ratio reads it, or
        every row is a whole episode.

        Args:
            rows: All rows of an optimizer step.
            episodes: The episode of each.
            updates: Optimizer steps of the batch before this one.
        """
        number = Counter(episodes)
        cut = [place for place, episode in enumerate(episodes) if number[episode] > 1]
        if self._settings.ratio.level != "sequence" or not cut:
            return None
        difference = torch.zeros(len(rows), dtype=torch.float64)
        start = "behaviour" if self._settings.proximal == "behaviour" else "old"
        if start == "behaviour" or updates:  # else the policy is the one that ratios start from: all are 1
            outputs = self._models.policy.forward([rows[place] for place in cut])
            for place, logprobs in zip(cut, outputs, strict=True):
                row = rows[place]
                difference[place] = (logprobs - row.fields[start])[row.mask].double().sum()
        tokens = torch.tensor([float(row.mask.sum()) for row in rows], dtype=torch.float64)
        episode = torch.tensor(episodes)
        return torch.stack([elsewhere(difference, episode), elsewhere(tokens, episode)]).float()

    def _minibatches(self, units: Sequence[Hashable], step: int, epoch: int) -> list[list[int]]:
        """Cut the rows at random into as many parts as the algorithm takes optimizer steps, units left whole."""
        places: dict[Hashable, list[int]] = {}
        for place, unit in enumerate(units):
            places.setdefault(unit, []).append(place)
        whole = list(places.values())
        count = min(self._settings.minibatches, len(whole))
        if count == 1:
            return [list(range(len(units)))]
        order = generator(self._seed, "minibatches", step, epoch).permutation(len(whole)).tolist()
        return [
            sorted(place for number in order[part::count] for place in whole[number]) for part in range(count)
        ]

    def _forward(self, backend: Scorer | None, rows: list[TrainRow]) -> list[Tensor]:
        if backend is None:
            raise ValueError("the algorithm reads a model that the run did not build")
        return backend.forward(rows)


def _train_row(
    ids: list[int],
    mask: list[bool],
    fields: Mapping[str, list[float]],
    experts: NDArray[np.int16] | None = None,
) -> TrainRow:
    return TrainRow(
        torch.tensor(ids),
        torch.tensor(mask),
        {name: torch.tensor(values, dtype=torch.float32) for name, values in fields.items()},
        None if experts is None else torch.from_numpy(experts[: len(ids)].copy()),
    )


def _lengths(rows: Sequence[TrainRow], sequences: Sequence[tuple[int, int]]) -> Counter[tuple[int, int]]:
    """Count the sampled tokens of each sequence, over all its rows."""
    lengths: Counter[tuple[int, int]] = Counter()
    for row, sequence in zip(rows, sequences, strict=True):
        lengths[sequence] += int(row.mask.sum())
    return lengths


def _step_metrics(name: str, steps: Sequence[StepReport]) -> dict[str, float]:
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


def _mismatch(
    rows: Sequence[TrainRow],
    outputs: Sequence[Tensor],
    places: Sequence[int],
    batch: EpisodeBatch,
    version: int,
) -> dict[str, float]:
    """Describe how far log-probabilities at the start of an update are from those at sampling.

    In all, by domain, and, where some tokens are of older versions, by how many updates they are behind.

    Args:
        rows: Rows of the update's first optimizer step.
        outputs: The log-probabilities of each.
        places: Their places in the batch.
        batch: The batch.
        version: The policy version that is trained.
    """
    old = torch.cat([line[row.mask] for row, line in zip(rows, outputs, strict=True)])
    behaviour = torch.cat([row.fields["behaviour"][row.mask] for row in rows])
    if not bool((old - behaviour).isfinite().all()):
        return {}
    metrics = mismatch_metrics(old, behaviour, torch.ones_like(old, dtype=torch.bool))
    tokens = torch.tensor([int(row.mask.sum()) for row in rows])
    of_rows = batch.domains
    domains = [of_rows[place] for place in places]
    names = sorted(set(domains))
    domain = torch.tensor([names.index(each) for each in domains]).repeat_interleave(tokens)
    parts = {f"domain/{name}": domain == place for place, name in enumerate(names)}
    sampled_by = [
        torch.tensor(batch.rows[place].versions)[row.mask] for row, place in zip(rows, places, strict=True)
    ]
    behind = (version - torch.cat(sampled_by)).clamp(0, len(_LAGS) - 1)
    if bool(behind.any()):
        parts |= {name: behind == lag for lag, name in enumerate(_LAGS)}
    for name, part in parts.items():
        metrics |= {f"{name}/{key}": value for key, value in mismatch_metrics(old, behaviour, part).items()}
    return metrics


def _policy_share(
    micro: MicroBatch,
    settings: AlgorithmSettings,
    scores: Tensor,
    lengths: Tensor,
    rest: Tensor | None,
    counts: Denominators,
) -> tuple[Tensor, Metrics]:
    elsewhere_difference, elsewhere_tokens = (
        (None, None) if rest is None else rest.to(micro.rows.device)[:, micro.rows]
    )
    inputs = LossInputs(
        logprobs=micro.outputs,
        behaviour_logprobs=micro.fields["behaviour"],
        advantages=micro.fields["advantages"],
        mask=micro.mask,
        turn_index=micro.fields["turn"].long(),
        old_logprobs=micro.fields.get("old"),
        reference_logprobs=micro.fields.get("reference"),
        entropy=micro.entropy,
        scores=scores.to(micro.rows.device)[micro.rows],
        lengths=lengths.to(micro.rows.device)[micro.rows],
        elsewhere_difference=elsewhere_difference,
        elsewhere_tokens=elsewhere_tokens,
    )
    return policy_loss(settings, inputs, counts)


def _critic_share(
    micro: MicroBatch, settings: AlgorithmSettings, lengths: Tensor, counts: Denominators
) -> tuple[Tensor, Metrics]:
    fields = micro.fields
    totals = lengths.to(micro.rows.device)[micro.rows]
    return critic_loss(
        settings, micro.outputs, fields["values"], fields["returns"], micro.mask, counts, totals
    )


def _padded_or_none(rows: Sequence[Tensor] | None) -> Tensor | None:
    return None if rows is None else padded_tensors(rows)


def _unpadded(table: Tensor, rows: Sequence[TrainRow]) -> list[Tensor]:
    return [table[place, : len(row.ids)] for place, row in enumerate(rows)]
