"""Training by settings, from the command line or from a program by `rollgym.train`."""

import asyncio
import gc
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from rollgym.extras import missing_extra
from rollgym.trainer.assembly.layout import check_model
from rollgym.trainer.cluster.placement import place_roles
from rollgym.trainer.config.checks import check_settings
from rollgym.trainer.config.load import load_settings, settings_from
from rollgym.trainer.config.pipelines import check_command
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.ending import Ending
from rollgym.trainer.core.errors import ConfigError

LearningCommand = Literal["train", "sft", "dpo", "distill", "reward"]
Settings = RunSettings | Mapping[str, Any] | Path | str | None


def train(settings: Settings = None, /, *, command: LearningCommand = "train", **overrides: Any) -> Path:
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
    settings: Settings = None, /, *, command: LearningCommand = "train", **overrides: Any
) -> Path:
    """Train as `train` does, in the event loop that runs."""
    resolved = _resolved(settings, overrides, command)
    ending = Ending()
    try:
        with ending.watching():
            await learn(resolved, ending, command)
    finally:
        gc.unfreeze()  # earlier objects are the caller's, which may drop them
    return Path(resolved.output_dir)


async def learn(settings: RunSettings, ending: Ending, command: str) -> int:
    """Carry out a command that trains.

    Raises:
        ConfigError: If the settings cannot be used. All that can be known without torch is checked before its import.
        MissingExtraError: If packages that training needs are not installed.
    """
    check_command(settings, command)
    check_settings(settings)
    place_roles(settings)
    check_model(settings)
    with large_imports("training"):
        from transformers.utils.logging import disable_progress_bar

        from rollgym.trainer.assembly.device_choices import with_planned_micro_batch
        from rollgym.trainer.commands.examples import learn_from_examples
        from rollgym.trainer.commands.train import train as play_and_train
    disable_progress_bar()  # the run has a console of its own
    settings = with_planned_micro_batch(settings)
    if command != "train" and not settings.plays:
        return await learn_from_examples(settings, command, ending)
    return await play_and_train(settings, ending, command)


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


def _resolved(settings: Settings, overrides: Mapping[str, Any], command: str) -> RunSettings:
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
