"""Human rendering: frames of a server's environments, drawn in a window on this machine as Gymnasium draws them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.error import DependencyNotInstalled
from gymnasium.wrappers import HumanRendering

from rollgym.extras import install_line

HUMAN = "human"
"""The render mode that opens a window."""
DRAWN_FROM = "rgb_array"
"""The render mode whose frames the window shows."""

_DEFAULT_FPS = 30
_EXTRA = "pettingzoo"
"""The extra that brings pygame."""
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
        raise DependencyNotInstalled(f"render_mode='human' needs pygame: {install_line(_EXTRA)}")
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
