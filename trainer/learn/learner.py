"""One update of the policy: rows, advantages once for the whole batch, then optimizer steps; and its metrics."""

import asyncio
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rollgym.trainer.algorithms.aggregation import Denominators, means, merge
from rollgym.trainer.algorithms.batch import RowBatch
from rollgym.trainer.algorithms.corrections import mismatch_metrics, version_shares
from rollgym.trainer.algorithms.credit import after_update, compute_advantages, select_episodes, with_returns
from rollgym.trainer.algorithms.settings import AlgorithmSettings
from rollgym.trainer.algorithms.state import AlgorithmState, Memory, adapted_coefficient
from rollgym.trainer.backends.base import Digest, Scorer, StepReport, TrainBackend, TrainRow
from rollgym.trainer.backends.batching import pad_rows
from rollgym.trainer.backends.optimizer import SkippedSteps
from rollgym.trainer.core.errors import InvalidNumberError, TrainerError
from rollgym.trainer.core.numbers import not_finite
from rollgym.trainer.core.seeding import derive_seed, generator
from rollgym.trainer.learn.batches import EpisodeBatch
from rollgym.trainer.learn.prepared import (
    elsewhere_of,
    positive_tokens,
    prepared_rows,
    sequence_lengths,
    sequences_of,
    unpadded,
)
from rollgym.trainer.learn.token_fields import PolicyFields, critic_share, policy_share

_LAGS = ("lag_0", "lag_1", "lag_2_up")
"""Names of parts of the mismatch: tokens of the version that is trained, of the one before it, and of all others."""


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
    indices: Sequence[int],
    batch: EpisodeBatch,
    version: int,
) -> dict[str, float]:
    """Describe how far log-probabilities at the start of an update are from those at sampling.

    In all, by domain, and, if some tokens are of older versions, by how many updates they are behind. Tokens of
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
    sampled_by = [batch.rows[index].sampled_by()[row.mask] for row, index in zip(rows, indices, strict=True)]
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
    drawn_in = own.turns()[row.mask]
    return ~torch.isin(drawn_in, torch.tensor(structured, dtype=drawn_in.dtype))


_MEMORY = "algorithm"
"""The part of a checkpoint that holds what the algorithm remembers."""


@dataclass(frozen=True, slots=True)
class Models:
    """The models that an update trains and reads.

    Attributes:
        policy: The policy.
        critic: The value model, if the algorithm has one.
        reference: The policy as the run began, if the algorithm has a KL penalty.
        memory: The algorithm's state between steps.
    """

    policy: TrainBackend
    critic: TrainBackend | None = None
    reference: Scorer | None = None
    memory: Memory = field(default_factory=Memory)

    def state_dicts(self) -> dict[str, Any]:
        """Return what a checkpoint holds of each model, and what the algorithm remembers, if anything."""
        states = {name: model.state_dict() for name, model in self._named()}
        remembered = self.memory.state.as_dict()
        return states | ({_MEMORY: remembered} if remembered else {})

    def load_state_dicts(self, states: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint.

        Raises:
            ValueError: If it is of other models.
        """
        self.memory.state = AlgorithmState.from_dict(states.get(_MEMORY, {}))
        for name, model in self._named():
            if name not in states:
                raise ValueError(f"it holds no {name}")
            try:
                model.load_state_dict(states[name])
            except TrainerError:
                raise  # a dead rank is not a state of another shape
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedBatch:
    """What the optimizer steps of an update have in common.

    Attributes:
        settings: The algorithm, with the numbers that this update has.
        rows: The rows that are trained on, with all that the losses read.
        batch: The same rows, and all episodes that statistics are of.
        scores: Return of the trajectory of each row.
        metrics: What is known before the first step.
    """

    settings: AlgorithmSettings
    rows: list[TrainRow]
    batch: EpisodeBatch
    scores: Tensor
    metrics: dict[str, float]


class Learner:
    """Updates the policy (and critic) on batches of episodes.

    Args:
        settings: The algorithm.
        models: The models to train and to read.
        seed: The run's seed; minibatches are drawn from a stream below it.
        max_skipped_steps: Optimizer steps in a row that may be skipped because loss or gradient is not finite.
        truncated: Whether tokens were drawn from a part of the vocabulary. Their log-probabilities then cannot be
            compared with the policy's, and no mismatch is reported.
        router_replay: Whether the steps of a batch take the experts that the policy took when its old
            log-probabilities were computed.
        say: Receives messages for people about skipped optimizer steps.
    """

    def __init__(
        self,
        settings: AlgorithmSettings,
        models: Models,
        seed: int,
        *,
        max_skipped_steps: int = 8,
        truncated: bool = False,
        router_replay: bool = False,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._settings = settings
        self._policy_steps = SkippedSteps("policy", max_skipped_steps, say)
        self._critic_steps = SkippedSteps("critic", max_skipped_steps, say)
        self._truncated = truncated
        self._router_replay = router_replay
        self._models = models
        self._seed = seed

    async def update(self, batch: EpisodeBatch, step: int, version: int | None = None) -> dict[str, float]:
        """Take the optimizer steps of one batch and return their metrics, without blocking the event loop.

        Args:
            batch: Episodes and their rows.
            step: Training step, which names the stream that minibatches are drawn from.
            version: The policy version in training; tells which tokens older versions sampled. Defaults to the step.

        Returns:
            The metrics. `policy/optimizer_steps` says how many steps were taken, `policy/skipped_steps` how many were
            left out because something was not finite.

        Raises:
            RunError: If too many in a row were skipped.
            PluginError: If the user's code fails.
        """
        version = step if version is None else version
        prepared = await asyncio.to_thread(self._prepared, batch, version)
        if not isinstance(prepared, PreparedBatch):
            return prepared
        metrics = await asyncio.to_thread(self._optimize, prepared, step, version)
        return metrics | prepared.metrics

    def _prepared(self, batch: EpisodeBatch, version: int) -> PreparedBatch | dict[str, float]:
        """Compute what is the same for all optimizer steps of a batch: its rows, with advantages; or say why none is.

        Returns:
            The batch, or the metrics of an update without an optimizer step.
        """
        choice = select_episodes(self._settings, batch.episodes)
        if not choice.in_statistics:
            batch = batch.only(choice.kept)
        kept = choice.kept if choice.in_statistics else [True] * len(batch.trajectories)
        left_out = (
            {"batch/episodes_left_out": float(choice.kept.count(False))} if False in choice.kept else {}
        )
        indices = [index for index, row in enumerate(batch.rows) if kept[row.trajectory]]
        if not indices:
            return {"batch/rows": 0.0} | left_out
        batch.chosen.update(batch.groups_of(indices))
        settings = self._effective()
        memory = self._models.memory
        memory.state = with_returns(settings, memory.state, batch.episodes)
        rows = [row.tensors(experts=True) for row in batch.rows]
        old = None
        if settings.needs_old_logprobs:
            old, rows = self._old_logprobs(rows)
        # Other models have routers of their own.
        free = [replace(row, experts=None) for row in rows]
        reference = self._forward(self._models.reference, free) if settings.needs_reference else None
        values = self._forward(self._models.critic, free) if settings.estimates_values else None
        turns = [row.turns() for row in batch.rows]
        row_batch = RowBatch(
            trajectory=torch.tensor([row.trajectory for row in batch.rows]),
            mask=batch.mask,
            turn_index=pad_rows(turns),
            values=None if values is None else pad_rows(values),
            old_logprobs=None if old is None else pad_rows(old),
            reference_logprobs=None if reference is None else pad_rows(reference),
            squared_probabilities=self._squared_probabilities(settings, rows),
            last_values=self._last_values(batch) if settings.bootstraps else None,
        )
        try:
            result = compute_advantages(settings, batch.episodes, row_batch, memory.state)
        except InvalidNumberError as error:
            return self._left_out(str(error))
        if wrong := list(not_finite({"old log-probabilities": old, "advantages": result.advantages})):
            return self._left_out(f"{wrong[0]} are not finite")
        advantages = unpadded(result.advantages, rows)
        returns = None if result.returns is None else unpadded(result.returns, rows)
        shares = self._shares(batch, version)
        complete = [
            row.with_fields(
                PolicyFields(
                    behaviour_logprobs=batch.rows[index].behaviour(),
                    advantages=advantages[index],
                    turn_index=turns[index],
                    old_logprobs=None if old is None else old[index],
                    reference_logprobs=None if reference is None else reference[index],
                    values=None if values is None else values[index],
                    returns=None if returns is None else returns[index],
                    shares=None if shares is None else shares[index],
                ).named()
            )
            for index, row in enumerate(rows)
        ]
        trained = batch.rows_at(indices)
        trained.note_advantages(result.advantages[indices])
        numbers = {"batch/rows": float(len(indices))}
        if settings.bootstraps:
            numbers["batch/bootstrapped"] = float(sum(bool(each.next_prompt) for each in batch.trajectories))
        return PreparedBatch(
            settings=settings,
            rows=[complete[index] for index in indices],
            batch=trained,
            scores=result.scores[indices],
            metrics=result.metrics | left_out | numbers,
        )

    def _last_values(self, batch: EpisodeBatch) -> Tensor:
        """Return the critic's values of the prompts at which episodes were cut off, `[trajectories]`; else 0."""
        last = torch.zeros(len(batch.trajectories), dtype=torch.float64)
        cut = [index for index, each in enumerate(batch.trajectories) if each.next_prompt]
        if cut:
            rows = [_behind(batch.trajectories[index].next_prompt) for index in cut]
            last[cut] = torch.stack([row[-1] for row in self._forward(self._models.critic, rows)]).double()
        return last

    def _old_logprobs(self, rows: list[TrainRow]) -> tuple[list[Tensor], list[TrainRow]]:
        """Return log-probabilities of rows at the start of the update, and the rows as its steps compute them."""
        if not self._router_replay:
            return self._models.policy.forward(rows), rows
        outputs, experts = self._models.policy.forward_routed(rows)
        return outputs, [replace(row, experts=taken) for row, taken in zip(rows, experts, strict=True)]

    def _effective(self) -> AlgorithmSettings:
        """Return the settings of this step: with the adaptive weight of the KL penalty, if there is one."""
        settings, coefficient = self._settings, self._models.memory.state.kl_coefficient
        if settings.kl.target is None or coefficient is None:
            return settings
        kl = settings.kl.model_copy(update={"coefficient": coefficient})
        return settings.model_copy(update={"kl": kl})

    def _remember(self, prepared: PreparedBatch, metrics: dict[str, float]) -> None:
        """Note what later steps read, once a step is taken."""
        settings, batch, memory = prepared.settings, prepared.batch, self._models.memory
        if settings.kl.target is not None:
            metrics["policy/kl_coefficient"] = settings.kl.coefficient
            coefficient = adapted_coefficient(
                settings.kl.coefficient,
                metrics.get("policy/kl_reference", math.nan),
                len(batch.trajectories),
                settings.kl,
            )
            memory.state = replace(memory.state, kl_coefficient=coefficient)
        if not metrics.get("policy/optimizer_steps"):
            return
        moved = 0.0
        if settings.tracks_values:
            metrics["policy/moved"] = moved = self._moved(prepared.rows)
        memory.state = after_update(settings, memory.state, batch.episodes, moved)

    def _squared_probabilities(self, settings: AlgorithmSettings, rows: Sequence[TrainRow]) -> Tensor | None:
        """Return the sum of the squared probabilities at each token, `[rows, tokens]`; None if it is not needed."""
        if not settings.needs_squared_probabilities:
            return None
        return pad_rows([(-line).exp() for line in self._models.policy.entropies(rows, "collision")])

    def _moved(self, rows: Sequence[TrainRow]) -> float:
        """Return by how much log-probabilities of the step's tokens have changed in it, in the mean."""
        after = self._models.policy.forward(rows)
        changes = torch.cat(
            [
                (line - PolicyFields.of(row.fields).old)[row.mask]
                for line, row in zip(after, rows, strict=True)
            ]
        )
        return float(changes.double().abs().mean())

    def _shares(self, batch: EpisodeBatch, version: int) -> list[Tensor] | None:
        """Return how far each token is on the way from the policy that sampled it to the one that is trained."""
        if self._settings.proximal != "interpolated":
            return None
        return [version_shares(row.sampled_by(), version + 1) for row in batch.rows]

    def _left_out(self, why: str) -> dict[str, float]:
        """Note that no step of an update can be taken."""
        for _ in range(self._settings.updates):
            self._policy_steps.note(applied=False, why=why)
        return {"policy/optimizer_steps": 0.0, "policy/skipped_steps": float(self._settings.updates)}

    def _optimize(self, prepared: PreparedBatch, step: int, version: int) -> dict[str, float]:
        """Take the optimizer steps of an update and return their metrics."""
        settings, rows = prepared.settings, prepared.rows
        batch, scores = prepared.batch, prepared.scores
        sequences = sequences_of(settings, batch)
        episodes = [row.trajectory for row in batch.rows]
        # What a ratio or a mean is taken over stays in one optimizer step; a group is of whole episodes.
        whole = settings.keeps_episodes_whole and settings.aggregation.unit != "group"
        units = episodes if whole else sequences
        lengths = sequence_lengths(rows, sequences)
        policy_steps: list[StepReport] = []
        critic_steps: list[StepReport] = []
        told: dict[str, float] = {}
        weighed: list[dict[str, float]] = []
        rate = self._models.policy.learning_rate
        for epoch in range(settings.epochs):
            for indices in self._minibatches(units, step, epoch):
                chosen = [rows[index] for index in indices]
                of_episodes = [episodes[index] for index in indices]
                # Only before the first step is the policy still the one that the update began with.
                updates = sum(taken.applied for taken in policy_steps)
                broken: str | None = None
                if settings.prepares:
                    seed = derive_seed(self._seed, "selection", step, len(policy_steps))
                    try:
                        chosen, numbers = prepared_rows(
                            self._models.policy, settings, chosen, of_episodes, updates, seed
                        )
                        weighed.append(numbers)
                    except InvalidNumberError as error:
                        broken = str(error)  # from a user's selection
                counts = Denominators.from_lengths(
                    lengths[each] for each in {sequences[index] for index in indices}
                )
                if settings.positive_nll.coefficient:
                    counts = replace(
                        counts, positive_tokens=positive_tokens(settings, chosen, scores[indices])
                    )
                totals = torch.tensor([lengths[sequences[index]] for index in indices])
                if broken is not None:
                    taken = StepReport({}, math.nan, applied=False, broken=broken)
                else:
                    rest = elsewhere_of(self._models.policy, settings, chosen, of_episodes, updates)
                    rate = self._models.policy.learning_rate
                    taken = self._models.policy.step(
                        chosen,
                        partial(
                            policy_share,
                            settings=settings,
                            scores=scores[indices],
                            lengths=totals,
                            rest=rest,
                            counts=counts,
                        ),
                        entropy="gradient" if settings.needs_entropy else "metric",
                        keep_outputs=not (updates or told or self._truncated),
                    )
                if taken.outputs is not None:
                    told = _mismatch(chosen, taken.outputs, indices, batch, version)
                self._policy_steps.note(applied=taken.applied, why=taken.broken)
                if taken.applied:
                    batch.trained.update(batch.groups_of(indices))
                policy_steps.append(taken)
                if self._models.critic is not None:
                    taken = self._models.critic.step(
                        chosen, partial(critic_share, settings=settings, lengths=totals, counts=counts)
                    )
                    self._critic_steps.note(applied=taken.applied, why=taken.broken)
                    critic_steps.append(taken)
        numbers = means(merge(taken.metrics for taken in [*policy_steps, *critic_steps]))
        numbers |= _step_metrics("policy", policy_steps) | _step_metrics("critic", critic_steps)
        numbers["policy/learning_rate"] = rate
        numbers |= _averaged(weighed) | told
        self._remember(prepared, numbers)
        return numbers

    def _minibatches(self, units: Sequence[Hashable], step: int, epoch: int) -> list[list[int]]:
        """Cut the rows at random into as many parts as the algorithm takes optimizer steps, units left whole."""
        indices: dict[Hashable, list[int]] = {}
        for index, unit in enumerate(units):
            indices.setdefault(unit, []).append(index)
        whole = list(indices.values())
        count = min(self._settings.minibatches, len(whole))
        if count == 1:
            return [list(range(len(units)))]
        order = generator(self._seed, "minibatches", step, epoch).permutation(len(whole)).tolist()
        return [
            sorted(index for number in order[part::count] for index in whole[number]) for part in range(count)
        ]

    def _forward(self, backend: Scorer | None, rows: list[TrainRow]) -> list[Tensor]:
        if backend is None:
            raise ValueError("the algorithm reads a model that the run did not build")
        return backend.forward(rows)


def _behind(prompt: Sequence[int]) -> TrainRow:
    """Return a row whose one result is of the state after a prompt: before the next token, whichever that is."""
    ids = torch.tensor([*prompt, 0])
    return TrainRow(ids, torch.arange(len(ids)) == len(prompt))


def _averaged(numbers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return means over optimizer steps."""
    names = dict.fromkeys(name for each in numbers for name in each)
    return {name: sum(each[name] for each in numbers) / len(numbers) for name in names}
