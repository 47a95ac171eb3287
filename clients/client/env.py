"""RemoteEnv: an environment on a server as a plain `gymnasium.Env`.

Its frames are drawn in a window on this machine as Gymnasium draws them. If a program drops it without closing, its
connection is closed all the same, with a warning.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, ClassVar, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import DependencyNotInstalled
from gymnasium.wrappers import HumanRendering

from rollgym.clients.client.answers import render_modes
from rollgym.clients.client.client import CONNECT_TIMEOUT_S, Encoding, EnvClient
from rollgym.clients.client.session import EnvSession
from rollgym.clients.process.background import BackgroundLoop
from rollgym.clients.protocol.episode import PortableEpisode
from rollgym.clients.protocol.messages import MAX_SEED

_AT_EXIT_S = 2.0


def _close_when_dropped(
    owner: object,
    name: str,
    background: BackgroundLoop,
    closing: Callable[[], Coroutine[Any, Any, None]],
) -> weakref.finalize[Any, Any]:
    """Close a connection once its owner is garbage-collected, or when the program ends; `detach` cancels that.

    Args:
        owner: The object that should have closed it.
        name: Its name in the warning.
        background: The loop that it belongs to, which then ends.
        closing: Closes it; it must not hold the owner.
    """
    return weakref.finalize(owner, _close, name, background, closing, os.getpid())


def _close(
    name: str, background: BackgroundLoop, closing: Callable[[], Coroutine[Any, Any, None]], pid: int
) -> None:
    if os.getpid() != pid:
        # A fork has the connection of the process that made it, and no thread for it.
        return
    background.end_with(closing)
    if not threading.main_thread().is_alive():
        # The program ends, and its threads with it; at any other time the caller does not wait for the close.
        background.join(_AT_EXIT_S)
    warnings.warn(f"unclosed {name}", ResourceWarning, stacklevel=2)


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


HUMAN = "human"
"""The render mode that opens a window."""
DRAWN_FROM = "rgb_array"
"""The render mode whose frames the window shows."""

_DEFAULT_FPS = 30
_Frame = np.ndarray[Any, np.dtype[np.uint8]]


def checked_mode(env_id: str, modes: Sequence[str], render_mode: str | None) -> str | None:
    """Return the mode to request from the server, given the one that the user wants.

    Args:
        env_id: The environment, for the message.
        modes: The return value of `offered_modes` for it.
        render_mode: The mode that the user wants.

    Raises:
        ValueError: The environment does not have this render mode.
        DependencyNotInstalled: `human` needs pygame.
    """
    if render_mode is not None and render_mode not in modes:
        raise ValueError(f"{env_id} renders as one of {list(modes)}, not as {render_mode!r}")
    if render_mode != HUMAN:
        return render_mode
    if find_spec("pygame") is None:
        # An extra has it too, beside games that this user has not asked for.
        raise DependencyNotInstalled("render_mode='human' needs pygame on this machine: pip install pygame")
    return DRAWN_FROM


def offered_modes(modes: Sequence[str]) -> list[str]:
    """Return the render modes of a remote environment: the server's, and `human` if it draws arrays.

    A server opens no window for a client, so its own `human` counts for nothing.
    """
    drawn = [mode for mode in modes if mode != HUMAN]
    return [*([HUMAN] if DRAWN_FROM in drawn else []), *drawn]


class Window:
    """A window with the present frame, by Gymnasium's own `HumanRendering`; it opens with the first frame.

    Args:
        draw: Returns the frame, of shape (height, width, 3).
        frames_per_second: `metadata["render_fps"]` of the environment, if it says any.
    """

    def __init__(self, draw: Callable[[], _Frame], frames_per_second: Any) -> None:
        stated = isinstance(frames_per_second, int | float) and frames_per_second >= 1
        self._shown = HumanRendering(_Frames(draw, frames_per_second if stated else _DEFAULT_FPS))

    def refresh(self) -> None:
        """Show the present frame; takes as long as a frame lasts at its rate."""
        self._shown.reset()

    def close(self) -> None:
        """Close the window, if it has opened."""
        self._shown.close()  # type: ignore[no-untyped-call]


class _Frames(gymnasium.Env[Any, Any]):
    """The environment that `HumanRendering` wraps; it only renders."""

    def __init__(self, draw: Callable[[], _Frame], frames_per_second: Any) -> None:
        self.metadata = {"render_modes": [DRAWN_FROM], "render_fps": frames_per_second}
        self.render_mode = DRAWN_FROM
        self.observation_space = self.action_space = spaces.Discrete(1)
        self._draw = draw

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        return 0, {}

    def render(self) -> Any:
        return self._draw()


def tiled(frames: Sequence[_Frame]) -> _Frame:
    """Return frames of one size side by side, in rows of equal length; the remaining cells are black."""
    columns = int(np.ceil(np.sqrt(len(frames))))
    rows = -(-len(frames) // columns)
    height, width = frames[0].shape[:2]
    picture = np.zeros((rows * height, columns * width, 3), np.uint8)
    for number, frame in enumerate(frames):
        top, left = number // columns * height, number % columns * width
        picture[top : top + height, left : left + width] = frame
    return picture


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
        self._dropped = _close_when_dropped(
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
