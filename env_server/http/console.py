"""The console, a page for people: its files, under headers that leave a page nothing to run but these files.

And what its forms and buttons ask for: calls of tools and marks around actions, as environments read them.
"""

import asyncio
from hashlib import blake2b
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.tool_calls import DEFAULT_CALL_FORMAT, ToolCall
from rollgym.clients.replies.formats.calls import UnwritableCallError
from rollgym.clients.replies.formats.table import FORMATS, written_calls
from rollgym.env_server.common.negotiation import own_path
from rollgym.env_server.common.requests import invalid
from rollgym.env_server.http.call_routes import Call, call_router
from rollgym.envs.core.profiles import PROFILES, marks_of

CONSOLE_PATH = "/console"
_PAGES = {CONSOLE_PATH: "index.html", "/docs": "calls.html"}
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    # Observations are drawn from `data:` URLs of raster images.
    "img-src": "'self' data:",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    # No text becomes markup or code, not even by a mistake of ours.
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # A browser revalidates each time, and mostly receives 304 Not Modified.
    "Cache-Control": "no-cache",
}
"""Headers of every file of the console."""


CONSOLE_CALLS = call_router()
"""What the console alone asks for; no part of the protocol."""


class CallToWrite(BaseModel):
    """A call of a tool.

    Attributes:
        call_format: How the environment reads calls.
        name: The tool's.
        arguments: By the names of its parameters.
        parameters: Their JSON Schema.
    """

    model_config = ConfigDict(extra="forbid")

    call_format: str = DEFAULT_CALL_FORMAT
    name: str
    arguments: dict[str, Any]
    parameters: dict[str, Any] = {}


@CONSOLE_CALLS.post(f"{CONSOLE_PATH}/written_call")
async def written_call(call: Call, request: CallToWrite) -> Response:
    """Write a call as a policy would, so that the environment reads what was meant.

    Raises:
        ProblemError: `invalid_request`: no format of that name is here, or it has no form for the call.
    """
    if request.call_format not in FORMATS:
        raise invalid("call_format", f"this server knows {', '.join(FORMATS)}; write the call as a text")
    meant, schemas = ToolCall(request.name, request.arguments), {request.name: request.parameters}
    try:
        # What is long takes a while to be written and read back.
        text = await asyncio.to_thread(written_calls, request.call_format, [meant], schemas=schemas)
    except UnwritableCallError as error:
        raise invalid("arguments", str(error)) from None
    return call.answer({"text": text})


class ProfileOfReplies(BaseModel):
    """How an environment reads replies.

    Attributes:
        profile: The value of its kwarg of that name.
    """

    model_config = ConfigDict(extra="forbid")

    profile: str


@CONSOLE_CALLS.post(f"{CONSOLE_PATH}/action_marks")
async def action_marks(call: Call, request: ProfileOfReplies) -> Response:
    """Return what stands around an action in a reply; nothing for a profile that is not ours, but an environment's."""
    known = PROFILES.get(request.profile)
    before, after = ("", "") if known is None else marks_of(known)
    return call.answer({"before": before, "after": after})


class _File(NamedTuple):
    content: bytes
    media_type: str
    tag: str


class Console:
    """The console's files, read once.

    Attributes:
        paths: The paths that it answers.
    """

    def __init__(self) -> None:
        self._files = {
            f"{CONSOLE_PATH}/{each.name}": _read(each)
            for each in files("rollgym").joinpath("console").iterdir()
            if PurePosixPath(each.name).suffix in _MEDIA_TYPES
        }
        for path, name in _PAGES.items():
            self._files[path] = self._files.pop(f"{CONSOLE_PATH}/{name}")
        self.paths = frozenset({"/", f"{CONSOLE_PATH}/", *self._files})

    async def respond(self, request: Request) -> Response:
        """Answer a GET of one of the paths.

        Raises:
            ProblemError: `not_found`, for a program at `/`.
        """
        path = own_path(request.scope)
        if path == "/":
            if "text/html" not in request.headers.get("accept", ""):
                raise ProblemError(
                    "not_found",
                    f"there is no call GET /: the calls are in /openapi.json, the console is at {CONSOLE_PATH}",
                )
            return RedirectResponse(CONSOLE_PATH.removeprefix("/"), status_code=303, headers=HEADERS)
        if path == f"{CONSOLE_PATH}/":
            return RedirectResponse(f"..{CONSOLE_PATH}", headers=HEADERS)
        file = self._files[path]
        headers = {**HEADERS, "ETag": file.tag}
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers=headers, media_type=file.media_type)


def _read(source: Traversable) -> _File:
    content = source.read_bytes()
    tag = f'"{blake2b(content, digest_size=12).hexdigest()}"'
    return _File(content, _MEDIA_TYPES[PurePosixPath(source.name).suffix], tag)
