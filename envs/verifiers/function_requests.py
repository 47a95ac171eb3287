"""Requests in words, and the function calls that they mean."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from rollgym.clients.protocol.tool_calls import ToolCall

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


FUNCTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
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


def draw_requests(generator: np.random.Generator, category: str) -> tuple[str, list[str], list[ToolCall]]:
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
