"""Output of a run: reports in its own files and to third-party trackers, and checkpoints.

Each tracker has one settings class, which says where its board is, and one key in `TrackingSettings`.
"""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, Self, get_args

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from rollgym.clients.process.modules import FormerNameWarning
from rollgym.extensions import extensions
from rollgym.suggestions import did_you_mean
from rollgym.trainer.core.kinds import imported
from rollgym.trainer.core.strict import Amount, Seconds, Settings, UserPath

GROUP = "rollgym.trackers"
"""Entry points `name = "module:Class"` of `TrackerSettings` in other packages."""


class TrackerSettings(Settings):
    """A tracker of experiments."""

    name: ClassVar[str]
    """Its key in `tracking`, or in `tracking.others`."""
    package: ClassVar[str] = ""
    """What must be installed for it, with an extra of its own name; empty for nothing."""
    board: ClassVar[str]
    """`module:attribute` of what opens it: an `OpenTracker`, given these settings and the `RunIdentity`."""


class WandbSettings(TrackerSettings):
    """Weights & Biases (the extra `wandb`)."""

    name: ClassVar[str] = "wandb"
    package: ClassVar[str] = "wandb"
    board: ClassVar[str] = "rollgym.trainer.learn.tracking:OpenWandb"

    project: str = Field("rollgym", min_length=1)
    entity: str | None = Field(None, description="Team or user; absent: the one that is logged in.")
    group: str | None = Field(None, description="Runs of one group are shown together.")
    tags: list[str] = Field([])
    mode: Literal["online", "offline"] = Field(
        "online",
        description="'offline' needs no network: `wandb sync` sends the folder below `wandb/` later.",
    )


class SwanlabSettings(TrackerSettings):
    """SwanLab (the extra `swanlab`)."""

    name: ClassVar[str] = "swanlab"
    package: ClassVar[str] = "swanlab"
    board: ClassVar[str] = "rollgym.trainer.learn.tracking:OpenSwanlab"

    project: str = Field("rollgym", min_length=1)
    workspace: str | None = Field(None, description="Absent: that of whoever is logged in.")
    group: str | None = Field(None, description="Runs of one group are shown together.")
    tags: list[str] = Field([])
    mode: Literal["online", "local", "offline"] = Field(
        "online",
        description="'local' is for `swanlab watch` on this machine; `swanlab sync` sends what is 'offline' later.",
    )


class MlflowSettings(TrackerSettings):
    """MLflow (the extra `mlflow`; `pip install mlflow-skinny` is enough where `uri` is a server)."""

    name: ClassVar[str] = "mlflow"
    package: ClassVar[str] = "mlflow"
    board: ClassVar[str] = "rollgym.trainer.learn.tracking:OpenMlflow"

    experiment: str = Field("rollgym", min_length=1)
    uri: UserPath | None = Field(
        None,
        description="Tracking server or folder; absent: MLFLOW_TRACKING_URI, or what MLflow does without it.",
    )


def others_of(values: Mapping[Any, Any]) -> dict[str, TrackerSettings]:
    """Return the settings of trackers that other packages add.

    Raises:
        ValueError: If there is none of a name, or its package is broken.
    """
    added = extensions(GROUP) if values else {}
    return {str(name): _other(str(name), value, added) for name, value in values.items()}


def _other(name: str, value: Any, added: Mapping[str, Any]) -> TrackerSettings:
    if name not in added:
        known = {each.name for each in TRACKERS}
        hint = (
            f"it is tracking.{name}" if name in known else did_you_mean(name, added) or "no package adds it"
        )
        raise ValueError(f"there is no tracker {name[:60]!r} of another package; {hint}")
    found = imported(name, added[name])
    if not (isinstance(found, type) and issubclass(found, TrackerSettings) and found.name == name):
        raise ValueError(
            f"tracker '{name}' of the package {added[name].owner} is broken: {added[name].path} is no subclass of "
            f"TrackerSettings with the name '{name}'"
        )
    return found.model_validate(value)


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


def _kinds(settings: type[Settings]) -> Iterator[type[TrackerSettings]]:
    """Yield the classes of the keys that hold one tracker's settings, or nothing."""
    for field in settings.model_fields.values():
        match get_args(field.annotation):
            case (type() as kind, none) if none is type(None) and issubclass(kind, TrackerSettings):
                yield kind


TRACKERS = tuple(_kinds(TrackingSettings))
"""Ours, in the order of their keys."""


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
        warnings.warn(
            f"checkpoint.best_metric: '{metric}' is called {current} now", FormerNameWarning, stacklevel=2
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
