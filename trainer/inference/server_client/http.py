"""Calls over HTTP to one server, retried until the caller's deadline.

A lost call is retried if that is safe. Callers do not poll: one shared health probe asks a server that is down whether
it is back, and notifies all waiters at once. Another probe runs while calls are in flight, because a hung server keeps
its connections, a front with a hung engine keeps answering, and a live server may never finish an answer that it has
begun.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.inference.calls import HttpAnswer, HttpCall, message_of
from rollgym.trainer.inference.errors import InferenceError, MalformedReplyError, ServerGoneError, words_of
from rollgym.trainer.inference.server_client.connections import (
    Connections,
    LostCallError,
    NotConnectedError,
    ResponseProgress,
)
from rollgym.trainer.inference.servers.dialect import Conversation


class EngineWatch:
    """Sends an engine health checks that it must answer itself, one at a time, so that they never pile up.

    Args:
        ask: Asks it, and returns when anything was answered, or nothing can be.
        patience_s: How long an engine may take to answer, control calls aside: it may compile for a new batch shape.
    """

    def __init__(self, ask: Callable[[], Awaitable[object]], patience_s: float) -> None:
        self._ask = ask
        self._patience_s = patience_s
        self._question: asyncio.Future[object] | None = None
        self._asked_at = 0.0

    def look(self, *, steered: bool) -> bool:
        """Return whether the engine has been silent for too long; once it has answered, ask the next question.

        Args:
            steered: Whether a control call (pause, load and the like) is in flight: the engine answers nothing else
                until that is done.
        """
        now = asyncio.get_running_loop().time()
        if steered:
            self.rest()
        elif self._question is None or self._question.done():
            self._question, self._asked_at = asyncio.ensure_future(self._ask()), now
        return self._question is not None and now - self._asked_at >= self._patience_s

    def rest(self) -> None:
        """Cancel the question in flight; the next `look` asks again."""
        if self._question is not None:
            self._question.cancel()
            self._question = None


Result = TypeVar("Result")
OnBody = Callable[[bytes], None]
OnNews = Callable[[], None]

_LARGEST_ANSWER = 2**26
"""Bytes; a reply of 100,000 tokens has a fifth of it."""
_CONNECT_S = 10.0
_HEALTH_S = 5.0
_ENGINE_S = 120.0
"""How long an engine may be silent behind a front that answers."""
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0
# Shorter than servers keep idle connections (5 s), so that none is used that they are about to close.
_KEEPALIVE_S = 2.0
_PAUSED = 503
_BUSY = (429, 502, _PAUSED, 504)
_UNCERTAIN = (502, 504)
"""What a proxy says that has passed a call on, and has no answer."""
_FAILURES = 3
"""Answers of status 500 that one call may get."""


class ServerHttp:
    """Makes calls to one server.

    Args:
        url: Its root.
        api_key: Key of its ordinary routes.
        admin_api_key: Key of its control routes, if that is a separate one.
        patience_s: How long it may be away, or busy, before a call fails.
        watch_every_s: How often it is asked whether it lives while calls are under way.
        sign_of_life: Route that it answers at once for as long as it lives, also in a pause.
        engine_sign: Route that its engine answers, also in a pause, and not while it is steered.
        stalled_after_s: How long an answer that has begun to come may take to its end; of a stream, to its next token.

    Raises:
        ConfigError: If `url` is none.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None,
        admin_api_key: str | None,
        patience_s: float,
        watch_every_s: float,
        sign_of_life: str = "/health",
        engine_sign: str = "/health",
        stalled_after_s: float = 120.0,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is no URL of a server: it starts with http:// or https://")
        self.url = url.rstrip("/")
        self._key = api_key
        self._admin_key = admin_api_key or api_key
        self._patience_s = patience_s
        self._watch_every_s = watch_every_s
        self._sign_of_life = sign_of_life
        self._engine_sign = engine_sign
        self._stalled_after_s = stalled_after_s
        self._engine_s = max(patience_s, _ENGINE_S)
        self._engine = EngineWatch(self._ask_engine, self._engine_s)
        self._steering = 0
        self._connections = Connections(
            self.url, connect_s=_CONNECT_S, keep_s=_KEEPALIVE_S, largest=_LARGEST_ANSWER
        )
        self._under_way: set[_WatchedCall] = set()
        self._watch: asyncio.Task[None] | None = None
        self._outage: asyncio.Task[None] | None = None
        self.troubles = 0

    async def close(self) -> None:
        """Fail all calls in flight, and close the connections."""
        self.interrupt(InferenceError(f"{self.url}: the client was closed"))
        self._engine.rest()
        tasks = [task for task in (self._watch, self._outage) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._connections.close()

    def interrupt(self, error: Exception) -> None:
        """Let all calls that are under way fail with `error`."""
        for each in self._under_way:
            each.end(error)

    async def converse(self, conversation: Conversation[Result], *, takes_pages: bool = False) -> Result:
        """Make the calls of a conversation and return what came of it; see `call`."""
        answer = None
        while True:
            try:
                call = next(conversation) if answer is None else conversation.send(answer)
            except StopIteration as ended:
                result: Result = ended.value
                return result
            answer = await self.call(call, takes_pages=takes_pages)

    async def call(
        self,
        call: HttpCall,
        *,
        held: Callable[[], bool] = lambda: False,
        takes_pages: bool = False,
        reading: Callable[[OnNews], OnBody] | None = None,
    ) -> HttpAnswer:
        """Make one call, with retries if it is lost or the server is busy.

        Args:
            call: What to call.
            held: Says whether the caller has paused the server; then it hears at once that it is busy.
            takes_pages: Whether a web page is an answer: true until the address is known to be a server's. Later it
                comes from a proxy in front of a server that is away.
            reading: Called for each attempt; returns the function that receives parts of the answer's body as they
                arrive, and that reports progress in turn.

        Raises:
            ServerGoneError: If patience ended.
            InferenceError: If a call was lost that cannot be repeated.
            MalformedReplyError: If the answer is too long.
        """
        pace = _Pace(self.url, self._patience_s)
        failures = 0
        while True:
            try:
                answer = await self._watched(call, held, reading)
            except LostCallError as error:
                self.troubles += 1
                if not call.repeatable and not isinstance(error, NotConnectedError):
                    raise InferenceError(
                        f"{self.url}{call.path} was lost on its way: {words_of(error)}"
                    ) from error
                await pace.wait(words_of(error))
                await self._until_back(pace)
                continue
            page = answer.is_page and not takes_pages
            hears_at_once = not call.patient or (answer.status == _PAUSED and held())
            if page or (answer.status in _BUSY and not hears_at_once):
                said = f"{answer.status}, {message_of(answer.body)}"
                if not call.repeatable and (page or answer.status in _UNCERTAIN):
                    raise InferenceError(f"{self.url}{call.path} was lost on its way: {said}")
                # A live server answers in JSON; any other body is a proxy's, and a different server may come back.
                self.troubles += answer.status in _UNCERTAIN or not answer.body.lstrip().startswith(b"{")
                await pace.wait(said)
                continue
            if answer.status == 500 and not call.admin and (failures := failures + 1) < _FAILURES:
                await pace.wait(message_of(answer.body))
                # An engine that is dead answers so for as long as its front lives.
                await self._until_back(pace)
                continue
            return answer

    async def _watched(
        self, call: HttpCall, held: Callable[[], bool], reading: Callable[[OnNews], OnBody] | None
    ) -> HttpAnswer:
        limit = asyncio.timeout(None)
        arrival = ResponseProgress(held, asyncio.get_running_loop().time)
        watched = _WatchedCall(limit, arrival)
        self._steering += call.admin
        try:
            async with limit:
                self._under_way.add(watched)
                self._start_watch()
                return await self._once(call, None if reading is None else reading(arrival.news), arrival)
        except TimeoutError:
            if watched.error is None:
                raise
            raise watched.error from None
        finally:
            self._under_way.discard(watched)
            self._steering -= call.admin

    async def _once(
        self, call: HttpCall, on_body: OnBody | None = None, arrival: ResponseProgress | None = None
    ) -> HttpAnswer:
        headers = dict(call.headers)
        if key := self._admin_key if call.admin else self._key:
            headers["Authorization"] = f"Bearer {key}"
        if call.body is None:
            return await self._connections.call(call, headers, None, on_body, arrival)
        headers["Content-Type"] = "application/json"
        return await self._connections.call(call, headers, orjson.dumps(call.body), on_body, arrival)

    # Watching

    async def alive(self) -> bool:
        """Ask the server whether it answers."""
        try:
            async with asyncio.timeout(_HEALTH_S):
                answer = await self._once(HttpCall(self._sign_of_life, method="GET"))
        except (TimeoutError, MalformedReplyError):
            return False
        except LostCallError:
            self.troubles += 1
            return False
        return answer.ok and not answer.is_page

    async def _ask_engine(self) -> None:
        # Any answer is one of the engine or of a release that asks it nothing; a lost one is the front's matter.
        with suppress(LostCallError, MalformedReplyError):
            await self._once(HttpCall(self._engine_sign, method="GET"))

    async def _until_back(self, pace: "_Pace") -> None:
        if self._outage is None or self._outage.done():
            self._outage = asyncio.create_task(self._look_out())
        await pace.spend(asyncio.shield(self._outage))

    async def _look_out(self) -> None:
        wait = _SHORTEST_WAIT_S
        while not await self.alive():
            await asyncio.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT_S)

    def _start_watch(self) -> None:
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._keep_watch())

    async def _keep_watch(self) -> None:
        loop = asyncio.get_running_loop()
        silent_since: float | None = None
        while self._under_way:
            await asyncio.sleep(min(self._watch_every_s, self._patience_s))
            asked = loop.time()
            if await self.alive():
                silent_since = None
                if self._engine.look(steered=self._steering > 0):
                    self._lose_engine()
                self._give_up_stalled()
                continue
            silent_since = asked if silent_since is None else silent_since
            if loop.time() - silent_since >= self._patience_s:
                self.troubles += 1
                self.interrupt(ServerGoneError(f"{self.url} has not answered for {self._patience_s:g} s"))
                silent_since = None
        self._engine.rest()

    def _give_up_stalled(self) -> None:
        for each in self._under_way:
            if each.arrival.stalled(self._stalled_after_s, steered=self._steering > 0):
                each.end(
                    ServerGoneError(
                        f"{self.url} has begun an answer, and brought nothing new of it for {self._stalled_after_s:g} "
                        "s (inference.stalled_after_s)"
                    )
                )

    def _lose_engine(self) -> None:
        self.troubles += 1
        self._engine.rest()
        self.interrupt(
            ServerGoneError(
                f"the engine behind {self.url} has not answered {self._engine_sign} for {self._engine_s:g} s"
            )
        )


@dataclass(eq=False, slots=True)
class _WatchedCall:
    """A call in flight.

    Attributes:
        limit: Ends it.
        arrival: What has come of its answer.
        error: What it is ended with.
    """

    limit: asyncio.Timeout
    arrival: ResponseProgress
    error: Exception | None = None

    def end(self, error: Exception) -> None:
        """Fail the call with an error, unless it has timed out."""
        if not self.limit.expired():
            self.error = error
            self.limit.reschedule(asyncio.get_running_loop().time())


class _Pace:
    """How long one call has waited, and how long it may.

    Args:
        url: Whom it waits for.
        patience_s: How long it may.
    """

    def __init__(self, url: str, patience_s: float) -> None:
        self._url = url
        self._patience_s = patience_s
        self._waited_s = 0.0
        self._next_s = _SHORTEST_WAIT_S
        self._reason = ""

    async def wait(self, reason: str) -> None:
        """Wait a little, each time longer."""
        self._reason = reason
        await self.spend(asyncio.sleep(self._next_s))
        self._next_s = min(2 * self._next_s, _LONGEST_WAIT_S)

    async def spend(self, waiting: Any) -> None:
        """Wait for something, on the patience that is left."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(self._patience_s - self._waited_s):
                await waiting
        except TimeoutError:
            raise ServerGoneError(
                f"{self._url} has not answered for {self._patience_s:g} s ({self._reason})"
            ) from None
        finally:
            self._waited_s += loop.time() - started
