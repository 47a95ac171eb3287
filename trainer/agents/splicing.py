"""Prompts of conversations that agents keep: what the policy sampled stands in them as the ids that it sampled.

An agent sends its whole conversation with every request, as text. Each assistant's message that equals one that was
handed out before stands for ids that are known, so it is rendered as a mark, and the ids are put in the mark's place;
all other text is tokenised piece by piece. Nothing that was sampled is ever tokenised again. So a conversation that
goes on renders to the stored ids and a tail, and one that was edited to other ids, from the edited place on.

A template may rewrite the past: most that know thinking drop that of earlier turns. Marks show that, too: where the
thinking's mark is gone, what is left of the reply stands as text, as the template wants it.
"""

import hashlib
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from trainer.agents.calls import Message, parsed_arguments
from trainer.agents.errors import ApiError
from trainer.agents.replies import Reply
from trainer.core.errors import ConfigError
from trainer.rollout.chat_template import Tool
from trainer.rollout.rendering import ChatRenderer

_OPENING = "<think>"
_KEPT_CHARACTERS = 1 << 22
"""Characters whose ids are kept: some hundred bytes each at the most."""
_NUMBER = re.compile(r"(\d+)z")


@dataclass(frozen=True, slots=True)
class SampledReply:
    """A reply that was handed to the agent.

    Attributes:
        token_ids: What was sampled.
        text: The same as text, with the marks of its family and without the closing of the turn.
        reply: What the agent was given.
        call_ids: Ids of its calls of tools.
    """

    token_ids: tuple[int, ...]
    text: str
    reply: Reply
    call_ids: tuple[str, ...] = ()

    @property
    def spoken(self) -> str:
        """What it says behind its thinking, calls of tools included."""
        return (
            self.text.rpartition("</think>")[2].lstrip("\n")
            if self.reply.reasoning is not None
            else self.text
        )


class ReplyBook:
    """The replies of one episode, found again in the conversations that the agent sends."""

    def __init__(self) -> None:
        self._by_history: dict[bytes, list[SampledReply]] = {}
        self._by_message: dict[bytes, list[SampledReply]] = {}

    def note(self, messages: Sequence[Message], tools: Sequence[Tool], sampled: SampledReply) -> None:
        """Remember a reply, and the conversation that it ended."""
        message = message_of(sampled)
        history = _histories([*messages, message], tools)[-1]
        self._by_history.setdefault(history, []).append(sampled)
        self._by_message.setdefault(_digest(message), []).append(sampled)

    def found(self, messages: Sequence[Message], tools: Sequence[Tool]) -> dict[int, SampledReply]:
        """Return which messages are replies that were handed out, by their places.

        A reply is looked for behind the very conversation that led to it, and failing that by what it says alone.
        """
        found = {}
        if self._by_history:
            for place, history in enumerate(_histories(messages, tools)):
                message = messages[place]
                if message["role"] != "assistant":
                    continue
                sampled = _meant(message, self._by_history.get(history, ()))
                sampled = sampled or _meant(message, self._by_message.get(_digest(message), ()))
                if sampled is not None:
                    found[place] = sampled
        return found


def message_of(sampled: SampledReply) -> Message:
    """Return a reply as the message that it is in a conversation."""
    message: Message = {"role": "assistant", "content": sampled.reply.content}
    if sampled.reply.reasoning:
        message["reasoning_content"] = sampled.reply.reasoning
    if sampled.reply.calls:
        message["tool_calls"] = [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": parsed_arguments(call.arguments)},
            }
            for call, call_id in zip(sampled.reply.calls, sampled.call_ids, strict=True)
        ]
    return message


def _meant(message: Message, candidates: Sequence[SampledReply]) -> SampledReply | None:
    """Choose among replies that say the same: by the ids of their calls, and the last one where nothing tells."""
    thought = message.get("reasoning_content")
    fitting = [each for each in candidates if thought is None or thought == each.reply.reasoning]
    ids = tuple(str(call["id"]) for call in message.get("tool_calls", ()))
    return next(
        (each for each in reversed(fitting) if each.call_ids == ids), fitting[-1] if fitting else None
    )


def _plain(message: Message) -> Any:
    """What two messages must have in common to be one: thinking may be left out, and ids may be given anew."""
    calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
    ]
    return [message["role"], message["content"], calls]


def _packed(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    except (orjson.JSONEncodeError, RecursionError) as error:
        raise ApiError(
            400, f"the conversation cannot be written as JSON: {error}", "invalid_value"
        ) from error


def _digest(message: Message) -> bytes:
    return hashlib.blake2b(_packed(_plain(message)), digest_size=16).digest()


def _histories(messages: Sequence[Message], tools: Sequence[Tool]) -> list[bytes]:
    """Return a digest of the conversation up to and with each message."""
    running = hashlib.blake2b(_packed(list(tools)), digest_size=16)
    digests = []
    for message in messages:
        running.update(_packed(_plain(message)))
        digests.append(running.digest())
    return digests


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the policy reads.

    Attributes:
        ids: As ids.
        thinks: Whether it ends with the opening of thinking, so that the reply begins within it.
    """

    ids: list[int]
    thinks: bool


class _Pieces:
    """Ids of long pieces of conversations that go on, those that were not used for longest forgotten first.

    Args:
        tokenize: Makes the ids of a text.
    """

    def __init__(self, tokenize: Callable[[str], list[int]]) -> None:
        self._tokenize = tokenize
        self._ids: OrderedDict[str, list[int]] = OrderedDict()
        self._size = 0
        # Large conversations are rendered in threads.
        self._lock = threading.Lock()

    def ids(self, text: str) -> list[int]:
        """Return the ids of a piece."""
        with self._lock:
            found = self._ids.get(text)
            if found is not None:
                self._ids.move_to_end(text)
                return found
        ids = self._tokenize(text)
        with self._lock:
            if text not in self._ids and len(text) <= _KEPT_CHARACTERS:
                self._ids[text] = ids
                self._size += len(text)
            while self._size > _KEPT_CHARACTERS:
                self._size -= len(self._ids.popitem(last=False)[0])
        return ids


class SplicingRenderer:
    """Renders conversations with sampled ids in them.

    Args:
        renderer: The policy's chat template.
    """

    def __init__(self, renderer: ChatRenderer) -> None:
        self.renderer = renderer
        self._pieces_of = _Pieces(renderer.ids_of)
        # No conversation holds it by chance, and nobody learns it.
        self._mark = f"x{secrets.token_hex(12)}"

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool], sampled: Mapping[int, SampledReply]
    ) -> Prompt:
        """Return the prompt of a conversation.

        Args:
            messages: The conversation.
            tools: Declarations that the template writes into it.
            sampled: Which messages are replies that were sampled, by place.

        Raises:
            ApiError: If the template refuses it.
        """
        try:
            text = self._text(messages, tools, sampled)
            pieces = self._pieces(text, sampled)
        except ConfigError:
            # Some templates want calls of tools as such, in the form that they write themselves.
            pieces = [self._text(messages, tools, {})]
        end = pieces[-1]
        return Prompt(self._ids(pieces), isinstance(end, str) and end.rstrip().endswith(_OPENING))

    def _text(
        self, messages: Sequence[Message], tools: Sequence[Tool], sampled: Mapping[int, SampledReply]
    ) -> str:
        written = [
            self._marked(place, sampled[place]) if place in sampled else message
            for place, message in enumerate(messages)
        ]
        try:
            return self.renderer.template.text(written, generation_prompt=True, tools=tools)
        except ConfigError as error:
            if sampled:
                raise
            raise ApiError(400, str(error), "template_error", "messages") from error
        except RecursionError as error:
            raise ApiError(400, "the conversation is nested too deep", "invalid_value", "messages") from error

    def _marked(self, place: int, sampled: SampledReply) -> Message:
        content = f"{self._mark}c{place}z"
        if sampled.reply.reasoning is not None:
            content = f"{_OPENING}\n{self._mark}t{place}z\n</think>\n\n{content}"
        return {"role": "assistant", "content": content}

    def _pieces(self, text: str, sampled: Mapping[int, SampledReply]) -> list[str | SampledReply]:
        """Cut a rendered conversation at its marks."""
        before, *parts = text.split(self._mark)
        pieces: list[str | SampledReply] = []
        kept = -1
        for part in parts:
            found = _NUMBER.match(part, 1)
            assert found is not None
            place, behind = int(found[1]), part[found.end() :]
            reply = sampled[place]
            if part[0] == "t":
                if behind.strip() == "</think>":
                    kept = place
                    before = _before_thinking(before, reply)
                else:
                    before += str(reply.reply.reasoning) + behind
            elif reply.reply.reasoning is None or kept == place:
                pieces += [before, reply]
                before = behind
            else:
                before += reply.spoken + behind
        return [*pieces, before]

    def _ids(self, pieces: Sequence[str | SampledReply]) -> list[int]:
        ids: list[int] = []
        closed = False
        for piece in pieces:
            if isinstance(piece, SampledReply):
                ids += piece.token_ids
                closed = ids[-1:] == [self.renderer.end_of_turn_id]
            else:
                tokens = self._pieces_of.ids(piece)
                # The policy has closed its turn itself.
                ids += tokens[1:] if closed and tokens[:1] == [self.renderer.end_of_turn_id] else tokens
                closed = False
        return ids


def _before_thinking(text: str, sampled: SampledReply) -> str:
    """Return what stands before a reply that begins with its thinking; the prompt may have opened that."""
    if not sampled.text.lstrip().startswith(_OPENING):
        return text
    plain = text.rstrip()
    return plain.removesuffix(_OPENING) if plain.endswith(_OPENING) else text
