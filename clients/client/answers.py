"""Answers of servers that are not what they should be."""

from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import ValidationError

from clients.protocol.arrays import DecodeError, EncodeError


@contextmanager
def reading(op: str) -> Iterator[None]:
    """Read an answer that may have any form while the context is open.

    Args:
        op: What was asked for, for the message.

    Raises:
        DecodeError: In place of what comes of an answer of another form.
    """
    try:
        yield
    except (DecodeError, EncodeError):
        raise
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise DecodeError(f"the server's answer to {op!r} cannot be read: {place}: {first['msg']}") from error
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise DecodeError(f"the server's answer to {op!r} cannot be read: {error!r:.200}") from error
