"""What a policy says that uses whichever tool it is offered, to add 1 and 2."""

import json
import re
from typing import Any

_TOOLS = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)
_VALUES: dict[str, Any] = {"integer": 3, "number": 3, "boolean": True, "array": [], "object": {}}
# How DSPy's format of text names what it asks for.
_FIELDS = re.compile(r"\[\[ ## (\w+) ## \]\]")


def helpful(prompt: str) -> str:
    """A call of a tool that adds, then a call of a tool that takes the answer if there is one, else the answer."""
    last = prompt.rpartition("<|im_start|>assistant")[0].rpartition("<|im_start|>")[2]
    tools = _tools(prompt)
    if "[[ ## " in prompt:
        return _in_fields(last)
    adder = next((name for name in tools if "add" in name.lower()), None)
    # Some agents put words of their own behind the result.
    answered = "<tool_response>" in prompt or "Observation" in last
    if adder is not None and not answered:
        return _call(adder, {"a": 1, "b": 2})
    taker = next((name for name in tools if name != adder), None)
    if taker is not None:
        return _call(taker, _filled(tools[taker]))
    if '"total"' in prompt or "JSON" in last:
        return '{"total": 3}'
    return "The sum is 3."


def _tools(prompt: str) -> dict[str, dict[str, Any]]:
    found = _TOOLS.search(prompt)
    read = [json.loads(line) for line in found[1].splitlines()] if found else []
    return {each["function"]["name"]: each["function"].get("parameters") or {} for each in read}


def _filled(schema: dict[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties", {})
    return {name: _VALUES.get(of.get("type", "string"), "3") for name, of in properties.items()}


def _call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _in_fields(last: str) -> str:
    """A reply in DSPy's format: every field that the prompt asks for behind the words `Respond with`."""
    asked = dict.fromkeys(_FIELDS.findall(last.rpartition("Respond with")[2]))
    values = {"next_tool_name": "finish", "next_tool_args": "{}", "completed": ""}
    if "next_tool_name" in asked and "observation_0" not in last:
        values |= {"next_tool_name": "add", "next_tool_args": '{"a": 1, "b": 2}'}
    return "\n\n".join(f"[[ ## {name} ## ]]\n{values.get(name, '3')}" for name in asked)
