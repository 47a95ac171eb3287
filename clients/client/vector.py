"""RemoteVectorEnv: many environments on a server as one `gymnasium.vector.VectorEnv`, in one frame a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import ResetNeeded
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from rollgym.clients.client.answers import render_modes
from rollgym.clients.client.client import CONNECT_TIMEOUT_S, Encoding, EnvClient
from rollgym.clients.client.env import (
    HUMAN,
    RemoteEnv,
    RemoteSpec,
    Window,
    checked_mode,
    offered_modes,
    remote_spec,
    tiled,
)
from rollgym.clients.client.operation import Operation, wait_for_all
from rollgym.clients.process.background import BackgroundLoop
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.messages import MAX_SEED

_Mask = np.ndarray[Any, np.dtype[np.bool_]]
# Attributes of a sub-environment, and under which name this environment has them.
_KNOWN = {
    "action_space": "single_action_space",
    "metadata": "metadata",
    "observation_space": "single_observation_space",
    "render_mode": "render_mode",
    "spec": "spec",
}


class SeedStream:
    """The seeds of one sub-environment's later episodes, as `RemoteEnv` would draw them.

    Args:
        seed: The seed of its first episode; a random stream if None.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._generator, _ = seeding.np_random(seed)
        self._next: int | None = None

    def peek(self) -> int:
        """Return the next seed without using it up."""
        if self._next is None:
            self._next = int(self._generator.integers(MAX_SEED))
        return self._next

    def take(self) -> int:
        """Return the next seed and advance."""
        seed = self.peek()
        self._next = None
        return seed


class RemoteVectorEnv(VectorEnv[Any, Any, np.ndarray[Any, Any]]):
    """Many sessions of one environment, stepped together.

    The semantics are those of `gymnasium.vector.SyncVectorEnv`. Sub-environment `i` draws the seeds of its later
    episodes from a generator that its first seed fixes, in every autoreset mode alike, so a run that was seeded
    once is reproducible as a whole.

    Examples:
        >>> envs = RemoteVectorEnv("http://127.0.0.1:8000", "FrozenLake-v0", num_envs=64)
        >>> observations, infos = envs.reset(seed=0)
        >>> observations, rewards, terminations, truncations, infos = envs.step(["Right"] * 64)

    Args:
        url: The server's address.
        env_id: One of the server's catalog.
        num_envs: How many sessions.
        env_kwargs: Kwargs that the environment's `kwargs_schema` allows.
        token: Bearer token; that of the environment variable `ROLLGYM_TOKEN` if None.
        encoding: `json`, or `msgpack` for large arrays.
        render_mode: One of the environment's `metadata["render_modes"]`. `human` shows all of them in one window.
        autoreset_mode: When an episode's end begins the next one.
        timeout_s: How long one call may take, with all reconnects and retries.
        connect_timeout_s: How long making waits for a server that does not answer. Once it has answered, it may be away
            for minutes.

    Raises:
        ProblemError: The server refuses.
        ConnectionError: The server cannot be reached; the message names the address and the remedy.
        ValueError: `num_envs` is below 1, or the environment does not have this render mode.
        gymnasium.error.DependencyNotInstalled: `human` needs pygame.
    """

    # Checkers of types know no descriptor in the place of a variable.
    spec = cast(EnvSpec | None, RemoteSpec())

    def __init__(
        self,
        url: str,
        env_id: str,
        num_envs: int = 1,
        env_kwargs: Mapping[str, Any] | None = None,
        *,
        token: str | None = None,
        encoding: Encoding = "json",
        render_mode: str | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        timeout_s: float = 600.0,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs must be at least 1, not {num_envs}")
        self.num_envs = num_envs
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self._client = EnvClient(
            url, token=token, encoding=encoding, timeout_s=timeout_s, connect_timeout_s=connect_timeout_s
        )
        self._background = BackgroundLoop()
        try:
            info = self._background.run(self._client.env(env_id))
            modes = offered_modes(render_modes(info.metadata))
            self._drawn_as = checked_mode(env_id, modes, render_mode)
            self._sessions = self._background.run(self._client.make_many(env_id, num_envs, env_kwargs))
        except BaseException:
            self.close()
            raise
        self.metadata = info.metadata | {"autoreset_mode": self.autoreset_mode, "render_modes": modes}
        self.render_mode = render_mode
        if render_mode == HUMAN:
            self._window = Window(lambda: tiled(self._draw()), self.metadata.get("render_fps"))
        arguments = {"url": url, "env_id": env_id, "env_kwargs": env_kwargs, "encoding": encoding}
        self.spec = remote_spec(RemoteEnv, env_id, arguments, info.max_episode_steps)
        self.single_action_space = self._sessions[0].action_space
        self.single_observation_space = self._sessions[0].observation_space
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self._seeds = [SeedStream() for _ in range(num_envs)]
        self._observations: list[Any] = [None] * num_envs
        self._ended: _Mask = np.zeros(num_envs, dtype=np.bool_)

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in all sub-environments, or in those that `options["reset_mask"]` selects.

        Args:
            seed: One for each; an integer stands for `seed, seed + 1, ...`.
            options: Options of the environment, and `reset_mask`.
        """
        seeds = self._spread(seed)
        options = None if options is None else dict(options)
        mask = self._take_mask(options)
        selected = [int(index) for index in np.flatnonzero(mask)]
        operations = [
            self._sessions[index].plan_reset(self._episode_seed(index, seeds[index]), options)
            for index in selected
        ]
        infos: dict[str, Any] = {}
        problems: dict[int, ProblemError] = {}
        for index, result in zip(selected, self._run(operations), strict=True):
            if isinstance(result, ProblemError):
                problems[index] = result
                continue
            self._observations[index], info = result
            self._ended[index] = False
            infos = self._add_info(infos, info, index)
        _raise_first(problems)
        self._refresh()
        return self._batch_observations(), infos

    def step(
        self, actions: Any
    ) -> tuple[Any, np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any], dict[str, Any]]:
        """Take an action in each sub-environment, in one frame.

        Raises:
            ResetNeeded: Autoreset is disabled, and an episode that ended was not reset.
            ProblemError: A sub-environment failed; the others have taken their steps.
        """
        if self.autoreset_mode is AutoresetMode.DISABLED and self._ended.any():
            raise ResetNeeded(
                f"sub-environments {np.flatnonzero(self._ended).tolist()} have ended; reset them"
            )
        parts = list(iterate(self.action_space, actions))
        if len(parts) != self.num_envs:
            raise ValueError(f"{len(parts)} actions for {self.num_envs} environments")
        results = self._run([self._plan_step(index, action) for index, action in enumerate(parts)])
        rewards = np.zeros(self.num_envs, dtype=np.float64)
        terminations = np.zeros(self.num_envs, dtype=np.bool_)
        truncations = np.zeros(self.num_envs, dtype=np.bool_)
        infos: dict[str, Any] = {}
        problems: dict[int, ProblemError] = {}
        for index, result in enumerate(results):
            if isinstance(result, ProblemError):
                problems[index] = result
                continue
            info = result.info
            self._observations[index] = result.observation
            if len(result) == 5:  # a step; the others are the resets of mode NEXT_STEP
                rewards[index], terminations[index], truncations[index] = result[1:4]
                if self.autoreset_mode is AutoresetMode.SAME_STEP and (
                    terminations[index] or truncations[index]
                ):
                    self._seeds[index].take()
                    final = {key: info.pop(key) for key in ("final_obs", "final_info")}
                    infos = self._add_info(infos, final, index)
            self._ended[index] = terminations[index] or truncations[index]
            infos = self._add_info(infos, info, index)
        _raise_first(problems)
        self._refresh()
        return self._batch_observations(), rewards, terminations, truncations, infos

    def render(self) -> tuple[Any, ...] | None:
        """Draw each state in the render mode; None without one, and for `human`, whose window shows them already."""
        if self.render_mode is None or self.render_mode == HUMAN:
            return None
        return self._draw()

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return an attribute of each sub-environment, or the result of its method of that name.

        Args:
            name: `render`, or one of the attributes that the wire knows: `action_space`, `metadata`,
                `observation_space`, `render_mode` and `spec`.
            *args: Arguments of the method.
            **kwargs: Likewise.

        Raises:
            AttributeError: The wire does not know it.
        """
        if name == "render":
            frames: tuple[Any, ...] | None = self.render(*args, **kwargs)
            return (None,) * self.num_envs if frames is None else frames
        if name not in _KNOWN:
            raise AttributeError(
                f"environments on a server have no {name!r} for their clients, only {', '.join(sorted(_KNOWN))}"
                " and render"
            )
        return (getattr(self, _KNOWN[name]),) * self.num_envs

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of each sub-environment; see `call`."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Refuse: the environments are on a server.

        Raises:
            AttributeError: Always; use `env_kwargs` or the options of a reset instead.
        """
        raise AttributeError(
            f"{name!r} cannot be set: the environments are on a server. Use env_kwargs, or the options of reset"
        )

    def _refresh(self) -> None:
        if self._window is not None:
            self._window.refresh()

    def _draw(self) -> tuple[Any, ...]:
        assert self._drawn_as is not None
        return tuple(self._background.run(self._render_all(self._drawn_as)))

    def close_extras(self, **_: Any) -> None:
        """Close the sessions and the connection."""
        if self._window is not None:
            self._window.close()
        self._background.run(self._client.close())
        self._background.close()

    _window: Window | None = None

    async def _render_all(self, mode: str) -> list[Any]:
        return await wait_for_all(session.render(mode) for session in self._sessions)

    def _spread(self, seed: int | Sequence[int | None] | None) -> Sequence[int | None]:
        if seed is None:
            return [None] * self.num_envs
        if isinstance(seed, (int, np.integer)):
            return [int(seed) + index for index in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise ValueError(f"{len(seed)} seeds for {self.num_envs} environments")
        return seed

    def _take_mask(self, options: dict[str, Any] | None) -> _Mask:
        if options is None or "reset_mask" not in options:
            return np.ones(self.num_envs, dtype=np.bool_)
        mask = options.pop("reset_mask")
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (self.num_envs,):
            raise TypeError(f"reset_mask must be a boolean array of shape ({self.num_envs},)")
        if not mask.any():
            raise ValueError("reset_mask selects no sub-environment")
        if any(
            session.episode < 0 for session, chosen in zip(self._sessions, mask, strict=True) if not chosen
        ):
            raise ResetNeeded("the first reset must be of all sub-environments")
        return mask

    def _episode_seed(self, index: int, seed: int | None) -> int:
        """Return the seed of a sub-environment's next episode, as `RemoteEnv.reset` would choose it."""
        if seed is None:
            return self._seeds[index].take()
        self._seeds[index] = SeedStream(seed)
        return seed

    def _plan_step(self, index: int, action: Any) -> Operation:
        session = self._sessions[index]
        if self.autoreset_mode is AutoresetMode.NEXT_STEP and self._ended[index]:
            return session.plan_reset(self._seeds[index].take())
        if self.autoreset_mode is AutoresetMode.SAME_STEP:
            return session.plan_step(action, autoreset=True, next_seed=self._seeds[index].peek())
        return session.plan_step(action)

    def _run(self, operations: Sequence[Operation]) -> list[Any]:
        return self._background.run(self._client.run_many(operations))

    def _batch_observations(self) -> Any:
        out: Any = create_empty_array(self.single_observation_space, self.num_envs)
        return concatenate(self.single_observation_space, self._observations, out)


def _raise_first(problems: Mapping[int, ProblemError]) -> None:
    """Raise the problem of the first sub-environment that has one; the results of the others are stored before."""
    for index, problem in problems.items():
        problem.add_note(f"in sub-environment {index}")
        raise problem
