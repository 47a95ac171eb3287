"""How weights are stepped: the optimizer and its schedule."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from rollgym.trainer.core.strict import Amount, LearningRate, Settings

_Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


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
    fused: bool = Field(
        False,
        description="Take a step in one kernel of torch's, where the device has one: faster, rounded otherwise.",
    )
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0, le=1_000_000_000)
    gradient_clip: PositiveFloat = 1.0
    max_skipped_steps: Amount = Field(
        8,
        description="Optimizer steps in a row that may be left out because loss or gradient is not finite; one more "
        "ends the run.",
    )
    tokens_per_micro_batch: Amount = 16384
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

    @model_validator(mode="after")
    def _numbers_are_read(self) -> Self:
        own = {name: getattr(self, name) for name in ("betas", "epsilon")}
        unread = [name for name, value in own.items() if value != type(self).model_fields[name].default]
        if self.kind == "sgd" and unread:
            raise ValueError(f"{', '.join(unread)}: read by kind 'adamw' only, not by 'sgd': leave it out")
        return self
