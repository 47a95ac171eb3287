"""RemoteEnv: an environment on a server as a plain `gymnasium.Env`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import gymnasium
from gymnasium.envs.registration import EnvSpec

from rollgym.clients.client.answers import render_modes
from rollgym.clients.client.client import CONNECT_TIMEOUT_S, Encoding, EnvClient
from rollgym.clients.client.dropped import close_when_dropped
from rollgym.clients.client.session import EnvSession
from rollgym.clients.client.spec import RemoteSpec, remote_spec
from rollgym.clients.client.window import HUMAN, Window, checked_mode, offered_modes
from rollgym.clients.process.background import BackgroundLoop
from rollgym.clients.protocol.episode import PortableEpisode
from rollgym.clients.protocol.messages import MAX_SEED


class RemoteEnv(gymnasium.Env[Any, Any]):
    """One environment on a server, used like a local one.

    Without a seed, `reset` draws one from `np_random`, so a run that was seeded once is reproducible as a whole.

    Examples:
        >>> env = RemoteEnv("http://127.0.0.1:8000", "FrozenLake-v0", {"size": 4})
        >>> observation, info = env.reset(seed=0)
        >>> observation, reward, terminated, truncated, info = env.step("Right")
        >>> env.close()

    Args:
        url: The server's address.
        env_id: One of the server's catalog.
        env_kwargs: Kwargs that the environment's `kwargs_schema` allows.
        token: Bearer token; that of the environment variable `ROLLGYM_TOKEN` if None.
        encoding: `json`, or `msgpack` for large arrays.
        render_mode: One of the environment's `metadata["render_modes"]`, which decides the return value of `render`.
            `human` shows each reset and step in a window on this machine, if the server draws `rgb_array` and pygame is
            installed.
        timeout_s: How long one call may take, with all reconnects and retries.
        connect_timeout_s: How long making waits for a server that does not answer. Once it has answered, it may be away
            for minutes.

    Raises:
        ProblemError: The server refuses.
        ConnectionError: The server cannot be reached; the message names the address and the remedy.
        ValueError: The environment does not have this render mode.
        gymnasium.error.DependencyNotInstalled: `human` needs pygame.
    """

    # `gymnasium.make` reads this before a server is known; an instance has its environment's own.
    metadata: ClassVar[dict[str, Any]] = {  # type: ignore[misc]
        "render_modes": ["human", "ansi", "rgb_array"],
        "render_fps": 4,
    }
    # Checkers of types know no descriptor in the place of a variable.
    spec = cast(EnvSpec | None, RemoteSpec())

    def __init__(
        self,
        url: str,
        env_id: str,
        env_kwargs: Mapping[str, Any] | None = None,
        *,
        token: str | None = None,
        encoding: Encoding = "json",
        render_mode: str | None = None,
        timeout_s: float = 600.0,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        self._name = f"{env_id!r} at {url}"
        self._client = EnvClient(
            url, token=token, encoding=encoding, timeout_s=timeout_s, connect_timeout_s=connect_timeout_s
        )
        self._background = BackgroundLoop()
        self._dropped = close_when_dropped(
            self, f"RemoteEnv({self._name})", self._background, self._client.close
        )
        try:
            served = self._background.run(self._client.env(env_id))
            self.metadata = served.metadata  # type: ignore[misc]
            modes = self.metadata["render_modes"] = offered_modes(render_modes(self.metadata))
            self._drawn_as = checked_mode(env_id, modes, render_mode)
            self._session: EnvSession = self._background.run(self._client.make(env_id, env_kwargs))
        except BaseException:
            self.close()
            raise
        self.render_mode = render_mode
        if render_mode == HUMAN:
            self._window = Window(self._draw, self.metadata.get("render_fps"))
        arguments = {"url": url, "env_id": env_id, "env_kwargs": env_kwargs, "encoding": encoding}
        self.spec = remote_spec(type(self), env_id, arguments, served.max_episode_steps)
        self.action_space = self._session.action_space
        self.observation_space = self._session.observation_space

    @property
    def session(self) -> EnvSession:
        """The session behind this environment; its coroutines belong to this environment's own loop."""
        return self._session

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; see `gymnasium.Env.reset`.

        Raises:
            ValueError: The seed is not below 2**53.
        """
        super().reset(seed=seed)
        if seed is None:
            seed = int(self.np_random.integers(MAX_SEED))
        observation, info = self._background.run(self._session.reset(seed, options))
        if self._window is not None:
            self._window.refresh()
        return observation, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take one action; see `gymnasium.Env.step`."""
        observation, reward, terminated, truncated, info = self._background.run(self._session.step(action))
        if self._window is not None:
            self._window.refresh()
        return observation, reward, terminated, truncated, info

    def render(self) -> Any:
        """Draw the state in the render mode; None without one, and for `human`, whose window shows it already."""
        if self.render_mode is None or self.render_mode == HUMAN:
            return None
        return self._draw()

    def _draw(self) -> Any:
        assert self._drawn_as is not None
        return self._background.run(self._session.render(self._drawn_as))

    def episode_record(self) -> PortableEpisode:
        """Return the portable episode so far: seed, actions and a digest of each step."""
        return self._background.run(self._session.episode_record())

    def close(self) -> None:
        """Close the session and the connection; closing again does nothing."""
        if not self._closed:
            self._closed = True
            self._dropped.detach()
            if self._window is not None:
                self._window.close()
            self._background.run(self._client.close())
            self._background.close()

    def __repr__(self) -> str:
        """Name the environment and its server."""
        return f"RemoteEnv({self._name}{', closed' if self._closed else ''})"

    _closed = False
    _window: Window | None = None
