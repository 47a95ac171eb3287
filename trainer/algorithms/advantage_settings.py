"""The kinds of advantages, one class each, and the tuple that lists them."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from rollgym.trainer.algorithms.advantage import Advantage, TokenCredit, TurnCredit, Update, Whitened
from rollgym.trainer.algorithms.modes import Baseline, GaeMask, Scale, Singleton
from rollgym.trainer.core.kinds import Kinds
from rollgym.trainer.core.strict import Count, Fraction

if TYPE_CHECKING:
    from torch import Tensor

    from rollgym.trainer.algorithms.rewards import TurnValues
    from rollgym.trainer.algorithms.state import AlgorithmState

Unit = Literal["trajectory", "step"]

_UNIT = (
    "What counts once in the statistics: a trajectory, or each of its steps (long episodes then weigh more)."
)
_SINGLETON = (
    "Advantage in a group of one: 0 (ROLL), or the bare score (verl). With unit 'step' that is a single step."
)
_EPSILON = "Added to the standard deviation (verl, ROLL: 1e-6)."
_GAMMA = "Discount per sampled token."
_SOLITARY = ("none", "greedy", "batch_mean")
"""Baselines that need no other member of the group."""


class GroupAdvantage(Advantage):
    """One advantage per trajectory, relative to its group (GRPO, arXiv:2402.03300, and its relatives)."""

    kind: Literal["group"] = "group"
    unit_of_credit: ClassVar[str] = "trajectory"
    formula: ClassVar[str] = (
        "`factor * (R - baseline) / scale`; baselines below; scale: `group_std`, `batch_std`, `none`"
    )
    takes_charges: ClassVar[bool] = True

    baseline: Baseline = Field(
        "mean",
        description="Group mean (GRPO), mean of the other members (RLOO), mean by length (OPO, arXiv:2505.23585), "
        "return of a greedy episode that is played beside each group (ReMax, arXiv:2310.10505), the second best where "
        "only the best member has an advantage (pass@k, arXiv:2503.19595), mean of the batch, or nothing.",
    )
    scale: Scale = Field(
        "group_std",
        description="Divide by the group's (GRPO) or the batch's (LitePPO) deviation, that of the group's other "
        "members (NeMo-RL), that of all differences from the baseline (AReaL), the group's mean (MaxRL, "
        "arXiv:2602.02710), or not at all (Dr. GRPO).",
    )
    baseline_shift: float = Field(
        0.0,
        allow_inf_nan=False,
        description="Added to the baseline (AsymRE, arXiv:2506.20520: -0.1): below 0 what went well weighs more.",
    )
    biased: bool = Field(
        False, description="Deviations with n in place of n - 1 (HGPO, AReaL's normalisation)."
    )
    factor: Literal["none", "informative", "nonzero_scores"] = Field(
        "none",
        description="GPG (arXiv:2504.02546): times the number of episodes over that of episodes in groups of unequal "
        "returns, or over that of episodes whose return is not 0 (verl).",
    )
    turn_discount: Fraction = Field(1.0, description="Discount of a turn's reward per turn before it.")
    unit: Unit = Field("trajectory", description=_UNIT)
    singleton: Singleton = Field("zero", description=_SINGLETON)
    epsilon: PositiveFloat = Field(1e-6, description=_EPSILON)

    @model_validator(mode="after")
    def _shift_stays(self) -> Self:
        if self.baseline_shift and self.whiten:
            raise ValueError(
                "whiten takes the mean off all advantages, and a baseline_shift with it: choose one"
            )
        return self

    @property
    def compares_members(self) -> bool:
        """Whether it is 0 in a group of one."""
        return _compares(self.singleton, self.baseline, self.scale)

    @property
    def reads_greedy(self) -> bool:
        """Whether its baseline is the return of a greedy episode."""
        return self.baseline == "greedy"

    def of_turns(self, credit: TurnCredit) -> "TurnValues":
        """Return the advantage of every turn."""
        from rollgym.trainer.algorithms.turn_credit import group_credit

        return group_credit(self, credit)


class TurnAdvantage(Advantage):
    """One advantage per turn: its discounted return, relative to all turns of the group (ROLL's agentic form)."""

    kind: Literal["turn"]
    unit_of_credit: ClassVar[str] = "turn"
    formula: ClassVar[str] = (
        "`R_t = r_t + turn_discount * R_{t+1}`, then as `group` over all turns of the group, or of the batch"
    )
    takes_charges: ClassVar[bool] = True

    baseline: Literal["mean", "batch_mean", "none"] = Field(
        "mean", description="Mean over the group's or the batch's turn returns, or nothing."
    )
    scale: Scale = Field("group_std", description="As in 'group'.")
    turn_discount: Fraction = Field(0.95, description="Discount from one turn to the next.")
    singleton: Singleton = Field("zero", description=_SINGLETON)
    epsilon: PositiveFloat = Field(1e-6, description=_EPSILON)

    @property
    def compares_members(self) -> bool:
        """Whether it is 0 in a group of one."""
        return _compares(self.singleton, self.baseline, self.scale)

    def of_turns(self, credit: TurnCredit) -> "TurnValues":
        """Return the advantage of every turn."""
        from rollgym.trainer.algorithms.turn_credit import return_credit

        return return_credit(self, credit)


class GigpoAdvantage(Advantage):
    """Episode advantage plus step advantage among steps that began in the same state (GiGPO, arXiv:2505.10978)."""

    kind: Literal["gigpo"]
    unit_of_credit: ClassVar[str] = "turn"
    formula: ClassVar[str] = (
        "`A_E + step_weight * A_S`: episode return in its group; `R_t` among steps of the group with the "
        "same anchor"
    )
    takes_charges: ClassVar[bool] = True

    normalisation: Literal["mean_norm", "mean_std_norm"] = Field(
        "mean_norm",
        description="Subtract the mean; or divide by the deviation too (ALFWorld and search scripts).",
    )
    step_weight: NonNegativeFloat = Field(
        1.0, description="Weight of the step advantage (the paper's omega)."
    )
    turn_discount: Fraction = Field(0.95, description="Discount of step returns (the paper's gamma).")
    similarity: Fraction | None = Field(
        None, description="Anchors this similar (difflib ratio) count as one state; absent: only equal ones."
    )
    unit: Unit = Field("step", description=_UNIT + " The authors' code uses steps, their paper trajectories.")
    singleton: Singleton = Field("zero", description=_SINGLETON + " Anchor groups of one always give 0.")
    epsilon: PositiveFloat = Field(1e-6, description=_EPSILON)

    @property
    def compares_members(self) -> bool:
        """Whether it is 0 in a group of one."""
        return self.singleton == "zero"

    def of_turns(self, credit: TurnCredit) -> "TurnValues":
        """Return the advantage of every turn."""
        from rollgym.trainer.algorithms.turn_credit import gigpo_credit

        return gigpo_credit(self, credit)


class HgpoAdvantage(Advantage):
    """Step advantages among steps of equal state and ever longer equal history (HGPO, arXiv:2602.22817)."""

    kind: Literal["hgpo"]
    unit_of_credit: ClassVar[str] = "turn"
    formula: ClassVar[str] = (
        "`R_t` among steps of equal state and equal k states before it, k = 0 .. `history`; weighted by `(k "
        "+ 1)^length_weight`"
    )
    takes_charges: ClassVar[bool] = True

    normalisation: Literal["mean_norm", "mean_std_norm"] = Field(
        "mean_std_norm", description="As in 'gigpo'; deviations are biased, as in the authors' code."
    )
    history: Annotated[int, Field(ge=0, le=1000)] = Field(
        2, description="States before the current one that the longest histories hold (the paper's K)."
    )
    length_weight: NonNegativeFloat = Field(
        1.0, description="A group of k equal states weighs (k + 1)^this (the paper's alpha)."
    )
    episode_group: bool = Field(
        False, description="Whether the episode's advantage is one of them, with weight 1 (base_group)."
    )
    turn_discount: Fraction = Field(0.95, description="Discount of step returns.")
    epsilon: PositiveFloat = Field(1e-6, description=_EPSILON)

    @property
    def compares_members(self) -> bool:
        """Whether it is 0 in a group of one: always, whatever its settings."""
        return True

    def of_turns(self, credit: TurnCredit) -> "TurnValues":
        """Return the advantage of every turn."""
        from rollgym.trainer.algorithms.turn_credit import hgpo_credit

        return hgpo_credit(self, credit)


class GdpoAdvantage(Whitened):
    """Several rewards, each relative to its group, then added and whitened (GDPO, arXiv:2601.05242)."""

    kind: Literal["gdpo"]
    unit_of_credit: ClassVar[str] = "trajectory"
    formula: ClassVar[str] = "each named reward as `group`, their weighted sum, whitened"
    reads_named_rewards: ClassVar[bool] = True

    weights: dict[str, float] = Field(
        {},
        description="Weight of each reward that the environment names in info['reward_parts'], or a reward function "
        "returns by name; absent: all of them, each 1.",
    )
    scale: Literal["group_std", "none"] = Field("group_std", description="As in 'group'.")
    singleton: Singleton = Field("zero", description=_SINGLETON)
    epsilon: PositiveFloat = Field(1e-6, description=_EPSILON)

    @property
    def compares_members(self) -> bool:
        """Whether it is 0 in a group of one."""
        return self.singleton != "raw"

    def of_turns(self, credit: TurnCredit) -> "TurnValues":
        """Return the advantage of every turn."""
        from rollgym.trainer.algorithms.turn_credit import gdpo_credit

        return gdpo_credit(self, credit)


class SpoAdvantage(Advantage):
    """Return less what the task was worth so far, over the batch's deviation; no groups (SPO, arXiv:2509.13232)."""

    kind: Literal["spo"]
    unit_of_credit: ClassVar[str] = "trajectory"
    formula: ClassVar[str] = (
        "`R - v(task)`, over the batch's deviation; v follows outcomes, forgetting by how far the policy "
        "moved"
    )
    takes_charges: ClassVar[bool] = True
    reads_moves: ClassVar[bool] = True

    tracks: Literal["task", "domain"] = Field(
        "task",
        description="What has a value of its own: a task, which must come again, as rows of data sets do; or a domain.",
    )
    rho_low: Fraction = Field(0.875, description="What is kept of the tracker at least at each visit.")
    rho_high: Fraction = Field(0.96, description="At most.")
    half_kl: PositiveFloat = Field(
        0.06, description="How far the policy moves until half of it is forgotten (nats per token)."
    )
    prior: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.5, description="Value of what was never played: a share of solved episodes."
    )
    tracked: Count = Field(
        100_000, description="Values that are kept at most; those that were not asked for longest go."
    )
    epsilon: PositiveFloat = Field(1e-8, description="Added to the deviation (the authors' code: 1e-8).")

    @model_validator(mode="after")
    def _rho_is_a_range(self) -> Self:
        if self.rho_low > self.rho_high or self.rho_low >= 1.0:
            raise ValueError("rho_low must be below 1, and at most rho_high")
        return self

    def of_turns(self, credit: TurnCredit) -> "TurnValues":
        """Return the advantage of every turn."""
        from rollgym.trainer.algorithms.turn_credit import spo_credit

        return spo_credit(self, credit)

    def remembered(self, state: "AlgorithmState", update: Update) -> "AlgorithmState":
        """Return the state with these episodes taken in."""
        from rollgym.trainer.algorithms.turn_credit import spo_remembered

        return spo_remembered(self, state, update)


class MovingBaselineAdvantage(Advantage):
    """Return less a moving average of the returns so far; no groups (SPIRAL's RAE, arXiv:2506.24119)."""

    kind: Literal["moving_baseline"]
    unit_of_credit: ClassVar[str] = "trajectory"
    formula: ClassVar[str] = (
        "`R - b(domain)`, b the moving average of the returns so far, which then takes R in (RAE)"
    )
    takes_charges: ClassVar[bool] = True

    tracks: Literal["task", "domain"] = Field(
        "domain", description="What has an average of its own: a domain, such as a game or a role, or a task."
    )
    decay: Fraction = Field(0.95, description="What an average keeps at each episode.")
    tracked: Count = Field(
        100_000, description="Averages that are kept at most; those that were not asked for longest go."
    )

    def of_turns(self, credit: TurnCredit) -> "TurnValues":
        """Return the advantage of every turn."""
        from rollgym.trainer.algorithms.turn_credit import moving_baseline_credit

        return moving_baseline_credit(self, credit)

    def remembered(self, state: "AlgorithmState", update: Update) -> "AlgorithmState":
        """Return the state with these episodes taken in."""
        from rollgym.trainer.algorithms.turn_credit import moving_baseline_remembered

        return moving_baseline_remembered(self, state, update)


class OptimalTokenAdvantage(Advantage):
    """One advantage per token: the return from it on, less the baseline of smallest variance there (verl's OTB).

    Members of a group are compared at their sampled tokens of equal number, each by how much gradient lies before.
    """

    kind: Literal["optimal_token"]
    unit_of_credit: ClassVar[str] = "token"
    formula: ClassVar[str] = (
        "return from it on, less `sum(G W) / sum(W)` over the group at the t-th sampled token, W the sum of "
        "`1 - 2 p + sum of p^2` up to it (OTB)"
    )
    per_token: ClassVar[bool] = True
    reads_squared_probabilities: ClassVar[bool] = True

    zero_tail: bool = Field(
        True, description="No baseline at tokens that only the longest episode of a group has."
    )
    epsilon: PositiveFloat = Field(1e-8, description="Added to the sum of weights (verl: 1e-8).")

    @property
    def compares_members(self) -> bool:
        """Whether it compares a token with the group's other members: always, whatever its settings."""
        return True

    def of_tokens(self, credit: TokenCredit) -> "tuple[Tensor, Tensor | None]":
        """Return the advantage of every token."""
        from rollgym.trainer.algorithms.token_credit import optimal_token_credit

        return optimal_token_credit(self, credit)


class TokenReturnAdvantage(Whitened):
    """One advantage per token: the discounted return from it on (REINFORCE++, arXiv:2501.03262). No critic, no group.

    A KL penalty in the reward is charged at its token, so that only the tokens up to it pay for it.
    """

    kind: Literal["token_return"]
    unit_of_credit: ClassVar[str] = "token"
    formula: ClassVar[str] = (
        "`R_t = r_t + gamma * R_t'`, with the next *sampled* token; a KL penalty in the reward is charged at "
        "its token; `baseline`: less the group's mean return, or that of a greedy episode; `return_mask: "
        "none` discounts by observation tokens, too"
    )
    per_token: ClassVar[bool] = True

    gamma: Fraction = Field(1.0, description=_GAMMA)
    baseline: Literal["none", "group_mean", "greedy"] = Field(
        "none",
        description="Nothing, or the group's mean return, taken off every token (REINFORCE++-baseline with its KL), or "
        "that of a greedy episode that is played beside each group (verl's ReMax).",
    )
    return_mask: Literal["skip", "none"] = Field(
        "skip",
        description="Observation tokens: skipped, or discounted by as any other, row by row (OpenRLHF, ROLL, slime).",
    )

    @property
    def compares_members(self) -> bool:
        """Whether its baseline is the group's."""
        return self.baseline == "group_mean"

    @property
    def reads_greedy(self) -> bool:
        """Whether its baseline is the return of a greedy episode."""
        return self.baseline == "greedy"

    def of_tokens(self, credit: TokenCredit) -> "tuple[Tensor, Tensor | None]":
        """Return the advantage of every token."""
        from rollgym.trainer.algorithms.token_credit import return_credit

        return return_credit(self, credit)


class GaeAdvantage(Whitened):
    """One advantage per token from a critic; observation tokens are skipped, not discounted (PPO, verl's form)."""

    kind: Literal["gae"]
    unit_of_credit: ClassVar[str] = "token"
    formula: ClassVar[str] = (
        "`d = r + gamma * V' - V`, `A = d + gamma * gae_lambda * A'`; primes: next *sampled* token"
    )
    per_token: ClassVar[bool] = True
    reads_critic: ClassVar[bool] = True

    gamma: Fraction = Field(1.0, description=_GAMMA)
    gae_lambda: Fraction = Field(1.0, description="Decay of the error trace per sampled token.")
    length_adaptive: PositiveFloat | None = Field(
        None,
        description="alpha of `gae_lambda = 1 - 1 / (alpha n)` with the episode's n sampled tokens (VAPO, "
        "arXiv:2504.05118: 0.05), in place of gae_lambda; absent: off.",
    )
    critic_gae_lambda: Fraction | None = Field(
        None,
        description="Decay for the critic's targets (VC-PPO, VAPO: 1.0); absent: gae_lambda.",
    )
    gae_mask: GaeMask = Field(
        "skip",
        description="skip: observation tokens are passed over (verl, AReaL). none: each costs a factor of both, with "
        "value 0 (ROLL, OpenRLHF), row by row: rows must then be whole episodes.",
    )
    bootstrap_truncated: bool = Field(
        False,
        description="Where an episode was cut off (`truncated`, or max_turns), take the critic's value of the "
        "observation after the last action for what would have come, as Gymnasium means it; absent: 0, as after an "
        "end.",
    )

    @model_validator(mode="after")
    def _rows_have_one_end(self) -> Self:
        if self.bootstrap_truncated and self.gae_mask != "skip":
            raise ValueError(
                "bootstrap_truncated needs gae_mask skip: with none, what is behind a row is padding"
            )
        return self

    @model_validator(mode="after")
    def _gae_lambda_is_read(self) -> Self:
        if (
            self.length_adaptive is not None
            and self.gae_lambda != type(self).model_fields["gae_lambda"].default
        ):
            raise ValueError("length_adaptive takes the place of gae_lambda: leave gae_lambda out")
        return self

    @property
    def bootstraps(self) -> bool:
        """Whether episodes that were cut off are worth what the critic says of their last observation."""
        return self.bootstrap_truncated

    def of_tokens(self, credit: TokenCredit) -> "tuple[Tensor, Tensor | None]":
        """Return the advantage of every token, and what the critic should say."""
        from rollgym.trainer.algorithms.token_credit import gae_credit

        return gae_credit(self, credit)


class BiLevelGaeAdvantage(Whitened):
    """GAE over turns, then over the tokens of each turn (RAGEN and VAGEN), with turn ends given, never guessed."""

    kind: Literal["bi_level_gae"]
    unit_of_credit: ClassVar[str] = "token"
    formula: ClassVar[str] = (
        "GAE over the last tokens of turns gives turn returns; then GAE inside each turn towards its return"
    )
    per_token: ClassVar[bool] = True
    reads_critic: ClassVar[bool] = True

    turn_discount: Fraction = Field(0.95, description="Discount from one turn to the next.")
    gamma: Fraction = Field(1.0, description="Discount per sampled token of a turn.")
    gae_lambda: Fraction = Field(1.0, description="Decay of the error trace, on both levels.")

    def of_tokens(self, credit: TokenCredit) -> "tuple[Tensor, Tensor | None]":
        """Return the advantage of every token, and what the critic should say."""
        from rollgym.trainer.algorithms.token_credit import bi_level_credit

        return bi_level_credit(self, credit)


class CustomAdvantage(Advantage):
    """One advantage per turn from a function of the user's."""

    kind: Literal["custom"]
    unit_of_credit: ClassVar[str] = "turn"
    formula: ClassVar[str] = (
        "`function: module:attr`, a function `TrajectoryBatch -> list of turn advantages per trajectory`"
    )
    follows_rewards: ClassVar[bool] = False

    function: str = Field(
        description="module:attr of a function TrajectoryBatch -> a list of turn advantages per trajectory. The "
        "batch's rewards are those that every advantage reads: penalties, bounds, scale and KL applied."
    )

    def of_turns(self, credit: TurnCredit) -> "TurnValues":
        """Return the advantage of every turn."""
        from rollgym.trainer.algorithms.turn_credit import custom_credit

        return custom_credit(self, credit)


def _compares(singleton: Singleton, baseline: Baseline, scale: Scale) -> bool:
    if singleton == "raw":
        return False
    return baseline not in _SOLITARY or scale == "group_std"


ADVANTAGES = (
    GroupAdvantage,
    TurnAdvantage,
    GigpoAdvantage,
    HgpoAdvantage,
    GdpoAdvantage,
    SpoAdvantage,
    MovingBaselineAdvantage,
    OptimalTokenAdvantage,
    TokenReturnAdvantage,
    GaeAdvantage,
    BiLevelGaeAdvantage,
    CustomAdvantage,
)
"""Ours, in the order of the documentation."""

AdvantageSettings = Annotated[Advantage, Kinds("rollgym.advantages", Advantage, ADVANTAGES)]
