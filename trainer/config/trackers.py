"""The trackers of others that a run reports to: one settings class each, with where its board is."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from rollgym.extensions import extensions
from rollgym.suggestions import did_you_mean
from rollgym.trainer.core.kinds import imported
from rollgym.trainer.core.strict import Settings, UserPath

GROUP = "rollgym.trackers"
"""Entry points `name = "module:Class"` of `TrackerSettings` in other packages."""


class TrackerSettings(Settings):
    """A tracker of experiments."""

    name: ClassVar[str]
    """Its key in `tracking`, or in `tracking.others`."""
    package: ClassVar[str] = ""
    """What must be installed for it."""
    board: ClassVar[str]
    """`module:attribute` of what opens it, a `Board`, given these settings and the `RunIdentity`."""


class WandbSettings(TrackerSettings):
    """Weights & Biases (the extra `wandb`)."""

    name: ClassVar[str] = "wandb"
    package: ClassVar[str] = "wandb"
    board: ClassVar[str] = "rollgym.trainer.learn.boards:WandbBoard"

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
    board: ClassVar[str] = "rollgym.trainer.learn.boards:SwanlabBoard"

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
    board: ClassVar[str] = "rollgym.trainer.learn.boards:MlflowBoard"

    experiment: str = Field("rollgym", min_length=1)
    uri: UserPath | None = Field(
        None,
        description="Tracking server or folder; absent: MLFLOW_TRACKING_URI, or what MLflow does without it.",
    )


TRACKERS: tuple[type[TrackerSettings], ...] = (WandbSettings, SwanlabSettings, MlflowSettings)
"""Ours."""


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
