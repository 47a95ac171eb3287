"""Base of the grid games: games of a few named actions whose board is a picture, too. Knows no game."""

from abc import abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.text_game import Move, NamedGame

__all__ = ["GridGame", "Move"]


class GridGame(NamedGame):
    """A game on a grid that a language model plays."""

    metadata: dict[str, Any] = NamedGame.metadata | {"render_modes": ["ansi", "rgb_array"]}

    @abstractmethod
    def _picture(self) -> NDArray[np.uint8]:
        """Return the board as a picture, `[height, width, 3]`."""

    def render(self) -> Any:
        """Return the board as text or as a picture, by `render_mode`."""
        return self._picture() if self.render_mode == "rgb_array" else super().render()
