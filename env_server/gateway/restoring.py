"""Beginning a session anew at a node, at the point where it was at another one."""

from typing import Any

from clients.protocol.errors import ProblemError
from env_server.gateway.registry import Registration


async def begin_anew(
    home: Registration,
    episode: dict[str, Any] | None,
    kwargs: dict[str, Any],
    *,
    idle_timeout_s: float,
    make_timeout_s: float,
) -> tuple[str, int]:
    """Make a session at a node; gives its id there, and the I/O process of the node that owns it.

    Args:
        home: Where.
        episode: The portable episode that it is in; None before the first one.
        kwargs: What the client set.
        idle_timeout_s: When the node evicts it.
        make_timeout_s: How long it may take.

    Raises:
        ProblemError: The node refuses, or answers something else than it should.
        ConnectionError: It cannot be reached.
        TimeoutError: It does not answer.
    """
    caller = home.node.link(False).caller
    fields: dict[str, Any] = {
        "lingers": False,
        "idle_timeout_s": idle_timeout_s,
        "request_id": caller.new_request_id(),
    }
    if episode is not None:
        fields |= {"op": "restore", "episode": {**episode, "env_id": home.upstream_env_id}}
    else:
        fields |= {"op": "make", "env_id": home.upstream_env_id, "kwargs": kwargs}
    process = await caller.pool.next_process()
    reply = await caller.call(fields, process, caller.deadline(make_timeout_s))
    if not isinstance(reply.payload, dict) or "session_id" not in reply.payload:
        raise ProblemError("upstream_error", f"the answer to {fields['op']} cannot be read")
    return str(reply.payload["session_id"]), reply.process
