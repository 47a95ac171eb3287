"""Experts that a server's mixture of experts took for each token, as its replies bring them. No I/O."""

import binascii
from base64 import b64decode
from io import BytesIO
from math import prod

import numpy as np
from numpy.typing import NDArray

from rollgym.trainer.inference.errors import MalformedReplyError
from rollgym.trainer.records.experts import Experts


def read_array_file(text: object, tokens: int, where: str) -> Experts:
    """Read vLLM's: a file of numpy in base64, `[tokens - 1, layers, taken]`.

    Args:
        text: What the reply has.
        tokens: Tokens of prompt and reply together; of the last one nothing was computed.
        where: What is read, for messages.

    Raises:
        MalformedReplyError: If it is none, or of other tokens.
    """
    stream = BytesIO(_bytes(text, where))
    try:
        version = np.lib.format.read_magic(stream)
        read = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, _, kind = read(stream)
    except (ValueError, EOFError) as error:
        raise MalformedReplyError(f"{where}: routed_experts is no file of numpy: {error}") from error
    raw = stream.read()
    # Nothing is made of a size that the file only says it has.
    if (
        kind.kind not in "biuf"
        or len(shape) != 3
        or min(shape) < 0
        or prod(shape) * kind.itemsize != len(raw)
    ):
        raise MalformedReplyError(f"{where}: routed_experts is no array of tokens, layers and experts")
    return _checked(np.frombuffer(raw, dtype=kind).reshape(shape), tokens, where)


def read_integers(text: object, tokens: int, where: str) -> Experts:
    """Read SGLang's: integers of 4 bytes in base64, as many for each token; see `read_array_file`.

    Raises:
        MalformedReplyError: If it is none, or of other tokens.
    """
    raw = _bytes(text, where)
    if len(raw) % 4:
        raise MalformedReplyError(
            f"{where}: routed_experts has {len(raw)} bytes, which are no integers of 4 bytes"
        )
    return _checked(np.frombuffer(raw, dtype="<i4"), tokens, where)


def _bytes(text: object, where: str) -> bytes:
    if not isinstance(text, str):
        raise MalformedReplyError(
            f"{where} has no routed_experts: start vLLM with --enable-return-routed-experts (SGLang with "
            "--enable-return-routed-experts), or set inference.routed_experts=false"
        )
    try:
        return b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MalformedReplyError(f"{where}: routed_experts is not base64: {error}") from error


def _checked(content: NDArray[np.generic], tokens: int, where: str) -> Experts:
    computed = tokens - 1
    if computed < 1 or content.size == 0 or content.size % computed:
        raise MalformedReplyError(
            f"{where}: routed_experts has {content.size} numbers for {computed} tokens that were computed"
        )
    if content.ndim == 3 and len(content) != computed:
        raise MalformedReplyError(
            f"{where}: routed_experts is of {len(content)} tokens, and {computed} were computed"
        )
    if (
        content.dtype.kind not in "iu"
        or int(content.min()) < 0
        or int(content.max()) > np.iinfo(np.int16).max
    ):
        raise MalformedReplyError(f"{where}: routed_experts has something that is no expert's number")
    return content.reshape(computed, -1).astype(np.int16)
