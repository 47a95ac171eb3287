"""What the algorithms read: episodes as turns, and training rows as padded tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TrajectoryBatch:
    """The turns of a batch of episodes. Outer lists have an entry per trajectory, inner ones an entry per turn.

    Attributes:
        groups: Group of each trajectory: equal task and seed, so that returns can be compared.
        rewards: Reward of each turn as the environment gave it, its own format penalty included.
        format_penalties: The part of each reward that punishes an unreadable reply (zero or negative).
        valid: Whether the environment could read the reply.
        anchors: Key of the state in which the turn began; None where it is not known.
        tokens: How many tokens the policy sampled in each turn.
        solved: Whether each trajectory reached its goal; empty where nobody asks.
    """

    groups: Sequence[int]
    rewards: Sequence[Sequence[float]]
    format_penalties: Sequence[Sequence[float]]
    valid: Sequence[Sequence[bool]]
    anchors: Sequence[Sequence[str | None]]
    tokens: Sequence[Sequence[int]]
    solved: Sequence[bool] = ()

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
    """

    trajectory: Tensor
    mask: Tensor
    turn_index: Tensor
    values: Tensor | None = None
    old_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None


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
