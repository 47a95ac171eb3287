"""What adapters have in common: they place a peer's inputs and choose our options, and compute nothing themselves."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from rollgym.trainer.algorithms.aggregation import Denominators
from rollgym.trainer.algorithms.batch import LossInputs, RowBatch, StepTokens, TrajectoryBatch
from rollgym.trainer.algorithms.credit import AdvantageResult, compute_advantages
from rollgym.trainer.algorithms.filter_settings import RewardSettings
from rollgym.trainer.algorithms.objective import policy_loss
from rollgym.trainer.algorithms.prepare import prepare_step
from rollgym.trainer.algorithms.rewards import turn_rewards
from rollgym.trainer.algorithms.settings import AlgorithmSettings


@dataclass(frozen=True, slots=True)
class Case:
    """One case: options in the peer's words, inputs as tensors where they are numbers."""

    function: str
    options: Mapping[str, Any]
    inputs: dict[str, Any]

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Self:
        """Return the case of a line; numbers with a fraction are float64, whatever the peer computed in."""
        return cls(line["function"], line["options"], {k: _tensor(v) for k, v in line["inputs"].items()})

    def __getitem__(self, name: str) -> Any:
        """Return an input."""
        return self.inputs[name]

    @property
    def mask(self) -> Tensor:
        """Which tokens were sampled."""
        return self.inputs["mask"]


def _tensor(value: Any) -> Any:
    if not isinstance(value, list) or not value or not _is_grid(value):
        return value
    tensor = torch.tensor(value)
    return torch.tensor(value, dtype=torch.float64) if tensor.is_floating_point() else tensor


def _is_grid(value: list[Any]) -> bool:
    """Whether a list holds numbers, or lists of them of one length."""
    if not isinstance(value[0], list):
        return not isinstance(value[0], str)
    return len({len(each) for each in value}) == 1 and all(each and _is_grid(each) for each in value)


@dataclass(frozen=True, slots=True)
class Choice:
    """A difference that is meant.

    Attributes:
        functions: Beginnings of the names of the functions that it is about.
        reason: What it is, and where the docs name it.
        when: Whether it can be behind a case.
        rows: Which rows it is about, `[rows]`; the others are equal all the same. None: it may be about all.
    """

    functions: Sequence[str]
    reason: str
    when: Callable[[Case], bool] = lambda case: True
    rows: Callable[[Case], Tensor] | None = None

    def covers(self, case: Case) -> bool:
        """Whether the difference can be behind a case."""
        named = case.function.startswith(tuple(self.functions)) and self.when(case)
        return named and (self.rows is None or bool(self.rows(case).any()))


@dataclass(frozen=True, slots=True)
class Peer:
    """Ours beside a peer's: a function for each of its own, and the differences that are meant."""

    adapters: Mapping[str, Callable[[Case], Mapping[str, Any]]]
    choices: Sequence[Choice] = ()


def algorithm(**parts: Any) -> AlgorithmSettings:
    """Return the settings of an algorithm, with the defaults of `GroupAdvantage` and `PpoSurrogate`."""
    return AlgorithmSettings.model_validate(parts)


def advantages(
    settings: AlgorithmSettings,
    mask: Tensor,
    rewards: Tensor,
    groups: Tensor,
    *,
    turns: bool = False,
    greedy: Tensor | None = None,
    **rows: Tensor,
) -> AdvantageResult:
    """Return `compute_advantages` of rows that are episodes.

    Args:
        settings: The algorithm.
        mask: Which tokens were sampled.
        rewards: Reward on each token, zero on those that were not; or of each episode, `[rows]`.
        groups: Group of each row.
        turns: Whether each run of sampled tokens is a turn; else an episode is one turn.
        greedy: Return of each group's greedy episode, an entry per row.
        rows: Further parts of `RowBatch`.
    """
    index = turn_index(mask) if turns else torch.zeros(mask.shape, dtype=torch.int64)
    counts = [int(row[m].max()) + 1 if bool(m.any()) else 1 for row, m in zip(index, mask, strict=True)]
    tokens = [
        [int((m & (row == turn)).sum()) for turn in range(n)]
        for row, m, n in zip(index, mask, counts, strict=True)
    ]
    if rewards.dim() == 1:
        given = [[float(each)] for each in rewards]
    else:
        given = [
            [float(line[index[place] == turn].sum()) for turn in range(counts[place])]
            for place, line in enumerate(rewards)
        ]
    batch = episodes_of(groups.tolist(), given, tokens)
    if greedy is not None:
        firsts = {group: float(value) for group, value in zip(groups.tolist(), greedy, strict=True)}
        played = episodes_of(list(firsts), [[value] for value in firsts.values()], [[1]] * len(firsts))
        batch = replace(batch, greedy=played)
    trajectory = torch.arange(len(mask))
    return compute_advantages(settings, batch, RowBatch(trajectory, mask, index, **rows))


def episodes_of(
    groups: list[int], rewards: list[list[float]], tokens: list[list[int]], **further: Any
) -> TrajectoryBatch:
    """Return episodes of which no more is known than this."""
    return TrajectoryBatch(
        groups=groups,
        rewards=rewards,
        format_penalties=[[0.0] * len(each) for each in rewards],
        valid=[[True] * len(each) for each in rewards],
        anchors=[[None] * len(each) for each in rewards],
        tokens=tokens,
        **further,
    )


def shaped(
    settings: RewardSettings,
    rewards: Tensor,
    *,
    lengths: Tensor | None = None,
    truncated: Tensor | None = None,
) -> Tensor:
    """Return what is made of the rewards of episodes of one turn.

    Args:
        settings: What is made of them.
        rewards: Reward of each episode.
        lengths: Its sampled tokens; 1 if None.
        truncated: Whether it was cut off.
    """
    counts = [1] * len(rewards) if lengths is None else lengths.tolist()
    batch = episodes_of(
        list(range(len(rewards))), [[each] for each in rewards.tolist()], [[n] for n in counts]
    )
    if truncated is not None:
        batch = replace(batch, truncated=truncated.tolist())
    return torch.tensor([turns[0] for turns in turn_rewards(settings, batch)], dtype=torch.float64)


def turn_index(mask: Tensor) -> Tensor:
    """Return which run of sampled tokens each token is of, or comes after."""
    begins = mask & ~torch.cat([torch.zeros_like(mask[:, :1]), mask[:, :-1]], dim=1)
    return (begins.cumsum(dim=1) - 1).clamp(min=0)


def loss(
    settings: AlgorithmSettings,
    case: Case,
    *,
    counts: Denominators | None = None,
    scores: Tensor | None = None,
    **further: Tensor,
) -> Tensor:
    """Return `policy_loss` of a whole batch, prepared where the algorithm prepares.

    Args:
        settings: The algorithm.
        case: With `logprobs`, `advantages` and `mask`, and with `old` or `behaviour`, or both.
        counts: Denominators that the peer was given; those of the mask if None.
        scores: Return of each row's episode.
        further: Further parts of `LossInputs`.
    """
    mask = case.mask
    old = case.inputs.get("old", case.inputs.get("behaviour"))
    behaviour = case.inputs.get("behaviour", old)
    index = torch.zeros(mask.shape, dtype=torch.int64)
    if settings.prepares and "weights" not in further:
        prepared = prepare_step(
            settings,
            StepTokens(
                trajectory=torch.arange(len(mask)),
                mask=mask,
                turn_index=index,
                advantages=case["advantages"],
                behaviour_logprobs=behaviour,
                old_logprobs=old,
                current_logprobs=case["logprobs"].detach(),
                entropy=further.get("entropy"),
            ),
        )
        further["weights"] = prepared.weights
        if prepared.charges is not None:
            further["charges"] = prepared.charges
    inputs = LossInputs(
        logprobs=case["logprobs"],
        behaviour_logprobs=behaviour,
        advantages=case["advantages"],
        mask=mask,
        turn_index=index,
        old_logprobs=old,
        scores=scores,
        **further,
    )
    return policy_loss(settings, inputs, counts or Denominators.from_mask(mask))[0]
