"""Which preference loss, and its numbers."""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from trainer.core.strict import Settings

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
