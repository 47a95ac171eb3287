"""FunctionCalls-v0: which functions a request needs, with which arguments; graded as BFCL does."""

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from rollgym.clients.protocol.tool_calls import DEFAULT_CALL_FORMAT, ToolCall
from rollgym.clients.replies.formats.calls import Schemas, read_calls
from rollgym.clients.replies.formats.table import FORMATS, format_named
from rollgym.clients.replies.marks import tagged
from rollgym.envs.core.kwargs import OneOf, RenderMode, SomeOf
from rollgym.envs.core.splits import TaskSplit
from rollgym.envs.tools.bfcl import KNOWN_TYPES, grade_calls
from rollgym.envs.verifiers.base import GeneratingVerifier, Verdict

CATEGORIES = ("simple", "multiple", "parallel", "irrelevance")
_JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


class FunctionCallsEnv(GeneratingVerifier):
    """One turn of function calling: the calls of a response are compared with those that are accepted.

    Tasks are generated, or are rows of BFCL's: `question`, `functions`, `accepted` (each call with the values that its
    arguments may have) and `category`.

    Raises:
        ValueError: If an argument makes no sense.
    """

    metadata: dict[str, Any] = GeneratingVerifier.metadata | {
        "description": "Call the functions that a request needs; graded by the rules of BFCL.",
        "observation": "A request and the functions that are there.",
        "actions": "Calls in the `call_format`, or `<answer>none</answer>` where none fits.",
        "reward": "1 where the calls are accepted, else 0.",
        "example_reply": "{answer}",
        "baselines": {"random": 0, "constant action": 0},
    }
    tries = 1_000

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
        ] = DEFAULT_CALL_FORMAT,
        split: TaskSplit = None,
        render_mode: RenderMode = None,
    ) -> None:
        super().__init__(split=split, render_mode=render_mode)
        self._categories = tuple(categories)
        self._form = format_named(call_format)

    def generate_task(self) -> dict[str, Any]:
        """Draw a request."""
        category = self._categories[int(self.np_random.integers(len(self._categories)))]
        question, functions, calls = _draw_requests(self.np_random, category)
        return {
            "question": question,
            "functions": [_FUNCTIONS[name] for name in functions],
            "accepted": [
                {call.name: {name: [value] for name, value in call.arguments.items()}} for call in calls
            ],
            "category": category,
            "answer": self._form.write(calls) if calls else "<answer>none</answer>",
        }

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
            # An empty response must not be rewarded.
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


_CITIES = ("Oslo", "Lima", "Kyoto", "Accra", "Quito", "Turin", "Hanoi", "Perth")
_NAMES = ("Ada", "Bruno", "Clara", "Dario", "Edda", "Felix")
_CURRENCIES = ("EUR", "USD", "JPY", "GBP", "CHF")
_LANGUAGES = ("French", "Korean", "Polish", "Swahili")
_WORDS = ("good morning", "the bill, please", "where is the station", "thank you")
_TASKS = ("water the plants", "call the dentist", "pay the rent", "pack the bags")


def _function(
    name: str, description: str, required: Sequence[str], /, **properties: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "description": description,
        "parameters": {"type": "dict", "properties": dict(properties), "required": list(required)},
    }


def _text(description: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "description": description, **more}


_FUNCTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        function["name"]: function
        for function in (
            _function(
                "weather.forecast",
                "Get the weather forecast of a city.",
                ["city", "days"],
                city=_text("Name of the city."),
                days={"type": "integer", "description": "Number of days."},
                unit=_text("Unit of temperatures.", enum=["celsius", "fahrenheit"]),
            ),
            _function(
                "currency.convert",
                "Convert an amount of money.",
                ["amount", "source", "target"],
                amount={"type": "float", "description": "How much."},
                source=_text("Three-letter code of the currency it is in."),
                target=_text("Three-letter code of the currency it is wanted in."),
            ),
            _function(
                "table.book",
                "Book a table at a restaurant.",
                ["name", "people", "hour"],
                name=_text("In whose name."),
                people={"type": "integer", "description": "For how many people."},
                hour={"type": "integer", "description": "Hour of the day, from 0 to 23."},
                outside={"type": "boolean", "description": "Whether to sit outside."},
            ),
            _function(
                "translate",
                "Translate a text.",
                ["text", "language"],
                text=_text("What is translated."),
                language=_text("English name of the language."),
            ),
            _function(
                "reminder.add",
                "Be reminded of something.",
                ["task", "minutes"],
                task=_text("Of what."),
                minutes={"type": "integer", "description": "In how many minutes."},
            ),
            _function(
                "statistics.mean",
                "Compute the mean of numbers.",
                ["numbers"],
                numbers={"type": "array", "items": {"type": "integer"}, "description": "The numbers."},
            ),
        )
    }
)


def _draw_requests(generator: np.random.Generator, category: str) -> tuple[str, list[str], list[ToolCall]]:
    """Draw a request of a category.

    Returns:
        What is asked, the names of the functions that are there, and the calls that it means.
    """
    names = [list(_REQUESTS)[int(each)] for each in generator.permutation(len(_REQUESTS))]
    if category == "irrelevance":
        question, _ = _REQUESTS[names[0]](generator)
        return question, names[1 : 1 + int(generator.integers(1, 4))], []
    wanted = names[:1]
    if category == "parallel":
        # The same function may be meant twice.
        wanted = [names[int(each)] for each in generator.integers(0, 3, int(generator.integers(2, 4)))]
    there = sorted({*wanted, *([] if category == "simple" else names[:3])})
    drawn = [_REQUESTS[name](generator) for name in wanted]
    calls = [ToolCall(name, arguments) for name, (_, arguments) in zip(wanted, drawn, strict=True)]
    return " Also: ".join(question for question, _ in drawn), there, calls


def _weather(generator: np.random.Generator) -> tuple[str, dict[str, Any]]:
    city, days = _one(generator, _CITIES), int(generator.integers(2, 10))
    if generator.random() < 0.5:
        return f"What will the weather in {city} be over the next {days} days?", {"city": city, "days": days}
    unit = _one(generator, ("celsius", "fahrenheit"))
    question = f"Give me the forecast for {city} for {days} days, in {unit}."
    return question, {"city": city, "days": days, "unit": unit}


def _convert(generator: np.random.Generator) -> tuple[str, dict[str, Any]]:
    source, target = (_CURRENCIES[int(each)] for each in generator.permutation(len(_CURRENCIES))[:2])
    amount = int(generator.integers(5, 9_000)) / 4
    return f"How much is {amount} {source} in {target}?", {
        "amount": amount,
        "source": source,
        "target": target,
    }


def _book(generator: np.random.Generator) -> tuple[str, dict[str, Any]]:
    name, people, hour = (
        _one(generator, _NAMES),
        int(generator.integers(2, 9)),
        int(generator.integers(12, 22)),
    )
    question = f"Book a table for {people} at {hour}:00 in the name of {name}"
    arguments = {"name": name, "people": people, "hour": hour}
    if generator.random() < 0.5:
        return f"{question}.", arguments
    return f"{question}, outside if you can.", {**arguments, "outside": True}


def _translate(generator: np.random.Generator) -> tuple[str, dict[str, Any]]:
    text, language = _one(generator, _WORDS), _one(generator, _LANGUAGES)
    return f'How do I say "{text}" in {language}?', {"text": text, "language": language}


def _remind(generator: np.random.Generator) -> tuple[str, dict[str, Any]]:
    task, minutes = _one(generator, _TASKS), int(generator.integers(5, 200))
    return f"Remind me in {minutes} minutes to {task}.", {"task": task, "minutes": minutes}


def _mean(generator: np.random.Generator) -> tuple[str, dict[str, Any]]:
    numbers = [int(each) for each in generator.integers(1, 100, int(generator.integers(3, 7)))]
    return f"What is the mean of {', '.join(map(str, numbers))}?", {"numbers": numbers}


def _one(generator: np.random.Generator, choices: Sequence[str]) -> str:
    return choices[int(generator.integers(len(choices)))]


_REQUESTS: Mapping[str, Callable[[np.random.Generator], tuple[str, dict[str, Any]]]] = MappingProxyType(
    {
        "weather.forecast": _weather,
        "currency.convert": _convert,
        "table.book": _book,
        "translate": _translate,
        "reminder.add": _remind,
        "statistics.mean": _mean,
    }
)
