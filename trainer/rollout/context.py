"""What of an episode goes into the next prompt: named policies over messages, no tokens yet.

A policy is a function `(history, observation) -> messages`. Where the messages of this turn continue those of the last
one, the prompt continues the stored tokens; where they do not, the turn opens a new segment.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clients.protocol.arrays import DecodeError
from trainer.config.prompt import PromptSettings
from trainer.core.plugins import Plugin, load_plugin

_LAST_TURNS = 3
Message = Mapping[str, Any]
"""A chat message: `role`, `content`, and whatever else the chat template reads."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One past turn: what the policy was shown and what it said."""

    observation: tuple[Message, ...]
    reply: str


ContextPolicy = Callable[[Sequence[Exchange], Sequence[Message]], list[Message]]


def full_history(history: Sequence[Exchange], observation: Sequence[Message]) -> list[Message]:
    """Show everything since the start of the episode."""
    messages: list[Message] = []
    for exchange in history:
        messages += exchange.observation
        messages.append({"role": "assistant", "content": exchange.reply})
    return [*messages, *observation]


def last_turns(count: int) -> ContextPolicy:
    """Show the last `count` turns, the current one included."""

    def policy(history: Sequence[Exchange], observation: Sequence[Message]) -> list[Message]:
        return full_history(history[max(0, len(history) - count + 1) :], observation)

    return policy


def context_policy(settings: PromptSettings) -> ContextPolicy:
    """Return the policy that `settings` name."""
    if settings.custom_context is not None:
        return _checked_policy(load_plugin(settings.custom_context, "prompt.custom_context"))
    if settings.context == "full_history":
        return full_history
    return last_turns(1 if settings.context == "single_turn" else settings.turns or _LAST_TURNS)


def _checked_policy(plugin: Plugin) -> ContextPolicy:
    def policy(history: Sequence[Exchange], observation: Sequence[Message]) -> list[Message]:
        messages = plugin(history, observation)
        if not isinstance(messages, list | tuple) or not messages or not all(map(_is_message, messages)):
            raise plugin.broken("must return a list of messages, each with a role and content")
        return list(messages)

    return policy


def _is_message(value: object) -> bool:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        return False
    # A message that only calls tools has no content.
    return isinstance(value.get("content"), str | list) or bool(value.get("tool_calls"))


def observation_messages(observation: Any, info: Mapping[str, Any]) -> tuple[Message, ...]:
    """Return what the environment shows as messages: `info["messages"]`, or the text as one user message.

    Raises:
        DecodeError: If its messages are none.
    """
    messages = info.get("messages")
    if messages:
        if not isinstance(messages, list | tuple) or not all(map(_is_message, messages)):
            raise DecodeError(
                "the environment's info['messages'] must be a list of messages with role and content"
            )
        return tuple(messages)
    return ({"role": "user", "content": observation if isinstance(observation, str) else str(observation)},)


def with_instruction(messages: list[Message], instruction: str | None, placement: str) -> list[Message]:
    """Put the environment's instruction in front: as a system message, or into the first user message."""
    if not instruction or placement == "none":
        return messages
    if placement == "system":
        return [{"role": "system", "content": instruction}, *messages]
    for position, message in enumerate(messages):
        if message["role"] == "user":
            changed = dict(message) | {"content": prefixed(instruction, message["content"])}
            return [*messages[:position], changed, *messages[position + 1 :]]
    return [{"role": "user", "content": instruction}, *messages]


def prefixed(text: str, content: Any) -> Any:
    """Return a message's content with a text before it, and an empty line between them."""
    if isinstance(content, list):
        return [{"type": "text", "text": text}, *content]
    return f"{text}\n\n{content}"
