"""JSON and MessagePack say the same, over HTTP and over the socket."""

import json
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollgym.clients.protocol.spaces import parse_space
from rollgym.clients.protocol.values import decode_value
from tests.support.wire import Server

MSGPACK = {"Content-Type": "application/msgpack"}


@pytest.mark.parametrize(
    ("headers", "binary"),
    [
        ({}, False),
        ({"Accept": "application/msgpack"}, True),
        ({"Accept": "text/html, application/x-msgpack;q=0.5"}, True),
        (MSGPACK, True),
        ({**MSGPACK, "Accept": "application/json"}, False),
        ({"Content-Type": "application/json; charset=utf-8", "Accept": "*/*"}, False),
    ],
)
async def test_the_encoding_is_negotiated(server: Server, headers: dict[str, str], binary: bool) -> None:
    fields = {"env_id": "Count", "reset": {"seed": 1}}
    content = (
        msgpack.packb(fields)
        if headers.get("Content-Type") == MSGPACK["Content-Type"]
        else json.dumps(fields)
    )
    async with server.http() as client:
        client.headers.pop("accept")
        answer = await client.post("/v1/sessions", content=content, headers=headers)
        assert answer.status_code == 201
        assert answer.headers["content-type"] == ("application/msgpack" if binary else "application/json")
        made = msgpack.unpackb(answer.content) if binary else answer.json()
        assert made["reset"]["seed"] == 1
        problem = await client.post("/v1/sessions", content=content[:-3], headers=headers)
        assert problem.headers["content-type"] == "application/problem+json", "problems are always JSON"


async def test_both_encodings_give_equal_episodes(server: Server) -> None:
    action = {"push": [0.25, -1.0], "key": 2}
    seen: list[list[Any]] = []
    async with server.socket() as plain, server.socket(binary=True) as packed:
        for socket in (plain, packed):
            made = await socket.call("make", env_id="Arrays", reset={"seed": 9})
            space = parse_space(made["observation_space"])
            observations = [decode_value(space, made["reset"]["observation"])]
            for _ in range(3):
                outcome = await socket.call("step", session_id=made["session_id"], action=action)
                assert outcome["reward"] == -0.75
                assert outcome["terminated"] is False
                observations.append(decode_value(space, outcome["observation"]))
            seen.append(observations)
            episode = await socket.call("episode", session_id=made["session_id"])
            seen[-1].append(episode["digests"])
    for one, other in zip(seen[0][:-1], seen[1][:-1], strict=True):
        np.testing.assert_equal(one, other)
    assert seen[0][-1] == seen[1][-1], "digests do not depend on the encoding"


async def test_a_step_is_repeated_in_the_other_encoding(server: Server) -> None:
    push = np.array([0.25, -1.0], np.float32)
    async with server.socket() as plain, server.socket(binary=True) as packed:
        made = await plain.call("make", env_id="Arrays", reset={"seed": 9})
        space = parse_space(made["observation_space"])
        fields = {"session_id": made["session_id"], "episode": 0, "step": 0}
        first = await plain.call("step", action={"push": push.tolist(), "key": 2}, **fields)
        raw = {"push": {"__nd__": ["float32", [2], push.tobytes()]}, "key": 2}
        again = await packed.call("step", action=raw, **fields)
        assert isinstance(again["observation"]["picture"]["__nd__"][2], bytes)
        np.testing.assert_equal(
            decode_value(space, first["observation"]), decode_value(space, again["observation"])
        )


@pytest.mark.parametrize(
    "action",
    [
        {"push": [0.0, 2.0], "key": 2},
        {"push": [0.0], "key": 2},
        {"push": ["NaN", 0], "key": 2},
        {"push": [0, 0], "key": 0},
        {"push": [0, 0], "key": 4},
        {"push": [0, 0], "key": True},
        {"push": [0, 0]},
        {"push": {"__nd__": ["float32", [2], "AAAA"]}, "key": 1},
        [0, 0],
        None,
    ],
)
async def test_actions_outside_the_space(server: Server, action: Any) -> None:
    async with server.socket() as socket:
        made = await socket.make("Arrays")
        answer = await socket.ask("step", session_id=made, action=action)
        assert answer["error"]["code"] == "invalid_action"
        assert (await socket.call("step", session_id=made, action={"push": [0, 0], "key": 3}))["step"] == 1


async def test_infos_with_what_json_cannot_say(server: Server) -> None:
    infos = []
    for binary in (False, True):
        async with server.socket(binary=binary) as socket:
            made = await socket.make()
            info = (await socket.call("step", session_id=made, action="special"))["info"]
            infos.append(decode_value(None, info))
            assert info["none"] is None
            assert info["5"] == 0.5
            assert (info["nan"] == "NaN") is not binary
    np.testing.assert_equal(infos[0]["array"], infos[1]["array"])
    assert infos[0]["pair"] == infos[1]["pair"] == [1, 2]


@pytest.mark.parametrize("action", ["nan", "object"])
async def test_what_the_wire_has_no_form_for_is_the_environments_error(server: Server, action: str) -> None:
    async with server.socket() as socket:
        made = await socket.make()
        answer = await socket.ask("step", session_id=made, action=action)
        assert answer["error"]["code"] == "env_error"
        assert (await socket.ask("step", session_id=made, action="a"))["error"]["code"] == "not_reset"


async def test_options_may_hold_arrays(server: Server) -> None:
    numbers = np.arange(3.0)
    for binary in (False, True):
        async with server.socket(binary=binary) as socket:
            content = numbers.tobytes() if binary else "AAAAAAAAAAAAAAAAAADwPwAAAAAAAABA"
            options = {"array": {"__nd__": ["float64", [3], content]}}
            made = await socket.call("make", env_id="Count", reset={"seed": 1, "options": options})
            assert made["reset"]["info"]["total"] == 3.0
            episode = await socket.call("episode", session_id=made["session_id"])
            assert isinstance(episode["options"]["array"]["__nd__"][2], str), "portable in any encoding"
            assert "session_id" in await socket.call("restore", episode=episode)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(action=st.text())
async def test_any_text_is_an_action(server: Server, action: str) -> None:
    verbs = ("raise", "sleep", "exit", "nan", "object", "special", "large")
    if action.partition(" ")[0] in verbs:
        return
    async with server.socket() as plain, server.socket(binary=True) as packed:
        for socket in (plain, packed):
            made = await socket.make()
            outcome = await socket.call("step", session_id=made, action=action)
            assert outcome["observation"] == f"1 {action}"


LARGE = [2**53, -(2**53), 2**63, 2**64 - 1, 2**70, -(2**70)]


def _with_large(number: int, session_id: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Requests that hold an integer in each place where one may stand: operation, route and fields."""
    route = f"/v1/sessions/{session_id}"
    return [
        ("reset", f"{route}/reset", {"options": {"rows": [{"answer": number}]}}),
        ("reset", f"{route}/reset", {"seed": number}),
        ("step", f"{route}/step", {"action": {"push": [0, 0], "key": number}}),
        ("step", f"{route}/step", {"action": {"push": [0, number], "key": 3}}),
        ("make", "/v1/sessions", {"env_id": "Arrays", "kwargs": {"size": number}}),
        ("make", "/v1/sessions", {"env_id": "Arrays", "count": number}),
        ("verify", "/v1/verify/Equal", {"items": [{"response": "4", "answer": number}]}),
    ]


@pytest.mark.parametrize("number", LARGE)
async def test_integers_beyond_the_limit_are_refused_over_http(server: Server, number: int) -> None:
    async with server.http() as client:
        made = (await client.post("/v1/sessions", json={"env_id": "Arrays", "reset": {"seed": 1}})).json()
        for _, route, fields in _with_large(number, made["session_id"]):
            bodies = [(json.dumps(fields), {"Content-Type": "application/json"})]
            if -(2**63) <= number < 2**64:
                bodies.append((msgpack.packb(fields), MSGPACK))
            for content, headers in bodies:
                answer = await client.post(route, content=content, headers=headers)
                assert answer.status_code == 422, (route, answer.text)
                assert answer.headers["content-type"] == "application/problem+json"
                assert answer.json()["code"] in ("invalid_request", "invalid_action", "invalid_kwargs")


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("number", LARGE)
async def test_integers_beyond_the_limit_are_refused_on_the_socket(
    server: Server, number: int, binary: bool
) -> None:
    if binary and not -(2**63) <= number < 2**64:
        with pytest.raises(OverflowError):
            msgpack.packb(number)
        return
    async with server.socket(binary=binary) as socket:
        made = await socket.call("make", env_id="Arrays", reset={"seed": 1})
        for op, _, fields in _with_large(number, made["session_id"]):
            if op == "verify":
                fields["env_id"] = "Equal"
            elif op != "make":
                fields["session_id"] = made["session_id"]
            answer = await socket.ask(op, **fields)
            assert answer["error"]["code"] in ("invalid_request", "invalid_action", "invalid_kwargs"), (
                op,
                answer,
            )
        await socket.connection.send(socket._encode({"id": number, "op": "ping"}))
        answer = await socket.receive()
        assert (answer["id"], answer["error"]["code"]) == (None, "invalid_request")
        assert await socket.call("ping") == {}


async def test_long_digits_in_texts_and_fractions_are_no_integers(server: Server) -> None:
    async with server.socket() as socket:
        made = await socket.make()
        options = {"text": "9" * 40, "fraction": 0.1234567890123456789}
        await socket.call("reset", session_id=made, options=options)
        episode = await socket.call("episode", session_id=made)
        assert episode["options"] == options
