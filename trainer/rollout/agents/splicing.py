"""Prompts that continue what an agent was sent: what the policy sampled stands in them as the ids that it sampled.

An agent sends its whole conversation with every request, as text. Each assistant's message that equals one that was
handed out before stands for ids that are known, so it is rendered as a mark, and the ids are put in the mark's place;
all other text is tokenised piece by piece. Nothing that was sampled is ever tokenised again. So a continued
conversation renders to the stored ids and a tail, and an edited one renders to other ids from the edit on.

A template may rewrite the past: most that know thinking drop that of earlier turns. Marks show that, too: if the
mark of the thinking is gone, what is left of the reply stands as text, as the template wants it.

A client of completions sends a text that continues an earlier prompt and its reply. The longest such beginning
stands for ids that are known, and the rest alone is tokenised.
"""

import hashlib
import json
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from rollgym.clients.replies.thinking import (
    CLOSING,
    OPENING,
    opens_thinking,
    opens_with_thinking,
    split_thinking,
)
from rollgym.trainer.core.errors import ConfigError, UnplayableTaskError
from rollgym.trainer.rollout.agents.calls import Message, parsed_arguments
from rollgym.trainer.rollout.agents.errors import ApiError, invalid
from rollgym.trainer.rollout.agents.replies import ParsedReply
from rollgym.trainer.rollout.chat_template import Tool
from rollgym.trainer.rollout.prompts import ChatRenderer

_KEPT_CHARACTERS = 1 << 22
"""Characters whose ids are kept: some hundred bytes each at the most."""
_NUMBER = re.compile(r"(\d+)z")


@dataclass(frozen=True, slots=True)
class SampledReply:
    """A reply that was handed to the agent.

    Attributes:
        token_ids: The sampled ids.
        text: The same as text, with the marks of its family and without the closing of the turn.
        reply: The reply as the agent received it.
        call_ids: Ids of its calls of tools.
        place: Segment of the record that holds it, and the position at which it ends there.
    """

    token_ids: tuple[int, ...]
    text: str
    reply: ParsedReply
    call_ids: tuple[str, ...] = ()
    place: tuple[int, int] | None = None

    @property
    def spoken(self) -> str:
        """Return the text after the thinking, including tool calls."""
        return split_thinking(self.text, begun=self.reply.reasoning is not None)[1]


@dataclass(frozen=True, slots=True)
class Found:
    """The replies in a conversation that were handed out before.

    Attributes:
        replies: By their indices in it.
        latest: Place of the last one that follows the same conversation as originally.
    """

    replies: Mapping[int, SampledReply]
    latest: int | None = None


NOTHING = Found({})


@dataclass(frozen=True, slots=True)
class AgentConversation:
    """An agent's conversation, with the digests that identify it.

    Attributes:
        messages: The messages.
        tools: Declarations that the template writes into it.
        histories: A digest of the conversation up to and with each message.
        size: Bytes of all of it.
        digest: Takes further messages.
    """

    messages: Sequence[Message]
    tools: Sequence[Tool]
    histories: Sequence[bytes]
    size: int
    digest: "hashlib.blake2b"

    @classmethod
    def of(cls, messages: Sequence[Message], tools: Sequence[Tool]) -> "AgentConversation":
        """Compute its digests.

        Raises:
            ApiError: If it is nested too deep to be written as JSON.
        """
        declared = _packed(list(tools))
        running = hashlib.blake2b(declared, digest_size=16)
        histories, size = [], len(declared)
        for message in messages:
            packed = _packed(_plain(message))
            running.update(packed)
            histories.append(running.digest())
            size += len(packed) + len(message.get("reasoning_content") or "")
        return cls(messages, tools, histories, size, running)

    def answered(self, message: Message) -> bytes:
        """Return the digest of the conversation with one message more."""
        digest = self.digest.copy()
        digest.update(_packed(_plain(message)))
        return digest.digest()


class ReplyIndex:
    """The replies of one episode, found again in the conversations that the agent sends."""

    def __init__(self) -> None:
        self._by_history: dict[bytes, list[SampledReply]] = {}
        self._by_message: dict[bytes, list[SampledReply]] = {}

    def note(self, conversation: AgentConversation, sampled: SampledReply) -> None:
        """Remember a reply, and the conversation that it ended."""
        message = message_of(sampled)
        try:
            history, digest = conversation.answered(message), _digest(message)
        except ApiError:
            return  # arguments in a nest that no JSON holds: it is not found again, which costs a segment
        self._by_history.setdefault(history, []).append(sampled)
        self._by_message.setdefault(digest, []).append(sampled)

    def found(self, conversation: AgentConversation) -> Found:
        """Return which messages are replies that were handed out.

        A reply is searched for after the same conversation as originally, else by its text alone.
        """
        if not self._by_history:
            return NOTHING
        found, latest = {}, None
        for index, (message, history) in enumerate(
            zip(conversation.messages, conversation.histories, strict=True)
        ):
            if message["role"] != "assistant":
                continue
            sampled = _meant(message, self._by_history.get(history, ()))
            if sampled is not None:
                latest = index
            else:
                sampled = _meant(message, self._by_message.get(_digest(message), ()))
            if sampled is not None:
                found[index] = sampled
        return Found(found, latest)


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
    """Choose among replies that say the same: by the ids of their calls, and the last one if they do not decide."""
    thought = message.get("reasoning_content")
    fitting = [each for each in candidates if thought is None or thought == each.reply.reasoning]
    ids = tuple(str(call["id"]) for call in message.get("tool_calls", ()))
    return next(
        (each for each in reversed(fitting) if each.call_ids == ids), fitting[-1] if fitting else None
    )


def _plain(message: Message) -> Any:
    """Return the key by which two messages are the same: thinking may be left out, and ids may differ."""
    calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
    ]
    return [message["role"], message["content"], calls]


def _packed(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    except (orjson.JSONEncodeError, RecursionError):
        pass  # numbers beyond 64 bits, half a pair of surrogates, a nest that is deep and not too deep
    try:
        return json.dumps(value, sort_keys=True, default=str).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise ApiError(
            400, f"the conversation cannot be written as JSON: {error}", "invalid_value"
        ) from error


def _digest(message: Message) -> bytes:
    return hashlib.blake2b(_packed(_plain(message)), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class SplicedPrompt:
    """The policy's prompt.

    Attributes:
        ids: As ids.
        thinks: Whether it ends with the opening of thinking, so that the reply begins within it.
    """

    ids: list[int]
    thinks: bool


class _Pieces:
    """Caches the ids of long pieces of ongoing conversations; evicts the least recently used first.

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
        # No conversation contains it by chance, and it is never disclosed.
        self._mark = f"x{secrets.token_hex(12)}"

    def prompt(
        self, conversation: AgentConversation, found: Found = NOTHING, stored: Sequence[int] = ()
    ) -> SplicedPrompt:
        """Return the prompt of a conversation.

        Args:
            conversation: The conversation.
            found: The messages that are sampled replies.
            stored: Ids of the conversation up to and with the latest of those.

        Raises:
            ApiError: If the template refuses it.
        """
        messages, tools = conversation.messages, conversation.tools
        try:
            text = self._text(messages, tools, found.replies)
            pieces = self._pieces(text, found.replies)
        except ConfigError:
            # Some templates want calls of tools as such, in the form that they write themselves.
            text = self._text(messages, tools, {})
            tail = None
            if found.latest is not None and stored:
                tail = self._tail(messages, tools, text, found.latest, stored[-1])
            if tail is not None:
                return SplicedPrompt([*stored, *self._pieces_of.ids(tail)], opens_thinking(tail))
            pieces = [text]
        end = pieces[-1]
        return SplicedPrompt(self._ids(pieces), isinstance(end, str) and opens_thinking(end))

    def _tail(
        self, messages: Sequence[Message], tools: Sequence[Tool], text: str, latest: int, last_id: int
    ) -> str | None:
        """Return the template's text after a reply, if it renders everything before as it did originally.

        Args:
            messages: The conversation.
            tools: Declarations of tools.
            text: The conversation as the template writes it.
            latest: Place of the reply.
            last_id: Last id of the reply. If the policy closed its turn itself, that is not repeated.
        """
        template, closing = self.renderer.template, self.renderer.token_text(self.renderer.end_of_turn_id)
        try:
            asked = template.text(messages[:latest], generation_prompt=True, tools=tools)
            answered = template.text(messages[: latest + 1], generation_prompt=False, tools=tools)
        except ConfigError:
            return None
        reply = answered[len(asked) :]
        if not (answered.startswith(asked) and text.startswith(answered) and closing in reply):
            return None
        behind = reply.rpartition(closing)[2] + text[len(answered) :]
        return behind if last_id == self.renderer.end_of_turn_id else closing + behind

    def _text(
        self, messages: Sequence[Message], tools: Sequence[Tool], sampled: Mapping[int, SampledReply]
    ) -> str:
        written = [
            self._marked(index, sampled[index]) if index in sampled else message
            for index, message in enumerate(messages)
        ]
        try:
            return self.renderer.template.text(written, generation_prompt=True, tools=tools)
        except ConfigError as error:
            if sampled:
                raise
            raise ApiError(400, str(error), "template_error", "messages") from error
        except RecursionError as error:
            raise ApiError(400, "the conversation is nested too deep", "invalid_value", "messages") from error

    def _marked(self, index: int, sampled: SampledReply) -> Message:
        content = f"{self._mark}c{index}z"
        if sampled.reply.reasoning is not None:
            content = f"{OPENING}\n{self._mark}t{index}z\n{CLOSING}\n\n{content}"
        return {"role": "assistant", "content": content}

    def _pieces(self, text: str, sampled: Mapping[int, SampledReply]) -> list[str | SampledReply]:
        """Cut a rendered conversation at its marks."""
        before, *parts = text.split(self._mark)
        pieces: list[str | SampledReply] = []
        kept = -1
        for part in parts:
            found = _NUMBER.match(part, 1)
            assert found is not None
            index, behind = int(found[1]), part[found.end() :]
            reply = sampled[index]
            if part[0] == "t":
                if behind.strip() == CLOSING:
                    kept = index
                    before = _before_thinking(before, reply)
                else:
                    before += self.renderer.quote(str(reply.reply.reasoning)) + behind
            elif reply.reply.reasoning is None or kept == index:
                pieces += [before, reply]
                before = behind
            else:
                before += self._spoken(reply) + behind
        return [*pieces, before]

    def _spoken(self, sampled: SampledReply) -> str:
        """Return a reply's text after its thinking, as a piece of a rendered conversation."""
        if self.renderer.quote(sampled.spoken) == sampled.spoken:
            return sampled.spoken
        written = self.renderer.written(sampled.token_ids)
        return split_thinking(written, begun=sampled.reply.reasoning is not None)[1]

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
    if opens_with_thinking(sampled.text) is None:
        return text
    plain = text.rstrip()
    return plain.removesuffix(OPENING) if plain.endswith(OPENING) else text


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt without a chat template.

    Attributes:
        ids: As the policy reads it.
        text: As the agent sent it, or would read it.
    """

    ids: list[int]
    text: str


class KnownTexts:
    """The texts of one episode whose ids are known: prompts with their replies.

    Args:
        renderer: The policy's tokenizer.
    """

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._ids: OrderedDict[str, list[int]] = OrderedDict()
        self._size = 0

    def prompt(self, asked: str | Sequence[int], param: str = "prompt") -> TextPrompt:
        """Return what the policy reads.

        Raises:
            ApiError: If the model does not know one of its ids, or the prompt is empty.
        """
        if not isinstance(asked, str):
            ids = list(asked)
            if max(ids) >= self._renderer.vocabulary:
                raise invalid(f"{param}: the model knows ids below {self._renderer.vocabulary}", param)
            return TextPrompt(ids, self._renderer.text(ids))
        noted = dict(self._ids)  # large prompts are read in threads
        known = max((each for each in noted if asked.startswith(each)), key=len, default="")
        try:
            rest = self._renderer.ids_of(asked[len(known) :]) if len(known) < len(asked) else []
        except UnplayableTaskError as error:
            raise ApiError(400, str(error), "invalid_value", param) from error
        ids = noted[known] + rest if known else self._opened(rest)
        return TextPrompt(ids, asked)

    def note(self, prompt: TextPrompt, reply: Sequence[int]) -> None:
        """Remember a reply and its prompt, unless the reply ended by itself: clients do not continue such a reply."""
        if not reply or reply[-1] in self._renderer.special_ids or reply[-1] in self._renderer.stop_token_ids:
            return
        text = prompt.text + self._renderer.text(reply)
        self._size += len(text) - (len(text) if text in self._ids else 0)
        self._ids[text] = [*prompt.ids, *reply]
        while self._size > _KEPT_CHARACTERS:
            self._size -= len(self._ids.popitem(last=False)[0])

    def _opened(self, ids: list[int]) -> list[int]:
        opening = self._renderer.opening_ids
        return ids if ids[: len(opening)] == opening else opening + ids
