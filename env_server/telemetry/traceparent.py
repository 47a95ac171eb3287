"""The trace that what runs now belongs to, as its W3C `traceparent`."""

from contextvars import ContextVar

CURRENT: ContextVar[str | None] = ContextVar("traceparent", default=None)
"""Set while a traced operation runs; what it asks of other servers and processes belongs to the same trace."""
