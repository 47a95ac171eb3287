"""Kwargs that are declared by a constructor: what follows from the one declaration."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypedDict, Unpack

import gymnasium
import numpy as np
import pytest
from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

import rollgym  # noqa: F401 - registers ours
from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.catalog.catalog import Catalog
from rollgym.env_server.common.settings import ConfigurationError, ServerSettings
from rollgym.envs.core.kwargs import OPERATOR, RENDER_MODES, DeclaredKwargs, OneOf, SomeOf, kwargs_of
from rollgym.envs.games.frozen_lake import FrozenLakeEnv
from rollgym.envs.games.sokoban.environment import SokobanEnv


class BaseKwargs(TypedDict, total=False):
    profile: str
    render_mode: str | None


class Base(DeclaredKwargs, gymnasium.Env[Any, Any]):
    """What others build on."""

    metadata = {"render_modes": ["ansi"]}

    def __init__(
        self,
        form: str,
        *,
        limit: Annotated[int, Field(ge=1, description="Steps.")],
        profile: Annotated[str, OneOf("plain", "rich"), Field(description="How it looks.")] = "plain",
        render_mode: Annotated[str | None, RENDER_MODES, Field(description="What is drawn.")] = None,
    ) -> None:
        self.given = {"form": form, "limit": limit, "profile": profile, "render_mode": render_mode}


class Game(Base):
    """A game.

    Raises:
        ValueError: If an argument makes no sense.
    """

    metadata = {"render_modes": ["ansi", "rgb_array"]}

    def __init__(
        self,
        *,
        size: Annotated[int, Field(ge=2, le=9, description="Side.")] = 4,
        share: Annotated[float | None, Field(gt=0, lt=1, description="Part.")] = None,
        pair: Annotated[
            Sequence[Annotated[int, Field(ge=4)]], Field(min_length=2, max_length=2, description="Both.")
        ] = (6, 6),
        kinds: Annotated[Sequence[str] | None, SomeOf("x", "y"), Field(description="Which.")] = None,
        bit: Annotated[int, OneOf(0, 1), Field(description="One bit.")] = 0,
        opponent: Annotated[
            Annotated[str, OneOf("self", "random")] | SkipJsonSchema[Callable[..., Any]],
            Field(description="Who plays."),
        ] = "self",
        data: Annotated[str | None, OPERATOR, Field(description="A file.")] = None,
        undeclared: object = None,
        **common: Unpack[BaseKwargs],
    ) -> None:
        super().__init__("form", limit=3, **common)
        self.size, self.pair = size, pair


class Open(Base):
    """Passes what it does not know on."""

    def __init__(self, game: Annotated[str, OPERATOR], **kwargs: Any) -> None:
        super().__init__("form", limit=3)
        self.own = kwargs


def test_the_schema_has_what_a_client_may_set() -> None:
    assert Game.kwargs_schema == {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "size": {"description": "Side.", "type": "integer", "minimum": 2, "maximum": 9, "default": 4},
            "share": {
                "description": "Part.",
                "type": ["number", "null"],
                "exclusiveMinimum": 0,
                "exclusiveMaximum": 1,
                "default": None,
            },
            "pair": {
                "description": "Both.",
                "type": "array",
                "items": {"type": "integer", "minimum": 4},
                "minItems": 2,
                "maxItems": 2,
                "default": [6, 6],
            },
            "kinds": {
                "description": "Which.",
                "type": ["array", "null"],
                "items": {"enum": ["x", "y"]},
                "minItems": 1,
                "uniqueItems": True,
                "default": None,
            },
            "bit": {"description": "One bit.", "enum": [0, 1], "default": 0},
            "opponent": {"description": "Who plays.", "enum": ["self", "random"], "default": "self"},
            "profile": {"description": "How it looks.", "enum": ["plain", "rich"], "default": "plain"},
            "render_mode": {
                "description": "What is drawn.",
                "enum": ["ansi", "rgb_array", None],
                "default": None,
            },
        },
    }
    assert Game.operator_kwargs == {"data"}


def test_signature_and_docstring_tell_the_same() -> None:
    parameters = inspect.signature(Game).parameters
    assert list(parameters) == [
        *("size", "share", "pair", "kinds", "bit", "opponent", "data", "undeclared", "profile", "render_mode")
    ]
    assert parameters["size"].annotation is int
    assert parameters["profile"].default == "plain"
    assert inspect.getdoc(Game) == (
        "A game.\n\nArgs:\n    size: Side.\n    share: Part.\n    pair: Both.\n    kinds: Which.\n    bit: One bit.\n"
        "    opponent: Who plays.\n    data: A file.\n    profile: How it looks.\n    render_mode: What is drawn.\n\n"
        "Raises:\n    ValueError: If an argument makes no sense."
    )


@pytest.mark.parametrize(
    ("kwargs", "told"),
    [
        ({"size": True}, "size must be a whole number from 2 to 9, not True"),
        ({"size": 4.0}, "size must be a whole number from 2 to 9, not 4.0"),
        ({"size": "4"}, "size must be a whole number from 2 to 9, not '4'"),
        ({"size": 1}, "size must be a whole number from 2 to 9, not 1"),
        ({"size": None}, "size must be a whole number from 2 to 9, not None"),
        ({"size": 10**5000}, "not a number of 16610 bits"),
        ({"share": True}, "share must be a number above 0 and below 1 or None, not True"),
        ({"share": float("nan")}, "not nan; numbers must be finite"),
        ({"share": float("inf")}, "not inf; numbers must be finite"),
        ({"share": 10**400}, "share must be a number"),
        ({"pair": (4,)}, r"pair must be a list of 2 whole numbers of at least 4, not \(4,\)"),
        ({"pair": (4, 3)}, "pair must be"),
        ({"pair": "44"}, "pair must be"),
        ({"kinds": []}, "kinds must be some of 'x', 'y' or None"),
        ({"kinds": ["x", "x"]}, "kinds must be some of"),
        ({"kinds": ["z"]}, "kinds must be some of"),
        ({"kinds": "x"}, "kinds must be some of"),
        ({"bit": True}, "bit must be 0 or 1, not True"),
        ({"opponent": "me"}, "opponent must be 'self' or 'random', not 'me'"),
        ({"data": 3}, "data must be text or None, not 3"),
        ({"profile": "x" * 1_000_000}, "profile must be 'plain' or 'rich', not 'xxx"),
        ({"render_mode": "human"}, "render_mode must be one of 'ansi', 'rgb_array' or None"),
    ],
)
def test_what_is_not_allowed_is_refused_before_the_constructor(kwargs: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        Game(**kwargs)
    assert len(str(caught.value)) < 200


def test_a_deep_nest_is_told_in_short() -> None:
    nest: Any = []
    for _ in range(10_000):
        nest = [nest]
    with pytest.raises(ValueError, match=r"size must be .*, not \[\[\["):
        Game(size=nest)


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"Game has no kwarg 'sise'; did you mean 'size'\?"):
        Game(sise=4)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="no kwarg 'limit'; it has size, share"):
        Game(limit=4)  # type: ignore[call-arg]


def test_all_unknown_names_are_refused_at_once() -> None:
    with pytest.raises(TypeError) as caught:
        Game(bit=7, sise=4, zzz=1, limit=4)  # type: ignore[call-arg]
    names = "size, share, pair, kinds, bit, opponent, data, undeclared, profile, render_mode"
    assert str(caught.value) == (
        f"Game has no kwargs 'sise' (did you mean 'size'?), 'zzz', 'limit'; it has {names}"
    )
    with pytest.raises(TypeError, match=r"no kwargs 'sise' \(did you mean 'size'\?\), 'bits' \(.*'bit'\?\)$"):
        Game(sise=4, bits=1)  # type: ignore[call-arg]


def test_a_refusal_of_many_or_long_names_is_short() -> None:
    many: dict[str, Any] = {f"{number}{'x' * 1000}": 1 for number in range(500)}
    with pytest.raises(TypeError, match="and 480 more; it has size") as caught:
        Game(**many)
    assert len(str(caught.value)) < 2000


def test_what_is_allowed_arrives_as_it_was_given() -> None:
    pair, call = [4, 5], print
    game = Game(
        size=3, share=0.5, pair=pair, kinds=("x", "y"), opponent=call, profile="rich", undeclared=call
    )
    assert game.pair is pair
    assert game.given["profile"] == "rich"
    assert Game(size=np.int64(3)).size == 3
    assert copy.deepcopy(game).size == 3


def test_a_constructor_that_takes_any_kwargs_gets_them() -> None:
    assert Open("a", size=3).own == {"size": 3}
    assert Open.operator_kwargs == {"game"}
    with pytest.raises(ValueError, match="limit must be"):
        Open("a", limit=0)


def test_one_who_declares_by_hand_is_left_alone() -> None:
    class Own(Base):
        kwargs_schema = {"type": "object", "properties": {"x": {}}}

        def __init__(self, x: int = 1) -> None:
            super().__init__("form", limit=1)

    assert Own.kwargs_schema == {"type": "object", "properties": {"x": {}}}
    Own(x=1)


def test_a_server_takes_schema_and_operator_s_names_from_the_class() -> None:
    catalog = Catalog.load(ServerSettings(env=[f"{__name__}:Game"], builtin=False))
    rules = catalog.get("Game").rules
    assert rules.schema == Game.kwargs_schema
    rules.check({"size": 9, "kinds": ["y"]})
    for kwargs, told in (
        ({"data": "/etc/passwd"}, "kwargs.data: is set by the operator"),
        ({"undeclared": 1}, "kwargs.undeclared: there is no such kwarg"),
        ({"siize": 3}, "kwargs.siize: there is no such kwarg; did you mean 'size'"),
        ({"size": 4.0}, "kwargs.size: 4.0 is not of type 'integer'"),
        ({"kinds": ["x", "x"]}, "kwargs.kinds"),
    ):
        with pytest.raises(ProblemError, match=told):
            rules.check(kwargs)


class Undescribable(Base):
    """Its annotation is no type."""

    def __init__(self, *, size: Annotated["Nowhere", Field(description="?")] = 1) -> None:  # type: ignore[name-defined]  # noqa: F821
        super().__init__("form", limit=1)


def test_an_annotation_that_cannot_be_read_stops_the_server_with_a_message() -> None:
    with pytest.raises(
        ConfigurationError, match=r"cannot read the kwargs that .*Undescribable' declares: NameError"
    ):
        Catalog.load(ServerSettings(env=[f"{__name__}:Undescribable"], builtin=False))


def test_defaults_hold_against_their_own_declaration() -> None:
    """Each built-in environment, made with its defaults said aloud, is the one made without them."""
    for entry in Catalog.load(ServerSettings()):
        properties: Mapping[str, Any] = entry.rules.schema["properties"]
        assert properties, entry.env_id
        for name, part in properties.items():
            assert part["description"].endswith((".", "?")), (entry.env_id, name)
            assert "TODO" not in part["description"]
            assert "default" in part, (entry.env_id, name)
        entry.rules.check({name: part["default"] for name, part in properties.items()})


def test_declared_kwargs_of_an_operator_are_told_too() -> None:
    told = {each.name: each for each in kwargs_of(SokobanEnv)}
    assert told["levels_file"].operator
    assert told["levels_file"].description
    assert not told["size"].operator


def test_a_plain_environment_needs_none_of_this() -> None:
    made = gymnasium.make("rollgym/FrozenLake-v0", size=3)
    assert isinstance(made.unwrapped, FrozenLakeEnv)
    with pytest.raises(ValueError, match="size must be"):
        gymnasium.make("rollgym/FrozenLake-v0", size=True)
