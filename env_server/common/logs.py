"""The log: one line a record, for people or as JSON for machines, with the operation and the trace that it is about."""

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, Literal

CURRENT_TRACE: ContextVar[str | None] = ContextVar("traceparent", default=None)
"""Set while a traced operation runs; its calls to other servers and processes belong to the same trace."""

LOGGED = ("session_id", "env_id", "request_id")
"""Fields of operations that records carry. No others: data of clients may be private or large."""

_LONGEST = 128

LogFormat = Literal["text", "json"]
# At their lower levels these write headers, with the tokens in them, and frames.
_TALKATIVE = ("uvicorn.error", "httpx", "httpcore", "websockets")
_MAX_LINE = 2_000
_MAX_RECORD = 20_000


def log_fields(fields: Mapping[str, Any]) -> dict[str, str]:
    """The `extra` of a record, from an operation's fields as they came."""
    return {name: value[:_LONGEST] for name in LOGGED if type(value := fields.get(name)) is str}


class _Bounded(logging.Formatter):
    """Cuts long records: an exception may contain a megabyte of a client's data each time."""

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the name in the standard library
        return _bounded(super().formatException(ei))


class _Text(_Bounded):
    """Lines for people; the subject of a record stands at the end of its first line."""

    def __init__(self, process: str) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._process = process

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name in the standard library
        about = "".join(f" {name}={value}" for name, value in _fields(record).items())
        place = f" process={self._process}" if self._process else ""
        return _bounded(super().formatMessage(record)) + about + place


class _Json(_Bounded):
    """One JSON object a line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        content: dict[str, object] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _bounded(record.getMessage()),
            "process": self._process,
            "pid": record.process,
            **_fields(record),
        }
        if record.exc_info:
            content["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            content["stack"] = self.formatStack(record.stack_info)
        return json.dumps(content, ensure_ascii=False, default=str)


class SubjectFilter(logging.Filter):
    """Adds the subject to each record of a log, if it is known.

    Args:
        find: Returns the fields for a record with the given session id; they may be empty.
    """

    def __init__(self, find: Callable[[str | None], dict[str, str]]) -> None:
        super().__init__()
        self._find = find

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass, with its fields."""
        for name, value in self._find(getattr(record, "session_id", None)).items():
            if not hasattr(record, name):
                setattr(record, name, value)
        return True


def configure_logs(level: str, form: LogFormat, process: str) -> None:
    """Send the log of this process to standard error, that of libraries included.

    Args:
        level: The lowest level that is written.
        form: How lines look.
        process: The name of this process in them; empty to leave it out of text.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(process) if form == "json" else _Text(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
    # Warnings, too, must keep the rule of one object per line.
    logging.captureWarnings(form == "json")


def describe_records(find: Callable[[str | None], dict[str, str]]) -> None:
    """Add the subjects of records to them, from now on."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(SubjectFilter(find))


def _fields(record: logging.LogRecord) -> dict[str, str]:
    return {name: value for name in LOGGED if (value := getattr(record, name, None)) is not None}


def _bounded(text: str) -> str:
    """A text with bounded lines and bounded length; its end, which names the exception of a stack, is kept."""
    if len(text) > _MAX_LINE:
        text = "\n".join(_cut(line, _MAX_LINE) for line in text.split("\n"))
    return _cut(text, _MAX_RECORD)


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} ... {len(text) - 2 * half} characters ... {text[-half:]}"
