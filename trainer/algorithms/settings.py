"""The settings of a whole algorithm, composed of parts. Settings that contradict each other are refused.

Sources are named as in docs/algorithms.md. The parts are in `advantage_settings.py`, `loss_settings.py`,
`token_settings.py` and `filter_settings.py`, presets in `presets.py`.
"""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rollgym.trainer.algorithms.advantage_settings import ADVANTAGES, AdvantageSettings, GroupAdvantage
from rollgym.trainer.algorithms.filter_settings import AllEpisodes, EpisodeSettings, RewardSettings
from rollgym.trainer.algorithms.group_filters import FilterSettings, NoFilter
from rollgym.trainer.algorithms.loss_settings import (
    AggregationSettings,
    CriticSettings,
    KLSettings,
    PositiveNllSettings,
    RatioSettings,
)
from rollgym.trainer.algorithms.surrogates import PpoSurrogate, SurrogateSettings
from rollgym.trainer.algorithms.token_settings import (
    BandCorrection,
    CorrectionSettings,
    NoCorrection,
    NoSelection,
    Rejection,
    SelectionSettings,
    TruncateCorrection,
    correction_named,
)
from rollgym.trainer.core.kinds import kind_of
from rollgym.trainer.core.strict import Amount, Settings

_READERS_OF_CRITICS = " and ".join(f"'{kind_of(each)}'" for each in ADVANTAGES if each.reads_critic)


class AlgorithmSettings(Settings):
    """A whole algorithm, composed of parts. Without settings it is GRPO."""

    advantage: AdvantageSettings = GroupAdvantage()
    ratio: RatioSettings = RatioSettings()
    surrogate: SurrogateSettings = PpoSurrogate()
    aggregation: AggregationSettings = AggregationSettings()
    kl: KLSettings = KLSettings()
    correction: CorrectionSettings = NoCorrection()
    selection: SelectionSettings = NoSelection()
    filter: FilterSettings = NoFilter()
    episodes: EpisodeSettings = AllEpisodes()
    reward: RewardSettings = RewardSettings()
    critic: CriticSettings | None = Field(
        None, description=f"Needed by the advantages {_READERS_OF_CRITICS}."
    )
    positive_nll: PositiveNllSettings = PositiveNllSettings()
    entropy_coefficient: float = Field(
        0.0, description="Weight of the entropy bonus (RAGEN: 0.001); 0 is off."
    )
    proximal: Literal["recomputed", "behaviour", "interpolated"] = Field(
        "recomputed",
        description="Policy that ratios start from: the weights at the start of the update, those that sampled, or a "
        "guess between these and the current ones by the versions that sampled (AReaL's loglinear), which needs no "
        "forward pass.",
    )
    epochs: Amount = Field(1, description="Passes over a batch.")
    minibatches: Amount = Field(1, description="Optimizer steps per pass.")

    @field_validator("correction", mode="before")
    @classmethod
    def _correction_by_name(cls, value: Any) -> Any:
        return correction_named(value)

    @model_validator(mode="after")
    def _critic_is_read(self) -> Self:
        if self.estimates_values and self.critic is None:
            raise ValueError(f"advantage '{self.advantage.kind}' reads a critic: set 'critic' (critic: {{}})")
        if not self.estimates_values and self.critic is not None:
            raise ValueError(f"advantage '{self.advantage.kind}' never reads a critic: set critic: null")
        return self

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        kind, level = self.surrogate.kind, self.surrogate.ratio_level
        if not self.surrogate.has_ratio:
            if self.ratio.level != "token":
                raise ValueError(f"surrogate '{kind}' has no ratio: ratio.level does nothing")
            if self.epochs * self.minibatches > 1:
                raise ValueError(
                    f"surrogate '{kind}' has no ratio: only its first step on a batch is on-policy"
                )
        if level is not None and self.ratio.level != level:
            what = "about single tokens" if level == "token" else "made of the ratios of whole episodes"
            raise ValueError(f"surrogate '{kind}' is {what}: set ratio.level to '{level}'")
        if self.kl.coefficient and self.kl.placement == "return" and self.advantage.per_token:
            raise ValueError(
                f"advantage '{self.advantage.kind}' credits each token with what follows: set kl.placement to 'reward'"
            )
        if self.reward.penalty_in == "return" and not self.advantage.takes_charges:
            raise ValueError(
                f"reward.penalty_in 'return' has no meaning for advantage '{self.advantage.kind}', which makes its own "
                "returns: use 'reward'"
            )
        return self

    @model_validator(mode="after")
    def _rewards_are_read(self) -> Self:
        if self.needs_greedy and self.reward.normalise != "none":
            raise ValueError(
                "reward.normalise divides the rewards of the group, and not those of the greedy episode that baseline "
                "'greedy' compares them with: leave one of the two out"
            )
        if not self.advantage.reads_named_rewards:
            return self
        if self.kl.coefficient and self.kl.placement == "reward":
            raise ValueError(
                f"advantage '{self.advantage.kind}' compares rewards that are named one by one, and a KL penalty is "
                "none of them: set kl.placement to 'return', 'advantage' or 'loss'"
            )
        fields = type(self.reward).model_fields
        unread = [name for name in fields if getattr(self.reward, name) != fields[name].default]
        if unread:
            raise ValueError(
                f"reward.{unread[0]} changes the sum of rewards, and advantage '{self.advantage.kind}' compares those "
                "named one by one: leave it out and say it with algorithm.advantage.weights instead"
            )
        return self

    @model_validator(mode="after")
    def _proximal_is_one(self) -> Self:
        if self.proximal == "behaviour" and not self._only_rejects_from_current:
            raise ValueError(
                "proximal 'behaviour' leaves nothing to correct: set correction.kind to off, or to reject with policy "
                "'current' in each of its rejections"
            )
        if self.proximal == "interpolated" and self.prepares:
            raise ValueError(
                "proximal 'interpolated' is a guess that is made inside the loss, and selections and rejections are "
                "made before it: set proximal to 'recomputed'"
            )
        return self

    @property
    def _only_rejects_from_current(self) -> bool:
        """Whether the correction has no weights, and rejects at most what the policy in training has left."""
        current = all(each.policy == "current" for each in self.rejections)
        return current and not isinstance(self.correction, TruncateCorrection | BandCorrection)

    @property
    def estimates_values(self) -> bool:
        """Whether the advantage reads a critic's values."""
        return self.advantage.reads_critic

    @property
    def bootstraps(self) -> bool:
        """Whether the critic is asked for the value of the observation at which an episode was cut off."""
        return self.advantage.bootstraps

    @property
    def needs_greedy(self) -> bool:
        """Whether a greedy episode is played beside each group, whose return is the baseline."""
        return self.advantage.reads_greedy

    @property
    def updates(self) -> int:
        """Optimizer steps per batch, `epochs * minibatches`."""
        return self.epochs * self.minibatches

    @property
    def rejections(self) -> list[Rejection]:
        """Which tokens and episodes the correction rejects."""
        return [] if isinstance(self.correction, NoCorrection) else self.correction.reject

    @property
    def prepares_correction(self) -> bool:
        """Whether the correction looks beyond a row, so that it is made before a step is divided."""
        chosen = self.correction
        if isinstance(chosen, TruncateCorrection | BandCorrection) and (
            chosen.level in ("sequence", "geometric") or chosen.normalise
        ):
            return True
        return bool(self.rejections)

    @property
    def prepares(self) -> bool:
        """Whether weights of tokens are made before an optimizer step is divided; see `prepare_step`."""
        return self.prepares_correction or self.selection.kind != "none"

    @property
    def prepares_from_current(self) -> bool:
        """Whether these weights read log-probabilities of the policy as it is when the step begins."""
        rejects = any(each.policy == "current" for each in self.rejections)
        return rejects or self.selection.reads_current

    @property
    def keeps_episodes_whole(self) -> bool:
        """Whether all rows of an episode must lie in one optimizer step."""
        sequences = self.ratio.level in ("sequence", "sequence_sum") or self.prepares_correction
        return sequences or self.aggregation.unit == "trajectory"

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether log-probabilities at the start of the update must be computed before the first step.

        With one step per batch they are the current ones, and with proximal 'behaviour' the recorded ones.
        """
        penalised = self.kl.coefficient > 0 and self.kl.placement != "loss"
        moves = self.proximal == "recomputed" and self.updates > 1
        reads = self.tracks_values or self.needs_squared_probabilities
        return penalised or moves or self.prepares or reads

    @property
    def reads_behaviour(self) -> bool:
        """Whether log-probabilities at sampling are compared with the policy's."""
        corrects = self.correction.kind != "off" or self.selection.reads_behaviour
        return corrects or self.proximal != "recomputed"

    @property
    def needs_reference(self) -> bool:
        """Whether log-probabilities under the reference policy are read."""
        return self.kl.coefficient > 0

    @property
    def needs_entropy(self) -> bool:
        """Whether the entropy must carry a gradient."""
        return self.entropy_coefficient != 0.0

    @property
    def needs_squared_probabilities(self) -> bool:
        """Whether the sum of squared probabilities at each token is read."""
        return self.advantage.reads_squared_probabilities

    @property
    def tracks_values(self) -> bool:
        """Whether what tasks were worth so far is remembered between steps."""
        return self.advantage.reads_moves
