"""Pictures in a sequence of tokens: which placeholder tokens stand for which picture.

A picture is kept as it came, without loss, so that an episode that is read back shows the policy what it saw. What a
model reads of it is computed by the model's processor and kept beside it; it is not written to files.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from io import BytesIO
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rollgym.trainer.records.schema import EpisodeFormatError

_MOST_PIXELS = 2**24
"""Pixels of the largest picture that is read: a kilobyte on the wire may take the event loop a second to unpack."""


class Picture:
    """A picture, equal to any other of the same pixels.

    Args:
        pixels: uint8 `[height, width, 3]`, RGB.
        inputs: The model's inputs for it, by the names of its forward's arguments; tensors whose first dimension
            counts pictures or parts of them. None until a processor has made it.

    Raises:
        ValueError: If the pixels are of another form.
    """

    def __init__(self, pixels: NDArray[np.uint8], inputs: Mapping[str, Any] | None = None) -> None:
        if not is_picture(pixels):
            raise ValueError("a picture is an array of uint8 with height, width and three colours")
        self.pixels = pixels
        self.inputs = inputs

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Read a picture from the bytes of a file: PNG, JPEG or WebP.

        Raises:
            ValueError: If they are not a picture, or the picture is too large.
            MissingExtraError: If Pillow is not installed.
        """
        from PIL import Image  # Imported late: episodes of text need no library of pictures.

        try:
            with Image.open(BytesIO(content), formats=("PNG", "JPEG", "WEBP")) as opened:
                if opened.width * opened.height > _MOST_PIXELS:
                    raise ValueError(f"{opened.width} x {opened.height} pixels are too many")
                return cls(np.asarray(opened.convert("RGB")))
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:
            raise ValueError(f"no picture that can be read: {error}") from error

    @cached_property
    def digest(self) -> bytes:
        """Return a hash of the image's pixels."""
        content = np.ascontiguousarray(self.pixels)
        shape = repr(content.shape).encode()
        return blake2b(shape + content.tobytes(), digest_size=16).digest()

    @cached_property
    def png(self) -> str:
        """Its pixels as PNG, in base64."""
        from PIL import Image

        written = BytesIO()
        Image.fromarray(self.pixels).save(written, "PNG")
        return base64.b64encode(written.getvalue()).decode("ascii")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Picture) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        height, width, _ = self.pixels.shape
        return f"[picture of {width} x {height} pixels]"


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """A picture and the tokens that stand for it.

    Attributes:
        start: The first of them.
        end: One past the last. Between them may be others, such as marks of lines.
        picture: The picture.
    """

    start: int
    end: int
    picture: Picture

    def moved(self, by: int) -> "PlacedImage":
        """Return the same pictures, moved by `by` tokens."""
        return replace(self, start=self.start + by, end=self.end + by)

    def as_record(self) -> dict[str, Any]:
        """Return the placed picture as plain data."""
        return {"start": self.start, "end": self.end, "png": self.picture.png}


def is_picture(value: object) -> bool:
    """Whether an observation is a picture: an array of bytes with height, width and three colours."""
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or value.ndim != 3:
        return False
    return value.shape[2] == 3 and value.size > 0


def images_until(images: Sequence[PlacedImage], end: int) -> tuple[PlacedImage, ...]:
    """Return the pictures of the first `end` tokens."""
    return tuple(image for image in images if image.end <= end)


def read_image(start: int, end: int, png: str, length: int, name: str) -> PlacedImage:
    """Return what `PlacedImage.as_record` wrote.

    Raises:
        EpisodeFormatError: If it is outside the `length` tokens, or is not a picture.
    """
    if not 0 <= start < end <= length:
        raise EpisodeFormatError(f"{name}: it does not lie within its segment")
    try:
        picture = Picture.from_bytes(base64.b64decode(png, validate=True))
    except (binascii.Error, ValueError) as error:
        raise EpisodeFormatError(f"{name}: {error}") from error
    return PlacedImage(start, end, picture)
