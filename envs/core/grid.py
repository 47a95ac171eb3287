"""Base of the grid games: games of a few named actions whose board is a picture, too. Knows no game."""

from abc import abstractmethod
from typing import Annotated, Any, ClassVar

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from pydantic import Field

from rollgym.envs.core.kwargs import OneOf
from rollgym.envs.core.text_game import Move, NamedGame

__all__ = ["GridGame", "Move", "Observation"]

OBSERVED_CELL = 8
"""Pixels along a cell of an observed picture."""

Observation = Annotated[
    str,
    OneOf("text", "image"),
    Field(
        description="What the policy sees: the board as `text`, or as an `image`, uint8 RGB with 8 pixels along a cell."
    ),
]


class GridGame(NamedGame):
    """A game on a grid whose actions are a few names, with a picture of its board.

    Beside the hooks of `TextGame`, of which `parse_action` is done, a subclass overrides `draw_picture`.
    """

    metadata: dict[str, Any] = NamedGame.metadata | {"render_modes": ["ansi", "rgb_array"]}
    RENDERED_CELL: ClassVar[int] = 16
    """Pixels along a cell of a rendered picture."""

    _shape: tuple[int, int] | None = None
    """Rows and columns of the observed pictures; None if boards are observed as text."""

    @abstractmethod
    def draw_picture(self, cell: int) -> NDArray[np.uint8]:
        """Return the board as a picture: RGB, uint8, `[rows * cell, columns * cell, 3]`.

        Args:
            cell: Pixels along a cell.
        """

    def render(self) -> Any:
        """Return the board as text or as a picture, by `render_mode`."""
        return self.draw_picture(self.RENDERED_CELL) if self.render_mode == "rgb_array" else super().render()

    # -- pictures as observations ----------------------------------------------------------------------------------

    def observe_pictures(self, rows: int, columns: int) -> None:
        """Make observations pictures of that many cells. Call it in the constructor."""
        self._shape = (rows, columns)
        shape = (rows * OBSERVED_CELL, columns * OBSERVED_CELL, 3)
        self.observation_space = spaces.Box(0, 255, shape, np.uint8)

    def require_fitting(self, rows: int, columns: int) -> None:
        """Refuse a board that does not fit the observation space.

        Raises:
            ValueError: If boards are observed as pictures, and this one has other sides.
        """
        if self._shape is not None and self._shape != (rows, columns):
            raise ValueError(
                f"the board has {rows} rows and {columns} columns, and with observation 'image' those of this "
                f"environment have {self._shape[0]} and {self._shape[1]}: make it with boards of that size"
            )

    def _observation(self) -> Any:
        return super()._observation() if self._shape is None else self.draw_picture(OBSERVED_CELL)

    def _noted(self, note: str, info: dict[str, Any]) -> Any:
        if self._shape is None:
            return super()._noted(note, info)
        info["caption"] = "\n".join(filter(None, (note, info.get("caption"))))
        return self._observation()

    def _info(self, *, success: bool, valid: bool, reward: float, penalty: float) -> dict[str, Any]:
        info = super()._info(success=success, valid=valid, reward=reward, penalty=penalty)
        if self._shape is not None and (frame := self._framed("").strip()):
            info["caption"] = frame
        return info
