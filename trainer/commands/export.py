"""`roll-train export`: the trained policy as a folder that other tools load."""

from pathlib import Path

from trainer.commands.policy import trained_policy
from trainer.config.run import RunSettings
from trainer.core.console import RunConsole
from trainer.core.errors import ConfigError
from trainer.core.run_files import write_errors
from trainer.models.load import save_model
from trainer.models.lora import has_adapters, save_adapter


def export(settings: RunSettings, checkpoint: Path | None, output: Path, *, adapter: bool) -> int:
    """Write the policy of a checkpoint, or the run's newest, in Hugging Face layout.

    Args:
        settings: The run.
        checkpoint: Checkpoint folder, model directory or adapter's folder; the run's newest if None.
        output: Where to; a folder that is empty, or not there yet.
        adapter: Whether to write the adapters alone, in peft's layout, in place of adding them to the model's weights.

    Raises:
        ConfigError: If there is something in `output`, or no adapter to keep.
        CheckpointError: If there is no such policy.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {output} holds something already: name another folder")
    policy = trained_policy(settings, checkpoint)
    if adapter and not has_adapters(policy.model):
        raise ConfigError("--adapter: this policy has no adapters beside its weights; leave --adapter out")
    with write_errors(output):
        if adapter:
            save_adapter(policy.model, output)
            policy.processor.save_pretrained(output)
        else:
            save_model(policy.model, policy.processor, output)
    RunConsole(settings.steps, live=False).say(f"{'adapters' if adapter else 'model'}: {output}")
    return 0
