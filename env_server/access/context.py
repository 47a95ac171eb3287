"""On whose behalf an operation runs, and how its answer is to be encoded."""

from typing import Any

from rollgym.env_server.access.tokens import Caller
from rollgym.env_server.common.logs import CURRENT_TRACE


class Context:
    """The caller of operations: one object for each socket or HTTP request.

    Attributes:
        caller: The token's name and rights.
        binary: Whether answers are encoded as MessagePack.
        fragments: Whether answers may contain parts that are already JSON.
        socket: The name of the socket that carries the calls, or None over HTTP.
        traceparent: The trace that its calls belong to, if it named one and traces are kept.
        forwarded: Whether another I/O process passed the call on.
        sessions: Ids of the sessions that this socket has used.
        dropped: Whether the socket has closed; operations that still run may open sessions all the same.
        remote: Indices of the I/O processes that this socket's calls were forwarded to.
        waited_s: How many seconds its present call has waited, if that is too long to begin it; otherwise 0.
        call_id: The id that a client of another protocol gave to the call that the operation is part of, and by which
            it may cancel the call; None otherwise.
    """

    __slots__ = (
        "binary",
        "call_id",
        "caller",
        "dropped",
        "forwarded",
        "fragments",
        "remote",
        "sessions",
        "socket",
        "traceparent",
        "waited_s",
    )

    def __init__(
        self,
        caller: Caller,
        *,
        binary: bool,
        socket: str | None = None,
        forwarded: bool = False,
        traceparent: str | None = None,
        call_id: str | None = None,
    ) -> None:
        self.traceparent = traceparent
        self.caller = caller
        self.binary = binary
        self.fragments = not binary and not forwarded
        self.socket = socket
        self.dropped = False
        self.forwarded = forwarded
        self.sessions: set[str] = set()
        self.remote: set[int] = set()
        self.call_id = call_id
        self.waited_s = 0.0

    def identity(self) -> dict[str, Any]:
        """The caller, in the form that another I/O process needs."""
        return {
            "name": self.caller.name,
            "socket": self.socket,
            "traceparent": CURRENT_TRACE.get(),
            "call_id": self.call_id,
        }
