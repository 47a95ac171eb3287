"""The trained policy of a run."""

from pathlib import Path

from trainer.assembly import Policy, build_policy
from trainer.checkpoint import CheckpointError, CheckpointStore, load_checkpoint
from trainer.config.run import RunSettings
from trainer.inference.torch_engine import load_weights


def trained_policy(settings: RunSettings, checkpoint: Path | None) -> Policy:
    """Load the policy of a checkpoint or model directory; the run's newest if none is named.

    Raises:
        CheckpointError: If there is none.
    """
    directory = Path(settings.output_dir)
    if checkpoint is None:
        store = CheckpointStore(directory / "checkpoints", settings.checkpoint.keep)
        checkpoint = directory / "model" if (directory / "model").exists() else store.latest()
    if checkpoint is None:
        raise CheckpointError(f"there is no trained policy in {directory}; name one with --checkpoint")
    if (checkpoint / "config.json").exists():
        return build_policy(settings, checkpoint)
    _, saved = load_checkpoint(checkpoint)
    policy = build_policy(settings)
    names = dict(policy.model.named_parameters())
    load_weights(policy.model, {name: saved["policy"]["model"][name] for name in names})
    return policy
