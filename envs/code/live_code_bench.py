"""The private tests of LiveCodeBench: a pickle of JSON text, packed, that somebody else has made."""

import base64
import binascii
import io
import json
import pickle
import zlib
from typing import Any, NoReturn

from rollgym.envs.code.item import ItemError

_MOST_BYTES = 256 * 1024 * 1024


class _TextUnpickler(pickle.Unpickler):
    """Reads plain values only: a pickle can name any function of any module otherwise."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to something outside")


def private_cases(field: Any) -> Any:
    """Return the cases of the field `private_test_cases`: a list, JSON text, or the packed form.

    Raises:
        ItemError: It is none of these.
    """
    if not isinstance(field, str):
        return field
    if field.lstrip().startswith("["):
        return _json(field)
    try:
        packed = base64.b64decode(field, validate=True)
        unpacking = zlib.decompressobj()
        data = unpacking.decompress(packed, _MOST_BYTES)
        if unpacking.unconsumed_tail:
            raise ItemError(f"the field 'private_test_cases' is larger than {_MOST_BYTES >> 20} MiB")
        found = _TextUnpickler(io.BytesIO(data)).load()
    except (
        *(binascii.Error, zlib.error, pickle.UnpicklingError, EOFError, ValueError, LookupError),
        *(TypeError, AttributeError, MemoryError, RecursionError, OverflowError),
    ) as error:
        if isinstance(error, ItemError):
            raise
        raise ItemError(f"the field 'private_test_cases' cannot be unpacked: {str(error)[:100]}") from None
    return _json(found) if isinstance(found, str) else found


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ItemError(f"the field 'private_test_cases' holds no JSON: {str(error)[:100]}") from None
