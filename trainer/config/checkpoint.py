"""What is kept so that a killed run goes on."""

from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from trainer.core.strict import Settings


class CheckpointSettings(Settings):
    """What is kept so that a killed run goes on."""

    every: int = Field(10, ge=0, description="Training steps between checkpoints; 0 keeps only the last.")
    keep: PositiveInt = Field(2, description="How many of the newest stay.")
    keep_best: int = Field(
        0, ge=0, le=1_000_000, description="How many of those with the best `best_metric` stay beside them."
    )
    best_metric: str | None = Field(
        None,
        min_length=1,
        description="A name in metrics.jsonl, such as rollout/success or evaluate/PANEL/greedy/success. A checkpoint's "
        "score is its value at that very step: evaluate where checkpoints are written.",
    )
    best_is: Literal["highest", "lowest"] = Field("highest", description="Which values of it are the best.")
    asynchronous: bool = Field(
        False,
        description="Go on training while a checkpoint is written, from a copy of it in the host's memory.",
    )
    resume: str = Field(
        "never",
        min_length=1,
        description="'auto' (the newest in output_dir, if any), 'never' (output_dir must hold no run), or a "
        "checkpoint's folder.",
    )

    @model_validator(mode="after")
    def _best_is_named(self) -> Self:
        if self.keep_best and self.best_metric is None:
            raise ValueError("keep_best needs best_metric: name the metric that checkpoints are chosen by")
        if self.best_metric is not None and not self.keep_best:
            raise ValueError(
                "best_metric is read by keep_best only: set keep_best to 1 or more, or leave it out"
            )
        return self
