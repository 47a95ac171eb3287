"""Whatever a registered node answers: clients get a problem that they can read, and other nodes' sessions go on."""

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import websockets

from rollgym.clients.protocol.errors import CODES
from tests.support.client_server import ENVS, ServerProcess
from tests.support.fragile_envs import nested
from tests.support.redis_server import RedisServer
from tests.support.twisting_node import TwistingNode
from tests.support.wire import Socket

_GATEWAY = ("--gateway", "--allow-network", "loopback", "--log-level", "error", "--step-timeout-s", "3")
_DEEP = "[" * 990 + "]" * 990


class Servers(NamedTuple):
    """A gateway, a node of its that twists what it answers, and the path of that node's heartbeat."""

    gateway: ServerProcess
    twisting: TwistingNode
    heartbeat: str


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    """A gateway with an honest node for FrozenLake-v0, and a twisting one for Walk-v0."""
    with (
        ServerProcess(("--log-level", "error", *ENVS)) as node,
        ServerProcess(_GATEWAY) as gateway,
        TwistingNode(node.url) as twisting,
        httpx.Client(base_url=gateway.url, timeout=60) as http,
    ):
        for env_id, url in (("FrozenLake-v0", node.url), ("Walk-v0", twisting.url)):
            body = {"env_id": env_id, "url": url, "protocol": "rollgym", "ttl_s": 600}
            answer = http.post("/v1/envs", json=body)
            assert answer.status_code == 201, answer.text
        heartbeat = f"/v1/registrations/{answer.json()['registration_id']}/heartbeat"
        yield Servers(gateway, twisting, heartbeat)


def _replaced(**fields: Any) -> Any:
    def twist(_: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        return {**answer, "ok": {**answer["ok"], **fields}}

    return twist


TWISTS: dict[str, Any] = {
    "nothing in it": lambda _, answer: {"id": answer["id"], "ok": {}},
    "no object": lambda _, answer: {"id": answer["id"], "ok": 7},
    "no ok and no error": lambda _, answer: {"id": answer["id"]},
    "a wait that is none": lambda _, answer: {
        "id": answer["id"],
        "error": {"code": "at_capacity", "detail": "", "retry_after": "1\r\nX-Other: 1"},
    },
    "a reason that nobody knows": lambda _, answer: {
        "id": answer["id"],
        "error": {"code": "session_gone", "detail": "", "reason": ["bored"]},
    },
    "an error that is none": lambda _, answer: {"id": answer["id"], "error": "bad luck"},
    "a code that nobody knows": lambda _, answer: {"id": answer["id"], "error": {"code": 7, "detail": []}},
    "a code of its own": lambda _, answer: {"id": answer["id"], "error": {"code": "tired", "detail": "no"}},
    "its own failure": lambda _, answer: {"id": answer["id"], "error": {"code": "internal", "detail": "x"}},
    "results of no batch": lambda _, answer: {"id": answer["id"], "results": [{"ok": {}}]},
    "no JSON": lambda _, answer: "what?",
    "bytes": lambda _, answer: b"\x00\xff",
    "a list": lambda _, answer: "[1, 2]",
    "deep": lambda _, answer: "[" * 100_000,
    "another's id": lambda _, answer: [answer, {**answer, "id": "unasked"}],
    "an episode of the past": _replaced(episode=-7),
    "an episode that is a word": _replaced(episode="first"),
    "a step that is none": _replaced(step=None, seed=[]),
    "an end that is no yes or no": _replaced(terminated="maybe", truncated=[]),
    "a reward that is a text": _replaced(reward="much"),
    "a reward without end": lambda frame, answer: (
        f'{{"id": {answer["id"]!r}, "ok": {{"reward": 1e999}}}}'.replace("'", '"')
    ),
    "an info that is none": _replaced(info=3),
    "an observation that is none": _replaced(observation={"__nd__": "no", "shape": [9]}),
    "an info that can be read and not written": _replaced(info=nested(300)),
    "a problem that can be read and not written": lambda _, answer: {
        "id": answer["id"],
        "error": {"code": "env_error", "detail": "deep", "errors": nested(300)},
    },
    "a begun episode that is none": _replaced(reset=3, terminated=True),
    "a problem that is nested more deeply than Python shows": lambda _, answer: (
        f'{{"id": {json.dumps(answer["id"])}, "error": {{"code": "env_error", "detail": {_DEEP}}}}}'
    ),
}


@pytest.mark.parametrize("moment", ["make", "reset", "step", "fork", "episode"])
@pytest.mark.parametrize("kind", TWISTS)
async def test_an_answer_of_another_form(servers: Servers, moment: str, kind: str) -> None:
    gateway, node, heartbeat = servers
    node.twist = None
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        # A node whose connection broke gets no sessions for five seconds, or until it says that it is there.
        assert (await http.post(heartbeat, json={})).status_code == 200

        async def ask(path: str, **body: Any) -> dict[str, Any]:
            answer = await http.post(path, json=body)
            found: dict[str, Any] = answer.json()
            if answer.status_code >= 400:
                assert found["code"] in CODES, found
                assert found["code"] != "internal", found
            return found

        def twist(frame: dict[str, Any], answer: dict[str, Any]) -> Any:
            if frame["op"] != moment or "ok" not in answer:
                return answer
            twisted = TWISTS[kind](frame, answer)
            if not isinstance(twisted, dict):
                # It ends the connection, and the gateway asks again for as long as it has patience.
                node.twist = None
            return twisted

        made = await ask("/v1/sessions", env_id="Walk-v0", reset={"seed": 1})
        place = f"/v1/sessions/{made['session_id']}"
        node.twist = twist
        if moment == "make":
            await ask("/v1/sessions", env_id="Walk-v0", reset={"seed": 2}, count=2)
        elif moment == "reset":
            await ask(f"{place}/reset", seed=3)
        elif moment == "step":
            await ask(f"{place}/step", action="a", step=0, episode=0)
        elif moment == "fork":
            await ask(f"{place}/fork", count=2)
        else:
            assert (await http.get(f"{place}/episode")).json().get("code") != "internal"
        node.twist = None
        other = await ask("/v1/sessions", env_id="FrozenLake-v0", reset={"seed": 1})
        assert (await ask(f"/v1/sessions/{other['session_id']}/step", action="Right"))["step"] == 1
        for each in (made, other):
            assert (await http.delete(f"/v1/sessions/{each['session_id']}")).status_code in (
                200,
                204,
                404,
                410,
            )


@pytest.mark.parametrize("op", ["step", "reset", "render", "batch"])
async def test_a_call_that_cannot_be_passed_on_costs_only_itself(servers: Servers, op: str) -> None:
    gateway = servers.gateway
    async with (
        asyncio.timeout(30),
        websockets.connect(f"ws://127.0.0.1:{gateway.port}/v1/ws", compression=None) as connection,
    ):
        socket = Socket(connection, binary=False)
        session_id = await socket.make("FrozenLake-v0")
        # What JSON is read and what it is written as have other limits.
        deep = {"op": "step", "session_id": session_id, "action": nested(400)}
        if op != "batch":
            deep = {"op": op, "session_id": session_id, "action": "Left", "mode": nested(400)}
        other = await socket.make("FrozenLake-v0")
        good = {"op": "step", "session_id": other, "action": "Right"}
        asked = [deep, good] if op != "batch" else [{"op": "batch", "ops": [deep, good]}, good]
        numbers = [await socket.send(**fields) for fields in asked]
        answers = [await socket.answer(number) for number in numbers]
        if op == "batch":
            answers = [*answers[0]["results"], answers[1]]
        assert [answer.get("error", {}).get("code") for answer in answers[:2]] == ["invalid_request", None]
        # Nothing is on its way any more, which a copy waits for.
        assert len((await socket.call("fork", session_id=session_id))["session_ids"]) == 1


@pytest.mark.parametrize(
    ("name", "errors"),
    [
        *(("a number", 3), ("a list of numbers", [1]), ("a field that is a number", [{"field": 7}])),
        *((f"nested {levels}", nested(levels)) for levels in (248, 249, 250, 251)),
    ],
)
async def test_openenvs_clients_get_an_answer_too(servers: Servers, name: str, errors: Any) -> None:
    gateway, node, heartbeat = servers
    node.twist = None
    async with (
        asyncio.timeout(30),
        httpx.AsyncClient(base_url=gateway.url) as http,
        websockets.connect(f"ws://127.0.0.1:{gateway.port}/openenv/Walk-v0/ws") as connection,
    ):
        await http.post(heartbeat, json={})

        async def ask(kind: str, **data: Any) -> dict[str, Any]:
            await connection.send(json.dumps({"type": kind, "data": data}))
            found: dict[str, Any] = json.loads(await connection.recv())
            return found

        assert (await ask("reset", seed=1))["type"] == "observation"
        problem = {"code": "invalid_action", "detail": "no", "errors": errors}
        node.twist = lambda frame, answer: (
            {"id": answer["id"], "error": problem} if frame["op"] == "step" else answer
        )
        assert (await ask("step", action="a"))["data"]["code"] == "VALIDATION_ERROR"
        socket = await http.post("/v1/sessions", json={"env_id": "Walk-v0", "reset": {"seed": 1}})
        stepping = {"op": "step", "session_id": socket.json()["session_id"], "action": "a"}
        async with websockets.connect(f"ws://127.0.0.1:{gateway.port}/v1/ws") as ours:
            await ours.send(json.dumps({"id": 1, **stepping}))
            assert json.loads(await ours.recv())["error"]["code"] == "invalid_action"
            await ours.send(json.dumps({"id": 2, "op": "batch", "ops": [stepping, {"op": "ping"}]}))
            results = json.loads(await ours.recv())["results"]
            assert [next(iter(each)) for each in results] == ["error", "ok"]
    node.twist = None


@pytest.mark.parametrize("way", ["http", "socket", "batch"])
async def test_sessions_that_nobody_can_be_told_of_are_closed_again(servers: Servers, way: str) -> None:
    gateway, node, heartbeat = servers
    node.twist = None
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        await http.post(heartbeat, json={})
        before = (await http.get("/v1/info")).json()["capacity"]["sessions"]

        def deep(frame: dict[str, Any], answer: dict[str, Any]) -> Any:
            if frame["op"] != "make" or "ok" not in answer:
                return answer
            made = answer["ok"]["sessions"]
            made = [{**each, "reset": {**each["reset"], "info": nested(300)}} for each in made]
            return {**answer, "ok": {**answer["ok"], "sessions": made}}

        node.twist = deep
        asked = {"env_id": "Walk-v0", "reset": {"seed": 1}}
        if way == "http":
            problem = (await http.post("/v1/sessions", json=asked)).json()
        else:
            url = f"ws://127.0.0.1:{gateway.port}/v1/ws"
            async with asyncio.timeout(30), websockets.connect(url, compression=None) as connection:
                socket = Socket(connection, binary=False)
                make = {"op": "make", **asked}
                if way == "batch":
                    (answer,) = await socket.batch(make)
                else:
                    answer = await socket.ask(**make)
                problem = answer["error"]
        node.twist = None
        assert problem["code"] == "upstream_error"
        assert (await http.get("/v1/info")).json()["capacity"]["sessions"] <= before


@pytest.fixture(scope="module")
def strangers() -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """A node, and a gateway that knows nothing of it."""
    with ServerProcess(("--log-level", "error", *ENVS)) as node, ServerProcess(_GATEWAY) as gateway:
        yield node, gateway


@pytest.mark.parametrize(
    "said",
    [
        *(
            7,
            [],
            None,
            "what?",
            {"processes": []},
            {"limits": [1]},
            {"limits": {"max_batch": "many"}},
            {"process": "first"},
        ),
        {"processes": 10**9},
    ],
    ids=repr,
)
async def test_a_node_that_says_nonsense_of_itself(
    strangers: tuple[ServerProcess, ServerProcess], said: Any
) -> None:
    asked = 0

    def twist(frame: dict[str, Any], answer: dict[str, Any]) -> Any:
        nonlocal asked
        if frame["op"] != "info":
            return answer
        asked += 1
        if isinstance(said, str):
            return said
        return {"id": answer["id"], "ok": {**answer["ok"], **said} if isinstance(said, dict) else said}

    node, gateway = strangers
    with TwistingNode(node.url) as twisting:
        twisting.twist = twist
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
            body = {"env_id": "Walk-v0", "url": twisting.url, "protocol": "rollgym"}
            answer = await http.post("/v1/envs", json=body)
            assert answer.status_code == 201 or answer.json()["code"] == "probe_failed", answer.text
            if not isinstance(said, dict):
                # Whether it is a gateway, and what its environment is: neither will be known by asking on.
                assert "does not say who it is" in answer.json()["detail"]
                assert asked == 2
            if answer.status_code == 201:
                left = await http.delete(f"/v1/registrations/{answer.json()['registration_id']}")
                assert left.status_code in (200, 204), left.text


@pytest.mark.slow
@pytest.mark.parametrize("episode", [True, math.inf])
@pytest.mark.parametrize("op", ["step", "reset"])
async def test_a_node_that_lies_to_a_gateway_with_a_journal(tmp_path: Path, op: str, episode: Any) -> None:
    with (
        RedisServer(tmp_path) as journal,
        ServerProcess(("--log-level", "error", *ENVS)) as node,
        ServerProcess((*_GATEWAY, "--journal-url", journal.url)) as gateway,
        TwistingNode(node.url) as twisting,
    ):
        body = {"env_id": "Walk-v0", "url": twisting.url, "protocol": "rollgym"}
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
            assert (await http.post("/v1/envs", json=body)).status_code == 201
        binary = websockets.Subprotocol("rollgym.v1.msgpack")
        url = f"ws://127.0.0.1:{gateway.port}/v1/ws"
        async with asyncio.timeout(20), websockets.connect(url, subprotocols=[binary]) as connection:
            socket = Socket(connection, binary=True)
            made = await socket.make("Walk-v0")
            twist = _replaced(episode=episode)
            twisting.twist = lambda frame, answer: twist(frame, answer) if frame["op"] == op else answer
            asked = {"action": "a"} if op == "step" else {}
            answer = await socket.ask(op, session_id=made, **asked)
            # A step of another episode than the session is in may be one that went through another gateway.
            codes = ("upstream_error", "draining") if op == "step" else ("upstream_error",)
            assert "ok" in answer or answer["error"]["code"] in codes, answer
            # The journal has nothing to do with that.
            await socket.call("make", env_id="Walk-v0")
