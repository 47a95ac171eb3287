"""Settings of an algorithm's loss: ratio, surrogate, aggregation, KL, critic."""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from rollgym.trainer.algorithms.modes import AggregationMode, KLEstimator, RatioLevel
from rollgym.trainer.core.strict import Amount, Fraction, Settings


class RatioSettings(Settings):
    """How the policy's change is measured."""

    level: RatioLevel = Field(
        "token",
        description="Ratio of each token (PPO), or mean over a turn or a whole episode (GSPO, arXiv:2507.18071), "
        "whatever rows its tokens lie in; sequence_sum: the product of the episode's ratios (RLOO in TRL, VESPO).",
    )
    clamp: float = Field(20.0, gt=0.0, le=80.0, description="Largest magnitude of the log ratio (verl: 20).")


class PpoSurrogate(Settings):
    """The clipped surrogate (PPO, arXiv:1707.06347)."""

    kind: Literal["ppo"] = "ppo"
    clip_low: Fraction | None = Field(0.2, description="Lower clip distance; null: none.")
    clip_high: NonNegativeFloat | None = Field(
        0.2, description="Upper clip distance (DAPO, StarPO-S: 0.28); null: none."
    )
    dual_clip: Annotated[float, Field(gt=1.0)] | None = Field(
        None,
        description="Bound of the ratio where the advantage is negative (verl: 3.0; TRL's delta); absent: off.",
    )


class ReinforceSurrogate(Settings):
    """The plain policy gradient: no ratio, no clip."""

    kind: Literal["reinforce"]


class WeightedSurrogate(Settings):
    """Policy gradient weighted by a bounded, detached ratio (CISPO, arXiv:2506.13585; TOPR, arXiv:2503.14286)."""

    kind: Literal["weighted"]
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


class SapoSurrogate(Settings):
    """A smooth gate in place of a clip: `-A sigmoid(tau (r - 1)) 4 / tau` (SAPO, arXiv:2511.20347)."""

    kind: Literal["sapo"]
    tau_positive: PositiveFloat = Field(1.0, description="tau where the advantage is positive.")
    tau_negative: PositiveFloat = Field(1.05, description="tau elsewhere.")


class QuadraticSurrogate(Settings):
    """Policy gradient that pays for every move: `-A lp + c/2 (lp - old)^2` (Kimi 1.5, arXiv:2501.12599; DRO)."""

    kind: Literal["quadratic"]
    coefficient: PositiveFloat = Field(0.1, description="c (ROLL's kimi15: 0.1; verl's dro_beta).")


class CpgdSurrogate(Settings):
    """Policy gradient of tokens whose ratio has not left its bounds in the advantage's direction (CPGD)."""

    kind: Literal["cpgd"]
    clip_low: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.2, description="How far the ratio may fall where the advantage is negative (siiRL: 0.2)."
    )
    clip_high: NonNegativeFloat = Field(
        0.2, description="How far it may rise where the advantage is positive."
    )


class DppoSurrogate(Settings):
    """Policy gradient inside a trust region of probabilities, not of ratios (DPPO, arXiv:2602.04879)."""

    kind: Literal["dppo"]
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


class GmpoSurrogate(Settings):
    """Geometric mean of an episode's clipped ratios times its advantage (GMPO, arXiv:2507.20673)."""

    kind: Literal["gmpo"]
    clip_low: NonNegativeFloat = Field(0.4, description="How far a token's log ratio may fall.")
    clip_high: NonNegativeFloat = Field(0.4, description="How far a token's log ratio may rise.")


class VespoSurrogate(Settings):
    """Policy gradient weighted by a gamma kernel of the episode's ratio: `w^k exp(l (1 - w))` (VESPO, as in TRL)."""

    kind: Literal["vespo"]
    k_positive: NonNegativeFloat = Field(2.0, description="k where the advantage is not negative.")
    rate_positive: PositiveFloat = Field(3.0, description="l there.")
    k_negative: NonNegativeFloat = Field(3.0, description="k where it is.")
    rate_negative: PositiveFloat = Field(2.0, description="l there.")


class CustomSurrogate(Settings):
    """A loss of the user's."""

    kind: Literal["custom"]
    function: str = Field(
        description="module:attr of a function SurrogateInputs -> the loss of each token, `[rows, tokens]`. It runs "
        "wherever the model is trained, on one micro-batch at a time: what it returns for a token may depend on no "
        "other row."
    )


SurrogateSettings = Annotated[
    PpoSurrogate
    | ReinforceSurrogate
    | WeightedSurrogate
    | SapoSurrogate
    | QuadraticSurrogate
    | CpgdSurrogate
    | DppoSurrogate
    | GmpoSurrogate
    | VespoSurrogate
    | CustomSurrogate,
    Field(discriminator="kind"),
]


class AggregationSettings(Settings):
    """How token losses become one number. All denominators are counts of the whole batch."""

    mode: AggregationMode = Field("token-mean", description="Names as in verl; see docs/algorithms.md.")
    unit: Literal["sequence", "trajectory", "row", "group"] = Field(
        "sequence",
        description="What counts once in the seq modes. sequence: a trajectory, or with a row per turn a turn; "
        "trajectory: always the whole episode; row: each training row (verl), so that an episode whose history was "
        "edited counts once for each of its segments; group: all episodes of a group together (SkyRL's prompt_mean).",
    )
    horizon: Amount | None = Field(
        None, description="The constant that 'seq-mean-token-sum-norm' divides by (Dr. GRPO)."
    )

    @model_validator(mode="after")
    def _horizon_fits_mode(self) -> Self:
        if (self.mode == "seq-mean-token-sum-norm") != (self.horizon is not None):
            raise ValueError("'horizon' belongs to mode seq-mean-token-sum-norm, which cannot do without it")
        if self.mode in ("token-mean", "token-sum") and self.unit != "sequence":
            raise ValueError(f"mode {self.mode} counts tokens: unit does nothing there, leave it out")
        return self


class KLSettings(Settings):
    """Penalty on the distance to a reference policy: the policy as it was when the run began."""

    coefficient: NonNegativeFloat = Field(0.0, description="0 is off and needs no reference model.")
    estimator: KLEstimator = Field(
        "k3", description="k1 = d, k2 = d^2/2, k3 = exp(-d) - 1 + d, abs = |d|; d = lp - reference."
    )
    placement: Literal["loss", "reward", "return", "advantage"] = Field(
        "loss",
        description="In the loss; subtracted from the reward, before any baseline; from what each token is worth, with "
        "what follows it, after the baseline (OpenRLHF beside a group); or from the advantages, less its mean over the "
        "batch (tinker-cookbook; k1 only).",
    )
    limit: PositiveFloat | None = Field(
        None, description="Largest magnitude of the estimate at a token (AReaL, OpenRLHF: 10); absent: none."
    )
    straight_through: bool = Field(
        False, description="Gradient of k2 whatever the estimator (verl's '+' forms); only in the loss."
    )
    gradient_cap: PositiveFloat | None = Field(
        None,
        description="With straight_through: multiply that gradient by the ratio, detached and at most this, so that it "
        "is right off-policy, too (OpenRLHF: 10); absent: no such factor.",
    )
    unbiased: bool = Field(
        False,
        description="Multiply the estimate (k3 or k1) by the token's ratio, with its gradient: unbiased off-policy "
        "(DeepSeek-V3.2); only in the loss.",
    )
    target: PositiveFloat | None = Field(
        None,
        description="Adapt the coefficient after every step so that the estimate stays near this "
        "(arXiv:1909.08593, section 2.2); absent: it is fixed.",
    )
    horizon: Amount = Field(
        10_000, description="Episodes over which an adaptive coefficient moves (verl, ROLL: 10000)."
    )

    @model_validator(mode="after")
    def _gradient_means_something(self) -> Self:
        if self.placement != "loss" and (self.straight_through or self.unbiased):
            name = "straight_through" if self.straight_through else "unbiased"
            raise ValueError(
                f"a KL penalty in the {self.placement} has no gradient: {name} does nothing there"
            )
        if self.placement == "advantage" and (self.estimator != "k1" or self.limit is not None):
            raise ValueError(
                "a KL penalty in the advantages is k1 as it is: set kl.estimator to k1, and no limit"
            )
        if self.gradient_cap is not None and not self.straight_through:
            raise ValueError("kl.gradient_cap is read with kl.straight_through only: leave it out")
        if self.unbiased and self.estimator not in ("k1", "k3"):
            raise ValueError(
                f"{self.estimator} times the ratio has a gradient of no divergence: with unbiased take k3, or k1"
            )
        if self.straight_through and self.unbiased:
            raise ValueError("straight_through and unbiased are two ways to mend the gradient: choose one")
        if (
            self.coefficient
            and self.placement == "loss"
            and self.estimator == "k1"
            and not (self.straight_through or self.unbiased)
        ):
            raise ValueError(
                "the gradient of k1 in the loss is zero in expectation: use k2 or k3, straight_through, unbiased, "
                "or placement 'reward'"
            )
        if self.target is not None and not self.coefficient:
            raise ValueError("an adaptive coefficient needs one to begin with: set kl.coefficient above 0")
        if self.target is None and self.horizon != type(self).model_fields["horizon"].default:
            raise ValueError("kl.horizon is read with kl.target only: leave it out")
        return self


class PositiveNllSettings(Settings):
    """Likelihood of the episodes that did well, beside the surrogate (VAPO, arXiv:2504.05118, section 4.3)."""

    coefficient: NonNegativeFloat = Field(
        0.0, description="Weight of the mean over the sampled tokens of those episodes (VAPO: 0.1); 0 is off."
    )
    score_threshold: float = Field(
        0.0, allow_inf_nan=False, description="An episode did well if its return is above this."
    )

    @model_validator(mode="after")
    def _threshold_is_read(self) -> Self:
        if not self.coefficient and self.score_threshold:
            raise ValueError("positive_nll.score_threshold is read with a coefficient above 0 only")
        return self


class CriticSettings(Settings):
    """The value model's loss, aggregated as the policy's."""

    value_clip: PositiveFloat | None = Field(
        0.5,
        description="How far a value may move from where the update began (verl, OpenRLHF); absent: free.",
    )
    coefficient: PositiveFloat = Field(1.0, description="Weight of the loss, for critics that share weights.")
    loss: Literal["squared", "huber"] = Field(
        "squared", description="Half the squared error, or half of it near 0 and linear beyond huber_delta."
    )
    huber_delta: PositiveFloat = Field(10.0, description="Where 'huber' becomes linear (AReaL: 10).")

    @model_validator(mode="after")
    def _delta_is_read(self) -> Self:
        if self.loss != "huber" and self.huber_delta != type(self).model_fields["huber_delta"].default:
            raise ValueError("critic.huber_delta is read with critic.loss huber only: leave it out")
        return self


PreferenceKind = Literal["dpo", "robust", "hinge", "ipo", "kto", "orpo", "simpo"]

_READ_BY: dict[str, tuple[str, ...]] = {
    "label_smoothing": ("dpo", "robust", "simpo"),
    "margin": ("simpo",),
    "average": ("ipo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}


class PreferenceLossSettings(Settings):
    """The loss of preferences."""

    kind: PreferenceKind = Field(
        "dpo",
        description="dpo (arXiv:2305.18290); robust, the same with labels that may be wrong (2403.00409); hinge (SLiC, "
        "2305.10425); ipo (2310.12036); kto, of single replies that are good or bad (2402.01306); orpo (2403.07691); "
        "simpo (2405.14734).",
    )
    beta: PositiveFloat | None = Field(
        None,
        description="Strength: of the pull towards the reference (dpo, robust, hinge, ipo, kto), of the odds ratio "
        "(orpo), of the difference of mean log-probabilities (simpo). Absent: 2.0 for simpo, else 0.1.",
    )
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = Field(
        0.0, description="Share of pairs whose order is wrong: conservative dpo, robust, simpo."
    )
    margin: NonNegativeFloat = Field(
        1.0, description="simpo: its gamma, by which the chosen one must be better."
    )
    average: bool = Field(
        True,
        description="ipo: log-ratios per token (TRL, and the paper's authors) in place of their sums (ROLL).",
    )
    desirable_weight: PositiveFloat = Field(1.0, description="kto: weight of good replies.")
    undesirable_weight: PositiveFloat = Field(1.0, description="kto: weight of bad replies.")

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the policy with another one."""
        return self.kind not in ("orpo", "simpo")

    @property
    def paired(self) -> bool:
        """Whether an example is two replies, and not one."""
        return self.kind != "kto"

    @model_validator(mode="after")
    def _numbers_are_read(self) -> Self:
        for name, kinds in _READ_BY.items():
            if self.kind not in kinds and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} is read by kind {' and '.join(kinds)} only, not by '{self.kind}': leave it out"
                )
        return self
