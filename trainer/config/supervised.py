"""Learning from examples: replies that are imitated, or preferred to others."""

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, field_validator, model_validator

from rollgym.trainer.algorithms.loss_settings import PreferenceLossSettings
from rollgym.trainer.config.data import ExamplesSettings
from rollgym.trainer.core.strict import Amount, Count, LearningRate, Settings, UserPath

PLAIN_REPLY = "{action}"
"""A reply that is the action and nothing else."""


class ExpertSettings(Settings):
    """Demonstrations of the environments' experts as examples."""

    demonstrations: Count = Field(description="Expert episodes, of the environments under `tasks`.")
    reply: str = Field(PLAIN_REPLY, description="How the expert's action is written as a reply.")

    @field_validator("reply")
    @classmethod
    def _reply_names_action(cls, value: str) -> str:
        if "{action}" not in value:
            raise ValueError("reply must contain {action}, for example '<answer>{action}</answer>'")
        return value


class WarmStartSettings(ExpertSettings):
    """Supervised start on expert demonstrations that are collected over the wire; none are used after it."""

    epochs: Amount = 4
    batch_rows: Amount = 64
    learning_rate: LearningRate = 2e-3


class LearningFromExamples(Settings):
    """Settings of the passes over the examples."""

    data: list[ExamplesSettings] = Field([], description="The examples, one data set after the other.")
    held_out: list[ExamplesSettings] = Field(
        [], description="Examples that are measured and never learnt from, as `data` has them."
    )
    held_out_every: int = Field(
        25, ge=0, description="Steps between measurements on held_out; 0 measures at the two ends only."
    )
    epochs: Amount | None = Field(
        None, description="Passes over the examples; they take the place of `steps`. Absent: `steps` steps."
    )
    batch: Count = Field(32, description="Examples of one optimizer step.")
    batch_tokens: Amount | None = Field(
        None,
        description="In place of `batch`: a step takes as many examples as have so many tokens, so that steps cost the "
        "same, whatever their examples' lengths.",
    )
    longer: Literal["refuse", "leave_out"] = Field(
        "refuse",
        description="What becomes of examples beyond model.max_length: the first of them is named, or all are left out "
        "and counted.",
    )


class SftSettings(LearningFromExamples):
    """`roll-train sft`: replies are imitated, token by token."""

    roles: list[Literal["assistant", "user", "system", "tool"]] = Field(
        ["assistant"], min_length=1, description="Whose messages are learnt; all others are read only."
    )
    expert: ExpertSettings | None = Field(
        None, description="In place of data: demonstrations of the environments' experts."
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if bool(self.data) == (self.expert is not None):
            raise ValueError("sft learns either from 'data' or from an 'expert': name one of them")
        if self.expert is not None and self.roles != ["assistant"]:
            raise ValueError(
                "roles: an expert's demonstrations are the assistant's replies, and nothing else of them is learnt: "
                "leave roles out"
            )
        return self


class DpoSettings(LearningFromExamples):
    """`roll-train dpo`: of two replies, the better one becomes likelier."""

    loss: PreferenceLossSettings = PreferenceLossSettings()
    reference: UserPath | None = Field(
        None,
        min_length=1,
        description="What the policy is compared with: a model's folder or name on the hub, `none` (no reference), or "
        "absent: the policy as it begins.",
    )

    @model_validator(mode="after")
    def _examples_are_named(self) -> Self:
        if not self.data:
            raise ValueError("dpo learns from 'data': name at least one data set")
        if self.reference is not None and not self.loss.has_reference:
            raise ValueError(f"loss '{self.loss.kind}' compares with no reference: leave it out")
        if self.reference == "none" and self.loss.kind == "kto":
            raise ValueError(
                "loss 'kto' measures how far the policy is from a reference: leave reference out"
            )
        return self


class RewardModelSettings(LearningFromExamples):
    """`roll-train reward`: a model that gives the better of two replies the higher number (Bradley and Terry)."""

    centre: NonNegativeFloat = Field(
        0.0, description="Weight of the pull of rewards towards zero (2312.09244: 0.01); 0: none."
    )

    @model_validator(mode="after")
    def _examples_are_named(self) -> Self:
        if not self.data:
            raise ValueError("reward learns from 'data': name at least one data set")
        return self
