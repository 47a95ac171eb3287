"""How advantages are computed: one settings class per kind. The code is in `advantages.py` and `gigpo.py`."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from trainer.core.strict import Settings

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Singleton = Literal["zero", "raw"]
Unit = Literal["trajectory", "step"]

_WHITEN = "Shift and scale the advantages to mean 0 and standard deviation 1 over the batch's sampled tokens."
_CLIP = "Bound the magnitude of every advantage, at the very end; absent: no bound (ROLL: 0.2 for GiGPO)."
_UNIT = (
    "What counts once in the statistics: a trajectory, or each of its steps (long episodes then weigh more)."
)
_SINGLETON = (
    "Advantage in a group of one: 0 (ROLL), or the bare score (verl). With unit 'step' that is a single step."
)
_EPSILON = "Added to the standard deviation (verl, ROLL: 1e-6)."


class GroupAdvantage(Settings):
    """One advantage per trajectory, relative to its group (GRPO, arXiv:2402.03300, and its relatives)."""

    kind: Literal["group"] = "group"
    baseline: Literal["mean", "leave_one_out", "none"] = Field(
        "mean", description="Group mean (GRPO), mean of the other members (RLOO), or nothing (plain return)."
    )
    scale: Literal["group_std", "batch_std", "none"] = Field(
        "group_std",
        description="Divide by the group's (GRPO) or the batch's (LitePPO) deviation, or not at all (Dr. GRPO).",
    )
    turn_discount: Fraction = Field(1.0, description="Discount of a turn's reward per turn before it.")
    unit: Unit = Field("trajectory", description=_UNIT)
    singleton: Singleton = Field("zero", description=_SINGLETON)
    epsilon: PositiveFloat = Field(1e-6, description=_EPSILON)
    whiten: bool = Field(False, description=_WHITEN + " With scale 'none': REINFORCE++-baseline.")
    clip: PositiveFloat | None = Field(None, description=_CLIP)


class TurnAdvantage(Settings):
    """One advantage per turn: its discounted return, relative to all turns of the group (ROLL's agentic form)."""

    kind: Literal["turn"]
    baseline: Literal["mean", "none"] = Field(
        "mean", description="Mean over the group's turn returns, or nothing."
    )
    scale: Literal["group_std", "batch_std", "none"] = Field("group_std", description="As in 'group'.")
    turn_discount: Fraction = Field(0.95, description="Discount from one turn to the next.")
    singleton: Singleton = Field("zero", description=_SINGLETON)
    epsilon: PositiveFloat = Field(1e-6, description=_EPSILON)
    whiten: bool = Field(False, description=_WHITEN)
    clip: PositiveFloat | None = Field(None, description=_CLIP)


class GigpoAdvantage(Settings):
    """Episode advantage plus step advantage among steps that began in the same state (GiGPO, arXiv:2505.10978)."""

    kind: Literal["gigpo"]
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
    whiten: bool = Field(False, description=_WHITEN)
    clip: PositiveFloat | None = Field(None, description=_CLIP)


class TokenReturnAdvantage(Settings):
    """One advantage per token: the discounted return from it on (REINFORCE++, arXiv:2501.03262). No critic, no group.

    A KL penalty in the reward is charged at its token, so that only the tokens up to it pay for it.
    """

    kind: Literal["token_return"]
    token_discount: Fraction = Field(1.0, description="Discount per sampled token (gamma).")
    whiten: bool = Field(True, description=_WHITEN)
    clip: PositiveFloat | None = Field(None, description=_CLIP)


class GaeAdvantage(Settings):
    """One advantage per token from a critic; observation tokens are skipped, not discounted (PPO, verl's form)."""

    kind: Literal["gae"]
    token_discount: Fraction = Field(1.0, description="Discount per sampled token (gamma).")
    trace: Fraction = Field(1.0, description="Decay of the error trace per sampled token (lambda).")
    whiten: bool = Field(True, description=_WHITEN)
    clip: PositiveFloat | None = Field(None, description=_CLIP)


class BiLevelGaeAdvantage(Settings):
    """GAE over turns, then over the tokens of each turn (RAGEN and VAGEN), with turn ends given, never guessed."""

    kind: Literal["bi_level_gae"]
    turn_discount: Fraction = Field(0.95, description="Discount from one turn to the next.")
    token_discount: Fraction = Field(1.0, description="Discount per sampled token of a turn (gamma).")
    trace: Fraction = Field(1.0, description="Decay of the error trace, on both levels (lambda).")
    whiten: bool = Field(True, description=_WHITEN)
    clip: PositiveFloat | None = Field(None, description=_CLIP)


class CustomAdvantage(Settings):
    """One advantage per turn from a function of the user's."""

    kind: Literal["custom"]
    function: str = Field(
        description="module:attr of a function TrajectoryBatch -> a list of turn advantages per trajectory. The "
        "batch's rewards are those that every advantage reads: penalties, bounds, scale and KL applied."
    )
    whiten: bool = Field(False, description=_WHITEN)
    clip: PositiveFloat | None = Field(None, description=_CLIP)


AdvantageSettings = Annotated[
    GroupAdvantage
    | TurnAdvantage
    | GigpoAdvantage
    | TokenReturnAdvantage
    | GaeAdvantage
    | BiLevelGaeAdvantage
    | CustomAdvantage,
    Field(discriminator="kind"),
]


def compares_members(advantage: AdvantageSettings) -> bool:
    """Whether an advantage is 0 in a group of one, because there is nobody to compare it with."""
    if (
        not isinstance(advantage, GroupAdvantage | TurnAdvantage | GigpoAdvantage)
        or advantage.singleton == "raw"
    ):
        return False
    return advantage.kind == "gigpo" or advantage.baseline != "none" or advantage.scale == "group_std"
