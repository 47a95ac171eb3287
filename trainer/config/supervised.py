"""Learning from examples: replies that are imitated."""

from pydantic import Field, PositiveInt, field_validator

from trainer.core.strict import Count, LearningRate, Settings

PLAIN_REPLY = "{action}"
"""A reply that is the action and nothing else."""


class WarmStartSettings(Settings):
    """Supervised start on expert demonstrations that are collected over the wire."""

    demonstrations: Count = Field(description="Expert episodes. None are used after the warm start.")
    epochs: PositiveInt = 4
    batch_rows: PositiveInt = 64
    learning_rate: LearningRate = 2e-3
    reply: str = Field(PLAIN_REPLY, description="How the expert's action is written as a reply.")

    @field_validator("reply")
    @classmethod
    def _reply_names_action(cls, value: str) -> str:
        if "{action}" not in value:
            raise ValueError("reply must contain {action}, for example '<answer>{action}</answer>'")
        return value
