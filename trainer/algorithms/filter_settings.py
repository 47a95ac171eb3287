"""Settings that select groups and episodes for training, and that transform rewards before any other use."""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from rollgym.trainer.core.strict import Amount, Count, Fraction, Settings


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


class ScoreRangeFilter(GroupwiseFilter):
    """Drop groups whose mean return is not between two bounds (ROLL's difficulty_mask and mean_filter)."""

    kind: Literal["score_range"]
    above: float = Field(0.0, description="The mean must be larger than this.")
    below: float = Field(1.0, description="The mean must be smaller than this.")

    @model_validator(mode="after")
    def _range_is_one(self) -> Self:
        if self.above >= self.below:
            raise ValueError("above must be smaller than below")
        return self


class RankedFilter(Settings):
    """What filters have in common that compare the groups of a step by a score (RAGEN-2, arXiv:2604.06268)."""

    by: Literal["deviation", "mean", "sum", "length"] = Field(
        "deviation",
        description="Score of a group: deviation, mean or sum of its returns, or its episodes' mean length in sampled "
        "tokens.",
    )
    keep: Literal["largest", "smallest"] = Field("largest", description="Which scores are kept first.")
    include_zero: bool = Field(True, description="Whether groups of score 0 take part at all.")


class TopFractionFilter(RankedFilter):
    """Keep the groups whose returns differ most (StarPO-S, arXiv:2504.20073)."""

    kind: Literal["top_fraction"]
    fraction: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.25, description="Part of the groups that is kept, rounded down, at least one."
    )


class TopCountFilter(RankedFilter):
    """Keep so many groups, those that score highest (RAGEN's top_k_abs)."""

    kind: Literal["top_count"]
    count: Count = Field(description="How many groups are kept.")


class TopPFilter(RankedFilter):
    """Keep the groups of largest deviation that make up a part of all deviation (RAGEN-2, arXiv:2604.06268)."""

    kind: Literal["top_p"]
    mass: Annotated[float, Field(gt=0.0, le=1.0)] = Field(0.9, description="Part of the summed deviation.")
    slack: NonNegativeFloat = Field(0.01, description="How far below that sum is enough; linear only.")
    shares: Literal["linear", "softmax"] = Field(
        "linear", description="Share of a group: its score itself, or the softmax of the scores."
    )

    @model_validator(mode="after")
    def _slack_is_read(self) -> Self:
        if self.shares != "linear" and self.slack != type(self).model_fields["slack"].default:
            raise ValueError("slack is read with shares: linear only: leave it out")
        return self


class MinPFilter(RankedFilter):
    """Keep the groups whose deviation is at least a part of the largest one (RAGEN-2)."""

    kind: Literal["min_p"]
    fraction: Fraction = Field(0.1, description="Part of the largest deviation.")


class CustomFilter(Settings):
    """Keep the groups that a function of the user's names."""

    kind: Literal["custom"]
    function: str = Field(
        description="module:attr of a function (groups, returns) -> the groups to keep; entries per trajectory."
    )
    sees: Literal["returns", "batch"] = Field(
        "returns", description="What it is given: (groups, returns), or the whole TrajectoryBatch."
    )


FilterSettings = Annotated[
    NoFilter
    | ZeroVarianceFilter
    | SuccessRangeFilter
    | ScoreRangeFilter
    | TopFractionFilter
    | TopCountFilter
    | TopPFilter
    | MinPFilter
    | CustomFilter,
    Field(discriminator="kind"),
]


class AllEpisodes(Settings):
    """Train on every episode of the groups that are kept."""

    kind: Literal["all"] = "all"


class ChosenEpisodes(Settings):
    """What selections of episodes have in common."""

    in_statistics: bool = Field(
        True,
        description="Whether episodes that are left out still count in baselines and deviations of their groups.",
    )


class FinishedEpisodes(ChosenEpisodes):
    """Leave episodes out that were cut off: overlong filtering (DAPO, section 3.4), ROLL's max_len_mask."""

    kind: Literal["finished"]


class ResampledEpisodes(Settings):
    """Of more episodes than are trained on, keep clean successes and any failures (GRPO-RoC, arXiv:2508.20722).

    Successes and failures keep their shares. Of the successes those of the fewest unreadable replies stay, of the
    failures the first ones, which are a uniform draw. The group's statistics are those of what stays.
    """

    kind: Literal["resample_on_correct"]
    size: Count = Field(description="Episodes of each group that are kept; the paper plays twice as many.")
    score_threshold: float = Field(0.0, description="An episode is a success if its return is above this.")
    at_least: Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        1, description="Successes, and failures, that are kept at least, where there are so many."
    )


class ShortestEpisodes(Settings):
    """Of more episodes than are trained on, keep the shortest of each group (GFPO, arXiv:2508.09726).

    The group's statistics are those of what stays.
    """

    kind: Literal["shortest"]
    size: Count = Field(
        description="Episodes of each group that are kept; the paper plays two to three times as many."
    )
    by: Literal["length", "return_per_token"] = Field(
        "length", description="The shortest first, or those of the most return for each sampled token."
    )


class CustomEpisodes(ChosenEpisodes):
    """Keep the episodes that a function of the user's names."""

    kind: Literal["custom"]
    function: str = Field(
        description="module:attr of a function TrajectoryBatch -> whether each trajectory is kept."
    )


EpisodeSettings = Annotated[
    AllEpisodes | FinishedEpisodes | ResampledEpisodes | ShortestEpisodes | CustomEpisodes,
    Field(discriminator="kind"),
]


class OverlongSettings(Settings):
    """Soft penalty on episodes near the longest length (DAPO, arXiv:2503.14476)."""

    max_tokens: Amount = Field(description="Sampled tokens of an episode at which the penalty is full.")
    buffer_tokens: Amount = Field(description="Tokens before that over which it grows from nothing.")
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
    truncated_scale: Fraction = Field(
        1.0,
        description="Factor of the rewards of episodes that were cut off (ProRL; stop_properly_penalty_coef in "
        "NeMo-RL); 0: they earn nothing.",
    )
    truncated_reward: float | None = Field(
        None,
        allow_inf_nan=False,
        description="What episodes that were cut off earn, in place of all their rewards, scaled or not (OpenRLHF's "
        "stop_properly_penalty_coef below 0); absent: what they earned.",
    )
    scale: PositiveFloat = Field(
        1.0,
        description="Factor of every turn's reward, after all of these. A critic learns returns of about 1 soonest.",
    )
    offset: float = Field(
        0.0,
        description="Added to an episode's last turn, after the scale: 0 and 1 become -1 and 1 by 2 and -1.",
    )
    normalise: Literal["none", "batch", "running"] = Field(
        "none",
        description="Divide every turn's reward by the deviation of returns: of this step's episodes, or of all so far "
        "(a state that checkpoints keep).",
    )
    normalise_mean: bool = Field(
        False, description="With normalise: also take their mean off each episode's last turn (ROLL, AReaL)."
    )

    @model_validator(mode="after")
    def _clip_is_ordered(self) -> Self:
        if self.turn_low is not None and self.turn_high is not None and self.turn_low >= self.turn_high:
            raise ValueError("turn_low must be below turn_high")
        if self.truncated_reward is not None and self.truncated_scale != 1.0:
            raise ValueError("truncated_reward leaves nothing for truncated_scale to scale: choose one")
        if self.normalise_mean and self.normalise == "none":
            raise ValueError("reward.normalise_mean needs reward.normalise batch or running")
        if self.normalise != "none" and self.penalty_in == "return":
            raise ValueError("reward.normalise knows rewards alone: set reward.penalty_in to 'reward'")
        return self
