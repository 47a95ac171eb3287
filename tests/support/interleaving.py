"""Clients that do everything at once, at random, and look whether each of their questions is answered once.

All of it follows from a seed but the moments at which the server answers.
"""

import asyncio
import json
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from tests.support.floods import Floods
from tests.support.interleaved_envs import EPISODIC
from tests.support.interleaving_answers import Answers
from tests.support.interleaving_clients import PATIENCE_S, Frames, Http
from tests.support.interleaving_protocols import OtherProtocols
from tests.support.patience import Patience

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


class Round:
    """Some sessions, some sockets, and bursts of operations on them.

    Args:
        port: Where the server is.
        token: Who does it.
        seed: What is done.
        exits: Whether environments in child processes may end these.
        is_too_much: Whether more is asked, again and again, than a server does in the time that something may wait.
        pids: The server's processes.
    """

    def __init__(
        self,
        port: int,
        token: str,
        seed: str,
        *,
        exits: bool = True,
        is_too_much: bool = False,
        pids: Sequence[int] = (),
    ) -> None:
        self._port = port
        self._pids = pids
        self._token = token
        self._seed = seed
        self._random = random.Random(seed)
        self._exits = exits
        self._is_too_much = is_too_much
        self._http = Http(port, token)
        self._sockets: list[Frames] = []
        self._asked: dict[asyncio.Future[Any], str] = {}
        self._sessions: list[str] = []
        self._known: dict[str, None] = {}
        self._closed: set[str] = set()
        self._episodes: list[dict[str, Any]] = []
        self._focus = ""
        self._answers = Answers()
        self.faults, self.answers = self._answers.faults, self._answers.codes
        self._floods = Floods(
            *(port, token, random.Random(f"floods {seed}"), self.faults, self.answers), pids
        )
        self._others = OtherProtocols(port, token, self._http, self._random, self._answers, pids)

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
                self._spawn("OpenEnv", self._others.openenv())
            elif chance < 0.09:
                self._spawn("GEM", self._others.gem())
            elif chance < 0.12:
                self._spawn("MCP", self._others.mcp())
            elif chance < 0.15:
                self._spawn("a flood", self._floods.one())
            elif chance < 0.16:
                self._overload()
            elif chance < 0.2 and self._is_too_much:
                self._demand_too_much()
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

    def _demand_too_much(self) -> None:
        """Work for much longer than something may wait: what comes later is refused, and has lost nothing by it."""
        for _ in range(self._random.choice((300, 1000))):
            self._shoot("step", {"session_id": self._session_id(), "action": "wait 0.005"})

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
            self._answers.take_problem(frame["error"], what)
        else:
            self._take_reply(frame["ok"])

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
        reply = self._answers.read(found, f"{op} {fields} over HTTP")
        if reply is not None:
            self._take_reply(reply)

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
