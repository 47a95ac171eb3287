"""HTTP bodies: their encoding, their size, and their contents."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from rollgym.clients.protocol.arrays import DecodeError, EncodeError
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.frames import LONG, MEDIA_TYPES, dumps, loads, read_long
from rollgym.env_server.common.requests import sendable

_JSON = frozenset({"application/json", "text/json"})
_MSGPACK = frozenset({"application/msgpack", "application/x-msgpack", "application/vnd.msgpack"})
PROBLEM_MEDIA_TYPE = "application/problem+json"
_MOST_DIGITS = 19


def own_path(scope: Mapping[str, Any]) -> str:
    """The path of a request or socket, without the prefix of the application that the server is mounted in."""
    path: str = scope["path"]
    prefix: str = scope.get("root_path") or ""
    return path[len(prefix) :] if prefix and path.startswith(f"{prefix}/") else path


def read_headers(scope: Mapping[str, Any]) -> dict[str, str]:
    """The headers of a request or socket by their names in lower case; values of one that came twice are joined.

    Once for each request: Starlette goes through all of them for every question.
    """
    found: dict[str, str] = {}
    repeated: dict[str, list[str]] = {}
    for raw_name, raw_value in scope["headers"]:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        if name in found:
            repeated.setdefault(name, [found[name]]).append(value)
        else:
            found[name] = value
    for name, values in repeated.items():
        found[name] = ", ".join(values)
    return found


def wants_binary(headers: Mapping[str, str]) -> bool:
    """Whether the answer is to be MessagePack: `Accept` says so, or says nothing and the request was."""
    accept = headers.get("accept")
    if accept is not None:
        accepted = [part.partition(";")[0].strip().lower() for part in accept.split(",")]
        if any(kind in _MSGPACK for kind in accepted):
            return True
        if any(kind in _JSON for kind in accepted):
            return False
    return _media_type(headers) in _MSGPACK


async def read_fields(request: Request, headers: Mapping[str, str], limit: int) -> dict[str, Any]:
    """Read a body that is an object; an empty one has no fields.

    Args:
        request: The request.
        headers: What `read_headers` has read of it.
        limit: Bytes that the body may have.

    Raises:
        ProblemError: `too_large`, `unsupported_media_type` or `invalid_request`.
    """
    fields = await read_value(request, headers, limit)
    if not isinstance(fields, dict) or not all(type(name) is str for name in fields):
        reason = "the body must be an object"
        raise ProblemError("invalid_request", reason, errors=[{"field": "", "reason": reason}])
    return fields


async def read_value(request: Request, headers: Mapping[str, str], limit: int) -> Any:
    """Read a body that may hold any value; an empty one is an empty object.

    Args:
        request: The request.
        headers: What `read_headers` has read of it.
        limit: Bytes that the body may have.

    Raises:
        ProblemError: `too_large`, `unsupported_media_type` or `invalid_request`.
    """
    body = await _read(request, headers, limit)
    if not body:
        # aiohttp says of a body that there is not that it is application/octet-stream.
        return {}
    coding = headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity"):
        raise ProblemError(
            "unsupported_media_type",
            f"bodies are not unpacked here, and this one has Content-Encoding {coding[:100]}",
        )
    media_type = _media_type(headers)
    if media_type and media_type not in _JSON and media_type not in _MSGPACK:
        raise ProblemError(
            "unsupported_media_type",
            f"{media_type[:100]} is neither application/json nor application/msgpack",
        )
    binary = media_type in _MSGPACK
    try:
        return await read_long(body, binary=binary) if len(body) > LONG else loads(body, binary=binary)
    except DecodeError as error:
        raise ProblemError(
            "invalid_request", str(error), errors=[{"field": "", "reason": str(error)}]
        ) from error


def answer(
    content: Any,
    *,
    binary: bool,
    limit: int,
    portable_limit: int = 0,
    status: int = 200,
    take_back: Callable[[Any], int] | None = None,
) -> Response:
    """An HTTP answer.

    Args:
        content: The content of the body.
        binary: Whether it is MessagePack.
        limit: Bytes that it may have.
        portable_limit: Bytes that it may have if it is a portable episode.
        status: Its status.
        take_back: Closes the sessions that an answer which cannot be sent has opened, and counts them.

    Raises:
        ProblemError: `too_large`.
        EncodeError: It cannot be written.
    """
    try:
        body = dumps(content, binary=binary)
    except EncodeError:
        if take_back is not None:
            take_back(content)
        raise
    if len(body) > limit and not is_portable(content, len(body), portable_limit):
        raise too_large_reply(len(body), limit, 0 if take_back is None else take_back(content))
    return Response(body, status, media_type=MEDIA_TYPES[binary])


def problem_answer(problem: ProblemError) -> Response:
    """A problem as an HTTP answer; always JSON, whatever the request was."""
    body = dumps(sendable(problem, binary=False), binary=False)
    return Response(body, problem.status, headers=problem_headers(problem), media_type=PROBLEM_MEDIA_TYPE)


def problem_headers(problem: ProblemError) -> dict[str, str]:
    """The headers by which HTTP says what a problem says.

    Members of a problem of a registered server may be anything: none goes into a header as it came.
    """
    headers = {}
    if (retry_after := problem.extra.get("retry_after")) is not None:
        headers["Retry-After"] = str(math.ceil(retry_after))
    if problem.code == "method_not_allowed" and isinstance(allowed := problem.extra.get("allow"), list):
        methods = [each for each in allowed if isinstance(each, str) and each.isascii() and each.isalpha()]
        headers["Allow"] = ", ".join(methods)
    if problem.code == "unauthorized":
        headers["WWW-Authenticate"] = 'Bearer realm="rollgym"'
    return headers


def _media_type(headers: Mapping[str, str]) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


async def _read(request: Request, headers: Mapping[str, str], limit: int) -> bytes:
    length = headers.get("content-length", "")
    # Another server than ours may let anything through.
    if length.isascii() and length.isdigit() and int(length[:_MOST_DIGITS]) > limit:
        raise too_large_request(int(length[:_MOST_DIGITS]), limit)
    chunks = []
    size, is_more = 0, True
    # Most bodies are one message, and `request.stream()`, an asynchronous generator, takes longer for it than parsing.
    while is_more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise too_large_request(size, limit)
        chunks.append(chunk)
        is_more = message.get("more_body", False)
    return b"".join(chunks)


def is_portable(reply: Any, size: int, limit: int) -> bool:
    """Whether a reply is a portable episode within its limit, which may be larger than that of other replies."""
    return size <= limit and isinstance(reply, dict) and "reset_digest" in reply


def too_large_request(size: int, limit: int) -> ProblemError:
    """The problem that a request is over the limit."""
    return ProblemError(
        "too_large", f"the request has {size} bytes or more; the limit is {limit}", limit=limit
    )


def too_large_reply(size: int, limit: int, closed: int = 0) -> ProblemError:
    """The problem that an answer exceeds the limit; the operation was done, but the sessions it opened are closed.

    Args:
        size: Bytes of the answer.
        limit: Bytes that it may have.
        closed: How many sessions were closed, since the client cannot learn their ids.
    """
    again = f"; the {closed} sessions that it opened are closed again: ask for fewer" if closed else ""
    return ProblemError(
        "too_large", f"the reply has {size} bytes; the limit is {limit}{again}", limit=limit, part="reply"
    )
