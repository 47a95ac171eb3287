"""Bodies that an answer did not wait for: the rest is read if it is short, or else the connection ends.

To reach the next request of a connection, a server reads what is left of this one, however much that is: one that is
refused unread could keep the trainer busy for as long as somebody sends. Hanging up at once would be no better, for a
client that is still sending may then never see why.
"""

import asyncio

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_PATIENCE_S = 1.0
"""Who sends is on this machine or near, and a body that is on its way is here at once."""


class UnreadBodies:
    """Ends the connection with an answer that leaves much of its request's body unread, whatever has answered.

    Args:
        app: What answers.
        largest: Bytes that are read and dropped, so that the connection goes on.
    """

    def __init__(self, app: ASGIApp, largest: int) -> None:
        self._app = app
        self._largest = largest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(receive)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and not await body.dropped(self._largest):
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        await self._app(scope, body.receive, answer)


class _Body:
    """A request's body, as it comes."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._ended = False

    async def receive(self) -> Message:
        """Return what comes next, and see whether it is the last of the body."""
        message = await self._receive()
        self._ended = not message.get("more_body", False)
        return message

    async def dropped(self, largest: int) -> bool:
        """Read the rest; return whether that was all of it, within so many bytes and a short time."""
        left = largest
        try:
            async with asyncio.timeout(_PATIENCE_S):
                while not self._ended and left >= 0:
                    left -= len((await self.receive()).get("body", b""))
        except TimeoutError:
            return False
        return self._ended
