"""Training by settings, from the command line or from a program by `rollgym.train`."""

import asyncio
import gc
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from rollgym.extras import missing_extra, require_extra
from rollgym.trainer.cluster.placement import place_roles
from rollgym.trainer.config.checks import check_settings
from rollgym.trainer.config.load import check_command, load_settings, settings_from
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.shutdown import GracefulShutdown
from rollgym.trainer.run.layout import check_model

LearningCommand = Literal["train", "sft", "dpo", "distill", "reward"]
SettingsSource = RunSettings | Mapping[str, Any] | Path | str | None


def train(
    settings: SettingsSource = None, /, *, command: LearningCommand = "train", **overrides: Any
) -> Path:
    """Train as `roll-train` does, and return the directory that the run leaves behind.

        rollgym.train("frozen_lake.yaml", steps=40, rollout={"group_size": 8, "reward": my_reward})

    The trained model is in its folder `model`, in Hugging Face layout. If the directory holds a run of the same
    settings, that run resumes. In a notebook, whose event loop runs already, `await train_async(...)`.

    Args:
        settings: A YAML file, a mapping of settings, or settings that were read; None for the defaults.
        command: How to learn: by playing, or by one of the pipelines over examples.
        overrides: Settings that override these; sections are mappings. A module's function stands for its name.

    Raises:
        TrainerError: If the settings are invalid (`ConfigError`), or the run cannot continue.
        RuntimeError: If an event loop runs in this thread.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(train_async(settings, command=command, **overrides))
    raise RuntimeError("an event loop runs here, as in a notebook: await rollgym.train_async(...)")


async def train_async(
    settings: SettingsSource = None, /, *, command: LearningCommand = "train", **overrides: Any
) -> Path:
    """Train as `train` does, in the event loop that runs."""
    resolved = _resolved(settings, overrides, command)
    try:
        await learn(resolved, command)
    finally:
        gc.unfreeze()  # earlier objects are the caller's, which may drop them
    return Path(resolved.output_dir)


async def learn(settings: RunSettings, command: str) -> int:
    """Carry out a command that trains: from the start, or from the newest checkpoint.

    If a role of the run dies, it is started again, and the run goes on from its last checkpoint.

    Raises:
        ConfigError: If the settings cannot be used. All that can be known without torch is checked before its import.
        MissingExtraError: If packages that training needs are not installed.
        RunStoppedError: If it ends before its last step, once what was learnt is saved.
    """
    shutdown = GracefulShutdown()
    with shutdown.watching():
        check_command(settings, command)
        check_settings(settings)
        place_roles(settings)
        check_model(settings)
        with large_imports("training"):
            from transformers.utils.logging import disable_progress_bar

            from rollgym.trainer.run.device_choices import with_planned_micro_batch
            from rollgym.trainer.run.examples import open_examples
            from rollgym.trainer.run.supervision import supervised
            from rollgym.trainer.run.train import open_run
        # They draw the curves of a run at its end, and are imported then.
        require_extra(("matplotlib", "PIL"), "train", "training")
        disable_progress_bar()  # the run has a console of its own
        settings = with_planned_micro_batch(settings)
        opened = open_run if command == "train" or settings.plays else open_examples
        async with supervised(settings, shutdown) as supervision:
            while not supervision.done:
                async with supervision.attempt() as attempt, opened(attempt) as run:
                    await run.train()
    return 0


@contextmanager
def large_imports(what: str) -> Iterator[None]:
    """Import torch and transformers without garbage collection: they allocate many objects, and keep them.

    The collector would take a fifth of the time of the imports, and later stop all episodes for a third of a second
    each time.

    Args:
        what: The feature that needs the imports, for the error.

    Raises:
        MissingExtraError: If a package of an extra is not installed.
    """
    looked_for = gc.isenabled()
    gc.disable()
    try:
        yield
    except ModuleNotFoundError as error:
        raise missing_extra(error, what) or error from error
    finally:
        gc.freeze()
        if looked_for:
            gc.enable()


def _resolved(settings: SettingsSource, overrides: Mapping[str, Any], command: str) -> RunSettings:
    if isinstance(settings, RunSettings):
        if not overrides:
            return settings
        settings = settings.model_dump(mode="json")
    laid = _named(overrides, "")
    if isinstance(settings, Mapping):
        return settings_from(_named(settings, ""), laid, command)
    return load_settings(None if settings is None else Path(settings), laid, command)


def _named(values: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return settings as plain data: mappings, lists, and the names of functions."""
    return {str(key): _plain(value, f"{place}{key}") for key, value in values.items()}


def _plain(value: Any, place: str) -> Any:
    match value:
        case Mapping():
            return _named(value, f"{place}.")
        case list() | tuple():
            return [_plain(each, f"{place}.{index}") for index, each in enumerate(value)]
        case Path():
            return str(value)
        case _ if callable(value):
            return _name_of(value, place)
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{place}: a {type(value).__name__} is no value of a setting") from error
    return value


def _name_of(function: Any, place: str) -> str:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not module or not name or "." in name or "<" in name:
        raise ConfigError(
            f"{place}: {name or function!r} has no name in a module by which others could import it"
        )
    return f"{module}:{name}"
