"""Settings of an algorithm's loss: ratio, surrogate, aggregation, KL, critic."""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from rollgym.trainer.algorithms.modes import AggregationMode, KLEstimator, RatioLevel
from rollgym.trainer.core.strict import Amount, Settings


class RatioSettings(Settings):
    """How the policy's change is measured."""

    level: RatioLevel = Field(
        "token",
        description="Ratio of each token (PPO), or mean over a turn or a whole episode (GSPO, arXiv:2507.18071), "
        "whatever rows its tokens lie in; sequence_sum: the product of the episode's ratios (RLOO in TRL, VESPO).",
    )
    clamp: float = Field(20.0, gt=0.0, le=80.0, description="Largest magnitude of the log ratio (verl: 20).")


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
    """The preference loss to train with, and its parameters."""

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
    def needs_reference(self) -> bool:
        """Whether the loss means nothing without one, because it measures how far the policy is from it."""
        return self.kind == "kto"

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
