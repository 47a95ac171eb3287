"""The kinds of surrogates for the policy's objective, one class each, and the tuple that lists them."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from rollgym.trainer.algorithms.modes import RatioLevel
from rollgym.trainer.core.kinds import Kinds
from rollgym.trainer.core.strict import Fraction, Settings

if TYPE_CHECKING:
    from torch import Tensor

    from rollgym.trainer.algorithms.batch import SurrogateInputs
    from rollgym.trainer.algorithms.losses import SurrogateLoss
    from rollgym.trainer.algorithms.ratio import Clip


class Surrogate(Settings):
    """A kind of surrogate: its settings, what is to be known of it, and the losses that it makes of tokens.

    Torch is imported inside of its functions, since settings are read without it.
    """

    kind: str
    formula: ClassVar[str]
    """Its formula, in Markdown, for the documentation's table."""
    has_ratio: ClassVar[bool] = True
    """Whether it reads how far the policy has moved; without that only the first step on a batch is on-policy."""
    ratio_level: ClassVar[RatioLevel | None] = None
    """What its ratios must be of; None for any."""
    follows_advantages: ClassVar[bool] = True
    """Whether tokens of advantage 0 have no gradient, whatever else is given."""

    def loss(self, inputs: "SurrogateInputs") -> "SurrogateLoss":
        """Return the loss of each token of a micro-batch, and where bounds took hold."""
        raise NotImplementedError

    def ratio_clip(self, advantages: "Tensor") -> "Clip | None":
        """Return the bounds of each token's log ratio before a mean is taken, if there are any."""
        return None


class PpoSurrogate(Surrogate):
    """The clipped surrogate (PPO, arXiv:1707.06347)."""

    kind: Literal["ppo"] = "ppo"
    formula: ClassVar[str] = (
        "`max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))`, null: no such bound; `dual_clip` c: at "
        "most `-A c` where A < 0"
    )

    clip_low: Fraction | None = Field(0.2, description="Lower clip distance; null: none.")
    clip_high: NonNegativeFloat | None = Field(
        0.2, description="Upper clip distance (DAPO, StarPO-S: 0.28); null: none."
    )
    dual_clip: Annotated[float, Field(gt=1.0)] | None = Field(
        None,
        description="Bound of the ratio where the advantage is negative (verl: 3.0; TRL's delta); absent: off.",
    )

    def loss(self, inputs: "SurrogateInputs") -> "SurrogateLoss":
        """Return the loss of each token."""
        from rollgym.trainer.algorithms.losses import ppo_surrogate

        return ppo_surrogate(
            inputs.log_ratio,
            inputs.advantages,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )


class ReinforceSurrogate(Surrogate):
    """The plain policy gradient: no ratio, no clip."""

    kind: Literal["reinforce"]
    formula: ClassVar[str] = "`-A lp`"
    has_ratio: ClassVar[bool] = False

    def loss(self, inputs: "SurrogateInputs") -> "SurrogateLoss":
        """Return the loss of each token."""
        from rollgym.trainer.algorithms.losses import reinforce_surrogate

        return reinforce_surrogate(inputs.logprobs, inputs.advantages)


class WeightedSurrogate(Surrogate):
    """Policy gradient weighted by a bounded, detached ratio (CISPO, arXiv:2506.13585; TOPR, arXiv:2503.14286)."""

    kind: Literal["weighted"]
    formula: ClassVar[str] = (
        "`-sg(clip(r, weight_low, weight_high)) A lp`; CISPO; `outside: drop`: 0 beyond the bounds; "
        "TOPR with `[0, 1]` and `applies_to: negative_scores`: episodes that scored at most "
        "`score_threshold` (0)"
    )

    weight_low: NonNegativeFloat = Field(0.0, description="Smallest weight.")
    weight_high: PositiveFloat = Field(1.28, description="Largest weight.")
    outside: Literal["clip", "drop"] = Field(
        "clip",
        description="Outside these bounds the weight is the nearer bound, or 0 (DIS in slime; prime-rl of 2025).",
    )
    applies_to: Literal["all", "negative_scores"] = Field(
        "all", description="Weigh every token, or only those of negative episodes (TOPR)."
    )
    score_threshold: float = Field(
        0.0,
        allow_inf_nan=False,
        description="An episode is negative if its return is at most this: with rewards of 0 and 1, a failed one.",
    )

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> Self:
        if self.weight_low >= self.weight_high:
            raise ValueError("weight_low must be below weight_high")
        if self.score_threshold and self.applies_to == "all":
            raise ValueError("score_threshold is read with applies_to: negative_scores only: leave it out")
        return self

    def loss(self, inputs: "SurrogateInputs") -> "SurrogateLoss":
        """Return the loss of each token."""
        from rollgym.trainer.algorithms.batch import required
        from rollgym.trainer.algorithms.losses import weighted_surrogate

        applies = None
        if self.applies_to == "negative_scores":
            applies = (required(inputs.scores, "scores") <= self.score_threshold)[:, None]
        return weighted_surrogate(
            inputs.logprobs,
            inputs.log_ratio,
            inputs.advantages,
            weight_low=self.weight_low,
            weight_high=self.weight_high,
            applies=applies,
            outside=self.outside,
        )


class SapoSurrogate(Surrogate):
    """A smooth gate in place of a clip: `-A sigmoid(tau (r - 1)) 4 / tau` (SAPO, arXiv:2511.20347)."""

    kind: Literal["sapo"]
    formula: ClassVar[str] = "`-A sigmoid(tau (r - 1)) 4 / tau`, tau by the sign of A"

    tau_positive: PositiveFloat = Field(1.0, description="tau where the advantage is positive.")
    tau_negative: PositiveFloat = Field(1.05, description="tau elsewhere.")

    def loss(self, inputs: "SurrogateInputs") -> "SurrogateLoss":
        """Return the loss of each token."""
        from rollgym.trainer.algorithms.losses import sapo_surrogate

        return sapo_surrogate(
            inputs.log_ratio,
            inputs.advantages,
            tau_positive=self.tau_positive,
            tau_negative=self.tau_negative,
        )


class QuadraticSurrogate(Surrogate):
    """Policy gradient that pays for every move: `-A lp + c/2 (lp - old)^2` (Kimi 1.5, arXiv:2501.12599; DRO)."""

    kind: Literal["quadratic"]
    formula: ClassVar[str] = "`-A lp + c / 2 (lp - old)^2` (Kimi 1.5, DRO)"
    ratio_level: ClassVar[RatioLevel | None] = "token"

    coefficient: PositiveFloat = Field(0.1, description="c (ROLL's kimi15: 0.1; verl's dro_beta).")

    def loss(self, inputs: "SurrogateInputs") -> "SurrogateLoss":
        """Return the loss of each token."""
        from rollgym.trainer.algorithms.losses import quadratic_surrogate

        return quadratic_surrogate(
            inputs.logprobs, inputs.old_logprobs, inputs.advantages, coefficient=self.coefficient
        )


class CpgdSurrogate(Surrogate):
    """Policy gradient of tokens whose ratio has not left its bounds in the advantage's direction (CPGD)."""

    kind: Literal["cpgd"]
    formula: ClassVar[str] = (
        "`-A lp`, lp at most `old + log(1 + clip_high)` where A > 0, at least `old + log(1 - clip_low)` "
        "elsewhere (CPGD, 2505.12504)"
    )
    ratio_level: ClassVar[RatioLevel | None] = "token"

    clip_low: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.2, description="How far the ratio may fall where the advantage is negative (siiRL: 0.2)."
    )
    clip_high: NonNegativeFloat = Field(
        0.2, description="How far it may rise where the advantage is positive."
    )

    def loss(self, inputs: "SurrogateInputs") -> "SurrogateLoss":
        """Return the loss of each token."""
        from rollgym.trainer.algorithms.losses import cpgd_surrogate

        return cpgd_surrogate(
            inputs.logprobs,
            inputs.old_logprobs,
            inputs.advantages,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )


class DppoSurrogate(Surrogate):
    """Policy gradient inside a trust region of probabilities, not of ratios (DPPO, arXiv:2602.04879)."""

    kind: Literal["dppo"]
    formula: ClassVar[str] = (
        "`-sg(min(r, cap)) A lp`, 0 where the token's probability moved further than `low`, `high` in "
        "A's direction (`two_sided`: in either, INTELLECT's IPO); `+ penalty (lp - old)^2`"
    )
    ratio_level: ClassVar[RatioLevel | None] = "token"

    divergence: Literal["tv", "kl"] = Field(
        "tv", description="How far a token's probability moved, or the KL of token against all others."
    )
    low: NonNegativeFloat = Field(0.2, description="How far it may fall where the advantage is negative.")
    high: NonNegativeFloat = Field(0.2, description="How far it may rise where the advantage is positive.")
    cap: PositiveFloat | None = Field(
        20.0, description="Largest weight of a token (verl: 20); null: none (prime-rl)."
    )
    penalty: NonNegativeFloat = Field(
        0.0, description="Weight of (lp - old)^2 on every token (prime-rl's kl_tau: 1e-3)."
    )
    two_sided: bool = Field(
        False, description="Whether both bounds hold whatever the advantage's sign (INTELLECT's IPO)."
    )

    def loss(self, inputs: "SurrogateInputs") -> "SurrogateLoss":
        """Return the loss of each token."""
        from rollgym.trainer.algorithms.losses import dppo_surrogate

        return dppo_surrogate(
            inputs.logprobs,
            inputs.old_logprobs,
            inputs.advantages,
            divergence=self.divergence,
            low=self.low,
            high=self.high,
            cap=self.cap,
            penalty=self.penalty,
            two_sided=self.two_sided,
        )


class GmpoSurrogate(Surrogate):
    """Geometric mean of an episode's clipped ratios times its advantage (GMPO, arXiv:2507.20673)."""

    kind: Literal["gmpo"]
    formula: ClassVar[str] = (
        "`-A exp(mean(clip(lp - old)))` over the episode, clipped towards the pessimistic side, "
        "`ratio.level: sequence`"
    )
    ratio_level: ClassVar[RatioLevel | None] = "sequence"

    clip_low: NonNegativeFloat = Field(0.4, description="How far a token's log ratio may fall.")
    clip_high: NonNegativeFloat = Field(0.4, description="How far a token's log ratio may rise.")

    def loss(self, inputs: "SurrogateInputs") -> "SurrogateLoss":
        """Return the loss of each token."""
        from rollgym.trainer.algorithms.losses import geometric_surrogate

        return geometric_surrogate(inputs.log_ratio, inputs.advantages)

    def ratio_clip(self, advantages: "Tensor") -> "Clip":
        """Bound the log ratio of each token."""
        from rollgym.trainer.algorithms.ratio import Clip

        return Clip(advantages, self.clip_low, self.clip_high)


class VespoSurrogate(Surrogate):
    """Policy gradient weighted by a gamma kernel of the episode's ratio: `w^k exp(l (1 - w))` (VESPO, as in TRL)."""

    kind: Literal["vespo"]
    formula: ClassVar[str] = "`-sg(w^k exp(l (1 - w))) A lp`, w the ratio, k and l by the sign of A"
    ratio_level: ClassVar[RatioLevel | None] = "sequence_sum"

    k_positive: NonNegativeFloat = Field(2.0, description="k where the advantage is not negative.")
    rate_positive: PositiveFloat = Field(3.0, description="l there.")
    k_negative: NonNegativeFloat = Field(3.0, description="k where it is.")
    rate_negative: PositiveFloat = Field(2.0, description="l there.")

    def loss(self, inputs: "SurrogateInputs") -> "SurrogateLoss":
        """Return the loss of each token."""
        from rollgym.trainer.algorithms.losses import vespo_surrogate

        return vespo_surrogate(
            inputs.logprobs,
            inputs.log_ratio,
            inputs.advantages,
            k_positive=self.k_positive,
            rate_positive=self.rate_positive,
            k_negative=self.k_negative,
            rate_negative=self.rate_negative,
        )


class CustomSurrogate(Surrogate):
    """A loss of the user's."""

    kind: Literal["custom"]
    formula: ClassVar[str] = (
        "`function: module:attr`, a function `SurrogateInputs -> token losses`, on one micro-batch at a time"
    )
    follows_advantages: ClassVar[bool] = False

    function: str = Field(
        description="module:attr of a function SurrogateInputs -> the loss of each token, `[rows, tokens]`. It runs "
        "wherever the model is trained, on one micro-batch at a time: what it returns for a token may depend on no "
        "other row."
    )

    def loss(self, inputs: "SurrogateInputs") -> "SurrogateLoss":
        """Return the loss of each token."""
        from rollgym.trainer.algorithms.user_functions import losses_of

        return losses_of(self.function, inputs)


SURROGATES = (
    PpoSurrogate,
    ReinforceSurrogate,
    WeightedSurrogate,
    SapoSurrogate,
    QuadraticSurrogate,
    CpgdSurrogate,
    DppoSurrogate,
    GmpoSurrogate,
    VespoSurrogate,
    CustomSurrogate,
)
"""Ours, in the order of the documentation."""

SurrogateSettings = Annotated[Surrogate, Kinds("rollgym.surrogates", Surrogate, SURROGATES)]
