"""Which tokens of an optimizer step count, and how much: correction of the mismatch, rejection, selection.

Corrections of the mismatch between sampling and training have names as well: `correction: icepop`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from rollgym.suggestions import near_names
from rollgym.trainer.algorithms.modes import Measure, Statistic, WeightLevel
from rollgym.trainer.core.strict import Settings

Part = Annotated[float, Field(gt=0.0, le=1.0)]
_SIGNED = ("k1", "probability")
"""Measures that may be negative."""


class Rejection(Settings):
    """Which tokens or episodes are too far from the policy that sampled them to be trained on.

    Their weight becomes 0; they stay in the denominators.
    """

    level: Literal["token", "turn", "sequence"] = Field(
        "token", description="What is judged, and rejected, as a whole."
    )
    measure: Measure = Field(
        "ratio",
        description="Of each token, d = log p - log behaviour: ratio = exp(d), k1 = -d, k2 = d^2/2, "
        "k3 = exp(d) - 1 - d, probability = p - behaviour's, variation = that without its sign, binary_kl = the "
        "larger KL of token against all others, behaviour_kl = the one from behaviour to p.",
    )
    statistic: Statistic = Field(
        "mean",
        description="Over the turn or sequence: mean (of ratios the geometric one), sum (of ratios the product), max, "
        "or all: every single token must lie within the bounds (a veto).",
    )
    low: float | None = Field(None, description="Smallest value that is kept; absent: no such bound.")
    high: float | None = Field(None, description="Largest value that is kept; absent: no such bound.")
    only_negative: bool = Field(
        False,
        description="Reject only where the advantage is negative (OPSM; the sequence mask of DeepSeek-V3.2).",
    )
    policy: Literal["old", "current"] = Field(
        "old",
        description="p: at the start of the update, or of each optimizer step, which costs a forward pass per step.",
    )

    @model_validator(mode="after")
    def _bounds_are_bounds(self) -> Self:
        if self.low is None and self.high is None:
            raise ValueError("a rejection needs a bound: set low, high, or both")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError("low must be below high")
        if self.measure not in _SIGNED and self.high is not None and self.high < 0.0:
            raise ValueError(
                f"measure '{self.measure}' is never below 0, so that high {self.high:g} would reject everything: "
                "raise it"
            )
        if self.level == "token" and self.statistic != "mean":
            raise ValueError("a token is one number: statistic does nothing at level 'token', leave it out")
        return self


class NoCorrection(Settings):
    """Take sampled tokens as if the policy at the start of the update had sampled them."""

    kind: Literal["off"] = "off"


_LEVEL = (
    "Weight of each token, of a turn (geometric mean), of the episode's geometric mean, or of the whole episode (the "
    "product, which is unbiased and of high variance)."
)
_NORMALISE = "Divide by the mean weight of the optimizer step's tokens, or at level sequence of its episodes."
_REJECT = "Which tokens or episodes have no weight at all; all of these must pass."


class TruncateCorrection(Settings):
    """Weigh tokens by exp(old - behaviour), capped (TIS); decoupled PPO (arXiv:2505.24298) where old is recomputed."""

    kind: Literal["truncate"]
    cap: PositiveFloat | None = Field(
        2.0, description="Largest weight (verl: 2.0, AReaL: 5.0); null: no cap."
    )
    floor: NonNegativeFloat = Field(0.0, description="Smallest weight (OpenRLHF: 0.5, with cap 5).")
    level: WeightLevel = Field("token", description=_LEVEL)
    normalise: bool = Field(False, description=_NORMALISE)
    reject: list[Rejection] = Field([], description=_REJECT)

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> Self:
        if self.cap is not None and self.floor >= self.cap:
            raise ValueError("floor must be below cap")
        return self


class BandCorrection(Settings):
    """Weigh tokens by exp(old - behaviour) inside a band and drop them outside it (IcePop, MIS)."""

    kind: Literal["band"]
    low: NonNegativeFloat = Field(0.5, description="Smallest weight that is kept.")
    high: PositiveFloat = Field(5.0, description="Largest weight that is kept.")
    level: WeightLevel = Field("token", description=_LEVEL)
    normalise: bool = Field(False, description=_NORMALISE)
    reject: list[Rejection] = Field([], description=_REJECT)

    @model_validator(mode="after")
    def _band_is_ordered(self) -> Self:
        if self.low >= self.high:
            raise ValueError("low must be below high")
        return self


class RejectCorrection(Settings):
    """No weights: what is not rejected counts as it is."""

    kind: Literal["reject"]
    reject: list[Rejection] = Field(min_length=1, description=_REJECT)


CorrectionSettings = Annotated[
    NoCorrection | TruncateCorrection | BandCorrection | RejectCorrection, Field(discriminator="kind")
]


class _Selection(Settings):
    """Which tokens of an optimizer step count, and what is read of them for that."""

    reads_behaviour: ClassVar[bool] = False
    """Whether it reads log-probabilities at sampling."""
    reads_entropy: ClassVar[bool] = False
    """Whether it reads the entropy of each token."""

    @property
    def reads_current(self) -> bool:
        """Whether it reads log-probabilities of the policy as it is when the step begins."""
        return False


class NoSelection(_Selection):
    """Every token of an optimizer step counts."""

    kind: Literal["none"] = "none"


class SecondMomentSelection(_Selection):
    """Drop the tokens that moved most until the rest's mean squared log ratio is small (M2PO, arXiv:2510.01161)."""

    kind: Literal["second_moment"]
    reads_behaviour: ClassVar[bool] = True
    threshold: PositiveFloat = Field(0.04, description="The mean of (lp - behaviour)^2 that is small enough.")
    policy: Literal["old", "current"] = Field(
        "current",
        description="lp: at the start of each optimizer step (the paper), or of the update (AReaL).",
    )

    @property
    def reads_current(self) -> bool:
        """Whether it reads log-probabilities of the policy as it is when the step begins."""
        return self.policy == "current"


class ClipCovSelection(_Selection):
    """Drop a few of the tokens whose log-probability goes most with their advantage (Clip-Cov, arXiv:2505.22617)."""

    kind: Literal["clip_cov"]
    fraction: Part = Field(2e-4, description="Part of the step's tokens that is dropped, at least one.")
    low: float = Field(1.0, description="Smallest covariance of those they are drawn from.")
    high: float = Field(5.0, description="Largest.")

    @property
    def reads_current(self) -> bool:
        """Whether it reads log-probabilities of the policy as it is when the step begins."""
        return True

    @model_validator(mode="after")
    def _range_is_one(self) -> Self:
        if self.low >= self.high:
            raise ValueError("low must be below high")
        return self


class KLCovSelection(_Selection):
    """Charge the tokens of largest covariance for moving: `+ c |lp - old|` (KL-Cov, arXiv:2505.22617)."""

    kind: Literal["kl_cov"]
    fraction: Part = Field(2e-4, description="Part of the step's tokens that is charged, at least one.")
    coefficient: PositiveFloat = Field(1.0, description="c.")

    @property
    def reads_current(self) -> bool:
        """Whether it reads log-probabilities of the policy as it is when the step begins."""
        return True


class HighEntropySelection(_Selection):
    """Train on the tokens of highest entropy alone (80/20, arXiv:2506.01939)."""

    kind: Literal["high_entropy"]
    reads_entropy: ClassVar[bool] = True
    fraction: Part = Field(0.2, description="Part of the step's tokens that counts.")


class CustomSelection(_Selection):
    """Weights of tokens by a function of the user's."""

    kind: Literal["custom"]
    function: str = Field(
        description="module:attr of a function StepTokens -> a weight for each token of the optimizer step, "
        "`[rows, tokens]`: all its rows, before they are divided among micro-batches and ranks."
    )

    @property
    def reads_current(self) -> bool:
        """Whether it reads log-probabilities of the policy as it is when the step begins."""
        return True


SelectionSettings = Annotated[
    NoSelection
    | SecondMomentSelection
    | ClipCovSelection
    | KLCovSelection
    | HighEntropySelection
    | CustomSelection,
    Field(discriminator="kind"),
]


@dataclass(frozen=True, slots=True)
class NamedCorrection:
    """A correction with the numbers of its authors.

    Attributes:
        settings: The correction.
        line: What it does, in a few words.
        source: Where its numbers are from.
    """

    settings: CorrectionSettings
    line: str
    source: str


CORRECTIONS: Mapping[str, NamedCorrection] = MappingProxyType(
    {
        "off": NamedCorrection(NoCorrection(), "no correction", "-"),
        "tis": NamedCorrection(
            TruncateCorrection(kind="truncate", cap=2.0),
            "weight of each token, at most 2",
            "Yao et al. 2025; verl token_tis",
        ),
        "seq_tis": NamedCorrection(
            TruncateCorrection(kind="truncate", cap=2.0, level="sequence"),
            "weight of the episode, at most 2",
            "verl seq_is",
        ),
        "seq_truncate": NamedCorrection(
            TruncateCorrection(kind="truncate", cap=3.0, level="sequence"),
            "weight of the episode, at most 3",
            "TRL sequence_truncate",
        ),
        "clamped_tis": NamedCorrection(
            TruncateCorrection(kind="truncate", cap=5.0, floor=0.5),
            "weight of each token within [0.5, 5]",
            "OpenRLHF",
        ),
        "mis": NamedCorrection(
            BandCorrection(kind="band", low=0.0, high=2.0, level="sequence"),
            "episodes of weight above 2 are dropped",
            "Li et al. 2025 (seq-MIS); verl",
        ),
        "token_mis": NamedCorrection(
            BandCorrection(kind="band", low=0.0, high=2.0),
            "tokens of weight above 2 are dropped",
            "Li et al. 2025 (token-MIS)",
        ),
        "icepop": NamedCorrection(
            BandCorrection(kind="band", low=0.5, high=5.0),
            "tokens of weight outside [0.5, 5] are dropped",
            "IcePop, ring-moe 2025",
        ),
        "sequence_mask": NamedCorrection(
            BandCorrection(kind="band", low=0.0, high=3.0, level="sequence"),
            "episodes of weight above 3 are dropped",
            "TRL's default",
        ),
        "seq_mask_tis": NamedCorrection(
            TruncateCorrection(
                kind="truncate",
                cap=None,
                reject=[Rejection(level="sequence", measure="ratio", low=0.999, high=1.002)],
            ),
            "token weights of episodes whose mean ratio is near 1",
            "NeMo-RL seq-mask-tis",
        ),
        "geometric_rejection": NamedCorrection(
            RejectCorrection(
                kind="reject",
                reject=[Rejection(level="sequence", measure="ratio", low=0.999, high=1.001)],
            ),
            "episodes whose mean ratio is not near 1 are dropped",
            "verl geo_rs",
        ),
        "k3_rejection": NamedCorrection(
            RejectCorrection(kind="reject", reject=[Rejection(level="sequence", measure="k3", high=0.01)]),
            "episodes of mean k3 above 0.01 are dropped",
            "verl seq_mean_k3",
        ),
        "veto": NamedCorrection(
            RejectCorrection(
                kind="reject",
                reject=[Rejection(level="sequence", measure="ratio", statistic="all", low=1e-4, high=100.0)],
            ),
            "drops episodes with a token ratio outside [1e-4, 100]",
            "SkyRL outlier mask",
        ),
        "opsm": NamedCorrection(
            RejectCorrection(
                kind="reject",
                reject=[
                    Rejection(
                        level="sequence",
                        measure="k1",
                        high=1e-4,
                        only_negative=True,
                        policy="current",
                    )
                ],
            ),
            "failed episodes that the policy has left are dropped",
            "slime --use-opsm",
        ),
        "deepseek_mask": NamedCorrection(
            RejectCorrection(
                kind="reject",
                reject=[
                    Rejection(level="sequence", measure="k1", high=0.5, only_negative=True, policy="current")
                ],
            ),
            "the same from a distance of 0.5 on",
            "DeepSeek-V3.2, as in TRL",
        ),
    }
)


def correction_named(value: Any) -> Any:
    """Return what a setting means that may name a correction; a value that is not a string is returned unchanged.

    Raises:
        ValueError: If the name is unknown.
    """
    if not isinstance(value, str):
        return value
    if value not in CORRECTIONS:
        near = near_names(value, CORRECTIONS)
        hint = f"did you mean '{near[0]}'?" if near else f"known corrections: {', '.join(CORRECTIONS)}"
        raise ValueError(f"unknown correction '{value}'; {hint}")
    return CORRECTIONS[value].settings
