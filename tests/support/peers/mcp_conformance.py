"""An environment with the tools that the conformance suite of the Model Context Protocol calls by name."""

from collections.abc import Mapping, Sequence
from typing import Any

from rollgym.envs.tools.base import ToolEnv, TurnResult
from rollgym.envs.tools.tool import Tool, Toolbox, ToolError, tool_parameters

# A schema with what a server might lose on its way.
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {"name": {"type": "string"}, "address": {"$ref": "#/$defs/address"}},
    "additionalProperties": False,
}


def fail() -> str:
    raise ToolError("it always fails")


class McpConformance(ToolEnv):
    """Its tools return text, fail, or have a schema with references."""

    metadata = {"description": "Call the tools of a test suite.", "max_episode_steps": 8}

    def __init__(self, *, render_mode: str | None = None) -> None:
        tools: Sequence[Tool] = (
            Tool("test_simple_text", "Say something.", tool_parameters(), lambda: "A text."),
            Tool("test_error_handling", "Fail.", tool_parameters(), fail),
            Tool("json_schema_2020_12_tool", "Take an address.", SCHEMA, lambda **address: str(address)),
        )
        super().__init__(Toolbox(tools), max_calls_per_turn=1, max_episode_steps=8, render_mode=render_mode)

    def start_episode(self, options: Mapping[str, Any]) -> str:
        return "Call the tools."

    def on_message(self, text: str) -> TurnResult:
        return TurnResult("Over.", terminated=True, success=True)

    def describe_rules(self) -> str:
        return "There is nothing to be solved."
