"""The HTTP calls: one table that routing and OpenAPI are both made from."""

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from clients.protocol.episode import PortableEpisode
from clients.protocol.messages import (
    AnnounceReply,
    AnnounceRequest,
    CloseReply,
    CloseRequest,
    EnvInfo,
    EnvsReply,
    ForkReply,
    ForkRequest,
    HeartbeatReply,
    HeartbeatRequest,
    MakeRequest,
    RegisterReply,
    RegisterRequest,
    RenderReply,
    RenderRequest,
    ResetReply,
    ResetRequest,
    RestoreRequest,
    ServerInfo,
    SessionInfo,
    SessionReply,
    SessionsReply,
    StepReply,
    StepRequest,
    VerifyReply,
    VerifyRequest,
)
from env_server.access.context import Context
from env_server.access.tokens import Role
from env_server.operations.information import EnvsQuery, SessionsQuery
from env_server.operations.operations import Calls
from env_server.sessions.replies import Reply
from sandbox.remote.run_code import RunCodeReply, RunCodeRequest, SandboxReply

Handler = Callable[[Calls, Context, Mapping[str, Any]], Awaitable[Reply]]
"""Answers a call that is not one operation: with which operations, on whose behalf, and the call's fields."""


class SessionList(BaseModel):
    """The caller's sessions, one page; `after` is there when more follow."""

    sessions: list[SessionInfo]
    after: str | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP call.

    Attributes:
        method: The HTTP method.
        path: The path; names in braces become fields of the operation.
        op: The operation.
        summary: What it does, for OpenAPI.
        status: The status of a good answer.
        request: The model of the body, if it has one.
        query: The model of the query, if it has one.
        replies: The models of the answer.
        empty: Whether a good answer has no body.
        role: The role that it needs where tokens are set; None if it needs no token.
        handler: What answers a call that is not one operation.
        abandoned: Whether it is given up when the client goes away before its answer.
    """

    method: str
    path: str
    op: str
    summary: str
    status: int = 200
    request: type[BaseModel] | None = None
    query: type[BaseModel] | None = None
    replies: tuple[type[BaseModel], ...] = field(default=())
    empty: bool = False
    role: Role | None = "play"
    handler: Handler | None = None
    abandoned: bool = False

    def pattern(self) -> re.Pattern[str]:
        """The path as a regular expression."""
        return re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", self.path))

    @property
    def parameters(self) -> list[str]:
        """The names in the path."""
        return re.findall(r"\{(\w+)\}", self.path)


_SESSION = "/v1/sessions/{session_id}"

CALLS: tuple[Call, ...] = (
    Call("POST", f"{_SESSION}/step", "step", "Take one action", request=StepRequest, replies=(StepReply,)),
    Call(
        "POST", f"{_SESSION}/reset", "reset", "Begin an episode", request=ResetRequest, replies=(ResetReply,)
    ),
    Call(
        "POST",
        f"{_SESSION}/render",
        "render",
        "Draw the state",
        request=RenderRequest,
        replies=(RenderReply,),
    ),
    Call("POST", f"{_SESSION}/cancel", "cancel", "Give the running operation up", 202),
    Call(
        *("POST", f"{_SESSION}/fork", "fork", "Copy a session at its point", 201),
        request=ForkRequest,
        replies=(ForkReply,),
    ),
    Call("GET", f"{_SESSION}/episode", "episode", "The portable episode", replies=(PortableEpisode,)),
    Call(
        *("POST", "/v1/sessions/restore", "restore", "Make a session from a portable episode", 201),
        request=RestoreRequest,
        replies=(SessionReply,),
    ),
    Call(
        *("POST", "/v1/sessions/close", "close", "Close many sessions"),
        request=CloseRequest,
        replies=(CloseReply,),
    ),
    Call(
        *("POST", "/v1/sessions", "make", "Make one session, or `count` of them", 201),
        request=MakeRequest,
        replies=(SessionReply, SessionsReply),
    ),
    Call(
        "GET",
        "/v1/sessions",
        "sessions",
        "The caller's sessions",
        query=SessionsQuery,
        replies=(SessionList,),
    ),
    Call("GET", _SESSION, "session", "One session", replies=(SessionInfo,)),
    Call("DELETE", _SESSION, "close", "Close one session, if it is there", 204, empty=True),
    Call(
        *("POST", "/v1/verify/{env_id}", "verify", "Score responses without a session"),
        request=VerifyRequest,
        replies=(VerifyReply,),
    ),
    Call("GET", "/v1/envs", "envs", "The environments", query=EnvsQuery, replies=(EnvsReply,)),
    Call("GET", "/v1/envs/{env_id}", "envs", "One environment", replies=(EnvInfo,)),
    Call("GET", "/v1/info", "info", "The server, its limits and capacity", replies=(ServerInfo,)),
)

REGISTRATION_CALLS = (
    Call(
        *("POST", "/v1/envs", "register", "Add an environment of another server", 201),
        request=RegisterRequest,
        replies=(RegisterReply,),
        role="register",
    ),
    Call(
        *("POST", "/v1/registrations", "announce", "Register what a server has, and say that it is there"),
        request=AnnounceRequest,
        replies=(AnnounceReply,),
        role="register",
    ),
    Call(
        "POST",
        "/v1/registrations/{registration_id}/heartbeat",
        "heartbeat",
        "Say that a registered server is there",
        request=HeartbeatRequest,
        replies=(HeartbeatReply,),
        role="register",
    ),
    Call(
        *("DELETE", "/v1/registrations/{registration_id}", "unregister", "End a registration", 204),
        empty=True,
        role="register",
    ),
)
"""What a gateway answers beside these."""

INTERACTIVE_SESSION_PATH = "/v1/sandbox/session"
"""The socket of an interactive session."""

RUN_CODE_CALLS = (
    Call(
        *("POST", "/run_code", "run_code", "Run a program in the sandbox (as SandboxFusion does)"),
        request=RunCodeRequest,
        replies=(RunCodeReply,),
        abandoned=True,
    ),
    Call("GET", "/v1/sandbox", "sandbox", "What the sandbox keeps to", replies=(SandboxReply,)),
)
"""What a server with a sandbox of its own answers beside these."""
