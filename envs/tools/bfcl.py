"""Grades function calls against the answers that are accepted, by the rules of the Berkeley leaderboard (BFCL v4).

The rules are those of its abstract-syntax-tree checker for Python functions, with its quirks: equal answers get equal
verdicts, and errors their names there. A call is `{function name: {parameter: value}}`; an accepted answer has a list
of accepted values for each parameter, and the empty string among them for one that may be left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Call = Mapping[str, Mapping[str, Any]]
"""One function with its arguments."""

Accepted = Mapping[str, Mapping[str, Sequence[Any]]]
"""One function with the values that each argument may have."""

_OPTIONAL = ""
KNOWN_TYPES: Mapping[str, type] = {
    "string": str,
    "integer": int,
    "float": float,
    "boolean": bool,
    "array": list,
    "tuple": list,
    "dict": dict,
    "any": str,
    # What JSON Schema calls two of them.
    "number": float,
    "object": dict,
}
"""The types of parameters, by their names in the leaderboard's function descriptions."""

_NESTED = frozenset({"array", "tuple"})
_DROPPED_FROM_STRINGS = str.maketrans({**dict.fromkeys(" ,./-_*^", ""), "'": '"'})


@dataclass(frozen=True, slots=True)
class Grade:
    """Whether calls are what was wanted.

    Attributes:
        valid: In a word.
        error_type: The error in the leaderboard's terms; None without an error.
        detail: The same for people.
    """

    valid: bool
    error_type: str | None = None
    detail: str = ""


_GOOD = Grade(True)


def grade_calls(
    functions: Sequence[Mapping[str, Any]],
    calls: Sequence[Call],
    accepted: Sequence[Accepted],
    category: str,
) -> Grade:
    """Grade the calls of one answer.

    Args:
        functions: The available functions: `name`, `parameters` with `properties` and `required`.
        calls: The calls, in order.
        accepted: The expected calls.
        category: Category, such as `simple_python`, `live_multiple` or `parallel`: those with several calls
            take them in any order.
    """
    described = {str(function["name"]): function for function in functions}
    if "parallel" in category:
        return _grade_in_any_order(described, calls, accepted)
    family = "multiple" if "multiple" in category else "simple"
    if len(calls) != len(accepted):
        return Grade(
            False, f"{family}_function_checker:wrong_count", f"{len(calls)} calls, {len(accepted)} wanted"
        )
    return _grade_call(described[_name(accepted[0])], calls[0], accepted[0])


def _grade_in_any_order(
    described: Mapping[str, Mapping[str, Any]], calls: Sequence[Call], accepted: Sequence[Accepted]
) -> Grade:
    checker = "parallel_function_checker_no_order"
    if len(calls) != len(accepted):
        return Grade(False, f"{checker}:wrong_count", f"{len(calls)} calls, {len(accepted)} wanted")
    left = list(calls)
    for wanted in accepted:
        function = described[_name(wanted)]
        found = next((call for call in left if _grade_call(function, call, wanted).valid), None)
        if found is None:
            return Grade(False, f"{checker}:cannot_find_match", f"no call is {_name(wanted)} as it is wanted")
        left.remove(found)
    return _GOOD


def _grade_call(function: Mapping[str, Any], call: Call, accepted: Accepted) -> Grade:
    name = str(function["name"])
    if name not in call:
        return _wrong("simple_function_checker:wrong_func_name", f"{name} is wanted, not {', '.join(call)}")
    arguments, wanted = call[name], accepted[name]
    properties = function["parameters"].get("properties", {})
    for parameter in function["parameters"].get("required", ()):
        if parameter not in arguments:
            return _wrong("simple_function_checker:missing_required", f"{parameter} is missing")
    for parameter, value in arguments.items():
        if parameter not in properties or parameter not in wanted:
            return _wrong("simple_function_checker:unexpected_param", f"{parameter} is not wanted")
        grade = _grade_value(parameter, value, properties[parameter], wanted[parameter])
        if not grade.valid:
            return grade
    for parameter, values in wanted.items():
        if parameter not in arguments and _OPTIONAL not in values:
            return _wrong("simple_function_checker:missing_optional", f"{parameter} is missing")
    return _GOOD


def _grade_value(parameter: str, value: Any, schema: Mapping[str, Any], accepted: Sequence[Any]) -> Grade:
    described = str(schema["type"])
    expected = KNOWN_TYPES[described]
    if expected is float and type(value) is int:
        try:
            value = float(value)
        except OverflowError:
            return _wrong("value_error:others", f"{parameter} is larger than any accepted number")
    nested = str(schema["items"]["type"]) if described in _NESTED and "items" in schema else None
    error, as_accepted = _type_error(value, expected, nested, accepted)
    if error is not None:
        return _wrong(error, f"{parameter} is {type(value).__name__}, and {described} is wanted")
    if not as_accepted:
        if expected is dict:
            return _grade_dict(parameter, value, accepted)
        if expected is list and nested in ("dict", "object"):
            return _grade_dicts(parameter, value, accepted)
        if expected is str:
            fits = _plain(value) in [_plain(each) for each in accepted if type(each) is str]
            return _GOOD if fits else _wrong("value_error:string", f"{parameter} is {value!r}")
        if expected is list:
            # An optional list is accepted empty as well: the mark for it holds no character.
            fits = _plain(value) in [[_plain(part) for part in each] for each in accepted]
            return _GOOD if fits else _wrong("value_error:list/tuple", f"{parameter} is {value!r}")
    return _GOOD if value in accepted else _wrong("value_error:others", f"{parameter} is {value!r}")


def _type_error(
    value: Any, expected: type, nested: str | None, accepted: Sequence[Any]
) -> tuple[str | None, bool]:
    """Return what is wrong with a type, and whether it is that of the accepted values and not the declared one.

    Accepted values of another type than the declared one stand for variables.
    """
    kind = next((type(each) for each in accepted if each != _OPTIONAL), None)
    as_accepted = kind is not None and kind is not expected
    if type(value) is expected:
        parts: Any = value
        if nested is None or any(_parts_fit(parts, nested, each) for each in accepted):
            return None, as_accepted
        return "type_error:nested", as_accepted
    if kind is not None and type(value) is kind:
        return None, True
    return "type_error:simple", as_accepted


def _parts_fit(value: Sequence[Any], nested: str, accepted: Any) -> bool:
    if type(accepted) is not list:
        return True
    return all(_type_error(part, KNOWN_TYPES[nested], None, accepted)[0] is None for part in value)


def _grade_dict(parameter: str, value: Any, accepted: Sequence[Any]) -> Grade:
    grade = _wrong("value_error:dict_key", f"no value is accepted for {parameter}")
    for wanted in accepted:
        if wanted == _OPTIONAL:
            continue
        grade = _dict_grade(parameter, value, wanted)
        if grade.valid:
            break
    return grade


def _dict_grade(parameter: str, value: Any, wanted: Mapping[str, Sequence[Any]]) -> Grade:
    if not isinstance(value, Mapping):
        return _wrong("type_error:nested", f"{parameter} has a part that is no object: {value!r}")
    for key, part in value.items():
        if key not in wanted:
            return _wrong("value_error:dict_key", f"{parameter}.{key} is not wanted")
        if _plain(part) not in [_plain(each) for each in wanted[key]]:
            return _wrong("value_error:dict_value", f"{parameter}.{key} is {part!r}")
    for key, values in wanted.items():
        if key not in value and _OPTIONAL not in values:
            return _wrong("value_error:dict_key", f"{parameter}.{key} is missing")
    return _GOOD


def _grade_dicts(parameter: str, value: Sequence[Any], accepted: Sequence[Any]) -> Grade:
    grade = _wrong("value_error:list_dict_count", f"no value is accepted for {parameter}")
    for wanted in accepted:
        if len(value) != len(wanted):
            grade = _wrong(
                "value_error:list_dict_count", f"{parameter} has {len(value)} parts, not {len(wanted)}"
            )
            continue
        grades = [_grade_dict(parameter, part, [each]) for part, each in zip(value, wanted, strict=True)]
        grade = next((each for each in grades if not each.valid), _GOOD)
        if grade.valid:
            break
    return grade


def _plain(value: Any) -> Any:
    """Return a text without what makes no difference; the parts of a list the same way."""
    if isinstance(value, str):
        return value.translate(_DROPPED_FROM_STRINGS).lower()
    if isinstance(value, list):
        return [_plain(part) if isinstance(part, str) else part for part in value]
    return value


def _name(call: Mapping[str, Any]) -> str:
    return next(iter(call))


def _wrong(error_type: str, detail: str) -> Grade:
    return Grade(False, error_type, detail)
