"""Clients of other protocols among those who do everything at once."""

import asyncio
import json
import random
from collections.abc import Coroutine, Sequence
from typing import Any

from tests.support.interleaved_envs import EPISODIC
from tests.support.interleaving_answers import Answers
from tests.support.interleaving_clients import Http, OpenEnvFrames


class OtherProtocols:
    """Short sessions by OpenEnv's, GEM's and MCP's protocols.

    Args:
        port: Where the server is.
        token: Who does it.
        http: Connections for requests.
        chance: What is done.
        answers: Where answers are looked at.
        pids: The server's processes.
    """

    def __init__(
        self,
        port: int,
        token: str,
        http: Http,
        chance: random.Random,
        answers: Answers,
        pids: Sequence[int] = (),
    ) -> None:
        self._port = port
        self._token = token
        self._http = http
        self._random = chance
        self._answers = answers
        self._pids = pids

    async def openenv(self) -> None:
        """A socket of OpenEnv's, and what is asked on it in one go."""
        draw = self._random
        env_id = draw.choice(EPISODIC)
        socket = await OpenEnvFrames.open(self._port, self._token, env_id, self._answers.faults, self._pids)
        kinds = [draw.choice(("reset", "step", "step", "state", "close")) for _ in range(draw.randint(1, 5))]
        answers = [socket.ask(kind, {"action": "wait 0.005"} if kind == "step" else {}) for kind in kinds]
        if draw.random() < 0.5:
            await asyncio.sleep(draw.choice((0, 0.002, 0.01)))
        else:
            # A goodbye has no answer, and what comes after it has none either.
            await asyncio.wait(answers)
        socket.drop()
        said = [socket.refusal, *(each.result() for each in answers if each.done())]
        for message in said:
            if message is not None:
                self._take_openenv(message)

    def _take_openenv(self, message: dict[str, Any]) -> None:
        """An answer on a socket of OpenEnv's; its errors carry our problems."""
        if message["type"] == "error":
            self._answers.take_problem(message["data"]["problem"], "OpenEnv")
        else:
            self._answers.codes["ok"] += 1

    async def gem(self) -> None:
        """A session as GEM's client has it, closed while it is used."""

        def reply(found: tuple[int, dict[str, str], bytes]) -> Any:
            return self._answers.read(found, "GEM")

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

    async def mcp(self) -> None:
        """A session of MCP's, ended while it is used."""
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
            self._answers.codes["ok"] += 1
        elif not isinstance(problem, dict):
            self._answers.faults.append(f"MCP answers {message}")
        else:
            self._answers.take_problem(problem, "MCP")
