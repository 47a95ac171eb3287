"""Where a run reports to: its own files, and trackers of others."""

from typing import Literal

from pydantic import Field

from trainer.core.strict import Seconds, Settings


class WandbSettings(Settings):
    """Weights & Biases (`pip install wandb`)."""

    project: str = Field("rollgym", min_length=1)
    entity: str | None = Field(None, description="Team or user; absent: the one that is logged in.")
    group: str | None = Field(None, description="Runs of one group are shown together.")
    tags: list[str] = Field([])
    mode: Literal["online", "offline"] = Field(
        "online",
        description="'offline' needs no network: `wandb sync` sends the folder below `wandb/` later.",
    )


class SwanlabSettings(Settings):
    """SwanLab (`pip install swanlab`)."""

    project: str = Field("rollgym", min_length=1)
    workspace: str | None = Field(None, description="Absent: that of whoever is logged in.")
    group: str | None = Field(None, description="Runs of one group are shown together.")
    tags: list[str] = Field([])
    mode: Literal["online", "local", "offline"] = Field(
        "online",
        description="'local' is for `swanlab watch` on this machine; `swanlab sync` sends what is 'offline' later.",
    )


class MlflowSettings(Settings):
    """MLflow (`pip install mlflow`; `mlflow-skinny` is enough where `uri` is a server)."""

    experiment: str = Field("rollgym", min_length=1)
    uri: str | None = Field(
        None,
        description="Tracking server or folder; absent: MLFLOW_TRACKING_URI, or what MLflow does without it.",
    )


class TrackingSettings(Settings):
    """Where a run reports to, beside metrics.jsonl. A tracker that fails never ends the run."""

    tensorboard: bool = True
    wandb: WandbSettings | None = Field(None, description="Report to Weights & Biases too; {} for defaults.")
    swanlab: SwanlabSettings | None = Field(None, description="Report to SwanLab too; {} for defaults.")
    mlflow: MlflowSettings | None = Field(None, description="Report to MLflow too; {} for defaults.")
    patience_s: Seconds = Field(
        30.0, description="How long trackers may take to send what is left when the run ends."
    )
    console: bool = Field(True, description="Live table in a terminal; plain lines otherwise.")
    episodes: bool = Field(True, description="Write every training episode, text and ids, to episodes.jsonl.")
    digests: bool = Field(False, description="Write a digest of ids, rewards and weights at every step.")
