"""Traces: a span for each operation, sent to an OpenTelemetry collector. Imported only if tracing is switched on."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Mapping
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.access.context import Context
from rollgym.env_server.common.io_process import ProcessRank
from rollgym.env_server.common.logs import CURRENT_TRACE
from rollgym.env_server.operations.operations import SOCKET_OPS, Calls
from rollgym.env_server.sessions.replies import Reply
from rollgym.env_server.sessions.session import BaseSession
from rollgym.version import __version__

_TRACED = SOCKET_OPS - {"ping"} | {"register", "unregister", "sessions"}
_LONGEST = 128
_CLOSE_TIMEOUT_S = 3.0
_PLACE = ("episode", "step", "terminated", "truncated")
_W3C = TraceContextTextMapPropagator()
_log = logging.getLogger(__name__)


class TracedOperations:
    """Calls operations, each within a span.

    A span belongs to the trace that its call names: the field `traceparent` of a frame, or else the header of that name
    of the HTTP request, or of the handshake of the socket.

    Args:
        operations: The operations to call.
        sessions: The open sessions by their ids.
        rank: Which process this is.
        endpoint: The URL that spans are posted to (OTLP over HTTP).
        ratio: The share of traces that are kept, of those that begin here. Others follow the decision of the client
            that began them.
    """

    def __init__(
        self,
        operations: Calls,
        sessions: Mapping[str, BaseSession],
        rank: ProcessRank,
        endpoint: str,
        ratio: float,
    ) -> None:
        self._operations = operations
        self._sessions = sessions
        resource = Resource.create({"service.name": "rollgym", "rollgym.process": rank.index})
        sampler = ParentBased(TraceIdRatioBased(ratio))
        # At the process's end, it would wait for the collector once more.
        self._provider = TracerProvider(resource=resource, sampler=sampler, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("rollgym", __version__)

    def call(self, context: Context, op: str, fields: Mapping[str, Any]) -> Reply | Awaitable[Reply]:
        """Run an operation.

        Raises:
            ProblemError: As the operation does.
        """
        if op not in _TRACED:
            return self._operations.call(context, op, fields)
        span = self._begin(context, op, fields)
        token = CURRENT_TRACE.set(_traceparent(span))
        try:
            reply = self._operations.call(context, op, fields)
        except ProblemError as problem:
            _fail(span, problem)
            raise
        finally:
            CURRENT_TRACE.reset(token)
        if isinstance(reply, dict):
            _finish(span, reply)
            return reply
        return self._later(span, reply)

    def share_out(self, context: Context, ops: list[Any]) -> None:
        """Pass no batch on as a whole: each of its operations has a span."""

    def end(self, context: Context, session_id: str) -> None:
        """Close a session that no client has named."""
        self._operations.end(context, session_id)

    def take_back(self, context: Context, reply: Reply) -> int:
        """Close the sessions that an answer has opened which cannot be sent."""
        return self._operations.take_back(context, reply)

    async def _later(self, span: Span, reply: Awaitable[Reply]) -> Reply:
        token = CURRENT_TRACE.set(_traceparent(span))
        try:
            answer = await reply
        except ProblemError as problem:
            _fail(span, problem)
            raise
        except BaseException:
            # The caller has left.
            span.end()
            raise
        finally:
            CURRENT_TRACE.reset(token)
        _finish(span, answer)
        return answer

    async def close(self) -> None:
        """Send the remaining spans; they are dropped if the collector takes too long."""
        loop, sent = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            # The loop may be closed by then.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(sent.set)

        # The exporter waits for the collector for half a minute, which cannot be configured; the process need not wait.
        threading.Thread(target=shut_down, name="last-spans", daemon=True).start()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await sent.wait()
        except TimeoutError:
            _log.warning("the last spans are lost: the collector did not take them in %g s", _CLOSE_TIMEOUT_S)

    def _begin(self, context: Context, op: str, fields: Mapping[str, Any]) -> Span:
        named = fields.get("traceparent")
        # A call that another process passed on belongs to that process's span.
        parent = named if type(named) is str and not context.forwarded else context.traceparent
        attributes: dict[str, str] = {}
        for name in ("session_id", "env_id", "request_id"):
            if type(value := fields.get(name)) is str:
                attributes[f"rollgym.{name}"] = value[:_LONGEST]
        session = self._sessions.get(attributes.get("rollgym.session_id", ""))
        if session is not None:
            attributes["rollgym.env_id"] = session.entry.env_id
        return self._tracer.start_span(
            op,
            context=_W3C.extract({} if parent is None else {"traceparent": parent}),
            kind=SpanKind.SERVER,
            attributes=attributes,
        )


def _traceparent(span: Span) -> str:
    found = span.get_span_context()
    return f"00-{found.trace_id:032x}-{found.span_id:016x}-{int(found.trace_flags):02x}"


def _finish(span: Span, reply: Reply) -> None:
    span.set_attribute("rollgym.code", "ok")
    for name in _PLACE:
        if type(value := reply.get(name)) in (int, bool):
            span.set_attribute(f"rollgym.{name}", value)
    if type(session_id := reply.get("session_id")) is str:
        span.set_attribute("rollgym.session_id", session_id)
    span.end()


def _fail(span: Span, problem: ProblemError) -> None:
    span.set_attribute("rollgym.code", problem.code)
    # The detail may be an environment's own words: it is for the client.
    span.set_status(Status(StatusCode.ERROR, problem.code))
    span.end()
