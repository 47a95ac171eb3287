"""The settings of an algorithm, part by part. Settings that contradict each other are refused.

Sources are named as in docs/algorithms.md. Presets are in `presets.py`.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from trainer.algorithms.advantage_settings import AdvantageSettings, GroupAdvantage
from trainer.algorithms.modes import AggregationMode, KLEstimator, RatioLevel
from trainer.core.strict import Count, Settings

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class RatioSettings(Settings):
    """How the policy's change is measured."""

    level: RatioLevel = Field(
        "token",
        description="Ratio of each token (PPO), or mean over a turn or a whole episode (GSPO, arXiv:2507.18071), "
        "whatever rows its tokens lie in.",
    )
    clamp: float = Field(20.0, gt=0.0, le=80.0, description="Largest magnitude of the log ratio (verl: 20).")


class PpoSurrogate(Settings):
    """The clipped surrogate (PPO, arXiv:1707.06347)."""

    kind: Literal["ppo"] = "ppo"
    clip_low: Fraction = Field(0.2, description="Lower clip distance.")
    clip_high: NonNegativeFloat = Field(0.2, description="Upper clip distance (DAPO, StarPO-S: 0.28).")
    dual_clip: Annotated[float, Field(gt=1.0)] | None = Field(
        None, description="Bound of the ratio where the advantage is negative (verl: 3.0); absent: off."
    )


class ReinforceSurrogate(Settings):
    """The plain policy gradient: no ratio, no clip."""

    kind: Literal["reinforce"]


class WeightedSurrogate(Settings):
    """Policy gradient weighted by a bounded, detached ratio (CISPO, arXiv:2506.13585; TOPR, arXiv:2503.14286)."""

    kind: Literal["weighted"]
    weight_low: NonNegativeFloat = Field(0.0, description="Smallest weight.")
    weight_high: PositiveFloat = Field(1.28, description="Largest weight.")
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
        return self


SurrogateSettings = Annotated[
    PpoSurrogate | ReinforceSurrogate | WeightedSurrogate, Field(discriminator="kind")
]


class AggregationSettings(Settings):
    """How token losses become one number. All denominators are counts of the whole batch."""

    mode: AggregationMode = Field("token-mean", description="Names as in verl; see docs/algorithms.md.")
    horizon: PositiveInt | None = Field(
        None, description="The constant that 'seq-mean-token-sum-norm' divides by (Dr. GRPO)."
    )

    @model_validator(mode="after")
    def _horizon_fits_mode(self) -> Self:
        if (self.mode == "seq-mean-token-sum-norm") != (self.horizon is not None):
            raise ValueError("'horizon' belongs to mode seq-mean-token-sum-norm, which cannot do without it")
        return self


class KLSettings(Settings):
    """Penalty on the distance to a reference policy: the policy as it was when the run began."""

    coefficient: NonNegativeFloat = Field(0.0, description="0 is off and needs no reference model.")
    estimator: KLEstimator = Field(
        "k3", description="k1 = d, k2 = d^2/2, k3 = exp(-d) - 1 + d, d = lp - reference."
    )
    placement: Literal["loss", "reward"] = Field(
        "loss", description="In the loss, or subtracted from the reward."
    )
    straight_through: bool = Field(
        False, description="Gradient of k2 whatever the estimator (verl's '+' forms); only in the loss."
    )

    @model_validator(mode="after")
    def _gradient_means_something(self) -> Self:
        if self.placement == "reward" and self.straight_through:
            raise ValueError(
                "a KL penalty in the reward has no gradient: straight_through does nothing there"
            )
        if (
            self.coefficient
            and self.placement == "loss"
            and self.estimator == "k1"
            and not self.straight_through
        ):
            raise ValueError(
                "the gradient of k1 in the loss is zero in expectation: use k2 or k3, straight_through, "
                "or placement 'reward'"
            )
        return self


class NoCorrection(Settings):
    """Take sampled tokens as if the policy at the start of the update had sampled them."""

    kind: Literal["off"] = "off"


class TruncateCorrection(Settings):
    """Weigh tokens by exp(old - behaviour), capped (TIS); decoupled PPO (arXiv:2505.24298) where old is recomputed."""

    kind: Literal["truncate"]
    cap: PositiveFloat | None = Field(
        2.0, description="Largest weight (verl: 2.0, AReaL: 5.0); null: no cap."
    )


class BandCorrection(Settings):
    """Weigh tokens by exp(old - behaviour) inside a band and drop them outside it (IcePop)."""

    kind: Literal["band"]
    low: PositiveFloat = Field(0.5, description="Smallest weight that is kept.")
    high: PositiveFloat = Field(5.0, description="Largest weight that is kept.")

    @model_validator(mode="after")
    def _band_is_ordered(self) -> Self:
        if self.low >= self.high:
            raise ValueError("low must be below high")
        return self


CorrectionSettings = Annotated[
    NoCorrection | TruncateCorrection | BandCorrection, Field(discriminator="kind")
]


class NoFilter(Settings):
    """Train on every group."""

    kind: Literal["none"] = "none"


class GroupwiseFilter(Settings):
    """What filters have in common that judge each group by itself."""

    refill: bool = Field(
        True,
        description="Play another group for each that is dropped, so that a step trains on groups_per_step of them "
        "(DAPO's dynamic sampling); false: a step trains on what is left of groups_per_step.",
    )
    max_rounds: Count = Field(
        10,
        description="With refill: a step that has dropped so many times groups_per_step groups is filled no further "
        "and trains on what it has; if that is nothing, the run ends (verl: max_num_gen_batches 10).",
    )

    @model_validator(mode="after")
    def _rounds_are_read(self) -> Self:
        if not self.refill and self.max_rounds != type(self).model_fields["max_rounds"].default:
            raise ValueError("max_rounds is read with refill: true only: leave it out")
        return self


class ZeroVarianceFilter(GroupwiseFilter):
    """Drop groups whose members all got the same return (DAPO, arXiv:2503.14476); groups of one stay."""

    kind: Literal["zero_variance"]
    tolerance: NonNegativeFloat = Field(1e-6, description="A deviation up to this counts as none.")


class SuccessRangeFilter(GroupwiseFilter):
    """Drop groups whose share of solved episodes is not between two bounds: by default all solved, and none."""

    kind: Literal["success_range"]
    above: Fraction = Field(0.0, description="The share must be larger than this.")
    below: Fraction = Field(1.0, description="The share must be smaller than this.")

    @model_validator(mode="after")
    def _range_is_one(self) -> Self:
        if self.above >= self.below:
            raise ValueError("above must be smaller than below")
        return self


class TopFractionFilter(Settings):
    """Keep the groups whose returns differ most (StarPO-S, arXiv:2504.20073)."""

    kind: Literal["top_fraction"]
    fraction: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.25, description="Part of the groups that is kept, rounded down, at least one."
    )


class TopPFilter(Settings):
    """Keep the groups of largest deviation that make up a part of all deviation (RAGEN-2, arXiv:2604.06268)."""

    kind: Literal["top_p"]
    mass: Annotated[float, Field(gt=0.0, le=1.0)] = Field(0.9, description="Part of the summed deviation.")
    slack: NonNegativeFloat = Field(0.01, description="How far below that sum is enough.")


class MinPFilter(Settings):
    """Keep the groups whose deviation is at least a part of the largest one (RAGEN-2)."""

    kind: Literal["min_p"]
    fraction: Fraction = Field(0.1, description="Part of the largest deviation.")


class CustomFilter(Settings):
    """Keep the groups that a function of the user's names."""

    kind: Literal["custom"]
    function: str = Field(
        description="module:attr of a function (groups, returns) -> the groups to keep; entries per trajectory."
    )


FilterSettings = Annotated[
    NoFilter
    | ZeroVarianceFilter
    | SuccessRangeFilter
    | TopFractionFilter
    | TopPFilter
    | MinPFilter
    | CustomFilter,
    Field(discriminator="kind"),
]


class OverlongSettings(Settings):
    """Soft penalty on episodes near the longest length (DAPO, arXiv:2503.14476)."""

    max_tokens: PositiveInt = Field(description="Sampled tokens of an episode at which the penalty is full.")
    buffer_tokens: PositiveInt = Field(description="Tokens before that over which it grows from nothing.")
    penalty: PositiveFloat = Field(1.0, description="The full penalty.")

    @model_validator(mode="after")
    def _buffer_fits(self) -> Self:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError("buffer_tokens cannot exceed max_tokens")
        return self


class RewardSettings(Settings):
    """What is made of the environment's rewards before anything else reads them."""

    invalid_action_penalty: NonNegativeFloat | None = Field(
        None,
        description="Taken off a turn with an unreadable reply, in place of the environment's own penalty.",
    )
    penalty_in: Literal["reward", "return"] = Field(
        "reward",
        description="Where that penalty (or the environment's own) is charged: in the turn's reward, so that the "
        "returns of earlier turns hold it, discounted; or off the turn's own return after discounting (verl-agent).",
    )
    turn_low: float | None = Field(None, description="Smallest reward of a turn.")
    turn_high: float | None = Field(None, description="Largest reward of a turn.")
    overlong: OverlongSettings | None = Field(
        None, description="Penalty on the last turn of very long episodes."
    )
    scale: PositiveFloat = Field(
        1.0,
        description="Factor of every turn's reward, after all of these. A critic learns returns of about 1 soonest.",
    )

    @model_validator(mode="after")
    def _clip_is_ordered(self) -> Self:
        if self.turn_low is not None and self.turn_high is not None and self.turn_low >= self.turn_high:
            raise ValueError("turn_low must be below turn_high")
        return self


class CriticSettings(Settings):
    """The value model's loss: half the squared error, aggregated as the policy's."""

    value_clip: PositiveFloat | None = Field(
        0.5,
        description="How far a value may move from where the update began (verl, OpenRLHF); absent: free.",
    )
    coefficient: PositiveFloat = Field(1.0, description="Weight of the loss, for critics that share weights.")


class AlgorithmSettings(Settings):
    """A whole algorithm, composed of parts. Without settings it is GRPO."""

    advantage: AdvantageSettings = GroupAdvantage()
    ratio: RatioSettings = RatioSettings()
    surrogate: SurrogateSettings = PpoSurrogate()
    aggregation: AggregationSettings = AggregationSettings()
    kl: KLSettings = KLSettings()
    correction: CorrectionSettings = NoCorrection()
    filter: FilterSettings = NoFilter()
    reward: RewardSettings = RewardSettings()
    critic: CriticSettings | None = Field(
        None, description="Needed by the advantages 'gae' and 'bi_level_gae'."
    )
    entropy_coefficient: float = Field(
        0.0, description="Weight of the entropy bonus (RAGEN: 0.001); 0 is off."
    )
    proximal: Literal["recomputed", "behaviour"] = Field(
        "recomputed",
        description="Policy that ratios start from: the weights at the start of the update, or those that sampled.",
    )
    epochs: PositiveInt = Field(1, description="Passes over a batch.")
    minibatches: PositiveInt = Field(1, description="Optimizer steps per pass.")

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        if self.estimates_values and self.critic is None:
            raise ValueError(f"advantage '{self.advantage.kind}' reads a critic: set 'critic' (critic: {{}})")
        if not self.estimates_values and self.critic is not None:
            raise ValueError(f"advantage '{self.advantage.kind}' never reads a critic: set critic: null")
        if self.surrogate.kind == "reinforce":
            if self.ratio.level != "token":
                raise ValueError("surrogate 'reinforce' has no ratio: ratio.level does nothing")
            if self.epochs * self.minibatches > 1:
                raise ValueError(
                    "surrogate 'reinforce' has no ratio: only its first step on a batch is on-policy"
                )
        if self.reward.penalty_in == "return" and self.advantage.kind not in ("group", "turn", "gigpo"):
            raise ValueError(
                f"reward.penalty_in 'return' has no meaning for advantage '{self.advantage.kind}', which makes its own "
                "returns: use 'reward'"
            )
        if self.proximal == "behaviour" and self.correction.kind != "off":
            raise ValueError("proximal 'behaviour' leaves nothing to correct: set correction.kind to off")
        return self

    @property
    def estimates_values(self) -> bool:
        """Whether the advantage reads a critic's values."""
        return self.advantage.kind in ("gae", "bi_level_gae")

    @property
    def updates(self) -> int:
        """Optimizer steps per batch."""
        return self.epochs * self.minibatches

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether log-probabilities at the start of the update must be computed before the first step.

        With one step per batch they are the current ones, and with proximal 'behaviour' the recorded ones.
        """
        penalised = self.kl.coefficient > 0 and self.kl.placement == "reward"
        return penalised or (self.proximal == "recomputed" and self.updates > 1)

    @property
    def reads_behaviour(self) -> bool:
        """Whether log-probabilities at sampling are compared with the policy's."""
        return self.proximal == "behaviour" or self.correction.kind != "off"

    @property
    def needs_reference(self) -> bool:
        """Whether log-probabilities under the reference policy are read."""
        return self.kl.coefficient > 0

    @property
    def needs_entropy(self) -> bool:
        """Whether the entropy must carry a gradient."""
        return self.entropy_coefficient != 0.0
