"""The trained policy of a run, measured (`roll-train eval`) and written for other tools (`roll-train export`)."""

import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import torch

from rollgym.trainer.backends.base import TrainBackend
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.console import RunConsole
from rollgym.trainer.core.errors import CheckpointError, ConfigError, RunError
from rollgym.trainer.core.run_files import (
    ADAPTER_FOLDER,
    MODEL_FOLDER,
    has_ended,
    output_lock,
    write_errors,
    write_whole,
)
from rollgym.trainer.evaluation.evaluator import Evaluator, build_evaluation_sets
from rollgym.trainer.models.load import save_model
from rollgym.trainer.models.lora import ADAPTER_CONFIG, has_adapters, save_adapter
from rollgym.trainer.records.checkpoint import (
    MANIFEST,
    Checkpoint,
    CheckpointStore,
    identity_of,
    load_checkpoint,
)
from rollgym.trainer.records.pieces import whole_state
from rollgym.trainer.run.environments import open_environments, task_source
from rollgym.trainer.run.inference import check_inference
from rollgym.trainer.run.judges import open_judges_alone
from rollgym.trainer.run.players import bring_weights, open_player, open_players
from rollgym.trainer.run.policy import Policy, build_policy

_ORIGIN = "checkpoint.json"
"""The file beside a trained model that names the checkpoint which holds the same weights; it is written last."""


def trained_policy(settings: RunSettings, checkpoint: Path | None) -> Policy:
    """Load the policy of a checkpoint, a model directory or an adapter's; the run's newest if none is named.

    Raises:
        CheckpointError: If there is none.
    """
    directory = Path(settings.output_dir)
    if checkpoint is None:
        ready = directory / (MODEL_FOLDER if settings.model.lora is None else ADAPTER_FOLDER)
        store = CheckpointStore(directory / "checkpoints", settings.checkpoint.keep)
        newest = store.latest()
        if _is_its_end(ready, newest):
            return build_policy(settings, ready)
        if ready.exists():
            _say(f"{ready} is of another checkpoint than the newest, {newest}: the checkpoint is taken")
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


def playing_policy(settings: RunSettings, checkpoint: Path | None) -> Policy:
    """Load the policy that plays: the trained one, or the original model if no run has trained one yet.

    Raises:
        CheckpointError: If there is none, and the settings name no model.
    """
    directory = Path(settings.output_dir)
    if checkpoint is not None or has_ended(directory) or (directory / "checkpoints").exists():
        return trained_policy(settings, checkpoint)
    if settings.model.path is None:
        raise CheckpointError(
            f"there is no trained policy in {settings.output_dir}; name one with --checkpoint, or a model with "
            "model.path, which plays as it is"
        )
    _say(f"no run has trained a policy in {settings.output_dir}: {settings.model.path} plays as it is")
    return build_policy(settings)


def _is_its_end(ready: Path, newest: Path | None) -> bool:
    """Whether a run has ended with a complete model, and has not continued since.

    Args:
        ready: The folder that a run writes at its end, after its last checkpoint.
        newest: The run's newest checkpoint, if it has one.
    """
    if newest is None:
        return ready.exists()
    origin, identity = _origin(ready), identity_of(newest)
    if origin is not None and identity is not None:
        return origin == identity
    # Earlier releases did not note it.
    written = _written(ready / "config.json", ready / ADAPTER_CONFIG)
    return written is not None and written >= (_written(newest / MANIFEST) or written)


def _written(*files: Path) -> int | None:
    """Return the modification time of the first existing file, in nanoseconds; None without one."""
    return next((file.stat().st_mtime_ns for file in files if file.exists()), None)


def save_policy(
    backend: TrainBackend, policy: Policy, directory: Path, checkpoint: Path | None = None
) -> str:
    """Write what was trained for other tools, and return a line about it.

    Args:
        backend: The policy.
        policy: The policy's tokenizer or processor, among others.
        directory: The parent folder; the policy gets a folder of its own there.
        checkpoint: The checkpoint that holds the same weights, if there is one.
    """
    folder = directory / (ADAPTER_FOLDER if backend.has_adapter else MODEL_FOLDER)
    (folder / _ORIGIN).unlink(missing_ok=True)
    if backend.has_adapter:
        backend.save_adapter(folder)
        said = f"adapters: {folder} (roll-train export adds them to the model's weights)"
    else:
        backend.save(folder)
        said = f"model: {folder}"
    policy.processor.save_pretrained(folder)
    if checkpoint is not None:
        origin = {"checkpoint": checkpoint.name, "manifest": identity_of(checkpoint)}
        write_whole(folder / _ORIGIN, json.dumps(origin) + "\n")
    return said


def _origin(folder: Path) -> str | None:
    """Return the identity of the checkpoint that a folder's model is of; None if it has no record of it."""
    try:
        origin = json.loads((folder / _ORIGIN).read_bytes())
    except (OSError, ValueError):
        return None
    identity = origin.get("manifest") if isinstance(origin, dict) else None
    return identity if isinstance(identity, str) else None


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


async def evaluate(settings: RunSettings, checkpoint: Path | None) -> int:
    """Measure a trained policy on the evaluation sets of its run."""
    check_inference(settings)
    async with AsyncExitStack() as stack:
        console = RunConsole(settings.steps, live=False)
        policy = playing_policy(settings, checkpoint)
        settings = await open_judges_alone(settings, stack, console.say)
        pool = await stack.enter_async_context(open_environments(settings, console))
        players = await stack.enter_async_context(open_players(settings, policy, pool, console))
        await bring_weights(settings, policy, players)
        evaluation_sets = await build_evaluation_sets(settings, pool)
        player = await stack.enter_async_context(open_player(settings, policy, players, console))
        evaluator = Evaluator(settings, player, pool, console, evaluation_sets, task_source(settings))
        evaluator.say("baseline", await evaluator.baselines())
        scores = await evaluator.measure(whole=True)
        evaluator.say("policy", scores)
        if evaluation_sets and not scores:
            raise RunError("nothing could be measured; the lines above say why")
    return 0


def export(settings: RunSettings, checkpoint: Path | None, output: Path, *, adapter: bool) -> int:
    """Write the policy of a checkpoint, or the run's newest, in Hugging Face layout.

    Args:
        settings: The run.
        checkpoint: Checkpoint folder, model directory or adapter's folder; the run's newest if None.
        output: The target folder; it must be empty or not exist yet.
        adapter: Whether to write the adapters alone, in peft's layout, in place of adding them to the model's weights.

    Raises:
        ConfigError: If `output` is not empty, another process writes there, or `adapter` is set without an adapter.
        CheckpointError: If there is no checkpoint or model to export.
    """
    _require_empty(output)
    policy = trained_policy(settings, checkpoint)
    if adapter and not has_adapters(policy.model):
        raise ConfigError("--adapter: this policy has no adapters beside its weights; leave --adapter out")
    with write_errors(output):
        output.mkdir(parents=True, exist_ok=True)
    with output_lock(output), write_errors(output):
        _require_empty(output)  # now that no other process writes there
        if adapter:
            save_adapter(policy.model, output)
            policy.processor.save_pretrained(output)
        else:
            save_model(policy.model, policy.processor, output)
    RunConsole(settings.steps, live=False).say(f"{'adapters' if adapter else 'model'}: {output}")
    return 0


def _require_empty(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {output} holds something already: name another folder")
