"""Conversations as training rows: ids as the policy will read and write them, with a mask of those to learn."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from rollgym.trainer.backends.base import TrainRow
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.rollout.rendering import ChatRenderer
from rollgym.trainer.tasks.examples import Conversation, Message

ASSISTANT = frozenset({"assistant"})


@dataclass(frozen=True, slots=True)
class _Piece:
    """A section of a rendered conversation."""

    text: str
    learnt: bool


def conversation_rows(
    renderer: ChatRenderer, conversation: Conversation, roles: Collection[str] = ASSISTANT
) -> list[TrainRow]:
    """Return the rows of a conversation: one in all, or one for each learnt message if the template rewrites the past.

    Ids of a learnt message are those of its text apart, as the policy samples them after its prompt, with the token
    that closes the turn at the end.

    Args:
        renderer: The policy's.
        conversation: The conversation to render.
        roles: Whose messages are learnt.

    Raises:
        ConfigError: If nothing in it is learnt, or the template does not show what is.
    """
    wanted = [
        number
        for number, message in enumerate(conversation.messages)
        if number >= conversation.learnt_from and message["role"] in roles and message.get("weight") != 0
    ]
    if not wanted:
        raise ConfigError(
            f"data set {conversation.place}: no message of {' or '.join(sorted(roles))} is there to be learnt"
        )
    if conversation.plain:
        return [_row(renderer, _plain_pieces(renderer, conversation, wanted))]
    renderer.template.note_unshown(conversation.messages, conversation.tools)
    texts = _texts(renderer, conversation, roles)
    if renderer.append_only and all(later.startswith(earlier) for earlier, later in pairwise(texts)):
        return [_row(renderer, _pieces(renderer, conversation, texts, wanted))]
    return [_row(renderer, _last_piece(renderer, conversation, number)) for number in wanted]


def reply_row(renderer: ChatRenderer, conversation: Conversation) -> TrainRow:
    """Return the one row of a conversation that ends with a reply to its prompt.

    Raises:
        ConfigError: If there is not one row.
    """
    rows = conversation_rows(renderer, conversation)
    if len(rows) != 1:
        raise ConfigError(
            f"data set {conversation.place}: the chat template rewrites earlier replies, so the answer has to be one "
            "message"
        )
    return rows[0]


def _texts(renderer: ChatRenderer, conversation: Conversation, roles: Collection[str]) -> list[str]:
    """Return the beginnings of a conversation as text, from the empty one to the whole."""
    template, messages = renderer.template, conversation.messages
    spoken = 0
    if "system" not in roles:  # some templates refuse a conversation before the user has said something
        spoken = next((index for index, each in enumerate(messages) if each["role"] == "user"), 0)
    return [""] * (spoken + 1) + [
        template.text(messages[:end], generation_prompt=False, tools=conversation.tools)
        for end in range(spoken + 1, len(messages) + 1)
    ]


def _pieces(
    renderer: ChatRenderer, conversation: Conversation, texts: Sequence[str], wanted: Collection[int]
) -> list[_Piece]:
    pieces: list[_Piece] = []
    for number, message in enumerate(conversation.messages):
        block = texts[number + 1][len(texts[number]) :]
        if number in wanted:
            pieces += _block_pieces(renderer, conversation, number, message, texts[number], block)
        else:
            pieces.append(_Piece(block, learnt=False))
    return pieces


def _plain_pieces(
    renderer: ChatRenderer, conversation: Conversation, wanted: Collection[int]
) -> list[_Piece]:
    """Return texts joined, between the tokenizer's own start and end of a text."""
    pieces = [
        _Piece(renderer.quote(str(message["content"])), learnt=number in wanted)
        for number, message in enumerate(conversation.messages)
    ]
    pieces[-1] = replace(pieces[-1], text=pieces[-1].text + renderer.token_text(renderer.end_of_text_id))
    opening = renderer.opening_ids
    return [*(_Piece(renderer.token_text(each), learnt=False) for each in opening), *pieces]


def _last_piece(renderer: ChatRenderer, conversation: Conversation, number: int) -> list[_Piece]:
    """Return the pieces of a conversation up to one message, as the template shows it at that moment."""
    template, messages, tools = renderer.template, conversation.messages, conversation.tools
    message = messages[number]
    whole = template.text(messages[: number + 1], generation_prompt=False, tools=tools)
    before = template.text(messages[:number], generation_prompt=False, tools=tools)
    if message["role"] == "assistant":
        asked = template.text(messages[:number], generation_prompt=True, tools=tools)
        if not whole.startswith(asked) and message["content"] and not message.get("tool_calls"):
            # The template's prompt differs from its later rendering: the answer to the prompt is learnt.
            closing = renderer.token_text(renderer.end_of_turn_id)
            return [
                _Piece(asked, learnt=False),
                _Piece(f"{renderer.quote(str(message['content']))}{closing}", learnt=True),
            ]
    if not whole.startswith(before):
        raise ConfigError(
            f"data set {conversation.place}: the chat template does not show message {number} behind those before it; "
            "set prompt.chat_template to one that does"
        )
    block = whole[len(before) :]
    return [
        _Piece(before, learnt=False),
        *_block_pieces(renderer, conversation, number, message, before, block),
    ]


def _block_pieces(
    renderer: ChatRenderer,
    conversation: Conversation,
    number: int,
    message: Message,
    before: str,
    block: str,
) -> list[_Piece]:
    """Split a message's rendering into its opening, the learnt part, and the rest."""
    start = 0
    if message["role"] == "assistant" and before:
        asked = renderer.template.text(
            conversation.messages[:number], generation_prompt=True, tools=conversation.tools
        )
        if asked.startswith(before) and (before + block).startswith(asked):
            start = len(asked) - len(before)
    content = renderer.quote(str(message["content"]))
    if not start and content:
        shown = content if content in block else content.strip()
        start = block.find(shown)
        if not shown or start < 0:
            raise ConfigError(
                f"data set {conversation.place}: the chat template does not show the content of message {number}: it "
                "cannot be learnt with this template (prompt.chat_template)"
            )
    closing = renderer.token_text(renderer.end_of_turn_id)
    end = block.rfind(closing)
    end = len(block) if end < start else end + len(closing)
    return [
        _Piece(block[:start], learnt=False),
        _Piece(block[start:end], learnt=True),
        _Piece(block[end:], learnt=False),
    ]


def _row(renderer: ChatRenderer, pieces: Sequence[_Piece]) -> TrainRow:
    ids: list[int] = []
    mask: list[bool] = []
    text = ""
    # Prompt text is tokenised in whole sections, as a prompt or its continuation is.
    for piece in [*pieces, _Piece("", learnt=True)]:
        if not piece.learnt:
            text += piece.text
            continue
        read, learnt = (
            renderer.ids_of(text) if text else [],
            renderer.ids_of(piece.text) if piece.text else [],
        )
        ids += [*read, *learnt]
        mask += [False] * len(read) + [True] * len(learnt)
        text = ""
    while mask and not mask[-1]:  # tokens after the last learnt one cost time and change nothing
        ids.pop()
        mask.pop()
    if mask and mask[0]:
        mask[0] = False  # nothing predicts the first token
    return TrainRow(torch.tensor(ids), torch.tensor(mask))
