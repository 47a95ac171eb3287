"""A context of this turn alone with every picture black: what is learnt so is learnt without seeing."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollgym import Picture


def without_seeing(
    history: Sequence[object], observation: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the observation's messages with black pictures of the same size."""
    return [{**message, "content": [_black(part) for part in message["content"]]} for message in observation]


def _black(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] != "image":
        return dict(part)
    return {**part, "image": Picture(np.zeros_like(part["image"].pixels))}
