"""OpenEnv's messages, with schemas as its servers write them."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgym.env_server.gateway.upstream.base import UpstreamError
from rollgym.env_server.gateway.upstream.openenv import OpenEnvMessages, OpenEnvRefused, read_data

TEXT = {"type": "string"}
INTEGER = {"type": "integer"}
OPTIONAL = {"anyOf": [TEXT, {"type": "null"}], "default": None}
OWN = {"done": {"type": "boolean"}, "reward": {"type": "number"}, "metadata": {"type": "object"}}


def schema(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {**OWN, **properties}, "required": list(required)}


def action_schema(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    properties = {"metadata": {"type": "object"}, **properties}
    return {"type": "object", "properties": properties, "required": list(required)}


def messages(
    action: dict[str, Any], observation: dict[str, Any] | None = None, **named: str | None
) -> OpenEnvMessages:
    schemas = {"action": action, "observation": observation or schema(text=TEXT)}
    names = {"action_field": None, "observation_field": None, **named}
    return OpenEnvMessages.of(schemas, names["action_field"], names["observation_field"])


# As OpenEnv 0.10.0 publishes the classes of its MCP environments.
CALL_TOOL = action_schema(
    ("tool_name",),
    type={"const": "call_tool", "type": "string"},
    tool_name=TEXT,
    arguments={"type": "object"},
) | {"title": "CallToolAction"}
CALLED = schema(("tool_name",), tool_name=TEXT, result={}, error={}) | {"title": "CallToolObservation"}


@pytest.mark.parametrize(
    ("action", "named", "text", "data"),
    [
        (action_schema(("move",), move=TEXT), None, "Left", {"move": "Left"}),
        (action_schema(("move",), move=TEXT, speed=TEXT), None, "Left", {"move": "Left"}),
        (action_schema(move=OPTIONAL), None, "3", {"move": "3"}),
        (action_schema(("move",), move=INTEGER), None, "3", {"move": 3}),
        (action_schema(("move",), move=INTEGER), None, "three", {"move": "three"}),
        (action_schema(("moves",), moves={"type": "array"}), None, "[1, 2]", {"moves": [1, 2]}),
        (action_schema(("x", "y"), x=TEXT, y=TEXT), None, '{"x": "a", "y": "b"}', {"x": "a", "y": "b"}),
        (action_schema(("x", "y"), x=TEXT, y=TEXT), None, "a", "a"),
        (action_schema(("x", "y"), x=TEXT, y=TEXT), "y", "a", {"y": "a"}),
        (action_schema(x=TEXT, y=INTEGER), "y", "7", {"y": 7}),
        (
            action_schema(("move",), move=TEXT, power=INTEGER),
            ".",
            '{"move": "up", "power": 3}',
            {"move": "up", "power": 3},
        ),
        ({"anyOf": [action_schema(x=TEXT), action_schema(y=TEXT)]}, None, '{"x": "a"}', {"x": "a"}),
        ({"anyOf": [action_schema(x=TEXT), action_schema(y=TEXT)]}, "x", '"a"', {"x": "a"}),
        (CALL_TOOL, None, '{"type": "list_tools"}', {"type": "list_tools"}),
        (
            action_schema(("kind",), kind={"$ref": "#/$defs/Kind"}) | {"$defs": {"Kind": "odd"}},
            *(None, "[1]", {"kind": [1]}),
        ),
        (
            action_schema(("kind",), kind={"$ref": "#/$defs/Kind"}) | {"$defs": {"Kind": {"type": "string"}}},
            *(None, "up", {"kind": "up"}),
        ),
    ],
)
def test_a_text_goes_into_the_declared_field(
    action: dict[str, Any], named: str | None, text: str, data: Any
) -> None:
    message = orjson.loads(messages(action, action_field=named).step(text))
    assert message == {"type": "step", "data": data}


@pytest.mark.parametrize(
    ("observation", "named", "given", "text", "info"),
    [
        (schema(("board",), board=TEXT), None, {"board": "#", "left": 2}, "#", {"left": 2}),
        (
            schema(("board",), board=TEXT, note=OPTIONAL),
            None,
            {"board": "#", "note": None},
            "#",
            {"note": None},
        ),
        (schema(board=OPTIONAL), None, {"board": None}, "", {}),
        (
            schema(("a", "b"), a=TEXT, b=TEXT),
            None,
            {"a": "x", "b": "y"},
            '{"a":"x","b":"y"}',
            {"a": "x", "b": "y"},
        ),
        (schema(("a", "b"), a=TEXT, b=TEXT), "b", {"a": "x", "b": "y"}, "y", {"a": "x"}),
        (schema(cells={"type": "array"}), "cells", {"cells": [1, 2]}, "[1,2]", {}),
        (schema(text=TEXT), None, {"text": "#", "info": {"a": 1}}, "#", {"a": 1}),
        (schema(text=TEXT), ".", {"text": "#"}, '{"text":"#"}', {"text": "#"}),
        (schema(("text",), text=TEXT), None, {"other": 1}, '{"other":1}', {"other": 1}),
        (schema(("text",), text=TEXT), None, {}, "{}", {}),
        (schema(info={}), "info", {"text": "#", "info": {"a": 1}}, '{"a":1}', {"text": "#"}),
        (
            *(schema(text=TEXT), "metadata"),
            *({"text": "#", "metadata": {"m": 1}}, '{"m":1}', {"text": "#", "metadata": {"m": 1}}),
        ),
        (
            *(CALLED, None, {"tool_name": "echo", "result": "hi", "error": None}),
            *(
                '{"tool_name":"echo","result":"hi","error":null}',
                {"tool_name": "echo", "result": "hi", "error": None},
            ),
        ),
        (
            *(CALLED, None, {"metadata": {"status": "ready"}}),
            *('{"status":"ready"}', {"metadata": {"status": "ready"}}),
        ),
        (
            *(schema(text=TEXT), None),
            *({"text": "#", "metadata": {"m": 1}}, "#", {"metadata": {"m": 1}}),
        ),
    ],
)
def test_the_text_of_an_observation_is_its_declared_field(
    observation: dict[str, Any], named: str | None, given: dict[str, Any], text: str, info: dict[str, Any]
) -> None:
    reader = messages(action_schema(move=TEXT), observation, observation_field=named)
    answer = orjson.dumps(
        {"type": "observation", "data": {"observation": given, "reward": None, "done": False}}
    )
    assert reader.read_reset(answer) == (text, info)
    assert reader.read_step(answer)[:2] == (text, 0.0)


@pytest.mark.parametrize(
    ("done", "metadata", "flags"),
    [
        (False, {}, (False, False)),
        (False, {"truncated": True}, (False, False)),
        (True, {}, (True, False)),
        (True, {"truncated": False}, (True, False)),
        (True, {"truncated": True}, (False, True)),
        (True, {"TimeLimit.truncated": True}, (False, True)),
        (True, {"truncated": True, "terminated": True}, (True, True)),
        (True, {"truncated": "yes"}, (True, False)),
    ],
)
@pytest.mark.parametrize("inside", [True, False])
def test_done_is_terminated_unless_the_metadata_says_truncated(
    done: bool, metadata: dict[str, Any], flags: tuple[bool, bool], inside: bool
) -> None:
    data = {"observation": {"text": ""}, "reward": 1, "done": done}
    (data["observation"] if inside else data)["metadata"] = metadata
    outcome = messages(action_schema(move=TEXT)).read_step(
        orjson.dumps({"type": "observation", "data": data})
    )
    assert (outcome.terminated, outcome.truncated) == flags


@pytest.mark.parametrize(
    ("schemas", "named", "reason"),
    [
        ({}, {}, "schema of the action"),
        ({"action": "text"}, {}, "schema of the action"),
        ({"action": action_schema(move=TEXT)}, {}, "schema of the observation"),
        (
            {"action": action_schema(move=TEXT), "observation": schema()},
            {"action_field": "x"},
            "it has metadata, move",
        ),
        (
            {"action": action_schema(move=TEXT), "observation": schema()},
            {"observation_field": "x"},
            "no field 'x'",
        ),
    ],
)
def test_schemas_that_cannot_be_used(schemas: dict[str, Any], named: dict[str, str], reason: str) -> None:
    with pytest.raises(UpstreamError, match=reason):
        OpenEnvMessages.of(schemas, named.get("action_field"), named.get("observation_field"))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({}, "no observation"),
        ({"observation": "text"}, "no observation"),
        ({"observation": {"text": ""}, "reward": 1}, "done"),
        ({"observation": {"text": ""}, "reward": 1, "done": 0}, "done"),
        ({"observation": {"text": ""}, "reward": "1", "done": True}, "reward"),
    ],
)
def test_answers_that_cannot_be_used(data: dict[str, Any], reason: str) -> None:
    with pytest.raises(UpstreamError, match=reason):
        messages(action_schema(move=TEXT)).read_step(orjson.dumps({"type": "observation", "data": data}))


def test_a_field_that_the_registration_names_must_be_in_each_step_and_may_be_missing_in_a_reset() -> None:
    reader = messages(CALL_TOOL, CALLED, observation_field="result")
    began = {"observation": {"metadata": {"status": "ready"}}, "done": False}
    assert reader.read_reset(orjson.dumps({"type": "observation", "data": began}))[0] == '{"status":"ready"}'
    called = {"observation": {"tool_name": "echo", "result": "hi"}, "done": False}
    assert reader.read_step(orjson.dumps({"type": "observation", "data": called})).observation == "hi"
    with pytest.raises(UpstreamError, match="no 'result'"):
        reader.read_step(orjson.dumps({"type": "observation", "data": began}))


def test_an_error_says_what_is_wrong_with_which_field() -> None:
    errors = [{"loc": ["guess"], "msg": "should be an integer"}, "odd", {"loc": None}]
    data = {"code": "VALIDATION_ERROR", "message": "Invalid", "errors": errors}
    with pytest.raises(OpenEnvRefused) as caught:
        read_data(orjson.dumps({"type": "error", "data": data}))
    assert caught.value.code == "VALIDATION_ERROR"
    assert "guess: should be an integer" in caught.value.message


# Names of that form say that an object is an array or bytes of our protocol.
NAMES = st.text().filter(lambda name: not name.startswith("__"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=10,
)


@given(
    st.binary()
    | JSON.map(orjson.dumps)
    | st.fixed_dictionaries({"type": JSON, "data": JSON}).map(orjson.dumps)
)
def test_whatever_a_server_answers_is_read_or_refused(answer: bytes) -> None:
    reader = messages(action_schema(move=TEXT))
    for read in (reader.read_reset, reader.read_step):
        try:
            read(answer)
        except (UpstreamError, OpenEnvRefused):
            continue


@given(
    st.dictionaries(NAMES, JSON, max_size=4),
    st.booleans(),
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False),
)
def test_every_observation_of_an_environment_is_read(
    observation: dict[str, Any], done: bool, reward: float | None
) -> None:
    reader = messages(action_schema(move=TEXT), schema(a={"type": "integer"}))
    data = {"observation": observation, "done": done, "reward": reward}
    outcome = reader.read_step(orjson.dumps({"type": "observation", "data": data}))
    assert isinstance(outcome.observation, str)
    assert outcome.reward == float(reward or 0.0)
    assert (outcome.terminated or outcome.truncated) is done


@given(st.text())
def test_every_text_can_be_taken_as_an_action(text: str) -> None:
    for action in (action_schema(move=TEXT), action_schema(move=INTEGER), action_schema(x=TEXT, y=TEXT)):
        assert orjson.loads(messages(action).step(text))["type"] == "step"


def test_integers_of_an_action_are_exact_however_large():
    built = messages(action_schema(("move",), move=INTEGER))
    assert built.step(str(2**70)) == b'{"type":"step","data":{"move":%d}}' % 2**70
    whole = messages(action_schema(("x", "y"), x=TEXT, y=TEXT))
    assert whole.step(f'{{"a": {2**70}}}') == b'{"type":"step","data":{"a":%d}}' % 2**70
    deep = "[" * 900 + str(2**70) + "]" * 900
    assert orjson.loads(whole.step(deep)) == {"type": "step", "data": deep}
