"""Selects the parts of an episode for the next prompt: named policies over messages, no tokens yet.

A policy is a function `(history, observation) -> messages`. If the messages of this turn continue those of the last
one, the prompt continues the stored tokens; if they do not, the turn opens a new segment.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollgym.clients.protocol.arrays import DecodeError, MediaBytes
from rollgym.trainer.config.rollout import (
    SUMMARY_REQUEST,
    SUMMARY_TOKENS,
    ExampleMessage,
    PromptSettings,
    read_examples,
)
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.plugins import Plugin, load_plugin
from rollgym.trainer.records.images import Picture, is_picture

_LAST_TURNS = 3
Message = Mapping[str, Any]
"""A chat message: `role`, `content`, and further keys of the chat template."""


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


@dataclass(frozen=True, slots=True)
class Compaction:
    """When and how a policy is asked to summarise its history.

    Attributes:
        above: Tokens of a prompt above which a summary comes first.
        tokens: Longest summary.
        request: The text of the request.
    """

    above: int
    tokens: int
    request: str

    def opening(self, first: Sequence[Message], summary: str) -> list[Message]:
        """Return the replacement of the history: the first observation and the summary.

        One without a word stands for nothing: then only the first observation is left.
        """
        said: list[Message] = [{"role": "assistant", "content": summary}] if summary.strip() else []
        return [*first, *said]


def compaction(settings: PromptSettings) -> Compaction | None:
    """Return in what way a policy sums up its history, if it does."""
    if settings.compact_above is None:
        return None
    tokens, request = settings.summary_tokens or SUMMARY_TOKENS, settings.summary_request or SUMMARY_REQUEST
    return Compaction(settings.compact_above, tokens, request)


def context_policy(settings: PromptSettings) -> ContextPolicy:
    """Return the policy that `settings` name."""
    if settings.custom_context is not None:
        return _checked_policy(load_plugin(settings.custom_context, "prompt.custom_context"))
    match settings.context:
        case "full_history" | "compaction":
            return full_history
        case "single_turn":
            return last_turns(1)
        case "last_turns":
            return last_turns(settings.turns or _LAST_TURNS)


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
    """Return what the environment shows as messages: `info["messages"]`, or the observation as one user message.

    A picture is an array of bytes with height, width and three colours, or the bytes of a PNG, JPEG or WebP file. As an
    observation it stands before the text in `info["caption"]`, if there is one; in messages it is a part of the
    content, `{"type": "image", "image": ...}`.

    Raises:
        DecodeError: If its messages or a picture are invalid.
    """
    messages = info.get("messages")
    if messages:
        if not isinstance(messages, list | tuple) or not all(map(_is_message, messages)):
            raise DecodeError(
                "the environment's info['messages'] must be a list of messages with role and content"
            )
        return tuple(_with_pictures(message) for message in messages)
    if (picture := _picture(observation)) is not None:
        caption = info.get("caption")
        parts: list[dict[str, Any]] = [{"type": "image", "image": picture}]
        return (
            {
                "role": "user",
                "content": [*parts, {"type": "text", "text": str(caption)}] if caption else parts,
            },
        )
    return ({"role": "user", "content": observation if isinstance(observation, str) else str(observation)},)


def _with_pictures(message: Message) -> Message:
    """Return a message whose pictures are ones that compare and can be read."""
    content = message.get("content")
    if not isinstance(content, list) or not any(map(_is_image_part, content)):
        return message
    parts = [dict(part) | {"image": _required(part)} if _is_image_part(part) else part for part in content]
    return dict(message) | {"content": parts}


def _is_image_part(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def _required(part: Mapping[str, Any]) -> Picture:
    picture = _picture(part.get("image"))
    if picture is None:
        raise DecodeError(
            "an image in the environment's info['messages'] must be an array of uint8 with height, width and three "
            "colours, or the bytes of a PNG, JPEG or WebP file"
        )
    return picture


def _picture(value: object) -> Picture | None:
    """Return the picture that a value is, if it is one."""
    if isinstance(value, Picture):
        return value
    if isinstance(value, MediaBytes) and value.media_type.startswith("image/"):
        try:
            return Picture.from_bytes(value)
        except ValueError as error:
            raise DecodeError(f"an image of the environment's is {error}") from error
    return Picture(value) if isinstance(value, np.ndarray) and is_picture(value) else None


def pictures_of(messages: Sequence[Message]) -> list[Picture]:
    """Return the pictures of a conversation, in order."""
    parts = [
        part
        for message in messages
        if isinstance(content := message.get("content"), list)
        for part in content
    ]
    return [part["image"] for part in parts if _is_image_part(part) and isinstance(part["image"], Picture)]


def example_messages(settings: PromptSettings) -> list[Message]:
    """Return the worked turns that settings name, as a chat template takes them.

    Raises:
        ConfigError: If their file cannot be read, or they are not whole turns.
    """
    return [_as_message(each) for each in read_examples(settings.examples, settings.instruction)]


def _as_message(example: ExampleMessage) -> Message:
    optional = {
        "tool_calls": example.tool_calls,
        "tool_call_id": example.tool_call_id,
        "name": example.name,
    }
    message: dict[str, Any] = {"role": example.role, "content": example.content}
    return message | {key: value for key, value in optional.items() if value is not None}


def with_examples(messages: list[Message], examples: Sequence[Message]) -> list[Message]:
    """Insert worked turns at the start of a conversation, after its system message if it has one.

    Raises:
        ConfigError: If both have a system message.
    """
    if not examples or not messages or messages[0]["role"] != "system":
        return [*examples, *messages]
    if examples[0]["role"] == "system":
        raise ConfigError(
            "prompt.examples begins with a system message, and so do the messages of the environment: leave it out of "
            "the examples"
        )
    return [messages[0], *examples, *messages[1:]]


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
