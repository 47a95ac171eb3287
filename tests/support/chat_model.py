"""Answers of a chat API's models, for `JudgeDouble`: one that solves FrozenLake, one that calls tools, and failures."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

Answer = tuple[int, dict[str, str], bytes]
_MOVES = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}


def said(content: Any = None, finish_reason: str = "stop", usage: Any = None, **message: Any) -> Answer:
    """An answer of the API with one choice."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": content, **message},
        "finish_reason": finish_reason,
    }
    usage = {"prompt_tokens": 10, "completion_tokens": 2} if usage is None else usage
    return 200, {}, json.dumps({"choices": [choice], "usage": usage}).encode()


def called(name: str, arguments: Mapping[str, Any] | str, call_id: str = "call-1") -> Answer:
    """An answer that calls a tool."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}
    return said(None, "tool_calls", tool_calls=[call])


def refused(status: int, message: str, **headers: str) -> Answer:
    """An answer that is an error, as OpenAI has it."""
    return status, headers, json.dumps({"error": {"message": message}}).encode()


def walks_to_the_goal(request: Mapping[str, Any]) -> Answer:
    """Solves FrozenLake from the board in the last message."""
    return said(f"<answer>{_first_move(str(request['messages'][-1]['content']))}</answer>")


def one_after_another(
    *answers: Answer | Callable[[dict[str, Any]], Answer],
) -> Callable[[dict[str, Any]], Answer]:
    """Gives one answer to each request; the last one again and again."""
    waiting = deque(answers)

    def answer(request: dict[str, Any]) -> Answer:
        each = waiting.popleft() if len(waiting) > 1 else waiting[0]
        return each(request) if callable(each) else each

    return answer


def _first_move(text: str) -> str:
    rows = [line for line in text.split("\n") if re.fullmatch("[P_OG]+", line)]
    cells = {(row, column): cell for row, line in enumerate(rows) for column, cell in enumerate(line)}
    start = next(place for place, cell in cells.items() if cell == "P")
    ways = deque([(start, "")])
    seen = {start}
    while ways:
        (row, column), first = ways.popleft()
        if cells[row, column] == "G":
            return first
        for name, (down, right) in _MOVES.items():
            place = row + down, column + right
            if cells.get(place, "O") != "O" and place not in seen:
                seen.add(place)
                ways.append((place, first or name))
    raise AssertionError("there is no way to the goal")
