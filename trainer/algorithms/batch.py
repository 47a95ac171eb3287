"""Inputs of the algorithms: episodes as turns, training rows as padded tensors, and each trajectory's sampled tokens.

The sampled tokens of a trajectory are one sequence across all of its rows.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TrajectoryBatch:
    """The turns of a batch of episodes. Outer lists have an entry per trajectory, inner ones an entry per turn.

    Attributes:
        groups: Group of each trajectory: equal task and seed, so that returns can be compared.
        rewards: Reward of each turn as the environment gave it, its own format penalty included.
        format_penalties: The part of each reward that punishes an unreadable reply (zero or negative).
        valid: Whether the environment could read the reply.
        anchors: Key of the state in which the turn began; None if it is unknown.
        tokens: How many tokens the policy sampled in each turn.
        solved: Whether each trajectory reached its goal; empty if unused.
        truncated: Whether each trajectory was cut off, or one of its replies was; empty if unused.
        parts: Rewards of each turn by name, as the environment itemises them; empty if unused.
        tasks: Key of each trajectory's task, equal for equal tasks; empty if unused.
        domains: Domain of each trajectory; empty if unused.
        greedy: The greedy episodes that were played beside the groups, one for each; None if none were played.
    """

    groups: Sequence[int]
    rewards: Sequence[Sequence[float]]
    format_penalties: Sequence[Sequence[float]]
    valid: Sequence[Sequence[bool]]
    anchors: Sequence[Sequence[str | None]]
    tokens: Sequence[Sequence[int]]
    solved: Sequence[bool] = ()
    truncated: Sequence[bool] = ()
    parts: Sequence[Sequence[Mapping[str, float]]] = ()
    tasks: Sequence[str] = ()
    domains: Sequence[str] = ()
    greedy: "TrajectoryBatch | None" = None

    def __post_init__(self) -> None:
        """Refuse a batch whose parts do not fit each other."""
        turns = [len(rewards) for rewards in self.rewards]
        if len(turns) != len(self.groups):
            raise ValueError(f"{len(self.groups)} groups were given for {len(turns)} trajectories")
        for name in ("format_penalties", "valid", "anchors", "tokens"):
            given = [len(entries) for entries in getattr(self, name)]
            if given != turns:
                raise ValueError(f"'{name}' has {given} turns per trajectory where 'rewards' has {turns}")

    def __len__(self) -> int:
        """Return the number of trajectories."""
        return len(self.groups)

    def copied(self) -> Self:
        """Return a copy that shares no list with this one, for code of the user's, whatever it does to it."""
        return deepcopy(self)

    def select(self, indices: Sequence[int]) -> Self:
        """Return these trajectories alone; the greedy ones stay as they are."""
        chosen: dict[str, Any] = {name: [part[index] for index in indices] for name, part in self._lists()}
        return replace(self, **chosen)

    def _lists(self) -> list[tuple[str, Sequence[Any]]]:
        """Return what has an entry per trajectory, as far as it is given."""
        names = [each.name for each in fields(self) if each.name != "greedy"]
        return [(name, part) for name in names if len(part := getattr(self, name))]


@dataclass(frozen=True, slots=True)
class RowBatch:
    """The training rows of a `TrajectoryBatch`: a row per trajectory, per segment or per turn.

    A trajectory may have several rows, but all sampled tokens of one turn lie in one row.

    Attributes:
        trajectory: Index of each row's trajectory, int64 `[rows]`.
        mask: True where the policy sampled the token, bool `[rows, tokens]`.
        turn_index: Turn that a sampled token belongs to, int64 `[rows, tokens]`; anything outside the mask.
        values: The critic's value of the state before each token, where the algorithm has a critic.
        old_logprobs: Log-probabilities at the start of the update, for a KL penalty in the reward.
        reference_logprobs: Log-probabilities under the reference policy, for a KL penalty in the reward.
        squared_probabilities: Sum of the squared probabilities of all tokens that could have been drawn, for the
            optimal token baseline.
        last_values: The critic's value of the observation after each trajectory's last action, `[trajectories]`: 0
            where an episode ended by itself; for advantages that bootstrap.
    """

    trajectory: Tensor
    mask: Tensor
    turn_index: Tensor
    values: Tensor | None = None
    old_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    squared_probabilities: Tensor | None = None
    last_values: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What the policy loss of a micro-batch reads. Tensors are `[rows, tokens]` unless said otherwise.

    Attributes:
        logprobs: Log-probabilities under the policy that is being trained; they carry the gradient.
        behaviour_logprobs: Log-probabilities recorded when the tokens were sampled.
        advantages: Advantage of each token.
        mask: True where the policy sampled the token.
        turn_index: Turn that a sampled token belongs to; anything outside the mask.
        old_logprobs: Log-probabilities at the start of the update. None only where
            `AlgorithmSettings.needs_old_logprobs` is false.
        reference_logprobs: Log-probabilities under the reference policy, where the loss has a KL term.
        entropy: Entropy of the policy at each token; it carries the gradient if it is rewarded.
        scores: Return of each row's trajectory, `[rows]`, for losses that treat good and bad episodes apart.
        lengths: Sampled tokens of the sequence that each row is of, `[rows]`; None where every row is one of its own.
        elsewhere_difference: Sum of `lp - old` over the sampled tokens of the row's episode that lie in other rows,
            `[rows]`, for ratios of sequences; None where every row is a whole episode.
        elsewhere_tokens: How many tokens those are, `[rows]`.
        weights: Weight of each token's loss, from `prepare_step`, where the algorithm has one.
        charges: What each token pays for every nat that it moved, likewise.
        shares: How far each token is on the way from the policy that sampled it to the current one, for proximal
            'interpolated'.
    """

    logprobs: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    turn_index: Tensor
    old_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    scores: Tensor | None = None
    lengths: Tensor | None = None
    elsewhere_difference: Tensor | None = None
    elsewhere_tokens: Tensor | None = None
    weights: Tensor | None = None
    charges: Tensor | None = None
    shares: Tensor | None = None

    def select(self, rows: Tensor) -> Self:
        """Return the rows with these indices (or where this mask is true)."""
        optional = (
            "old_logprobs",
            "reference_logprobs",
            "entropy",
            "scores",
            "lengths",
            "elsewhere_difference",
            "elsewhere_tokens",
            "weights",
            "charges",
            "shares",
        )
        return replace(
            self,
            logprobs=self.logprobs[rows],
            behaviour_logprobs=self.behaviour_logprobs[rows],
            advantages=self.advantages[rows],
            mask=self.mask[rows],
            turn_index=self.turn_index[rows],
            **{name: part[rows] for name in optional if (part := getattr(self, name)) is not None},
        )


@dataclass(frozen=True, slots=True)
class SurrogateInputs:
    """What a surrogate of the user's reads of a micro-batch. Tensors are `[rows, tokens]`, zero outside the mask.

    Attributes:
        logprobs: Log-probabilities under the policy that is being trained; they carry the gradient.
        log_ratio: Log of the ratio as `ratio` has it, with gradient.
        old_logprobs: Log-probabilities that ratios start from.
        behaviour_logprobs: Log-probabilities recorded when the tokens were sampled.
        advantages: Advantage of each token.
        mask: True where the policy sampled the token.
        turn_index: Turn that a sampled token belongs to; anything outside the mask.
        scores: Return of each row's trajectory, `[rows]`; None if the caller gave none.
    """

    logprobs: Tensor
    log_ratio: Tensor
    old_logprobs: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    turn_index: Tensor
    scores: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepTokens:
    """All rows of one optimizer step, before they are divided. Tensors are `[rows, tokens]` unless said otherwise.

    Attributes:
        trajectory: Episode of each row, int64 `[rows]`.
        mask: True where the policy sampled the token.
        turn_index: Turn of its episode that a sampled token belongs to; anything outside the mask.
        advantages: Advantage of each token.
        behaviour_logprobs: Log-probabilities recorded when the tokens were sampled.
        old_logprobs: Log-probabilities at the start of the update.
        current_logprobs: Log-probabilities when this step begins: the old ones in the first step of an update.
        entropy: Entropy of the policy at each token when this step begins, where the algorithm reads it.
    """

    trajectory: Tensor
    mask: Tensor
    turn_index: Tensor
    advantages: Tensor
    behaviour_logprobs: Tensor
    old_logprobs: Tensor
    current_logprobs: Tensor
    entropy: Tensor | None = None


def required(tensor: Tensor | None, name: str) -> Tensor:
    """Return what an algorithm reads of a batch.

    Raises:
        ValueError: It is missing.
    """
    if tensor is None:
        raise ValueError(f"the algorithm reads '{name}', which is missing")
    return tensor


@dataclass(frozen=True, slots=True)
class TokenStream:
    """Sampled tokens in the order in which they were sampled: observations left out, rows put end to end.

    A trajectory that was cut into a row per turn is here the same stream as in a single row, so that GAE runs over
    all its turns. Tensors have one entry per sampled token of the batch.

    Attributes:
        row: Row of the token.
        column: Index of the token in its row.
        trajectory: Trajectory of the token.
        turn: Turn of the token.
        position: Index of the token in its trajectory.
        turn_end: Whether the token is the last of its turn.
        shape: Number of trajectories and the most tokens that one of them has.
    """

    row: Tensor
    column: Tensor
    trajectory: Tensor
    turn: Tensor
    position: Tensor
    turn_end: Tensor
    shape: tuple[int, int]

    @classmethod
    def from_rows(cls, rows: RowBatch, trajectories: int) -> "TokenStream":
        """Order the sampled tokens of a batch of rows.

        Raises:
            ValueError: If a turn lies in more than one row: no order of its tokens is known.
        """
        return cls.ordered(rows.trajectory, rows.mask, rows.turn_index, trajectories)

    @classmethod
    def ordered(cls, episode: Tensor, mask: Tensor, turn_index: Tensor, trajectories: int) -> "TokenStream":
        """Order the sampled tokens of rows of which episode `[rows]`, mask and turns `[rows, tokens]` are known.

        Raises:
            ValueError: If a turn lies in more than one row: no order of its tokens is known.
        """
        row, column = mask.nonzero(as_tuple=True)
        trajectory, turn = episode[row], turn_index[row, column]
        turns = int(turn.max()) + 1 if len(turn) else 1
        key = trajectory * turns + turn
        order = torch.argsort(key * mask.shape[1] + column, stable=True)
        row, column, trajectory, turn, key = (part[order] for part in (row, column, trajectory, turn, key))
        same_turn = key[1:] == key[:-1]
        if bool((same_turn & (row[1:] != row[:-1])).any()):
            raise ValueError("the sampled tokens of a turn must lie in one row")
        turn_end = torch.ones_like(key, dtype=torch.bool)
        turn_end[:-1] = ~same_turn
        count = torch.bincount(trajectory, minlength=trajectories)
        first = count.cumsum(0) - count
        position = torch.arange(len(key), device=key.device) - first[trajectory]
        longest = int(count.max()) if trajectories else 0
        return cls(row, column, trajectory, turn, position, turn_end, (trajectories, longest))

    def gather(self, values: Tensor) -> Tensor:
        """Return `[rows, tokens]` values as `[trajectories, longest]`, in float64, zeros behind the last token."""
        dense = torch.zeros(self.shape, dtype=torch.float64, device=values.device)
        dense[self.trajectory, self.position] = values[self.row, self.column].double()
        return dense

    def scatter(self, dense: Tensor, like: Tensor) -> Tensor:
        """Return `[trajectories, longest]` values as `[rows, tokens]` of the shape of `like`, zeros elsewhere."""
        values = torch.zeros(like.shape, dtype=dense.dtype, device=dense.device)
        values[self.row, self.column] = dense[self.trajectory, self.position]
        return values

    def flags(self, values: Tensor) -> Tensor:
        """Return a flag per token as bool `[trajectories, longest]`, False behind the last token."""
        dense = torch.zeros(self.shape, dtype=torch.bool, device=values.device)
        dense[self.trajectory, self.position] = values
        return dense

    def sampled(self) -> Tensor:
        """Return which of `[trajectories, longest]` are tokens, and not what is behind the last one."""
        return self.flags(torch.ones_like(self.turn_end))
