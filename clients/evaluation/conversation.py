"""A conversation between a model and an environment: replies become actions, observations become messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollgym.clients.evaluation.chat import Reply
from rollgym.clients.protocol.tool_calls import (
    ToolCall,
    ToolDeclaration,
    answer_text,
    call_format_of,
    declared_tools,
    other_messages,
    tool_results,
)
from rollgym.clients.replies.formats.calls import UnwritableCallError, parse_arguments
from rollgym.clients.replies.formats.table import written_calls
from rollgym.clients.replies.json_values import CallFault


class Conversation:
    """The messages of one episode.

    Args:
        observation: The first observation.
        info: The `info` of the reset: its instruction, and its tools if the environment has any.
        system: A system message that comes first; none if empty.

    Attributes:
        messages: As a chat API takes them.
        tools: The declared tools; empty if it is played by text alone.
    """

    def __init__(self, observation: str, info: Mapping[str, Any], system: str = "") -> None:
        self.messages: list[dict[str, Any]] = []
        self.tools: list[ToolDeclaration] = declared_tools(info)
        self._call_format = call_format_of(info)
        self._reply = Reply()
        if system:
            self.messages.append({"role": "system", "content": system})
        # If the API offers the tools, instructions for calls as text would only mislead.
        told = info.get("rules", info.get("instruction")) if self.tools else info.get("instruction")
        opening = [str(told)] if told else []
        self.messages.append({"role": "user", "content": "\n\n".join([*opening, observation])})

    def hear(self, reply: Reply) -> str | None:
        """Add a reply of the model, and return the action that it stands for.

        Returns:
            The action; None if the arguments of a call cannot be read, in which case the model gets an error message.
        """
        self._reply = reply
        self.messages.append(reply.as_message())
        if not reply.calls:
            return reply.content
        calls = []
        for call in reply.calls:
            try:
                arguments = parse_arguments(call.arguments or "{}", strict=False)
            except CallFault as fault:
                self._answer_calls([f"error: the arguments are not a JSON object: {fault}. Nothing was run."])
                return None
            calls.append(ToolCall(call.name, arguments, call.call_id))
        schemas = {tool.name: tool.parameters for tool in self.tools}
        try:
            return written_calls(self._call_format, calls, reply.content, schemas)
        except UnwritableCallError as error:
            self._answer_calls([f"error: {error}. Nothing was run."])
            return None

    def observe(self, observation: str, info: Mapping[str, Any]) -> None:
        """Add the environment's answer to the last action."""
        if not self._reply.calls:
            self.messages.append({"role": "user", "content": answer_text(observation, info)})
            return
        results = tool_results(info)
        if len(results) != len(self._reply.calls):
            self._answer_calls([answer_text(observation, info)])
            return
        self._answer_calls(results)
        if others := other_messages(info):
            self.messages.append({"role": "user", "content": "\n".join(others)})

    def _answer_calls(self, results: list[str]) -> None:
        """Answer each call; those that have no result of their own were not run."""
        for index, call in enumerate(self._reply.calls):
            content = results[index] if index < len(results) else "not run"
            self.messages.append({"role": "tool", "tool_call_id": call.call_id, "content": content})
