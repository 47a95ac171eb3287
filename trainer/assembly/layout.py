"""Checks, before anything is built, whether a run's model can be sharded and trained as its settings say."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from rollgym.trainer.assembly.memory import model_config
from rollgym.trainer.assembly.rank_makers import maker_of
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.models.division import check_routed, check_server


def check_combinations(settings: RunSettings) -> None:
    """Refuse settings that a kind of backend does not train with, for any model.

    Raises:
        ConfigError: If there is such a setting; the message says what to take in its place.
    """
    for reason in settings.backend.what.refusals(settings):
        raise ConfigError(reason)


def check_model(settings: RunSettings) -> None:
    """Refuse what the run's model cannot be trained with, as far as its sizes are known here before it is loaded.

    Raises:
        ConfigError: If there is such a setting; the message says what to take in its place.
    """
    check_combinations(settings)
    try:
        config = model_config(settings.model)
    except ConfigError:
        return  # the memory plan reports it, and loading the model checks again
    check_division(settings, config)


def check_division(settings: RunSettings, config: Mapping[str, Any]) -> None:
    """Refuse a mesh, or servers, that the run's model does not divide by.

    Args:
        settings: The run.
        config: The model's config.json.

    Raises:
        ConfigError: If there is a number that does not divide; the message has one that does.
    """
    try:
        _check_division(settings, SimpleNamespace(**(config.get("text_config") or config)))
    except AttributeError as error:
        raise ConfigError(f"the model's config.json lacks a size: {error.name}") from error


def _check_division(settings: RunSettings, model: SimpleNamespace) -> None:
    if settings.backend.what.maker:
        maker_of(settings.backend).check_division(settings.backend, model)
    launch = settings.inference.launch
    if launch is not None and settings.plays:
        check_server(model, launch.tensor_parallel)
    if settings.optimizer.router_replay:
        check_routed(model, "optimizer.router_replay")
    if settings.inference.routed_experts:
        check_routed(model, "inference.routed_experts")
