"""Clients that do everything at once, at random, and look whether each of their questions is answered once.

All of it follows from a seed but the moments at which the server answers.
"""

import asyncio
import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from rollgym.clients.net.transport import WebSocket, open_socket
from rollgym.clients.protocol.errors import CODES
from rollgym.clients.protocol.frames import SUBPROTOCOLS, dumps, loads
from tests.support.floods import Floods
from tests.support.interleaved_envs import EPISODIC
from tests.support.patience import Patience

# Nothing that is asked for here takes longer than seconds.
PATIENCE_S = 30.0
IDLE_S = 3.0
_OPS = {
    "step": 30,
    "cancel": 16,
    "reset": 12,
    "close": 4,
    "render": 7,
    "batch": 6,
    "fork": 5,
    "make": 5,
    "verify": 4,
    "episode": 4,
    "restore": 4,
    "session": 3,
    "sessions": 1,
    "info": 1,
}
_HTTP = {
    "step": ("POST", "/v1/sessions/{session_id}/step"),
    "reset": ("POST", "/v1/sessions/{session_id}/reset"),
    "render": ("POST", "/v1/sessions/{session_id}/render"),
    "cancel": ("POST", "/v1/sessions/{session_id}/cancel"),
    "fork": ("POST", "/v1/sessions/{session_id}/fork"),
    "episode": ("GET", "/v1/sessions/{session_id}/episode"),
    "session": ("GET", "/v1/sessions/{session_id}"),
    "close": ("DELETE", "/v1/sessions/{session_id}"),
    "make": ("POST", "/v1/sessions"),
    "restore": ("POST", "/v1/sessions/restore"),
    "verify": ("POST", "/v1/verify/{env_id}"),
    "sessions": ("GET", "/v1/sessions"),
    "info": ("GET", "/v1/info"),
}


class Http:
    """HTTP with nothing between: a connection for each request that is on its way."""

    def __init__(self, port: int, token: str) -> None:
        self._port = port
        self._token = token
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(
        self, method: str, path: str, body: Any = None, headers: str = ""
    ) -> tuple[int, dict[str, str], bytes]:
        """Send a request; gives the status, the headers and the body of its answer."""
        reader, writer = await self._connection()
        content = b"" if body is None else json.dumps(body).encode()
        headers += f"Authorization: Bearer {self._token}\r\n"
        head = f"{method} {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n{headers}"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        status_line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
        found = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        answer = await reader.readexactly(int(found.get("content-length", 0)))
        self._free.append((reader, writer))
        return int(status_line.split()[1]), found, answer

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._free:
            return self._free.pop()
        return await asyncio.open_connection("127.0.0.1", self._port)

    def close(self) -> None:
        """End the connections that are free."""
        for _, writer in self._free:
            writer.close()
        self._free.clear()


async def _open(port: int, token: str, path: str, subprotocol: str | None, pids: Sequence[int]) -> WebSocket:
    opening = open_socket(
        f"ws://127.0.0.1:{port}{path}",
        headers={"Authorization": f"Bearer {token}"},
        subprotocol=subprotocol,
        timeout_s=math.inf,
    )
    try:
        return await Patience(PATIENCE_S, pids).wait_for(opening)
    except TimeoutError:
        raise AssertionError(f"the handshake of {path} was not answered in {PATIENCE_S} s") from None


class Frames:
    """A socket of our own protocol; frames of one turn of the loop go out together."""

    def __init__(self, connection: WebSocket, binary: bool, faults: list[str]) -> None:
        self.connection = connection
        self._binary = binary
        self._faults = faults
        self._numbers = itertools.count()
        self.waiting: dict[int, tuple[asyncio.Future[Any], str]] = {}
        connection.on_message = self._take

    @classmethod
    async def open(
        cls, port: int, token: str, binary: bool, faults: list[str], pids: Sequence[int] = ()
    ) -> "Frames":
        connection = await _open(port, token, "/v1/ws", SUBPROTOCOLS[binary], pids)
        return cls(connection, binary, faults)

    def ask(self, op: str, fields: dict[str, Any]) -> "asyncio.Future[Any]":
        """Send a frame; gives its answer, or None where the socket was dropped before."""
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        frame = {"id": number, "op": op, **fields}
        self.waiting[number] = answer, f"{op} {fields}"
        self.connection.send(dumps(frame, binary=self._binary), binary=self._binary)
        return answer

    def drop(self) -> None:
        """Go away without a word."""
        self.connection.abort()
        for answer, _ in self.waiting.values():
            if not answer.done():
                answer.set_result(None)
        self.waiting.clear()

    def _take(self, message: bytes) -> None:
        frame = loads(message, binary=self._binary)
        answer, _ = self.waiting.pop(frame["id"], (None, ""))
        if answer is None:
            self._faults.append(f"a frame was answered that nobody waits for: {frame}")
        elif not answer.done():  # who asked may have given up
            answer.set_result(frame)


class OpenEnvFrames:
    """A socket of OpenEnv's: answers come in the order of the messages."""

    def __init__(self, connection: WebSocket, faults: list[str]) -> None:
        self.connection = connection
        self._faults = faults
        self._waiting: list[asyncio.Future[Any]] = []
        connection.on_message = self._take
        connection.closed.add_done_callback(lambda _: self.drop())

    @classmethod
    async def open(
        cls, port: int, token: str, env_id: str, faults: list[str], pids: Sequence[int] = ()
    ) -> "OpenEnvFrames":
        return cls(await _open(port, token, f"/openenv/{env_id}/ws", None, pids), faults)

    def ask(self, kind: str, data: dict[str, Any]) -> "asyncio.Future[Any]":
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        message = {"type": kind} | ({"data": data} if kind in ("step", "reset") else {})
        self._waiting.append(answer)
        self.connection.send(json.dumps(message).encode(), binary=False)
        return answer

    def drop(self) -> None:
        """Go away without a word."""
        self.connection.abort()
        for answer in self._waiting:
            if not answer.done():
                answer.set_result(None)
        self._waiting.clear()

    def _take(self, message: bytes) -> None:
        if not self._waiting:
            self._faults.append(f"OpenEnv's socket has said what it was not asked: {message[:200]!r}")
        else:
            self._waiting.pop(0).set_result(json.loads(message))


class Round:
    """Some sessions, some sockets, and bursts of operations on them.

    Args:
        port: Where the server is.
        token: Who does it.
        seed: What is done.
        exits: Whether environments in child processes may end these.
        pids: The server's processes.
    """

    def __init__(
        self, port: int, token: str, seed: str, *, exits: bool = True, pids: Sequence[int] = ()
    ) -> None:
        self._port = port
        self._pids = pids
        self._token = token
        self._seed = seed
        self._random = random.Random(seed)
        self._exits = exits
        self._http = Http(port, token)
        self._sockets: list[Frames] = []
        self._asked: dict[asyncio.Future[Any], str] = {}
        self._sessions: list[str] = []
        self._known: dict[str, None] = {}
        self._closed: set[str] = set()
        self._episodes: list[dict[str, Any]] = []
        self._focus = ""
        self.faults: list[str] = []
        self.answers: Counter[str] = Counter()
        self._floods = Floods(
            *(port, token, random.Random(f"floods {seed}"), self.faults, self.answers), pids
        )

    async def play(self, bursts: int) -> None:
        """Do it all; what goes wrong is in `faults`."""
        draw = self._random
        self._sockets = [await self._open_socket(number) for number in range(4)]
        for env_id in EPISODIC:
            for _ in range(draw.randint(1, 2)):
                self._shoot("make", {"env_id": env_id, "reset": {"seed": 1}, "idle_timeout_s": IDLE_S})
        await self._all_answered()
        for _ in range(bursts):
            await self._burst()
        await self._all_answered()
        for socket in self._sockets:
            socket.drop()
        await self._none_is_wedged()
        self._http.close()
        self.faults = [f"{fault} (seed {self._seed!r})" for fault in self.faults]

    # -- bursts --------------------------------------------------------------------------------------------------

    async def _burst(self) -> None:
        draw = self._random
        if self._sessions:
            self._focus = draw.choice(self._sessions)
            # Most of what is asked is asked of sessions that are there.
            self._sessions = [
                each for each in self._sessions if each not in self._closed or draw.random() < 0.1
            ]
        for _ in range(draw.randint(2, 12)):
            chance = draw.random()
            if chance < 0.03:
                await self._drop_a_socket()
            elif chance < 0.06:
                self._spawn("OpenEnv", self._openenv())
            elif chance < 0.09:
                self._spawn("GEM", self._gem())
            elif chance < 0.12:
                self._spawn("MCP", self._mcp())
            elif chance < 0.15:
                self._spawn("a flood", self._floods.one())
            elif chance < 0.16:
                self._overload()
            else:
                op = draw.choices(list(_OPS), list(_OPS.values()))[0]
                self._shoot(op, self._fields(op))
                if op in ("step", "reset", "render") and draw.random() < 0.3:
                    # In the same turn of the server's loop, if it comes at the same time.
                    other = draw.choice(("cancel", "cancel", "cancel", "close", "step", "reset", "fork"))
                    self._shoot(other, self._fields(other) | {"session_id": self._focus})
        await asyncio.sleep(draw.choice((0, 0, 0, 0.001, 0.003, 0.01, 0.03)))

    def _overload(self) -> None:
        """More at once than a server does in a second: each of them is answered, or refused for now."""
        draw = self._random
        for _ in range(draw.choice((100, 400))):
            op = draw.choice(("step", "step", "session", "info"))
            fields = self._fields(op)
            if op == "step":
                # Work that takes no time by itself, so that only the number of it counts.
                fields["action"] = "go"
            self._shoot(op, fields)

    async def _drop_a_socket(self) -> None:
        place = self._random.randrange(len(self._sockets))
        self._sockets[place].drop()
        self._sockets[place] = await self._open_socket(place)

    async def _open_socket(self, place: int) -> Frames:
        return await Frames.open(self._port, self._token, place % 2 == 1, self.faults, self._pids)

    def _shoot(self, op: str, fields: dict[str, Any]) -> None:
        if op not in ("batch", "make", "restore", "verify", "sessions", "info") and not fields.get(
            "session_id"
        ):
            return
        if op == "close":
            self._closed.add(fields["session_id"])
        if op == "sessions" or (op != "batch" and self._random.random() < 0.4):
            self._spawn(f"{op} {fields} over HTTP", self._over_http(op, fields))
        else:
            answer = self._random.choice(self._sockets).ask(op, fields)
            self._asked[answer] = f"{op} {fields}"
            answer.add_done_callback(self._take_frame)

    def _spawn(self, what: str, body: Coroutine[Any, Any, None]) -> None:
        self._asked[asyncio.get_running_loop().create_task(body)] = what

    def _session_id(self) -> str:
        if self._sessions and self._random.random() < 0.35:
            return self._random.choice(self._sessions)
        return self._focus

    def _action(self) -> str:
        actions = ["go", "go", "wait 0.005", "wait 0.02", "raise trouble", "object"]
        if self._exits and self._random.random() < 0.02:
            return "exit"
        return self._random.choice(actions)

    def _fields(self, op: str) -> dict[str, Any]:
        draw = self._random
        if op == "batch":
            names = ("step", "step", "step", "reset", "cancel", "render", "close", "fork", "verify")
            chosen = [draw.choice(names) for _ in range(draw.randint(0, 6))]
            return {"ops": [{"op": name, **self._fields(name)} for name in chosen]}
        if op in ("sessions", "info"):
            return {}
        if op == "verify":
            responses = ("good", "good", "raise trouble", "wait 0.01")
            items = [{"response": draw.choice(responses)} for _ in range(draw.randint(0, 4))]
            return {"env_id": "Verdicts", "items": items}
        if op == "make":
            return self._opening(
                env_id=draw.choice(EPISODIC),
                count=draw.choice((None, 1, 2)),
                kwargs=draw.choice((None, {"length": 2}, {"length": 13}, {"wait": 0.01})),
                reset=draw.choice((None, {"seed": 2}, {"options": {"do": "raise no"}})),
            )
        if op == "restore":
            if not self._episodes:
                return {"episode": {}}
            return self._opening(episode=draw.choice(self._episodes))
        fields: dict[str, Any] = {"session_id": self._session_id()}
        if op == "step":
            fields["action"] = self._action()
            fields |= draw.choice(({}, {}, {"step": draw.randint(0, 2)}, {"autoreset": True}))
        elif op == "reset":
            request_id = draw.choice((None, "one", "two"))
            fields["seed"] = draw.choice((None, 3))
            fields["options"] = draw.choice((None, None, {"do": "wait 0.01"}, {"do": "raise trouble"}))
            fields |= {} if request_id is None else {"request_id": request_id}
        elif op == "fork":
            fields |= {"count": draw.randint(1, 2)} | draw.choice(({}, {"reseed": 5}))
        return fields

    def _opening(self, **fields: Any) -> dict[str, Any]:
        request_id = self._random.choice((None, None, "same"))
        fields |= {"idle_timeout_s": IDLE_S, "request_id": request_id}
        return {name: value for name, value in fields.items() if value is not None}

    # -- answers -------------------------------------------------------------------------------------------------

    async def _all_answered(self) -> None:
        patience, late = Patience(PATIENCE_S, self._pids), set(self._asked)
        while late and (left := patience.left_s) > 0:
            _, late = await asyncio.wait(late, timeout=left)
        for question, what in self._asked.items():
            if question in late:
                self.faults.append(f"never answered: {what}")
                question.cancel()
            elif not question.cancelled() and (error := question.exception()) is not None:
                self.faults.append(f"{what}: {error!r}")
        self._asked.clear()

    def _take_frame(self, answer: "asyncio.Future[Any]") -> None:
        if answer.cancelled() or (frame := answer.result()) is None:
            return
        self._take(frame, self._asked.get(answer, ""))

    def _take(self, frame: dict[str, Any], what: str) -> None:
        parts = frame.keys() & {"ok", "error", "results"}
        if len(parts) != 1:
            self.faults.append(f"{what} is answered {frame}")
        elif "results" in frame:
            for result in frame["results"]:
                self._take(result, what)
        elif "error" in frame:
            self._take_problem(frame["error"], what)
        else:
            self._take_reply(frame["ok"])

    def _take_problem(self, problem: Any, what: str) -> None:
        code = problem.get("code")
        self.answers[code] += 1
        if code not in CODES or code == "internal" or not problem.get("detail"):
            self.faults.append(f"{what} is answered {problem}")

    def _take_reply(self, reply: dict[str, Any]) -> None:
        self.answers["ok"] += 1
        made = [each for each in (reply, *reply.get("sessions", [])) if "action_space" in each]
        opened = [*reply.get("session_ids", []), *(each["session_id"] for each in made)]
        self._sessions += opened
        self._known |= dict.fromkeys(opened)
        if "reset_digest" in reply:
            self._episodes.append(reply)

    async def _over_http(self, op: str, fields: dict[str, Any]) -> None:
        method, path = _HTTP[op]
        body = {name: value for name, value in fields.items() if f"{{{name}}}" not in path}
        found = await self._http.ask(
            method, path.format(**fields), body if method == "POST" and body else None
        )
        reply = self._read(found, f"{op} {fields} over HTTP")
        if reply is not None:
            self._take_reply(reply)

    def _read(self, found: tuple[int, dict[str, str], bytes], what: str) -> Any:
        """A good answer's body; None where there is none, or it is a problem."""
        status, headers, body = found
        kind = headers.get("content-type", "")
        if status == 204 and not body:
            self.answers["ok"] += 1
        elif kind == "application/problem+json":
            self._take_problem(json.loads(body), what)
        elif 200 <= status < 300 and kind == "application/json":
            return json.loads(body)
        else:
            self.faults.append(f"{what} is answered {status} {kind}: {body[:300]!r}")
        return None

    # -- other protocols -----------------------------------------------------------------------------------------

    async def _openenv(self) -> None:
        draw = self._random
        env_id = draw.choice(EPISODIC)
        socket = await OpenEnvFrames.open(self._port, self._token, env_id, self.faults, self._pids)
        kinds = [draw.choice(("reset", "step", "step", "state", "close")) for _ in range(draw.randint(1, 5))]
        answers = [socket.ask(kind, {"action": "wait 0.005"} if kind == "step" else {}) for kind in kinds]
        if draw.random() < 0.5:
            await asyncio.sleep(draw.choice((0, 0.002, 0.01)))
        else:
            # A goodbye has no answer, and what comes after it has none either.
            await asyncio.wait(answers)
        socket.drop()

    async def _gem(self) -> None:
        def reply(found: tuple[int, dict[str, str], bytes]) -> Any:
            return self._read(found, "GEM")

        path = "/apis/v1/envs/gem"
        made = reply(await self._http.ask("POST", f"{path}/make", {"env_id": self._random.choice(EPISODIC)}))
        if made is not None:
            name = {"sandbox_id": made["sandbox_id"]}
            asked = [
                self._http.ask("POST", f"{path}/reset", name),
                self._http.ask("POST", f"{path}/step", name | {"action": "wait 0.01"}),
                self._http.ask("POST", f"{path}/close", name),
            ]
            self._random.shuffle(asked)
            for found in await asyncio.gather(*asked):
                reply(found)
            reply(await self._http.ask("POST", f"{path}/close", name))

    async def _mcp(self) -> None:
        path = f"/mcp/{self._random.choice(EPISODIC)}"

        async def say(method: str, headers: str = "", **params: Any) -> tuple[int, dict[str, str], bytes]:
            message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
            return await self._http.ask("POST", path, message, headers)

        status, found, body = await say("initialize", protocolVersion="2025-06-18", capabilities={})
        if status != 200:
            self._take_message(json.loads(body))
            return
        headers = f"Mcp-Session-Id: {found['mcp-session-id']}\r\n"
        asked: list[Coroutine[Any, Any, Any]] = [
            say("tools/list", headers),
            say("tools/call", headers, name="step", arguments={"action": "wait 0.01"}),
            say("tools/call", headers, name="reset", arguments={}),
            self._http.ask("DELETE", path, None, headers),
        ]
        self._random.shuffle(asked)
        for _, _, answer in await asyncio.gather(*asked):
            if answer:
                self._take_message(json.loads(answer))
        await self._http.ask("DELETE", path, None, headers)

    def _take_message(self, message: dict[str, Any]) -> None:
        """A message of JSON-RPC; its errors carry our problems."""
        problem = message.get("error", {}).get("data")
        if "result" in message:
            self.answers["ok"] += 1
        elif not isinstance(problem, dict):
            self.faults.append(f"MCP answers {message}")
        else:
            self._take_problem(problem, "MCP")

    # -- what is left --------------------------------------------------------------------------------------------

    async def _none_is_wedged(self) -> None:
        await asyncio.gather(*(self._is_not_wedged(each) for each in self._known))

    async def _is_not_wedged(self, session_id: str) -> None:
        """A session can be played, or has ended; half of them are closed, the others left to their time."""
        path = f"/v1/sessions/{session_id}"
        patience = Patience(PATIENCE_S, self._pids)
        while True:
            problem = await self._until_not_busy(
                lambda: self._http.ask("POST", f"{path}/reset", {"seed": 1}), path
            )
            if problem is None:
                problem = await self._problem("POST", f"{path}/step", {"action": "go"})
            # What sockets had asked for before they dropped is done all the same, cancels among it: an episode
            # that is broken off between our reset and our step is reset again.
            disturbed = problem in ("busy", "step_timeout", "not_reset", "overloaded")
            if not disturbed or patience.left_s <= 0:
                break
        if problem is not None and problem not in ("session_gone", "unknown_session"):
            self.faults.append(f"{session_id} cannot be played: {problem}")
        if self._random.random() < 0.5:
            await self._http.ask("DELETE", path)

    async def _until_not_busy(
        self, ask: Callable[[], Coroutine[Any, Any, tuple[int, dict[str, str], bytes]]], path: str
    ) -> str | None:
        """Operations of sockets that were dropped may still run; who cancels them need not wait for long."""
        patience = Patience(PATIENCE_S, self._pids)
        while True:
            status, _, body = await ask()
            if status < 400:
                return None
            code = str(json.loads(body)["code"])
            if code not in ("busy", "overloaded") or patience.left_s <= 0:
                return code
            await self._http.ask("POST", f"{path}/cancel")
            await asyncio.sleep(0.01)

    async def _problem(self, method: str, path: str, body: Any) -> str | None:
        status, _, answer = await self._http.ask(method, path, body)
        return None if status < 400 else str(json.loads(answer)["code"])
