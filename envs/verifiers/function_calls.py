"""FunctionCalls-v0: which functions a request needs, with which arguments; graded as BFCL does."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from rollgym.clients.protocol.tool_calls import ToolCall
from rollgym.clients.replies.formats.calls import (
    Schemas,
    read_calls,
)
from rollgym.clients.replies.formats.table import FORMATS, format_named
from rollgym.clients.replies.marks import tagged
from rollgym.envs.core.kwargs import OneOf, RenderMode, SomeOf
from rollgym.envs.core.splits import TaskSplit, checked_split, split_of_text
from rollgym.envs.tools.bfcl import KNOWN_TYPES, grade_calls
from rollgym.envs.verifiers.base import Verdict, VerifierEnv
from rollgym.envs.verifiers.function_requests import FUNCTIONS, draw_requests

CATEGORIES = ("simple", "multiple", "parallel", "irrelevance")
_JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
_TRIES = 1_000


class FunctionCallsEnv(VerifierEnv):
    """One turn of function calling: the calls of a response are compared with those that are accepted.

    Tasks are generated, or are rows of BFCL's: `question`, `functions`, `accepted` (each call with the values that its
    arguments may have) and `category`.

    Raises:
        ValueError: If an argument makes no sense.
    """

    metadata: dict[str, Any] = VerifierEnv.metadata | {
        "description": "Call the functions that a request needs; graded by the rules of BFCL.",
        "observation": "A request and the functions that are there.",
        "actions": "Calls in the `call_format`, or `<answer>none</answer>` where none fits.",
        "reward": "1 where the calls are accepted, else 0.",
    }

    def __init__(
        self,
        *,
        categories: Annotated[
            Sequence[str],
            SomeOf(*CATEGORIES),
            Field(
                description=(
                    "Which are drawn: `simple` (one function is there), `multiple` (one of several is "
                    "needed), `parallel` (several calls, in any order) and `irrelevance` (none fits)."
                )
            ),
        ] = CATEGORIES,
        call_format: Annotated[
            str, OneOf(*FORMATS), Field(description="How the policy writes calls.")
        ] = "hermes",
        split: TaskSplit = None,
        render_mode: RenderMode = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        self._categories = tuple(categories)
        self._form = format_named(call_format)
        self._split = checked_split(split)

    def draw_task(self) -> dict[str, Any]:
        """Draw a request of the wanted split."""
        for _ in range(_TRIES):
            category = self._categories[int(self.np_random.integers(len(self._categories)))]
            question, functions, calls = draw_requests(self.np_random, category)
            if self._split is None or split_of_text(question) == self._split:
                accepted = [
                    {call.name: {name: [value] for name, value in call.arguments.items()}} for call in calls
                ]
                return {
                    "question": question,
                    "functions": [FUNCTIONS[name] for name in functions],
                    "accepted": accepted,
                    "category": category,
                    "answer": self._form.write(calls) if calls else "<answer>none</answer>",
                }
        raise ValueError(f"no request of split {self._split} in {_TRIES} tries")

    def checked_task(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return a task that was given."""
        task = dict(fields)
        if not isinstance(task.get("question"), str):
            raise ValueError("a task needs the field 'question', the request as text")
        _parts(task)
        return task

    def prompt(self, task: Mapping[str, Any]) -> str:
        """Return the functions and the request."""
        functions = "\n".join(json.dumps(function, ensure_ascii=False) for function in task["functions"])
        return f"Functions, as JSON:\n{functions}\n\nRequest: {task['question']}"

    def instruction(self) -> str:
        """Return how to answer."""
        return (
            "Call the functions that the request needs, with its values, and leave out what it does not say. If none "
            f"of the functions can do it, reply <answer>none</answer>. {self._form.explain({})}"
        )

    def score(self, response: str, task: Mapping[str, Any]) -> Verdict:
        """Grade the calls of a response."""
        try:
            functions, accepted, category = _parts(task)
        except ValueError as error:
            return Verdict(0.0, "error", str(error))
        reading = read_calls(response, self._form, _schemas(functions))
        if reading.faults:
            return Verdict(0.0, "unparsable", reading.faults[0])
        if not reading.calls:
            # Silence is no answer: whoever says nothing at all is not to be paid for it.
            if all(said.strip().lower() != "none" for said in tagged(reading.content, "answer")):
                return Verdict(0.0, "unparsable", "there is neither a call nor <answer>none</answer>")
            if accepted:
                return Verdict(0.0, "wrong", "nothing was called")
            return Verdict(1.0, "correct", "nothing was called")
        if not accepted:
            return Verdict(0.0, "wrong", f"{reading.calls[0].name} was called, and no function fits")
        grade = grade_calls(functions, [_plain(call) for call in reading.calls], accepted, category)
        if grade.valid:
            return Verdict(1.0, "correct", f"{len(reading.calls)} calls")
        return Verdict(0.0, "wrong", f"{grade.error_type}: {grade.detail}"[:500])


def _plain(call: ToolCall) -> dict[str, Mapping[str, Any]]:
    return {call.name: call.arguments}


def _parts(task: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], list[Any], str]:
    """Return functions, accepted calls and category of a task.

    Raises:
        ValueError: If they do not fit together.
    """
    functions, accepted = task.get("functions"), task.get("accepted")
    category = task.get("category", "simple")
    if not isinstance(functions, list) or not all(_is_function(each) for each in functions):
        raise ValueError("a task needs 'functions': objects with a name and parameters")
    if not isinstance(accepted, list) or not all(_is_accepted(each) for each in accepted):
        raise ValueError("a task needs 'accepted': a list of {function: {parameter: [values]}}")
    if not isinstance(category, str):
        raise ValueError("the category of a task is text")
    names = {str(each["name"]) for each in functions}
    for each in accepted:
        if unknown := each.keys() - names:
            raise ValueError(f"{sorted(unknown)[0]!r} is accepted, and is none of the functions")
    return functions, accepted, category


def _is_function(value: Any) -> bool:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return False
    parameters = value.get("parameters")
    if not isinstance(parameters, Mapping):
        return False
    properties = parameters.get("properties", {})
    return isinstance(properties, Mapping) and all(map(_is_typed, properties.values()))


def _is_typed(schema: Any) -> bool:
    if not isinstance(schema, Mapping) or schema.get("type") not in KNOWN_TYPES:
        return False
    return "items" not in schema or _is_typed(schema["items"])


def _is_accepted(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and len(value) == 1
        and all(
            isinstance(arguments, Mapping) and all(isinstance(values, list) for values in arguments.values())
            for arguments in value.values()
        )
    )


def _schemas(functions: Sequence[Mapping[str, Any]]) -> Schemas:
    """Return the functions' parameters with the names that JSON Schema has for types."""
    return {
        str(function["name"]): {
            **function["parameters"],
            "properties": {
                name: {**schema, "type": _JSON_TYPES.get(schema["type"], schema["type"])}
                for name, schema in function["parameters"].get("properties", {}).items()
            },
        }
        for function in functions
    }
