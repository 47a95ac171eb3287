"""What was worked out once for an item, and is the same for every response to it."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

_Value = TypeVar("_Value")
_MOST = 64


class Remembered(Generic[_Value]):
    """Values by the content that they were made of; those used least recently are forgotten."""

    def __init__(self) -> None:
        self._values: OrderedDict[bytes, _Value] = OrderedDict()

    def get(self, content: bytes, make: Callable[[], _Value]) -> _Value:
        """Return what belongs to a content, making it if it is not known."""
        key = hashlib.blake2b(content, digest_size=16).digest()
        if key not in self._values:
            self._values[key] = make()
            if len(self._values) > _MOST:
                self._values.popitem(last=False)
        self._values.move_to_end(key)
        return self._values[key]
