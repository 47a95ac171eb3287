"""A model behind an OpenAI-compatible chat API: one request, one reply, and named failures."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from enum import StrEnum
from types import TracebackType
from typing import Any, Self

import httpx
import orjson

_LONGEST_WAIT_S = 120.0
_FIRST_WAIT_S = 0.5
_LONGEST_REASON = 300
_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_REFUSED = frozenset({401, 402, 403, 404, 405})
_CONTEXT_WORDS = ("context_length", "context length", "context window", "maximum context", "too many tokens")


class Failure(StrEnum):
    """Why a request has no reply."""

    CONNECTION = "connection lost"
    TIMEOUT = "no reply in time"
    RATE_LIMITED = "rate limited"
    SERVER_ERROR = "server error"
    REJECTED = "request rejected"
    CONTEXT = "context too long"
    UNREADABLE = "unreadable answer"


class ReplyError(Exception):
    """A request has no reply, after all retries; other requests may have one.

    Attributes:
        failure: Why.
    """

    def __init__(self, failure: Failure, message: str) -> None:
        super().__init__(message)
        self.failure = failure


class EndpointError(Exception):
    """No request can succeed: the key, the model or the address is wrong. The message names the remedy."""


@dataclass(frozen=True, slots=True)
class RequestedCall:
    """A call of a tool, as the model requested it.

    Attributes:
        call_id: The id that its result refers to.
        name: The tool.
        arguments: JSON text, as the model wrote it.
    """

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ModelReply:
    """A reply of the model.

    Attributes:
        content: Text; empty if there was none.
        reasoning: Its reasoning, if the server returns it separately.
        refusal: The text of a refusal; empty if it did not refuse.
        calls: Calls of tools, in order.
        finish_reason: `stop`, `length`, `tool_calls`, `content_filter`, or the server's own value.
        prompt_tokens: Tokens of the prompt; None if the server does not say.
        completion_tokens: Tokens of the reply; None if the server does not say.
        cost: The cost of the request as the server reports it; None if it does not.
        seconds: From the request that succeeded to its reply.
    """

    content: str = ""
    reasoning: str = ""
    refusal: str = ""
    calls: tuple[RequestedCall, ...] = ()
    finish_reason: str = "stop"
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cost: float | None = None
    seconds: float = 0.0

    def as_message(self) -> dict[str, Any]:
        """Return the reply as the conversation has it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or self.refusal}
        if self.calls:
            message["content"] = self.content or None
            message["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.calls
            ]
        return message


@dataclass(slots=True)
class ChatModel:
    """A model behind `POST {base_url}/chat/completions`; used as an asynchronous context manager.

    Args:
        base_url: The API's address, for example `https://api.openai.com/v1`.
        model: The model's name there.
        api_key: Sent as a bearer token; None sends none.
        sampling: Further fields of each request, such as `temperature`.
        timeout_s: How long one request may take.
        retries: How often a request is repeated that was rate limited, or met an error of the server or connection.

    Attributes:
        retried: How often requests were repeated, by reason.
    """

    base_url: str
    model: str
    api_key: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 300.0
    retries: int = 5
    retried: Counter[Failure] = field(default_factory=Counter)
    _http: httpx.AsyncClient | None = None
    _reached: bool = False

    async def __aenter__(self) -> Self:
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        # Without a bound on connecting, a wrong address would take as long as a slow model.
        timeout = httpx.Timeout(self.timeout_s, connect=min(15.0, self.timeout_s))
        self._http = httpx.AsyncClient(headers=headers, limits=limits, timeout=timeout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._http is not None:
            await self._http.aclose()

    @property
    def url(self) -> str:
        """The URL that requests are posted to."""
        return f"{self.base_url.rstrip('/')}/chat/completions"

    async def reply(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> ModelReply:
        """Return the model's reply to a conversation.

        Args:
            messages: The conversation.
            tools: Declarations of tools, as the API takes them.

        Raises:
            ReplyError: There is none, after all retries.
            EndpointError: There can be none.
        """
        body: dict[str, Any] = {"model": self.model, "messages": list(messages), **self.sampling}
        if tools:
            body["tools"] = list(tools)
        # orjson refuses half of a surrogate pair, which an environment may say.
        content = orjson.dumps(_well_formed(body))
        attempt = 0
        while True:
            try:
                return await self._ask(content)
            except _RetryableError as error:
                if attempt >= self.retries:
                    raise ReplyError(error.failure, str(error)) from None
                self.retried[error.failure] += 1
                await asyncio.sleep(_wait_s(attempt, error.retry_after_s))
                attempt += 1

    async def _ask(self, content: bytes) -> ModelReply:
        assert self._http is not None, "a ChatModel is used in `async with`"
        began = time.perf_counter()
        try:
            async with asyncio.timeout(self.timeout_s):
                response = await self._http.post(
                    self.url, content=content, headers={"Content-Type": "application/json"}
                )
        except (httpx.TimeoutException, TimeoutError):
            self._check_reached("nothing answers in time")
            raise _RetryableError(Failure.TIMEOUT, f"no reply within {self.timeout_s:g} s") from None
        except (httpx.HTTPError, OSError) as error:
            reason = str(error) or type(error).__name__
            self._check_reached(reason)
            raise _RetryableError(Failure.CONNECTION, self._safe(reason)) from None
        self._reached = True
        if not response.is_success:
            raise self._problem(response)
        return _read_reply(response.content, time.perf_counter() - began)

    def _check_reached(self, reason: str) -> None:
        """A server that was never reached is not waited for.

        Raises:
            EndpointError: It was never reached.
        """
        if not self._reached:
            raise EndpointError(
                f"no model server at {self.base_url} ({self._safe(reason)}): start it, or correct --base-url"
            ) from None

    def _problem(self, response: httpx.Response) -> Exception:
        """Return the error of an unsuccessful answer."""
        status, said = response.status_code, self._safe(_reason_of(response))
        if status in (401, 403):
            remedy = (
                "name the variable that holds the right key with --api-key-env"
                if self.api_key is not None
                else "set OPENAI_API_KEY, or name another variable with --api-key-env"
            )
            return EndpointError(f"the key is refused ({status}: {said}): {remedy}")
        if status in _REFUSED:
            return EndpointError(
                f"{self.url} answers {status} for the model {self.model!r} ({said}): correct --model, or --base-url "
                "(it usually ends in /v1)"
            )
        if 300 <= status < 400:
            target = self._safe(response.headers.get("location", "another address"))
            return EndpointError(f"{self.url} redirects to {target}: give that as --base-url")
        if status == 429 and "insufficient_quota" in response.text:
            return EndpointError(f"the account has no quota left ({said})")
        if status in _RETRIED:
            failure = Failure.RATE_LIMITED if status == 429 else Failure.SERVER_ERROR
            return _RetryableError(failure, f"{status}: {said}", _retry_after_s(response.headers))
        lowered = response.text[:10_000].lower()
        if status in (400, 413, 422) and any(words in lowered for words in _CONTEXT_WORDS):
            return ReplyError(Failure.CONTEXT, f"{status}: {said}")
        failure = Failure.SERVER_ERROR if status >= 500 else Failure.REJECTED
        return ReplyError(failure, f"{status}: {said}")

    def _safe(self, text: str) -> str:
        """Return a server's text in one line, without the key, which some servers repeat."""
        if self.api_key:
            text = text.replace(self.api_key, "***")
        return " ".join(text.split())[:_LONGEST_REASON]


class _RetryableError(Exception):
    def __init__(self, failure: Failure, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.failure = failure
        self.retry_after_s = retry_after_s


def _wait_s(attempt: int, retry_after_s: float | None) -> float:
    """Return how long to wait: the server's delay, or twice as long each time, with jitter."""
    if retry_after_s is not None:
        return min(_LONGEST_WAIT_S, retry_after_s) + random.uniform(0.0, 0.1)
    return min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0**attempt) * random.uniform(0.75, 1.25)


def _retry_after_s(headers: httpx.Headers) -> float | None:
    """Return `Retry-After`, seconds or a date (RFC 9110, section 10.2.3), as seconds from now.

    A date is in the server's time, so it is compared with the server's `Date`, or with the local clock if there is
    none.
    """
    text = headers.get("retry-after", "")
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - _answered_at(headers)
        except ValueError:
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _answered_at(headers: httpx.Headers) -> float:
    """Return when a server says that it answered, in seconds since 1970."""
    try:
        return parsedate_to_datetime(headers.get("date", "")).timestamp()
    except ValueError:
        return time.time()


def _reason_of(response: httpx.Response) -> str:
    """Return the message in an error's body: `error.message` as OpenAI has it, `detail`, or the text."""
    try:
        body = orjson.loads(response.content)
    except orjson.JSONDecodeError:
        return response.text[: 2 * _LONGEST_REASON] or response.reason_phrase
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or response.reason_phrase
    return str(error)


def _read_reply(content: bytes, seconds: float) -> ModelReply:
    """Read an answer of the API.

    Raises:
        ReplyError: It does not have the API's form.
    """
    try:
        body = orjson.loads(content)
        choice = body["choices"][0]
        message = choice["message"]
        calls = tuple(_read_call(call, index) for index, call in enumerate(message.get("tool_calls") or ()))
        usage = body.get("usage") or {}
        return ModelReply(
            content=_text_of(message.get("content")),
            reasoning=_text_of(message.get("reasoning_content") or message.get("reasoning")),
            refusal=_text_of(message.get("refusal")),
            calls=calls,
            finish_reason=str(choice.get("finish_reason") or "stop"),
            prompt_tokens=_count(usage.get("prompt_tokens")),
            completion_tokens=_count(usage.get("completion_tokens")),
            cost=_amount(usage.get("cost")),
            seconds=seconds,
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ReplyError(
            Failure.UNREADABLE, f"not an answer of a chat API: {type(error).__name__}: {str(error)[:100]}"
        ) from None


def _read_call(call: Any, index: int) -> RequestedCall:
    function = call["function"]
    arguments = function.get("arguments")
    # Some servers give an object in place of its text.
    text = arguments if isinstance(arguments, str) else orjson.dumps(arguments or {}).decode()
    return RequestedCall(str(call.get("id") or f"call_{index}"), str(function["name"]), text)


def _text_of(content: Any) -> str:
    """Return the text of a content, which may come in parts."""
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _amount(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return None
    return float(value)


def _well_formed(value: Any) -> Any:
    """Return a value with halves of surrogate pairs replaced, which no UTF-8 text can hold."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Mapping):
        return {_well_formed(key): _well_formed(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_well_formed(each) for each in value]
    return value
