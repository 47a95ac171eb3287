"""What settings name as `module:attr`: all of it is imported before anything else is begun."""

from collections.abc import Iterator

from trainer.config.run import RunSettings
from trainer.errors import ConfigError
from trainer.plugins import load_attribute


def check_plugins(settings: RunSettings) -> None:
    """Import everything that settings name of a user's code.

    Raises:
        ConfigError: If something is not there, cannot be imported, or cannot be called; the message names the key.
    """
    for key, path in _named(settings):
        try:
            found = load_attribute(path)
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from error
        if not callable(found):
            raise ConfigError(f"{key}: '{path}' is no function, but {type(found).__name__}")


def _named(settings: RunSettings) -> Iterator[tuple[str, str]]:
    rollout, algorithm = settings.rollout, settings.algorithm
    named = {
        "rollout.agent": rollout.agent,
        "rollout.reward": rollout.reward,
        "rollout.task_source": rollout.task_source,
        "prompt.custom_context": settings.prompt.custom_context,
        "algorithm.advantage.function": getattr(algorithm.advantage, "function", None),
        "algorithm.filter.function": getattr(algorithm.filter, "function", None),
    }
    for key, path in named.items():
        if path is not None:
            yield key, path
