"""JSON Schemas that operators and strangers wrote, and what holding kwargs against them may cost."""

import contextlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.catalog.catalog import Catalog
from rollgym.env_server.catalog.kwargs_rules import KwargsRules, without_descriptions
from rollgym.env_server.common.settings import ConfigurationError, ServerSettings


@pytest.fixture
def elsewhere() -> Iterator[tuple[str, list[str]]]:
    """A server, and what it was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/schema", asked
    server.shutdown()
    server.server_close()


def refusal(schema: dict[str, Any], kwargs: dict[str, Any], *, trusted: bool) -> str:
    with pytest.raises(ProblemError) as caught:
        KwargsRules("Game", schema, frozenset(), trusted=trusted).check(kwargs)
    assert caught.value.code == "invalid_kwargs"
    return str(caught.value.extra["errors"][0]["reason"])


@pytest.mark.parametrize("trusted", [True, False])
def test_a_reference_is_never_fetched(elsewhere: tuple[str, list[str]], trusted: bool) -> None:
    url, asked = elsewhere
    for reference in (url, "file:///etc/hostname", "#/nowhere", "other.json"):
        with pytest.raises(
            ConfigurationError, match="leads nowhere within the schema, and nothing is fetched"
        ):
            KwargsRules("Game", {"properties": {"x": {"$ref": reference}}}, frozenset(), trusted=trusted)
    assert asked == []


@pytest.mark.parametrize("trusted", [True, False])
def test_a_schema_that_refers_to_itself_for_ever(trusted: bool) -> None:
    with pytest.raises(ConfigurationError, match=r"Game cannot be used: a \$ref leads round in circles"):
        KwargsRules("Game", {"$ref": "#"}, frozenset(), trusted=trusted)


@pytest.mark.parametrize("dialect", [{}, {"$schema": "http://json-schema.org/draft-07/schema#"}])
def test_a_stranger_s_schema_is_not_worked_on_for_ever(dialect: dict[str, str]) -> None:
    """Each definition looks twice at the next: two to the power of forty looks."""
    definitions = {
        f"d{number}": {**dialect, "allOf": [{"$ref": f"#/$defs/d{number + 1}"}] * 2} for number in range(40)
    }
    schema = {"$defs": {**definitions, "d40": {}}, "properties": {"x": {"$ref": "#/$defs/d0"}}}
    assert "cannot be followed" in refusal(schema, {"x": 1}, trusted=False)


def test_a_stranger_s_regular_expressions_are_not_run() -> None:
    schema = {
        "properties": {
            "x": {"type": "string", "pattern": "^(a+)+$"},
            "pattern": {"type": "integer"},
        },
        "patternProperties": {"^(b+)+$": False},
        "additionalProperties": False,
        "required": ["x"],
    }
    rules = KwargsRules("Game", schema, frozenset(), trusted=False)
    rules.check({"x": "a" * 50 + "!", "b" * 50 + "!": 1})
    assert "not of type 'integer'" in refusal(schema, {"x": "", "pattern": "a property"}, trusted=False)
    assert "required" in refusal(schema, {"y": 1}, trusted=False)
    assert rules.schema == schema, "what clients are shown is whole"


def test_items_of_a_stranger_s_schema_must_differ_where_it_says_so() -> None:
    schema = {"properties": {"x": {"uniqueItems": True}}}
    assert "non-unique" in refusal(schema, {"x": [{"a": 1}, {"a": 1.0}]}, trusted=False)


def test_the_operator_s_are() -> None:
    schema = {"properties": {"x": {"pattern": "^a+$"}}}
    assert "does not match" in refusal(schema, {"x": "b"}, trusted=True)


def test_schemas_that_are_refused_at_once() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"not": deep}
    for schema in ({"description": "x" * 70_000}, deep, {"type": "nonsense"}, {"properties": 3}):
        with pytest.raises(ConfigurationError):
            KwargsRules("Game", schema, frozenset(), trusted=False)


def test_a_stranger_s_schema_works_again_and_again() -> None:
    schema = {"properties": {"x": {"type": "array", "items": {"type": "integer"}}}}
    rules = KwargsRules("Game", schema, frozenset(), trusted=False)
    for _ in range(100):
        rules.check({"x": list(range(1000))})


STRICT = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "size": {"type": "integer"},
        "share": {"type": "number", "minimum": 0},
        "part": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"weight": {"type": "number"}},
        },
    },
}


@pytest.mark.parametrize(
    ("kwargs", "field", "reason"),
    [
        ({"size": True}, "kwargs.size", "True is not of type 'integer'"),
        ({"size": 4.0}, "kwargs.size", "4.0 is not of type 'integer'"),
        ({"share": True}, "kwargs.share", "True is not of type 'number'"),
        ({"share": float("nan")}, "kwargs.share", "is not finite"),
        ({"part": {"weight": float("-inf")}}, "kwargs.part.weight", "is not finite"),
        ({"sise": 4}, "kwargs.sise", "there is no such kwarg; did you mean 'size'?"),
        ({"zzz": 4}, "kwargs.zzz", "there is no such kwarg; there are size, share, part"),
        ({"part": {"age": 1}}, "kwargs.part.age", "there is no such kwarg; there are weight"),
    ],
)
def test_what_is_refused_is_named(kwargs: dict[str, Any], field: str, reason: str) -> None:
    with pytest.raises(ProblemError) as caught:
        KwargsRules("Game", STRICT, frozenset()).check(kwargs)
    assert caught.value.extra["errors"][0] == {"field": field, "reason": reason}


def test_all_that_is_refused_is_named_in_the_message() -> None:
    with pytest.raises(ProblemError) as caught:
        KwargsRules("Game", STRICT, frozenset({"path"})).check(
            {"sise": 4, "zzz": 1, "yyy": 2, "share": -1, "path": "/etc"}
        )
    assert caught.value.detail == (
        "Game refuses kwargs.path: is set by the operator of the server only; "
        "kwargs.sise: there is no such kwarg; did you mean 'size'?; "
        "kwargs.zzz, kwargs.yyy: there is no such kwarg; there are size, share, part; "
        "kwargs.share: -1 is less than the minimum of 0"
    )


def test_what_is_no_value_is_held_against_no_schema() -> None:
    with pytest.raises(ProblemError) as caught:
        KwargsRules("Game", STRICT, frozenset()).check({"size": 1 << 60, "sise": 4})
    assert [each["field"] for each in caught.value.extra["errors"]] == ["kwargs"]


def test_long_names_are_told_in_part() -> None:
    schema = {"properties": {"part": {"additionalProperties": {"type": "integer"}}}}
    for kwargs in ({"part": {"x" * 100_000: "text"}}, {"part": {"x" * 100_000: float("nan")}}):
        with pytest.raises(ProblemError) as caught:
            KwargsRules("Game", schema, frozenset()).check(kwargs)
        assert len(str(caught.value.to_problem())) < 2_000


def test_what_belongs_to_the_operator_is_refused_once() -> None:
    with pytest.raises(ProblemError) as caught:
        KwargsRules("Game", STRICT, frozenset({"path"})).check({"path": "/etc"})
    assert caught.value.extra["errors"] == [
        {"field": "kwargs.path", "reason": "is set by the operator of the server only"}
    ]


def test_many_unknown_names_are_told_in_part() -> None:
    with pytest.raises(ProblemError) as caught:
        KwargsRules("Game", STRICT, frozenset()).check({f"sise{number}": 1 for number in range(50_000)})
    assert len(caught.value.extra["errors"]) == 20


def test_the_words_of_a_schema_are_told_from_what_it_allows() -> None:
    properties = {"description": {"type": "string", "description": "A word.", "default": {"title": "x"}}}
    schema = {"title": "Game", "properties": properties, "anyOf": [{"description": "One."}]}
    assert without_descriptions(schema) == {
        "properties": {"description": {"type": "string", "default": {"title": "x"}}},
        "anyOf": [{}],
    }


def test_schemas_of_what_is_built_in_are_made_when_they_are_asked_for() -> None:
    """Sixty of them are a tenth of a second of every server's start."""
    made: list[str] = []

    def declared() -> dict[str, Any]:
        made.append("once")
        return {"type": "object", "properties": {"size": {"type": "integer"}}, "additionalProperties": False}

    rules = KwargsRules("Later", declared, frozenset())
    rules.check({})
    assert not made
    with pytest.raises(ProblemError, match="invalid_kwargs"):
        rules.check({"size": "large"})
    rules.check({"size": 3})
    assert rules.schema["type"] == "object"
    assert made == ["once"]


def test_every_built_in_environment_declares_a_schema() -> None:
    for entry in Catalog.load(ServerSettings()):
        assert KwargsRules(entry.env_id, entry.rules.schema, frozenset()).schema == entry.rules.schema


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ({"uniqueItems": True}, [{"": number} for number in range(20_000)]),
        ({"items": {"enum": [f"value {each}" for each in range(4_000)]}}, ["value 3999"] * 4_000),
    ],
)
def test_what_a_strangers_schema_compares_is_bounded(part: dict[str, Any], value: Any) -> None:
    rules = KwargsRules("Game", {"properties": {"x": part}}, frozenset(), trusted=False)
    begun = time.process_time()
    with contextlib.suppress(ProblemError):
        rules.check({"x": value})
    assert time.process_time() - begun < 1


def test_a_number_without_end_is_no_kwarg_whatever_the_schema_makes_of_it() -> None:
    schema = {"properties": {"x": {"multipleOf": 0.01}}}
    assert "finite" in refusal(schema, {"x": float("inf")}, trusted=True)


@pytest.mark.parametrize("trusted", [True, False])
def test_kwargs_within_kwargs_are_followed_to_a_bound(trusted: bool) -> None:
    schema = {
        "properties": {"x": {"$ref": "#/$defs/tree"}},
        "$defs": {"tree": {"items": {"$ref": "#/$defs/tree"}}},
    }
    tree: Any = []
    for level in range(190):
        tree = [tree]
        if level == 40:
            KwargsRules("Game", schema, frozenset(), trusted=trusted).check({"x": tree})
    assert "cannot be followed" in refusal(schema, {"x": tree}, trusted=trusted)
