"""Answers that come as server-sent events: the first at once, the last when the work behind them is done."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rollgym.env_server.common.io_process import going_away
from rollgym.env_server.http.call_routes import SERVICES
from rollgym.env_server.messages.envelope import as_problem
from rollgym.env_server.protocols.ors_forms import PING, event

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_PING_S = 10.0


class EventStream(Response):
    """A stream of events.

    If the client disconnects, its operation continues without it, and the client may ask for the result again.

    Args:
        first: The first event, sent before anything is done.
        work: Runs the operation, and returns the other events.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, work: Callable[[], Awaitable[Iterable[bytes]]]) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._first = first
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as a response."""
        services = scope[SERVICES]
        task = services.unanswered.enter()
        working = asyncio.ensure_future(self._events(scope))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send(scope, send, self._first)
            while not working.done():
                await asyncio.wait({working, gone}, timeout=_PING_S, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    return
                if not working.done():
                    await self._send(scope, send, PING)
            for each in working.result():
                await self._send(scope, send, each)
            await send({"type": "http.response.body", "body": b""})
        except asyncio.CancelledError:
            # The server ends and waits for this answer no longer.
            await send({"type": "http.response.body", "body": event("error", going_away().detail)})
        except OSError:
            # uvicorn says in this way that the client went away.
            return
        finally:
            working.cancel()
            gone.cancel()
            services.unanswered.leave(task)

    async def _events(self, scope: Scope) -> Iterable[bytes]:
        try:
            return list(await self._work())
        except Exception as error:  # noqa: BLE001 - a defect of ours costs this call, not the server
            problem = as_problem(error)
        scope[SERVICES].metrics.problems[problem.code] += 1
        return [event("error", f"{problem.code}: {problem.detail}")]

    @staticmethod
    async def _send(scope: Scope, send: Send, content: bytes) -> None:
        scope[SERVICES].metrics.http_sent += len(content)
        await send({"type": "http.response.body", "body": content, "more_body": True})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
