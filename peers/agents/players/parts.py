"""What the players share: the question, and how a player says what became of each part of its episode."""

import asyncio
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

NAME = sys.argv[1]
"""Who plays: some programs play with several libraries."""
QUESTION = "Add 1 and 2."
INSTRUCTIONS = "You add numbers with the tool."
BASE_URL = os.environ["OPENAI_BASE_URL"]
ANTHROPIC_URL = os.environ["ANTHROPIC_BASE_URL"]
KEY = "any"
MODEL = "policy"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
"""Of what `add` takes, for libraries that make none of a function."""


class Total(BaseModel):
    """The sum."""

    total: int


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    print(f"add({a}, {b})", file=sys.stderr)
    return a + b


def play(**parts: Callable[[], Any]) -> None:
    """Play the parts in turn; one line of JSON each: what the library returned, or how it failed."""
    # One loop for all: libraries keep connections, which belong to the loop that made them.
    with asyncio.Runner() as runner:
        for name, part in parts.items():
            try:
                said = part()
                if inspect.isawaitable(said):
                    said = runner.run(_awaited(said))
                if "3" not in str(said):
                    # Some libraries give the words of a refusal as the reply.
                    raise ValueError(f"this is not the sum: {said}")
                line = {"part": name, "said": str(said)[:200]}
            except Exception as error:  # noqa: BLE001 - a library that fails is a line of the result
                traceback.print_exc()
                line = {"part": name, "error": f"{type(error).__name__}: {error}"[:400]}
            # Libraries print what they like: the line is found by what stands before it.
            print(f"\nPART {json.dumps(line)}", flush=True)


async def _awaited(value: Any) -> Any:
    return await value


async def joined(stream: Any, text: Callable[[Any], Any] = str) -> str:
    """The text of a stream's parts."""
    return "".join([str(text(each) or "") async for each in stream])
