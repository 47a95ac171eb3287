"""HTTP calls and their answers as plain data, and the parsing of untrusted answers. No I/O."""

import asyncio
import math
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

import orjson

from rollgym.trainer.inference.errors import MalformedReplyError

_SHOWN = 300
"""Characters of a server's message that stand in ours."""
_LARGEST_ID = 2**31 - 1
"""More than any vocabulary has; arrays of ids hold no larger ones."""


@dataclass(frozen=True, slots=True)
class HttpCall:
    """A call to make.

    Attributes:
        path: From the root of the server.
        body: The JSON object of a POST; None for a GET, or where a POST has none.
        query: Parameters of the URL.
        headers: Beyond those of every call.
        method: "POST" or "GET".
        admin: Whether it steers the server: SGLang may want another key for these.
        repeatable: Whether it is idempotent: it may be retried if it is unknown whether the server received it.
        patient: Whether 503 and its like are retried; otherwise they are the answer.
    """

    path: str
    body: Mapping[str, Any] | None = None
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    method: str = "POST"
    admin: bool = False
    repeatable: bool = True
    patient: bool = True


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """The answer to a call.

    Attributes:
        status: HTTP status.
        body: Its bytes.
    """

    status: int
    body: bytes

    @property
    def ok(self) -> bool:
        """Whether the status says so."""
        return 200 <= self.status < 300

    @property
    def is_page(self) -> bool:
        """Whether it is a web page: no inference server gives one, but what stands before it does while it is gone."""
        return self.body[:_SHOWN].lstrip().startswith(b"<")


def steering(
    path: str,
    body: Mapping[str, Any] | None = None,
    *,
    query: Mapping[str, str] | None = None,
    repeatable: bool = True,
) -> HttpCall:
    """Return a call that steers the server."""
    return HttpCall(path, body, query or {}, admin=True, repeatable=repeatable)


def streamed(call: HttpCall) -> HttpCall:
    """Return the call that asks for the same reply as a stream; servers of all kinds call it alike."""
    return replace(call, body={**(call.body or {}), "stream": True})


def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in `body`, in time linear in its length.

    Raises:
        MalformedReplyError: If it is none: broken, nested too deep, with NaN in it, or a list.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise MalformedReplyError(f"the answer is not JSON ({error}): {excerpt(body)}") from error
    if not isinstance(value, dict):
        raise MalformedReplyError(f"the answer is no JSON object: {excerpt(body)}")
    return value


def excerpt(body: bytes) -> str:
    """Return the start of a body, in one line, for people."""
    text = body[: _SHOWN * 4].decode(errors="replace")
    words = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return words if len(words) <= _SHOWN and len(body) <= _SHOWN * 4 else f"{words[:_SHOWN]}..."


def message_of(body: bytes) -> str:
    """Return what an error's body says, in any of the shapes that servers use.

    `{"error": {"message": ...}}`, `{"error": "..."}`, `{"message": ...}`, `{"error_message": ...}`, `{"detail": ...}`,
    or plain text.
    """
    try:
        value = read_object(body)
    except MalformedReplyError:
        return excerpt(body)
    error = value.get("error")
    candidates = [error.get("message") if isinstance(error, dict) else error]
    candidates += [value.get(key) for key in ("message", "error_message", "detail")]
    for candidate in candidates:
        if isinstance(candidate, str) and candidate:
            return excerpt(candidate.encode())
    return excerpt(body)


def part_of(value: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    """Return `value[key]`.

    Args:
        value: Part of an answer.
        key: What is wanted of it.
        kind: The type that it must have. A boolean does not pass as an int.
        where: What `value` is, for the message.

    Raises:
        MalformedReplyError: If it is missing or something else.
    """
    found = value.get(key)
    if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
        raise MalformedReplyError(f"{where} has no {key!r} that is a {kind.__name__}")
    return found


def list_of(value: Mapping[str, Any], key: str) -> list[Any]:
    """Return `value[key]` if it is a list, and an empty list if it is missing or of another type."""
    found = value.get(key)
    return found if isinstance(found, list) else []


def token_ids_of(values: Sequence[Any], where: str) -> list[int]:
    """Check token ids.

    Raises:
        MalformedReplyError: If one is not an integer, is negative, or is too large for any vocabulary.
    """
    for index, value in enumerate(values):
        if type(value) is not int or not 0 <= value <= _LARGEST_ID:
            raise MalformedReplyError(f"{where}: token id {index} is {_shown(value)}")
    return list(values)


LOWEST_LOGPROB = -9999.0
"""What servers write for a probability of zero: JSON has no infinity."""

_ROUNDING = 1e-3
"""Log-probabilities pass zero by rounding alone."""


def _logprob_of(value: Any, index: int, where: str) -> float:
    if type(value) not in (float, int) or not math.isfinite(value) or value > _ROUNDING:
        raise MalformedReplyError(f"{where}: the log-probability of token {index} is {_shown(value)}")
    if value <= LOWEST_LOGPROB:
        raise MalformedReplyError(
            f"{where}: token {index} was sampled, and its log-probability {value} says that it could not be"
        )
    return float(value)


def logprobs_of(values: Sequence[Any], where: str) -> list[float]:
    """Check the log-probabilities of sampled tokens.

    Raises:
        MalformedReplyError: If one is not a number, not finite, above zero, or says that the token was impossible.
    """
    if all(type(value) is float and LOWEST_LOGPROB < value <= _ROUNDING for value in values):
        return list(values)
    return [_logprob_of(value, index, where) for index, value in enumerate(values)]


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, bool | int | float | str | None) else f"a {type(value).__name__}"
    return text if len(text) <= 40 else f"{text[:40]}..."


def header_value(text: str) -> str:
    """Return `text` as the value of a header: printable, without line ends, and short."""
    return quote(text, safe="-_.:~/")[:256]


async def all_or_cancel(calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Return all answers; if one call fails, cancel the others before raising its error."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
