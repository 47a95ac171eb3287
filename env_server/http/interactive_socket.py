"""An interactive session with a program in this server's sandbox: one socket is one program, which ends with it.

The first message is a request of `run_code`; it is answered by `{"ok": {}}` or `{"error": problem}`. Then each message
is answered by one:

- bytes, which the program can read, by `{"ok": {}}`;
- `{"op": "read", "timeout_s": 5}` by the bytes that it has written, none at the time-out or at its end;
- `{"op": "alive"}` by `{"ok": {"alive": true}}`;
- `{"op": "close"}` by `{"ok": ...}` with the reply of `run_code`, and the end of the socket.

Who sends more than eight messages before the first of them is answered has the socket ended.
"""

import asyncio
import contextlib
from collections.abc import MutableMapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import Headers

from rollgym.clients.protocol.arrays import DecodeError
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.frames import dumps, loads
from rollgym.env_server.access.context import Context
from rollgym.env_server.common.io_process import going_away
from rollgym.env_server.common.negotiation import too_large_request
from rollgym.env_server.common.requests import as_problem, invalid, validate
from rollgym.env_server.http.socket import POLICY_VIOLATION, Receive, Send, close_revoked, reject
from rollgym.env_server.operations.sandbox import InteractiveSession, InteractiveSessions
from rollgym.env_server.operations.services import Services

# A read occupies a thread; a client that wants to wait longer repeats it.
_LONGEST_READ_S = 5.0
# The number of messages that may wait while one is answered; a server that stops reading misses the disconnect.
_MOST_UNANSWERED = 8


class _Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    op: Literal["read", "alive", "close"]
    timeout_s: float = Field(0.0, ge=0, allow_inf_nan=False)


async def serve_interactive_socket(
    services: Services, scope: MutableMapping[str, Any], receive: Receive, send: Send
) -> None:
    """Accept one socket and serve it until it drops, or its program has been closed."""
    await receive()
    try:
        programs = services.interactive_sessions
        if programs is None:
            raise ProblemError(
                "not_found", "this server runs no programs; a server does that is started with --sandbox"
            )
        caller = services.tokens.from_headers(Headers(scope=scope))
        if caller is None:
            raise ProblemError("unauthorized", "this server needs a token, in the Authorization header")
        caller.require("play")
        services.lifecycle.require_open()
        slot = services.sockets.enter(caller, scope["client"][0] if scope["client"] else "")
    except ProblemError as problem:
        await reject(services, send, problem)
        return
    services.metrics.sockets += 1
    socket = _InteractiveSocket(services, programs, Context(caller, binary=False), receive, send)
    slot.on_change = lambda: socket.revoke() if slot.revoked else None
    try:
        await send({"type": "websocket.accept"})
        await socket.serve()
    except OSError:
        # uvicorn says in this way that the client went away while an answer was being sent.
        pass
    finally:
        slot.on_change = None
        services.metrics.sockets -= 1
        services.sockets.leave(slot)


class _InteractiveSocket:
    """One open socket, and its program. Messages are answered one after another."""

    def __init__(
        self,
        services: Services,
        programs: InteractiveSessions,
        context: Context,
        receive: Receive,
        send: Send,
    ) -> None:
        self._services = services
        self._programs = programs
        self._context = context
        self._receive = receive
        self._send = send
        self._revoked = False
        self._heard: asyncio.Queue[str | bytes | None] = asyncio.Queue()

    def revoke(self) -> None:
        """End it: its token works no more."""
        self._revoked = True
        self._services.unanswered.add(asyncio.get_running_loop().create_task(close_revoked(self._send)))

    async def serve(self) -> None:
        """Answer messages until the socket drops, or the program was closed."""
        message = await self._next()
        if message is None:
            return
        program = await self._open_in_time(message)
        if program is None:
            return
        try:
            await self._say({"ok": {}})
            await self._converse(program)
        finally:
            await program.close()

    async def _open_in_time(self, message: str | bytes) -> InteractiveSession | None:
        """Start the program of the first message; on failure send the client the problem, and return None."""
        unanswered = self._services.unanswered
        task = unanswered.enter()
        try:
            try:
                return await self._programs.open(self._context.caller, self._object(message))
            except asyncio.CancelledError:
                # The server ends and waits for this program no longer.
                problem = self._problem(going_away())
            except Exception as error:  # noqa: BLE001 - a defect of ours costs this socket, not the server
                problem = self._problem(error)
            await self._say({"error": problem})
            await self._send({"type": "websocket.close"})
            return None
        finally:
            unanswered.leave(task)

    async def _converse(self, program: InteractiveSession) -> None:
        """Answer messages; a client that goes away while one is answered takes the program along."""
        listening = asyncio.get_running_loop().create_task(self._listen(program))
        try:
            while (message := await self._heard.get()) is not None:
                if await self._answer_in_time(program, message):
                    await self._send({"type": "websocket.close"})
                    return
        finally:
            listening.cancel()
            await asyncio.wait({listening})

    async def _listen(self, program: InteractiveSession) -> None:
        """Take messages until there is none any more, or too many are not answered yet; then end the program."""
        while (message := await self._next()) is not None:
            if self._heard.qsize() >= _MOST_UNANSWERED:
                with contextlib.suppress(OSError):
                    reason = "too many messages are unanswered"
                    await self._send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": reason})
                break
            self._heard.put_nowait(message)
        try:
            await program.close()
        finally:
            self._heard.put_nowait(None)

    async def _next(self) -> str | bytes | None:
        """The next message; None if there is none."""
        message = await self._receive()
        if message["type"] != "websocket.receive" or self._revoked:
            return None
        text: str | None = message.get("text")
        data: str | bytes = message["bytes"] if text is None else text
        self._services.metrics.socket_received += len(data)
        return data

    async def _answer_in_time(self, program: InteractiveSession, message: str | bytes) -> bool:
        """Answer a message, or report that the server is shutting down; return whether it was the last message."""
        unanswered = self._services.unanswered
        task = unanswered.enter()
        try:
            return await self._answer(program, message)
        except asyncio.CancelledError:
            await self._say({"error": self._problem(going_away())})
            return True
        finally:
            unanswered.leave(task)

    async def _answer(self, program: InteractiveSession, message: str | bytes) -> bool:
        """Answer a message; return whether it was the last one."""
        try:
            if isinstance(message, bytes):
                self._check_size(message)
                await program.write(message)
                await self._say({"ok": {}})
                return False
            asked = validate(_Message, self._object(message))
            if asked.op == "read":
                data = await program.read(min(asked.timeout_s, _LONGEST_READ_S))
                self._services.metrics.socket_sent += len(data)
                await self._send({"type": "websocket.send", "bytes": data})
            elif asked.op == "alive":
                await self._say({"ok": {"alive": await program.alive()}})
            else:
                await self._say({"ok": await program.close()})
                return True
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 - a defect of ours costs this message, not the socket
            await self._say({"error": self._problem(error)})
        return False

    def _object(self, message: str | bytes) -> dict[str, Any]:
        self._check_size(message)
        try:
            content = loads(message, binary=False)
        except DecodeError as error:
            raise invalid("", str(error)) from error
        if not isinstance(content, dict):
            raise invalid("", "a message must be an object")
        return content

    def _check_size(self, message: str | bytes) -> None:
        limit = self._services.settings.max_request_bytes
        size = len(message) if isinstance(message, bytes) else len(message.encode())
        if size > limit:
            raise too_large_request(size, limit)

    def _problem(self, error: Exception) -> dict[str, Any]:
        problem = as_problem(error)
        self._services.metrics.problems[problem.code] += 1
        return problem.to_problem()

    async def _say(self, content: dict[str, Any]) -> None:
        text = dumps(content, binary=False)
        self._services.metrics.socket_sent += len(text)
        await self._send({"type": "websocket.send", "text": text.decode()})
