"""Train, valid and test: every task belongs to one of them by its content alone."""

import hashlib
from typing import Annotated, Any, Literal

from pydantic import Field

from rollgym.envs.core.kwargs import OneOf

Split = Literal["train", "valid", "test"]

SPLIT = OneOf("train", "valid", "test", None)
"""Marks the kwarg of an environment that is a split, or None for any."""

TaskSplit = Annotated[str | None, SPLIT, Field(description="Only tasks of this split, by content.")]
"""The kwarg `split` of an environment that draws tasks."""

_SPLITS: tuple[Split, ...] = ("train", "valid", "test")
# Of 256 values of a digest byte: train below the first bound, valid below the second, test above.
_TRAIN_BELOW, _VALID_BELOW = 154, 205


def split_of_text(text: str) -> Split:
    """Return the split that a task belongs to, given as text: 60 % train, 20 % valid, 20 % test."""
    byte = hashlib.blake2b(text.encode(), digest_size=1).digest()[0]
    if byte < _TRAIN_BELOW:
        return "train"
    return "valid" if byte < _VALID_BELOW else "test"


def checked_split(name: Any) -> Split | None:
    """Return a split by its name; None stands for any.

    Raises:
        ValueError: The split is unknown.
    """
    if name is None:
        return None
    for split in _SPLITS:
        if name == split:
            return split
    raise ValueError(f"split must be one of {', '.join(_SPLITS)} or None, not {name!r}")
