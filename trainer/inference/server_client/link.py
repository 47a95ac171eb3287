"""The link to one server: its address, what it can do, and its dialect."""

import asyncio
from contextlib import suppress
from typing import TypeVar

from rollgym.trainer.config.inference import ServerName
from rollgym.trainer.core.errors import TrainerError
from rollgym.trainer.inference.errors import (
    InferenceError,
    MalformedReplyError,
    RequestRefusedError,
    ServerSetupError,
)
from rollgym.trainer.inference.server_client.http import ServerHttp
from rollgym.trainer.inference.servers.dialect import (
    Conversation,
    Dialect,
    InspectedServer,
    ServerCapabilities,
    ServerRequirements,
    server_program,
)

Result = TypeVar("Result")

FAREWELL_S = 5.0
"""Time limit of background calls, and of the last calls before a link is closed."""


class ServerLink:
    """Talks to one server in its dialect.

    Args:
        http: Makes the calls.
        kind: The dialect that it speaks.
        need: What the run needs of it.
    """

    def __init__(self, http: ServerHttp, kind: ServerName, need: ServerRequirements) -> None:
        self.http = http
        self.program = server_program(kind)
        self.need = need
        self._dialect: Dialect | None = None
        self._left: set[asyncio.Task[None]] = set()
        self._undoing: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Root URL of the server, without a path."""
        return self.http.url

    @property
    def capabilities(self) -> ServerCapabilities:
        """What the server can do."""
        return self.dialect.capabilities

    @property
    def dialect(self) -> Dialect:
        """Its calls, built for what it can do."""
        if self._dialect is None:
            raise RuntimeError(f"the client of {self.url} is not connected: use it in `async with`")
        return self._dialect

    async def probe(self) -> ServerCapabilities:
        """Ask the server what it can do.

        Raises:
            ServerSetupError: If it lacks something that the run needs; the message names the switch or the release.
            ServerGoneError: If the server does not answer.
        """
        self._dialect = await self._met(self.program.probe(self.need))
        return self.capabilities

    async def try_out(self) -> None:
        """Ask the server for tokens, unless that was done: one that was met in a pause could not be asked.

        Raises:
            ServerSetupError: If it does not know the policy's tokens.
            ServerGoneError: If the server does not answer.
        """
        if not self.capabilities.tried:
            self._dialect = await self._met(self.program.try_out(self.need, self.capabilities))

    async def look(self) -> InspectedServer:
        """Ask the server for its name, release and model, by read-only calls.

        Raises:
            ServerSetupError: If it is seen to lack something that the run needs.
            ServerGoneError: If the server does not answer.
        """
        return await self._met(self.program.look(self.need))

    async def _met(self, conversation: Conversation[Result]) -> Result:
        """Have a first conversation with whatever answers at this address; errors say at which."""
        try:
            return await self.http.converse(conversation, takes_pages=True)
        except (ServerSetupError, MalformedReplyError) as error:
            raise type(error)(f"{self.url}: {error}") from error
        except RequestRefusedError as error:
            raise InferenceError(f"{self.url}: {error}") from error

    async def converse(self, conversation: Conversation[Result]) -> Result:
        """Make the calls of a conversation and return what came of it."""
        return await self.http.converse(conversation)

    # Background calls

    def leave(
        self, conversation: Conversation[None], after: asyncio.Task[None] | None = None
    ) -> asyncio.Task[None]:
        """Make calls in a background task, once `after` has ended; closing the link cancels them."""

        async def quietly() -> None:
            if after is not None:
                await asyncio.gather(after, return_exceptions=True)
            with suppress(TrainerError, TimeoutError):
                async with asyncio.timeout(FAREWELL_S):
                    await self.http.converse(conversation)

        task = asyncio.create_task(quietly())
        self._left.add(task)
        task.add_done_callback(self._left.discard)
        return task

    def undo(self, conversation: Conversation[None], after: asyncio.Task[None] | None = None) -> None:
        """Roll back an operation that failed, without delaying the caller; `undone` waits for the rollback."""
        self._undoing = self.leave(conversation, after)

    async def undone(self) -> None:
        """Wait until what broke off is taken back."""
        if self._undoing is not None:
            await asyncio.wait([self._undoing])

    async def close(self) -> None:
        """Cancel background calls, then fail all other calls in flight."""
        for task in list(self._left):
            task.cancel()
        await asyncio.gather(*self._left, return_exceptions=True)
        await self.http.close()
