"""How weights are stepped: the optimizer and its schedule."""

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PrivateAttr, field_validator, model_validator

from rollgym.trainer.core.strict import Amount, LearningRate, Settings

TOKENS_UNPLANNED = 16_384
"""Default tokens of a micro-batch, without a setting or a memory plan."""

_Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


@dataclass(frozen=True, slots=True)
class PlannedMicroBatch:
    """A micro-batch as the memory plan has room for it.

    Attributes:
        tokens: Its tokens, padding included.
        peak_bytes: The most that the plan expects on a device of the policy's.
    """

    tokens: int
    peak_bytes: int


class OptimizerSettings(Settings):
    """The optimizer and its schedule."""

    kind: Literal["adamw", "sgd"] = Field(
        "adamw",
        description="adamw (Loshchilov and Hutter 2019), or plain gradient descent, which holds no averages: betas "
        "and epsilon mean nothing to it.",
    )
    learning_rate: LearningRate = 1e-3
    critic_learning_rate: LearningRate = Field(2e-3, description="Used where the algorithm has a critic.")
    betas: tuple[_Beta, _Beta] = Field((0.9, 0.95), description="Decay of AdamW's two averages.")
    epsilon: float = Field(1e-8, gt=0.0, le=1.0, description="Added to the divisor of AdamW's steps.")
    weight_decay: float = Field(0.0, ge=0.0, le=100.0)
    fused: bool | Literal["auto"] = Field(
        "auto",
        description="Take a step in one kernel of torch's: faster, rounded otherwise. auto: on accelerators that have "
        "one (torch, fsdp2).",
    )
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0, le=1_000_000_000)
    gradient_clip: PositiveFloat = 1.0
    max_skipped_steps: Amount = Field(
        8,
        description="Optimizer steps in a row that may be left out because loss or gradient is not finite; one more "
        "ends the run.",
    )
    tokens_per_micro_batch: Amount | Literal["auto"] = Field(
        "auto",
        description="Tokens of a micro-batch, padding included. auto: on an accelerator as many as the memory plan has "
        "room for, at most 32768, and half of them where a first step in one process finds too little memory; else "
        "16384.",
    )
    packed_rows: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Compute rows behind each other, without padding. auto: where attention has a kernel for rows of "
        "unequal lengths (torch's own in bf16, or flash attention) and the model is exact so; on: everywhere, in "
        "a slower form without a kernel; off: pad rows of similar length.",
    )
    shared_prefixes: Literal["auto", "off"] = Field(
        "auto",
        description="Whether tokens of rows that begin alike go through the model once: where that is exact and costs "
        "less, or never.",
    )
    router_replay: bool = Field(
        False,
        description="Mixtures of experts: the optimizer steps of a batch take the experts that the policy took when "
        "its old log-probabilities were computed (R2). Experts of the rollout (inference.routed_experts) stay.",
    )

    @field_validator("tokens_per_micro_batch", mode="before")
    @classmethod
    def _is_an_amount_or_auto(cls, value: object) -> object:
        """Report one error in one line: a union of types would report one for each."""
        number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
        if number != "auto" and not (type(number) is int and 1 <= number <= 1_000_000_000):
            shown = str(value)[:60]
            raise ValueError(f"give a number of tokens, at least 1 and at most 10^9, or auto; not {shown}")
        return number

    @field_validator("fused", mode="before")
    @classmethod
    def _is_told_or_auto(cls, value: object) -> object:
        if value != "auto" and not isinstance(value, bool):
            raise ValueError(f"give true, false or auto; not {str(value)[:60]}")
        return value

    _planned: PlannedMicroBatch | None = PrivateAttr(default=None)

    @property
    def keeps_averages(self) -> bool:
        """Whether it keeps two averages of each weight, as AdamW does; plain gradient descent has no state."""
        return self.kind == "adamw"

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of a micro-batch: those that are set, those that were planned, or what a processor takes."""
        if isinstance(self.tokens_per_micro_batch, int):
            return self.tokens_per_micro_batch
        return TOKENS_UNPLANNED if self._planned is None else self._planned.tokens

    @property
    def planned_micro_batch(self) -> PlannedMicroBatch | None:
        """Return the planned size, if the settings leave it open."""
        return self._planned if self.tokens_per_micro_batch == "auto" else None

    def planned(self, micro_batch: PlannedMicroBatch) -> Self:
        """Return the same with a micro-batch that was planned for a device; what is set stays."""
        settings = self.model_copy()
        settings._planned = micro_batch
        return settings

    @model_validator(mode="after")
    def _numbers_are_read(self) -> Self:
        own = {name: getattr(self, name) for name in ("betas", "epsilon")}
        unread = [name for name, value in own.items() if value != type(self).model_fields[name].default]
        if not self.keeps_averages and unread:
            raise ValueError(f"{', '.join(unread)}: read by kind 'adamw' only, not by 'sgd': leave it out")
        return self
