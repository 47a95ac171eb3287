"""Kwargs of environments, declared once: by the annotations of the constructor.

    def __init__(self, *, size: Annotated[int, Field(ge=2, le=30, description="Side of a map.")] = 4) -> None: ...

From that one place come the JSON Schema that a server shows and holds requests against, the check when an environment
is made in Python, the `Args` of its docstring, the console's form and its page in the documentation.
"""

import inspect
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import (
    Annotated,
    Any,
    ClassVar,
    Generic,
    Self,
    TypeVar,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
)

import gymnasium
import numpy as np
from pydantic import (
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationError,
    create_model,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from typing_extensions import TypedDict

from rollgym.clients.protocol.schema_words import wanted
from rollgym.envs.core.hooks import require_hooks
from rollgym.suggestions import near_names

T = TypeVar("T")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_MOST_NAMED = 20
_MOST_BITS = 256
_NO_DEFAULT = inspect.Parameter.empty


class _Mark:
    """An annotation of a kwarg that is not a constraint."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler(source)


OPERATOR = _Mark()
"""Marks a kwarg that only the operator of a server sets, never a client: paths, addresses, what costs money."""

RENDER_MODES = _Mark()
"""Marks the kwarg that is one of the render modes that the class's metadata name, or None."""


RenderMode = Annotated[str | None, RENDER_MODES, Field(description="What `render` gives.")]
"""The kwarg `render_mode`."""


class OneOf:
    """Marks a kwarg that is one of some values. None is allowed if it is among them."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(
            self._distinct, core_schema.literal_schema(list(self.values))
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": list(self.values)}

    def _distinct(self, given: Any) -> Any:
        # Python takes True for 1.
        if isinstance(given, bool) and not any(given is value for value in self.values):
            raise PydanticCustomError("one_of", "not one of the values")
        return given


class SomeOf:
    """Marks a kwarg that is a sequence of some of the values: at least one, none of them twice."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        inner = handler(schema)
        kinds: Any = ["array", "null"] if "anyOf" in inner else "array"
        return {"type": kinds, "items": {"enum": list(self.values)}, "minItems": 1, "uniqueItems": True}

    def _checked(self, given: Sequence[Any] | None) -> Sequence[Any] | None:
        if given is None or (given and len(set(given)) == len(given) and set(given) <= set(self.values)):
            return given
        raise PydanticCustomError("some_of", "not some of the values")


@dataclass(frozen=True, slots=True)
class Kwarg:
    """One kwarg of an environment.

    Attributes:
        name: The kwarg's name.
        schema: Its JSON Schema, with description and default.
        operator: Whether only the operator of a server sets it.
    """

    name: str
    schema: Mapping[str, Any]
    operator: bool

    @property
    def description(self) -> str:
        """Return the text that describes the kwarg."""
        return str(self.schema.get("description", ""))


@dataclass(frozen=True, slots=True)
class _Parameters:
    """The parameters of a constructor and of those that it passes `**kwargs` on to.

    Attributes:
        named: By name; their annotations are types.
        takes_any: Whether other names are taken, too.
    """

    named: Mapping[str, inspect.Parameter]
    takes_any: bool

    def marked(self) -> dict[str, inspect.Parameter]:
        """Those that are declared: they have a `Field` or are the operator's."""
        return {name: parameter for name, parameter in self.named.items() if _is_declared(parameter)}


class _OfClass(Generic[T]):
    """A class attribute that is computed on access."""

    def __init__(self, find: Callable[[Any], T]) -> None:
        self._find = find

    def __get__(self, instance: object, owner: type) -> T:
        return self._find(owner)


def kwargs_of(env_class: type) -> tuple[Kwarg, ...]:
    """The declared kwargs of a class, in the order of its constructor."""
    operator = operator_kwargs_of(env_class)
    return tuple(Kwarg(name, schema, name in operator) for name, schema in _schemas(env_class).items())


def kwargs_schema_of(env_class: type) -> dict[str, Any]:
    """JSON Schema of the kwargs that a client may set."""
    properties = {each.name: dict(each.schema) for each in kwargs_of(env_class) if not each.operator}
    return {"type": "object", "additionalProperties": False, "properties": properties}


@cache
def operator_kwargs_of(env_class: type) -> frozenset[str]:
    """Names of the kwargs that only the operator of a server sets."""
    return frozenset(
        name
        for name, parameter in _parameters(env_class).named.items()
        if OPERATOR in _marks(parameter.annotation)
    )


def check_kwargs(env_class: type, kwargs: Mapping[str, Any]) -> None:
    """Validate kwargs against a class's declarations. Valid values are unchanged: nothing is converted.

    Numbers are strict: True is not a number, 4.0 is not an integer, NaN and infinities are refused.

    Raises:
        TypeError: A kwarg is unknown; the message suggests similar names.
        ValueError: A value is not allowed.
    """
    validate = _validator(env_class)
    try:
        validate(kwargs)
    except ValidationError:
        plain = {
            name: value.item() if isinstance(value, np.generic) else value for name, value in kwargs.items()
        }
        try:
            validate(plain)
        except ValidationError as error:
            raise _refusal(env_class, plain, error) from None


class DeclaredKwargs:
    """Mixed into an environment whose constructor declares its kwargs by annotations.

    A parameter is declared by a `pydantic.Field` with a description in its `Annotated`; any other parameter is internal
    to the class, and clients cannot set it. `**kwargs: Unpack[SomeTypedDict]` stands for those parameters of the next
    constructor that the dictionary names.
    """

    kwargs_schema: ClassVar[Any] = _OfClass(kwargs_schema_of)
    """JSON Schema of the kwargs that a client may set."""
    operator_kwargs: ClassVar[Any] = _OfClass(operator_kwargs_of)
    """Names of those that only an operator sets."""
    __signature__: ClassVar[Any] = _OfClass(lambda owner: _signature(owner))

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Check the class and the kwargs before the constructor runs."""
        require_hooks(cls)
        if kwargs:
            check_kwargs(cls, kwargs)
        return super().__new__(cls)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Put the kwargs into the docstring."""
        super().__init_subclass__(**kwargs)
        if text := cls.__dict__.get("__doc__"):
            cls.__doc__ = _OfClass(cache(lambda owner: _documented(owner, text)))  # type: ignore[assignment]


# -- reading a constructor ---------------------------------------------------------------------------------------------


@cache
def _parameters(env_class: type) -> _Parameters:
    named: dict[str, inspect.Parameter] = {}
    passed_on: frozenset[str] | None = None
    first, takes_any = True, False
    for owner in env_class.__mro__:
        constructor = owner.__dict__.get("__init__")
        if constructor is None or owner in (gymnasium.Env, Generic, object):
            continue
        hints = get_type_hints(constructor, include_extras=True)
        rest: inspect.Parameter | None = None
        for name, parameter in list(inspect.signature(constructor).parameters.items())[1:]:
            if parameter.kind is parameter.VAR_KEYWORD:
                rest = parameter
            elif (first and parameter.kind is not parameter.VAR_POSITIONAL) or (
                parameter.kind is parameter.KEYWORD_ONLY and (passed_on is None or name in passed_on)
            ):
                named.setdefault(name, _typed(parameter, hints.get(name, Any), env_class))
        first = False
        if rest is None:
            break
        names = _named_by(hints.get(rest.name))
        takes_any = takes_any or (names is None and passed_on is None)
        if names is not None:
            passed_on = names if passed_on is None else names & passed_on
    return _Parameters(named, takes_any)


def _named_by(hint: Any) -> frozenset[str] | None:
    """The names that `**kwargs: Unpack[...]` takes; None if it takes any."""
    if get_origin(hint) is not Unpack:
        return None
    (dictionary,) = get_args(hint)
    return frozenset(get_type_hints(dictionary))


def _typed(parameter: inspect.Parameter, annotation: Any, env_class: type) -> inspect.Parameter:
    """A parameter with its type, in which the class's render modes are filled in."""
    marks = _marks(annotation)
    if RENDER_MODES in marks:
        modes = OneOf(*getattr(env_class, "metadata", {}).get("render_modes", ()), None)
        kept = [modes if mark is RENDER_MODES else mark for mark in marks]
        annotation = Annotated[(get_args(annotation)[0], *kept)]
    return parameter.replace(annotation=annotation)


def _marks(annotation: Any) -> tuple[Any, ...]:
    return tuple(getattr(annotation, "__metadata__", ()))


def _is_declared(parameter: inspect.Parameter) -> bool:
    return any(isinstance(mark, FieldInfo) for mark in _marks(parameter.annotation))


@cache
def _validator(env_class: type) -> Callable[[Any], Any]:
    """Validates kwargs against all parameters, with none required: Python's own call reports missing ones."""
    parameters = _parameters(env_class)
    marked = parameters.marked()
    types: Any = {
        name: parameter.annotation if name in marked else Any for name, parameter in parameters.named.items()
    }
    # Not a model: it would fill in all the defaults each time.
    make: Any = TypedDict
    dictionary = make(env_class.__name__, types, total=False)
    dictionary.__pydantic_config__ = ConfigDict(
        strict=True,
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
        extra="allow" if parameters.takes_any else "forbid",
    )
    return TypeAdapter(dictionary).validator.validate_python


@cache
def _schemas(env_class: type) -> Mapping[str, dict[str, Any]]:
    """JSON Schemas of the declared kwargs, by name."""
    marked = _parameters(env_class).marked()
    fields: dict[str, Any] = {
        name: (parameter.annotation, ... if parameter.default is _NO_DEFAULT else parameter.default)
        for name, parameter in marked.items()
    }
    config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())
    model = create_model(env_class.__name__, __config__=config, **fields)
    return {name: _tidy(part) for name, part in model.model_json_schema().get("properties", {}).items()}


def _tidy(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema without titles, with "or null" among its types, description first and default last."""
    told = {name: schema[name] for name in ("description",) if name in schema}
    default = {name: schema[name] for name in ("default",) if name in schema}
    allowed = {
        name: value for name, value in schema.items() if name not in {"title", "anyOf", *told, *default}
    }
    ways = [_tidy(way) for way in schema.get("anyOf", ())]
    kept = [way for way in ways if way != {"type": "null"}]
    if len(kept) == 1 and "enum" in kept[0]:
        allowed |= kept[0]
    elif len(kept) == 1 and isinstance(kept[0].get("type"), str):
        allowed |= kept[0] | {"type": [kept[0]["type"], "null"]}
    elif ways:
        allowed["anyOf"] = ways
    return told | allowed | default


# -- telling -----------------------------------------------------------------------------------------------------------


def _refusal(env_class: type, kwargs: Mapping[str, Any], error: ValidationError) -> Exception:
    names = _parameters(env_class).named
    errors = error.errors(include_url=False)
    if unknown := [name for each in errors if (name := str(each["loc"][0])) not in names]:
        return TypeError(f"{env_class.__name__} has no {_unknown(unknown, names)}")
    first = errors[0]
    name = str(first["loc"][0])
    finite = "; numbers must be finite" if first["type"] == "finite_number" else ""
    return ValueError(
        f"{name} must be {wanted(_schemas(env_class)[name])}, not {_shown(kwargs[name])}{finite}"
    )


def _unknown(unknown: Sequence[str], names: Mapping[str, Any]) -> str:
    """Name each unknown kwarg with the known one that is near, or else the known ones."""
    named = unknown[:_MOST_NAMED]
    near = [near_names(name, names) for name in named]
    hints = [f"did you mean {found[0]!r}?" if found else "" for found in near]
    there_are = f"it has {', '.join(names) or 'none'}"
    if len(unknown) == 1:
        return f"kwarg {_shown(unknown[0])}; {hints[0] or there_are}"
    told = [
        f"{_shown(name)} ({hint})" if hint else _shown(name) for name, hint in zip(named, hints, strict=True)
    ]
    more = f" and {len(unknown) - len(named)} more" if len(unknown) > len(named) else ""
    return f"kwargs {', '.join(told)}{more}" + ("" if all(hints) else f"; {there_are}")


def _shown(value: Any) -> str:
    """Return any value as a short text for a message."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"a number of {value.bit_length()} bits"
    return _SHORT.repr(value)


def _signature(env_class: type) -> inspect.Signature:
    """The signature of the constructor with all that it passes on, and types that can be read."""
    parameters = _parameters(env_class)
    annotations = {name: each.annotation for name, each in parameters.named.items()}
    types = get_type_hints(SimpleNamespace(__annotations__=annotations))
    shown = [each.replace(annotation=types[name]) for name, each in parameters.named.items()]
    if parameters.takes_any:
        shown.append(inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD, annotation=Any))
    return inspect.Signature(sorted(shown, key=lambda each: each.kind))


def _documented(env_class: type, text: str) -> str:
    """A docstring with the section `Args`, before that on errors."""
    told = "".join(f"    {line}\n" for line in _told_kwargs(env_class))
    if not text or not told:
        return text
    body = inspect.cleandoc(text)
    before, separator, after = body.partition("\nRaises:")
    return f"{before.rstrip()}\n\nArgs:\n{told}{separator}{after}"


def _told_kwargs(env_class: type) -> Iterator[str]:
    for kwarg in kwargs_of(env_class):
        yield f"{kwarg.name}: {kwarg.description}"
