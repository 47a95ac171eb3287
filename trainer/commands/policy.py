"""The trained policy of a run."""

import sys
from pathlib import Path

import torch

from trainer.assembly.build import Policy, build_policy
from trainer.backends.base import TrainBackend
from trainer.config.run import RunSettings
from trainer.models.lora import ADAPTER_CONFIG
from trainer.records.checkpoint import Checkpoint, CheckpointError, CheckpointStore, load_checkpoint
from trainer.records.pieces import whole_state

MODEL_FOLDER = "model"
"""Name of the trained model in a run's directory, where all of it was trained."""
ADAPTER_FOLDER = "adapter"
"""Name of the trained adapters in a run's directory, where only those were trained."""


def trained_policy(settings: RunSettings, checkpoint: Path | None) -> Policy:
    """Load the policy of a checkpoint, a model directory or an adapter's; the run's newest if none is named.

    Raises:
        CheckpointError: If there is none.
    """
    directory = Path(settings.output_dir)
    if checkpoint is None:
        ready = directory / (MODEL_FOLDER if settings.model.lora is None else ADAPTER_FOLDER)
        if ready.exists():
            return build_policy(settings, ready)
        store = CheckpointStore(directory / "checkpoints", settings.checkpoint.keep)
        saved = store.load_newest(_say)
        if saved is None:
            raise CheckpointError(f"there is no trained policy in {directory}; name one with --checkpoint")
        return _of_checkpoint(settings, saved)
    if (checkpoint / ADAPTER_CONFIG).exists():
        if settings.model.lora is None:
            raise CheckpointError(
                f"{checkpoint} holds adapters: say with model.lora what they were made with"
            )
        return build_policy(settings, checkpoint)
    if (checkpoint / "config.json").exists():
        return build_policy(settings, checkpoint)
    return _of_checkpoint(settings, load_checkpoint(checkpoint))


def save_policy(backend: TrainBackend, policy: Policy, directory: Path) -> str:
    """Write what was trained for other tools, and return a line about it."""
    if backend.has_adapter:
        folder = directory / ADAPTER_FOLDER
        backend.save_adapter(folder)
        said = f"adapters: {folder} (roll-train export adds them to the model's weights)"
    else:
        folder = directory / MODEL_FOLDER
        backend.save(folder)
        said = f"model: {folder}"
    policy.processor.save_pretrained(folder)
    return said


def _of_checkpoint(settings: RunSettings, checkpoint: Checkpoint) -> Policy:
    policy = build_policy(settings)
    saved = whole_state(checkpoint.parts.get("policy", {})).get("model", {})
    trained = {name: each for name, each in policy.model.named_parameters() if each.requires_grad}
    if not all(name in saved and saved[name].shape == each.shape for name, each in trained.items()):
        raise CheckpointError(
            f"{checkpoint.folder} is of another model than these settings name: give the run's own, which its "
            "config.yaml holds, model.lora among them"
        )
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(saved[name])
    return policy


def _say(text: str) -> None:
    sys.stderr.write(f"roll-train: {text}\n")
