"""Settings that select groups and episodes for training, and that transform rewards before any other use."""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from rollgym.trainer.core.strict import Amount, Count, Fraction, Settings


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
        1, description="Least number of successes, and of failures, that are kept, if there are as many."
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
