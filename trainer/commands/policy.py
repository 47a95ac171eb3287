"""The trained policy of a run."""

import sys
from pathlib import Path

from trainer.assembly.build import Policy, build_policy
from trainer.config.run import RunSettings
from trainer.inference.torch_engine import load_weights
from trainer.records.checkpoint import Checkpoint, CheckpointError, CheckpointStore, load_checkpoint


def trained_policy(settings: RunSettings, checkpoint: Path | None) -> Policy:
    """Load the policy of a checkpoint or model directory; the run's newest if none is named.

    Raises:
        CheckpointError: If there is none.
    """
    directory = Path(settings.output_dir)
    if checkpoint is None:
        store = CheckpointStore(directory / "checkpoints", settings.checkpoint.keep)
        if (directory / "model").exists():
            return build_policy(settings, directory / "model")
        saved = store.load_newest(_say)
        if saved is None:
            raise CheckpointError(f"there is no trained policy in {directory}; name one with --checkpoint")
        return _of_checkpoint(settings, saved)
    if (checkpoint / "config.json").exists():
        return build_policy(settings, checkpoint)
    return _of_checkpoint(settings, load_checkpoint(checkpoint))


def _of_checkpoint(settings: RunSettings, checkpoint: Checkpoint) -> Policy:
    policy = build_policy(settings)
    names = dict(policy.model.named_parameters())
    saved = checkpoint.parts.get("policy", {}).get("model", {})
    if not all(name in saved and saved[name].shape == value.shape for name, value in names.items()):
        raise CheckpointError(f"{checkpoint.folder} is of another model than these settings name")
    load_weights(policy.model, {name: saved[name] for name in names})
    return policy


def _say(text: str) -> None:
    sys.stderr.write(f"roll-train: {text}\n")
