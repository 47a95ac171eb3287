"""Common parts of all routes for agents: reading bodies, clients that disconnect, answers, and refusals."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from rollgym.clients.protocol import json_text
from rollgym.trainer.core.errors import ConfigError, TrainerError
from rollgym.trainer.rollout.agents.anthropic_messages import error_body
from rollgym.trainer.rollout.agents.errors import ApiError, invalid

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


async def read_body(request: Request, largest: int) -> bytes:
    """Read a body up to its size limit, and keep it for a second reader.

    Raises:
        ApiError: If it is larger.
    """
    if hasattr(request, "_body"):
        return bytes(request._body)
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > largest:
            raise ApiError(413, f"the body has more than {largest} bytes (max_body_bytes)", "body_too_large")
        chunks.append(chunk)
    body = b"".join(chunks)
    request._body = body
    return body


async def read_json(request: Request, largest: int, *, numbers_of_python: bool = False) -> dict[str, Any]:
    """Read a body that is a JSON object.

    Args:
        request: Whose body it is.
        largest: Bytes that are allowed.
        numbers_of_python: Whether NaN is read as a number, so that it can be refused by name.

    Raises:
        ApiError: If it is larger, or no such object.
    """
    body = await read_body(request, largest)
    try:
        value = json.loads(body) if numbers_of_python else json_text.read_json(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {str(error)[:200]}", "invalid_json") from error
    if not json_text.is_shallow(value):
        raise invalid(f"the body is nested more than {json_text.DEEPEST} deep")
    if not isinstance(value, dict):
        raise invalid("the body must be a JSON object")
    return value


def refuse_web_pages(request: Request) -> None:
    """Refuse what a web page in a browser sends to loopback: agents send no Origin header."""
    if "origin" in request.headers:
        raise ApiError(403, "requests of web pages are refused", "origin_refused")


async def while_connected(request: Request, work: Awaitable[_T]) -> _T:
    """Wait for work, and cancel it if its client disconnects.

    Raises:
        ClientDisconnect: The client has disconnected.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def json_answer(body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    """Return an object as an answer."""
    return Response(packed(body), media_type="application/json", headers=dict(headers or {}))


def packed(body: Mapping[str, Any]) -> bytes:
    """Return an object as JSON, for any content that an agent or a model put into it."""
    try:
        return orjson.dumps(body)
    except orjson.JSONEncodeError:  # half a pair of surrogates, or a number beyond 64 bits
        return json.dumps(body, default=str).encode()


def as_api_error(error: BaseException) -> ApiError:
    """Return the error that an agent receives for a failure; the run learns of it through the session."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ConfigError):
        # This server cannot fulfil the request, and a retry cannot help.
        return ApiError(400, str(error), "unsupported_value")
    if isinstance(error, TrainerError):
        # Our own errors say what is wrong, such as an inference server that does not answer.
        return ApiError(502, str(error), "inference_failed")
    _log.error("an agent's request failed", exc_info=error)
    return ApiError(500, "the request failed; the run has the reason", "internal_error")


def refusal(error: ApiError) -> Response:
    """Return a refusal as an answer of OpenAI's API."""
    return JSONResponse(error.as_body(), error.status)


def anthropic_refusal(error: ApiError) -> Response:
    """Return a refusal as an answer of Anthropic's API."""
    return JSONResponse(error_body(error), error.status)
