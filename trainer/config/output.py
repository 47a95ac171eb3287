"""Output of a run: reports in its own files and to third-party trackers, and checkpoints."""

import warnings
from typing import Any, Literal, Self

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from rollgym.trainer.config.trackers import (
    TRACKERS,
    MlflowSettings,
    SwanlabSettings,
    TrackerSettings,
    WandbSettings,
    others_of,
)
from rollgym.trainer.core.strict import Amount, Seconds, Settings, UserPath


def current_metric(name: str) -> str:
    """Return the name that a metric has now; prefix breaks were counted as `rollout/forks` before."""
    former = "rollout/forks"
    return name.replace(former, "rollout/prefix_breaks", 1) if name.startswith(former) else name


class TrackingSettings(Settings):
    """Trackers that a run reports to, beside metrics.jsonl. A failing tracker never ends the run."""

    tensorboard: bool = True
    wandb: WandbSettings | None = Field(None, description="Report to Weights & Biases too; {} for defaults.")
    swanlab: SwanlabSettings | None = Field(None, description="Report to SwanLab too; {} for defaults.")
    mlflow: MlflowSettings | None = Field(None, description="Report to MLflow too; {} for defaults.")
    others: dict[str, SerializeAsAny[TrackerSettings]] = Field(
        {}, description="Trackers that other packages add, by their names; {} for defaults of one."
    )
    patience_s: Seconds = Field(
        30.0, description="How long trackers may take to send what is left when the run ends."
    )
    console: bool = Field(True, description="Live table in a terminal; plain lines otherwise.")
    episodes: bool = Field(True, description="Write every training episode, text and ids, to episodes.jsonl.")
    digests: bool = Field(False, description="Write a digest of ids, rewards and weights at every step.")

    @field_validator("others", mode="before")
    @classmethod
    def _of_other_packages(cls, value: Any) -> Any:
        return others_of(value) if isinstance(value, dict) else value

    @property
    def chosen(self) -> list[TrackerSettings]:
        """The trackers of others that the run reports to."""
        ours = (getattr(self, each.name) for each in TRACKERS)
        return [each for each in (*ours, *self.others.values()) if each is not None]


class CheckpointSettings(Settings):
    """Checkpoints and the rollout log, from which a killed run resumes."""

    every: int = Field(10, ge=0, description="Training steps between checkpoints; 0 keeps only the last.")
    keep: Amount = Field(2, description="How many of the newest stay.")
    keep_best: int = Field(
        0, ge=0, le=1_000_000, description="How many of those with the best `best_metric` stay beside them."
    )
    best_metric: str | None = Field(
        None,
        min_length=1,
        description="A name in metrics.jsonl, such as rollout/success or evaluate/SET/greedy/success. A checkpoint's "
        "score is its value at that very step: evaluate where checkpoints are written.",
    )
    best_is: Literal["highest", "lowest"] = Field("highest", description="Which values of it are the best.")
    asynchronous: bool = Field(
        False,
        description="Go on training while a checkpoint is written, from a copy of it in the host's memory.",
    )
    resume: UserPath = Field(
        "never",
        min_length=1,
        description="'auto' (the newest in output_dir, if any), 'never' (output_dir must hold no run), or a "
        "checkpoint's folder.",
    )

    @field_validator("best_metric")
    @classmethod
    def _by_its_current_name(cls, metric: str | None) -> str | None:
        if metric is None or (current := current_metric(metric)) == metric:
            return metric
        # FutureWarning: Python shows it to the settings' author, and not only to developers.
        warnings.warn(
            f"checkpoint.best_metric: '{metric}' is called {current} now", FutureWarning, stacklevel=2
        )
        return current

    @model_validator(mode="after")
    def _best_is_named(self) -> Self:
        if self.keep_best and self.best_metric is None:
            raise ValueError("keep_best needs best_metric: name the metric that checkpoints are chosen by")
        if self.best_metric is not None and not self.keep_best:
            raise ValueError(
                "best_metric is read by keep_best only: set keep_best to 1 or more, or leave it out"
            )
        if self.changed("best_is") and not self.keep_best:
            raise ValueError("best_is is read by keep_best only: set keep_best to 1 or more, or leave it out")
        return self
