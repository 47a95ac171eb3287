"""An OpenAI-compatible endpoint: one question at a time, with retries, within a deadline."""

import logging
import random
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import httpx
import orjson

from rollgym.clients.protocol.addresses import server_parts

_CONNECT_TIMEOUT_S = 10.0
_LARGEST_REPLY = 1024 * 1024
_FIRST_BACKOFF_S = 0.5
_LONGEST_BACKOFF_S = 20.0
_TOO_MANY = 429
_SERVER_ERRORS = range(500, 600)
_OK = 200
_SHOWN = 200


_log = logging.getLogger(__name__)


class JudgeError(Exception):
    """The judge gave no answer: a fault of it or of ours, and none of the candidate."""


class JudgeTimeoutError(JudgeError):
    """The judge gave no answer in time."""


class _BusyError(Exception):
    """The endpoint may answer another time.

    Args:
        message: What it said.
        wait_s: How long it asked to wait.
    """

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


@dataclass(frozen=True, slots=True)
class JudgeEndpoint:
    """Where a judge is, and how it is asked. All of it is the operator's.

    Attributes:
        url: Base URL, such as `https://api.example.org/v1`.
        model: The judge.
        key: Bearer token, or None; it never appears in a message or a log.
        temperature: Of its replies.
        max_output_tokens: Longest reply.
        retries: How often a call is repeated after 429, 5xx or a lost connection.
    """

    url: str
    model: str
    key: str | None = field(repr=False)
    temperature: float = 0.0
    max_output_tokens: int = 1024
    retries: int = 3

    def __post_init__(self) -> None:
        wrong = "url must be a base URL such as https://api.example.org/v1, without name or query"
        try:
            parts = server_parts(self.url, ("http", "https"))
        except ValueError as error:
            raise ValueError(f"{wrong}: {error}") from None
        if parts.query or parts.username:
            raise ValueError(wrong)
        if not 0 <= self.temperature <= 2:
            raise ValueError(f"temperature must be between 0 and 2, not {self.temperature}")
        if self.max_output_tokens < 1 or self.retries < 0:
            raise ValueError("max_output_tokens must be at least 1, and retries at least 0")


@dataclass(frozen=True, slots=True)
class JudgeAnswer:
    """What a judge said, and how many tokens that took."""

    text: str
    tokens: int


class JudgeClient:
    """Asks one endpoint. Proxies and redirects are not followed.

    Args:
        endpoint: Its address and settings.
    """

    def __init__(self, endpoint: JudgeEndpoint) -> None:
        self._endpoint = endpoint
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        if endpoint.key is not None:
            headers["Authorization"] = f"Bearer {endpoint.key}"
        secure = endpoint.url.startswith("https:")
        self._client = httpx.Client(
            # Plain HTTP needs no certificates, and reading them takes longer than many a call.
            verify=_certificates() if secure else False,
            headers=headers,
            trust_env=False,
            follow_redirects=False,
        )
        # Servers that many clients ask at once are not asked again by all at once.
        self._jitter = random.Random()

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    def ask(
        self,
        messages: Sequence[Mapping[str, str]],
        deadline: float,
        before: Callable[[], None],
        after: Callable[[int], None],
    ) -> JudgeAnswer:
        """Ask, again where the endpoint is busy, until the deadline.

        Args:
            messages: What to say.
            deadline: When to give up, by the monotonic clock.
            before: Called before each request; may raise JudgeError.
            after: Called with the tokens that a request took.

        Raises:
            JudgeTimeoutError: It did not answer before the deadline.
            JudgeError: It refused, or its answer cannot be used.
        """
        for attempt in range(self._endpoint.retries + 1):
            before()
            try:
                answer = self._post(messages, deadline)
            except _BusyError as busy:
                if attempt == self._endpoint.retries:
                    raise JudgeError(f"the judge is not available: {busy}") from busy
                self._back_off(busy, attempt, deadline)
                continue
            after(answer.tokens)
            return answer
        raise AssertionError("the last attempt returns or raises")

    def _back_off(self, busy: _BusyError, attempt: int, deadline: float) -> None:
        spread = 0.5 + self._jitter.random()
        pause = min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2.0**attempt) * spread
        pause = max(pause, busy.wait_s or 0.0)
        if time.monotonic() + pause >= deadline:
            raise JudgeTimeoutError(f"the judge is not available in time: {busy}") from busy
        time.sleep(pause)

    def _post(self, messages: Sequence[Mapping[str, str]], deadline: float) -> JudgeAnswer:
        endpoint = self._endpoint
        body = {
            "model": endpoint.model,
            "messages": list(messages),
            "temperature": endpoint.temperature,
            "max_tokens": endpoint.max_output_tokens,
        }
        left = deadline - time.monotonic()
        if left <= 0:
            raise JudgeTimeoutError("the judge did not answer in time")
        timeout = httpx.Timeout(left, connect=min(left, _CONNECT_TIMEOUT_S))
        url = f"{endpoint.url.rstrip('/')}/chat/completions"
        try:
            with self._client.stream("POST", url, content=orjson.dumps(body), timeout=timeout) as response:
                content = _content(response, deadline)
                return _answer(response.status_code, response.headers, content)
        except (
            httpx.ConnectTimeout,
            httpx.ConnectError,
            httpx.RemoteProtocolError,
            httpx.ReadError,
        ) as error:
            raise _BusyError(f"{type(error).__name__}: {str(error)[:_SHOWN]}") from error
        except httpx.TimeoutException as error:
            raise JudgeTimeoutError("the judge did not answer in time") from error
        except httpx.HTTPError as error:
            raise JudgeError(f"the judge cannot be asked: {type(error).__name__}") from error


@cache
def _certificates() -> ssl.SSLContext:
    return httpx.create_ssl_context()


def _content(response: httpx.Response, deadline: float) -> bytes:
    content = bytearray()
    for chunk in response.iter_bytes():
        content += chunk
        if len(content) > _LARGEST_REPLY:
            raise JudgeError(f"the judge's reply is over {_LARGEST_REPLY} bytes")
        if time.monotonic() > deadline:
            raise JudgeTimeoutError("the judge did not answer in time")
    return bytes(content)


def _answer(status: int, headers: Mapping[str, str], content: bytes) -> JudgeAnswer:
    if status == _TOO_MANY or status in _SERVER_ERRORS:
        raise _BusyError(f"it answers {status}", _seconds(headers.get("retry-after")))
    if status != _OK:
        # What it says of keys and machines is for the operator's log, and not for the sender of the response.
        _log.error("the judge answers %d: %s", status, content[:_SHOWN].decode(errors="replace"))
        raise JudgeError(f"the judge answers {status}; the server's log has its words")
    try:
        reply: Any = orjson.loads(content)
        choice = reply["choices"][0]
        text = choice["message"]["content"]
        usage = reply.get("usage") or {}
        tokens = usage.get("total_tokens", 0)
    except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError) as error:
        raise JudgeError("what the judge's endpoint answers is no chat completion") from error
    if not isinstance(text, str) or type(tokens) is not int:
        raise JudgeError("what the judge's endpoint answers is no chat completion with a text")
    return JudgeAnswer(text, max(0, tokens))


def _seconds(value: str | None) -> float | None:
    return float(value) if value is not None and value.isascii() and value.isdigit() else None
