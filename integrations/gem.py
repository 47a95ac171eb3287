"""Environments of a server as GEM has environments, which is the interface of ROLL's recipes.

`gem.make("rollgym", url=..., environment="FrozenLake-v0")` after `register()`, or in ROLL's `env_config`:

    env_type: rollgym
    env_config: {url: "http://127.0.0.1:8000", environment: FrozenLake-v0, env_kwargs: {size: 4}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollgym.clients.client.env import RemoteEnv
from rollgym.clients.protocol.spaces import UnicodeText

ENTRY_POINT = "rollgym.integrations.gem:RemoteGemEnv"

_FLAGS = ("success", "action_is_valid", "format_penalty")
_MODES = frozenset({"mean", "last", "sum", "min", "max", "first"})
_MODE_OF_FLAGS = {"success": "last", "action_is_valid": "mean", "format_penalty": "mean"}


def register(env_id: str = "rollgym", **config: Any) -> None:
    """Make `RemoteGemEnv` known to GEM; calling it again for the same id changes what it is made with.

    Args:
        env_id: What `gem.make` calls it, for example ROLL's `env_type`.
        **config: Arguments that `gem.make` need not give, for example `url` and `environment`.
    """
    from gem.envs import registration

    registration.ENV_REGISTRY.pop(env_id, None)
    registration.register(env_id, ENTRY_POINT, **config)


def _plain(value: Any) -> Any:
    """Return a value of a configuration as plain data: ROLL's recipes hold lists and mappings of OmegaConf."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(each) for each in value]
    return value


class RemoteGemEnv:
    """One environment on a server with the interface of `gem.Env`.

    It needs GEM only where it is registered there. `info` has the words of ROLL: `env_instruction` at a reset, and
    `metrics` with `metrics_agg_mode` at each step. `info["messages"]` is left out: ROLL would take it for its own
    record of the conversation.

    Args:
        url: The server's address.
        environment: One of the server's catalog. (`env_id` is what `gem.make` calls its own id.)
        env_kwargs: What the environment's `kwargs_schema` allows.
        seed: Seed of the first episode, where `reset` gives none; `gem.make_vec` passes it.
        token: Bearer token; the variable `ROLLGYM_TOKEN` if None.
        timeout_s: How long one call may take, with all reconnects and retries.
        **more_kwargs: Further kwargs of the environment: configurations of ROLL are flat.

    Attributes:
        env_id: What `gem.make` calls it.

    Raises:
        ProblemError: The server refuses, for example `unknown_env` or `invalid_kwargs`.
        ConnectionError: The server cannot be reached.
        ValueError: The environment is not played by text.
    """

    env_id = ""

    def __init__(
        self,
        url: str,
        environment: str,
        env_kwargs: Mapping[str, Any] | None = None,
        *,
        seed: int | None = None,
        token: str | None = None,
        timeout_s: float = 600.0,
        **more_kwargs: Any,
    ) -> None:
        self._config: dict[str, Any] = {
            "url": url,
            "environment": environment,
            "env_kwargs": {key: _plain(each) for key, each in {**(env_kwargs or {}), **more_kwargs}.items()},
            "token": token,
            "timeout_s": timeout_s,
        }
        self._first_seed = seed
        self._env = RemoteEnv(
            url,
            environment,
            self._config["env_kwargs"],
            token=token,
            timeout_s=timeout_s,
        )
        for space in (self._env.action_space, self._env.observation_space):
            if not isinstance(space, UnicodeText):
                self._env.close()
                raise ValueError(f"{environment} is not played by text: serve it with --gymnasium-text")
        modes = self._env.metadata.get("metrics")
        self._modes = _MODE_OF_FLAGS | {
            name: mode
            for name, mode in (modes if isinstance(modes, Mapping) else {}).items()
            if mode in _MODES
        }

    @property
    def unwrapped(self) -> RemoteGemEnv:
        """This environment: there is no wrapper."""
        return self

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode.

        Args:
            seed: Its seed; equal seeds are equal tasks. Without one, it is drawn.

        Returns:
            The observation, and `info` with `env_instruction`.
        """
        if seed is None:
            seed, self._first_seed = self._first_seed, None
        observation, info = self._env.reset(seed=seed)
        return observation, self._in_words_of_roll(info) | {"env_instruction": info.get("instruction", "")}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take a reply of the model, as it is: the environment reads the action in it.

        At the limit of steps an episode is terminated as well as truncated, as GEM's and ROLL's own environments have
        it: ROLL's managers of environments look at the former alone.
        """
        observation, reward, terminated, truncated, info = self._env.step(action)
        return observation, reward, terminated or truncated, truncated, self._in_words_of_roll(info)

    def sample_random_action(self) -> str:
        """Return an action at random, where the environment names its actions.

        Raises:
            NotImplementedError: It does not.
        """
        actions = self._available
        if not actions:
            raise NotImplementedError(f"{self._config['environment']} does not name its actions")
        return str(actions[int(self._env.np_random.integers(len(actions)))])

    def spawn(self, same_state: bool = False, **kwargs: Any) -> RemoteGemEnv:
        """Return another environment with this one's arguments.

        Args:
            same_state: Not supported; a session is copied by `EnvSession.fork`.
            **kwargs: Arguments that differ.

        Raises:
            NotImplementedError: The same state is asked for.
        """
        if same_state:
            raise NotImplementedError("a copy at the same state is made by EnvSession.fork")
        return RemoteGemEnv(**(self._config | kwargs))

    def close(self) -> None:
        """Close the session and the connection; closing again does nothing."""
        self._env.close()

    _available: list[Any] = []  # noqa: RUF012 - replaced at each reset and step, never changed

    def _in_words_of_roll(self, info: Mapping[str, Any]) -> dict[str, Any]:
        available = info.get("available_actions")
        self._available = list(available) if isinstance(available, list | tuple) else []
        found = {name: value for name, value in info.items() if name not in ("messages", "instruction")}
        metrics = info.get("metrics")
        numbers = {name: info[name] for name in _FLAGS if name in info}
        if isinstance(metrics, Mapping):
            numbers |= metrics
        found["metrics"] = {
            name: float(value) for name, value in numbers.items() if isinstance(value, bool | int | float)
        }
        found["metrics_agg_mode"] = {name: self._modes.get(name, "last") for name in found["metrics"]}
        return found
