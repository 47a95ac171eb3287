"""What all kinds of advantages have in common, and what they are made of."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field, PositiveFloat, model_validator

from rollgym.trainer.algorithms.filter_settings import RewardSettings
from rollgym.trainer.algorithms.modes import WhitenForm
from rollgym.trainer.core.strict import Settings, with_current_keys

if TYPE_CHECKING:
    from torch import Tensor

    from rollgym.trainer.algorithms.batch import RowBatch, TokenStream, TrajectoryBatch
    from rollgym.trainer.algorithms.rewards import TurnValues
    from rollgym.trainer.algorithms.state import AlgorithmState

FORMER_KEYS: Mapping[str, str] = MappingProxyType(
    {"token_discount": "gamma", "trace": "gae_lambda", "critic_trace": "critic_gae_lambda"}
)
"""Names that settings of advantages had before; they are still understood in this release."""


def by_current_keys(advantage: Any) -> Any:
    """Return settings of an advantage by the names that they have now, and warn of those that had another.

    Raises:
        ValueError: If one is given by both.
    """
    return with_current_keys(advantage, FORMER_KEYS, "advantage")


@dataclass(frozen=True, slots=True)
class TurnCredit:
    """What advantages of turns are made of.

    Attributes:
        batch: The episodes.
        rewards: Reward of each turn, as everything but filters reads it.
        charges: Added to each turn's own return after discounting; nothing if None.
        state: What is remembered of earlier steps.
        shaping: What was made of the environment's rewards.
    """

    batch: "TrajectoryBatch"
    rewards: "TurnValues"
    charges: "TurnValues | None"
    state: "AlgorithmState"
    shaping: RewardSettings


@dataclass(frozen=True, slots=True)
class TokenCredit:
    """What advantages of tokens are made of.

    Attributes:
        batch: The episodes.
        rows: Their training rows.
        stream: The order of their sampled tokens, whatever rows these lie in.
        rewards: Reward on each token, `[rows, tokens]`.
        shaping: What was made of the environment's rewards.
    """

    batch: "TrajectoryBatch"
    rows: "RowBatch"
    stream: "TokenStream"
    rewards: "Tensor"
    shaping: RewardSettings


@dataclass(frozen=True, slots=True)
class Update:
    """An update that was made.

    Attributes:
        batch: The episodes that it was made of.
        moved: How far it has moved the policy, in nats per token.
        shaping: What was made of the environment's rewards.
    """

    batch: "TrajectoryBatch"
    moved: float
    shaping: RewardSettings


class Advantage(Settings):
    """A kind of advantage: its settings, what is to be known of it, and what it makes of a batch.

    A kind credits turns or tokens: it has `of_turns`, or `per_token` and `of_tokens`. Torch is imported inside of them,
    since settings are read without it.
    """

    kind: str
    unit_of_credit: ClassVar[str]
    """What has one advantage, as the documentation's table says it."""
    formula: ClassVar[str]
    """The same table's formula, in Markdown."""
    per_token: ClassVar[bool] = False
    """Whether tokens are credited, each with what follows it."""
    reads_critic: ClassVar[bool] = False
    """Whether it reads a critic's values."""
    takes_charges: ClassVar[bool] = False
    """Whether it adds what turns are charged to returns of its own."""
    reads_named_rewards: ClassVar[bool] = False
    """Whether it reads rewards by name, and not their sum."""
    reads_squared_probabilities: ClassVar[bool] = False
    """Whether it reads the sum of squared probabilities at each token."""
    follows_rewards: ClassVar[bool] = True
    """Whether episodes of equal rewards in a group are credited alike."""
    reads_moves: ClassVar[bool] = False
    """Whether it reads how far updates have moved the policy."""

    whiten: bool = Field(
        False,
        description="Shift and scale the advantages to mean 0 and standard deviation 1 over the batch's sampled "
        "tokens. Of 'group' with scale 'none': REINFORCE++-baseline.",
    )
    whiten_unbiased: bool = Field(
        True, description="Divide squares by n - 1 (verl), or by n (OpenRLHF, AReaL)."
    )
    whiten_epsilon: PositiveFloat = Field(1e-8, description="Keeps that division finite (AReaL: 1e-5).")
    whiten_form: WhitenForm = Field(
        "variance",
        description="Where it is: added to the variance (verl), to the deviation (AReaL), or the variance's floor "
        "(OpenRLHF); mean: take the mean off alone (OpenRLHF's no_std_norm).",
    )
    clip: PositiveFloat | None = Field(
        None,
        description="Bound the magnitude of every advantage, at the very end; absent: no bound (ROLL: 0.2 for GiGPO).",
    )

    @model_validator(mode="before")
    @classmethod
    def _by_current_keys(cls, values: Any) -> Any:
        return by_current_keys(values)

    @model_validator(mode="after")
    def _whitening_is_read(self) -> Self:
        own = ("whiten_unbiased", "whiten_epsilon", "whiten_form")
        set_here = [name for name in own if getattr(self, name) != type(self).model_fields[name].default]
        if set_here and not self.whiten:
            raise ValueError(f"{', '.join(set_here)}: read with whiten: true only")
        unread = [name for name in set_here if name != "whiten_form"]
        if unread and self.whiten_form == "mean":
            raise ValueError(f"{', '.join(unread)}: whiten_form 'mean' divides by nothing: leave it out")
        return self

    @property
    def compares_members(self) -> bool:
        """Whether it is 0 in a group of one, because it compares a member with the others."""
        return False

    @property
    def reads_greedy(self) -> bool:
        """Whether it reads the return of a greedy episode that is played beside each group."""
        return False

    @property
    def bootstraps(self) -> bool:
        """Whether it reads a critic's value of the observation at which an episode was cut off."""
        return False

    def of_turns(self, credit: "TurnCredit") -> "TurnValues":
        """Return the advantage of every turn, which all its tokens share."""
        raise NotImplementedError(f"advantage '{self.kind}' is computed per token")

    def of_tokens(self, credit: "TokenCredit") -> "tuple[Tensor, Tensor | None]":
        """Return the advantage of every token, and the critic's target if the algorithm has a critic."""
        raise NotImplementedError(f"advantage '{self.kind}' is computed per turn")

    def remembered(self, state: "AlgorithmState", update: "Update") -> "AlgorithmState":
        """Return what is remembered after an update."""
        return state


class Whitened(Advantage):
    """The same, whitened unless it is turned off."""

    whiten: bool = Field(True, description=str(Advantage.model_fields["whiten"].description))
