"""The `gymnasium.Env.spec` of a remote environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gymnasium.envs.registration import EnvSpec

_LIMIT = "max_episode_steps"


class RemoteSpec:
    """The attribute `spec` of environments on a server: their id, and their step limit.

    `gymnasium.make` sets the spec of `rollgym/Remote-v0`, which knows no step limit. The limit that the server knows is
    added to it, so that wrappers which need one (`TimeAwareObservation`) find it.
    """

    def __get__(self, env: Any, owner: type) -> EnvSpec | None:
        return None if env is None else vars(env).get("_spec")

    def __set__(self, env: Any, spec: EnvSpec | None) -> None:
        known: EnvSpec | None = vars(env).get("_spec")
        if spec is not None and known is not None and spec.max_episode_steps is None:
            spec = replace(spec, max_episode_steps=known.max_episode_steps)
        vars(env)["_spec"] = spec


def remote_spec(
    env_class: type,
    env_id: str,
    arguments: Mapping[str, Any],
    max_episode_steps: int | None,
) -> EnvSpec:
    """Return the spec of an environment that was made without `gymnasium.make`.

    Args:
        env_class: The class that makes it again.
        env_id: The served environment.
        arguments: Keyword arguments that make it again, without the token: specs are printed and written down.
        max_episode_steps: The step limit that the catalog names. One among the kwargs of the environment overrides it.
    """
    given = (arguments.get("env_kwargs") or {}).get(_LIMIT)
    if isinstance(given, int) and not isinstance(given, bool):
        max_episode_steps = given
    return EnvSpec(
        id=env_id,
        entry_point=f"{env_class.__module__}:{env_class.__qualname__}",
        max_episode_steps=max_episode_steps,
        kwargs={name: value for name, value in arguments.items() if value is not None},
    )
