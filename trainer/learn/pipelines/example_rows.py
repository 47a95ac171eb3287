"""Examples of data sets as the rows that pipelines learn from, none of them longer than the model reads.

A conversation becomes ids as the policy will read and write them, with a mask of those to learn.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import torch

from rollgym.trainer.backends.base import TrainRow
from rollgym.trainer.config.data import ExamplesSettings
from rollgym.trainer.config.supervised import LearningFromExamples
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.learn.distilling import with_teacher
from rollgym.trainer.learn.pipelines.preferences import PreferenceRows
from rollgym.trainer.rollout.prompts import ChatRenderer
from rollgym.trainer.tasks.examples import (
    ExampleConversation,
    Judged,
    Message,
    Pair,
    read_conversations,
    read_judged,
    read_pairs,
)

_ASSISTANT = frozenset({"assistant"})


@dataclass(frozen=True, slots=True)
class _Piece:
    """A section of a rendered conversation."""

    text: str
    learnt: bool


def conversation_rows(
    renderer: ChatRenderer, conversation: ExampleConversation, roles: Collection[str] = _ASSISTANT
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


def reply_row(renderer: ChatRenderer, conversation: ExampleConversation) -> TrainRow:
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


def _texts(renderer: ChatRenderer, conversation: ExampleConversation, roles: Collection[str]) -> list[str]:
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
    renderer: ChatRenderer, conversation: ExampleConversation, texts: Sequence[str], wanted: Collection[int]
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
    renderer: ChatRenderer, conversation: ExampleConversation, wanted: Collection[int]
) -> list[_Piece]:
    """Return texts joined, between the tokenizer's own start and end of a text."""
    pieces = [
        _Piece(renderer.quote(str(message["content"])), learnt=number in wanted)
        for number, message in enumerate(conversation.messages)
    ]
    pieces[-1] = replace(pieces[-1], text=pieces[-1].text + renderer.token_text(renderer.end_of_text_id))
    opening = renderer.opening_ids
    return [*(_Piece(renderer.token_text(each), learnt=False) for each in opening), *pieces]


def _last_piece(renderer: ChatRenderer, conversation: ExampleConversation, number: int) -> list[_Piece]:
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
    conversation: ExampleConversation,
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


Say = Callable[[str], None]
_Part = TypeVar("_Part")


class ExampleRows:
    """Renders examples for a policy.

    Args:
        renderer: The policy's.
        settings: How to treat examples that are too long.
        longest: Tokens of the longest row.
        say: Called with how many are left out.
    """

    def __init__(
        self, renderer: ChatRenderer, settings: LearningFromExamples, longest: int, say: Say
    ) -> None:
        self._renderer = renderer
        self._settings = settings
        self._longest = longest
        self._say = say

    def conversations(
        self,
        data: Sequence[ExamplesSettings],
        roles: Iterable[str] = _ASSISTANT,
        teacher_of: Callable[[str], int] | None = None,
    ) -> list[TrainRow]:
        """Return the rows of conversations.

        Args:
            data: The data set.
            roles: Whose messages are learnt.
            teacher_of: Gives the number of a domain's teacher; None without teachers.

        Raises:
            ConfigError: If a row of the data cannot be learnt from; the message has its place.
        """
        chosen = frozenset(roles)
        empty = _Oddity(_EMPTY)

        def rendered(conversation: ExampleConversation) -> list[TrainRow]:
            rows = conversation_rows(self._renderer, conversation, chosen)
            empty.note(conversation.place, found=_has_empty_reply(conversation, chosen))
            if teacher_of is None:
                return rows
            return [with_teacher(row, teacher_of(conversation.domain)) for row in rows]

        made = ((each.place, rendered(each)) for each in read_conversations(data))
        kept = [row for rows in self._fitting(made, lambda rows: rows) for row in rows]
        self._tell(empty)
        return kept

    def pairs(self, data: Sequence[ExamplesSettings], *, rewarded: bool = False) -> PreferenceRows:
        """Return the rows of pairs.

        Args:
            data: The data set.
            rewarded: Whether a text's reward is read at its end, and not its tokens' log-probabilities.

        Raises:
            ConfigError: If a row of the data is not a pair, or no two replies of a pair differ.
        """
        empty, same, unlike = _Oddity(_EMPTY), _Oddity(_SAME), _Oddity(_UNLIKE)

        def rendered(conversation: ExampleConversation) -> TrainRow:
            row = reply_row(self._renderer, conversation)
            return whole_text(row) if rewarded else row

        def noted(pair: Pair) -> Pair:
            replies = (pair.chosen, pair.rejected)
            empty.note(pair.chosen.place, found=any(_has_empty_reply(each, _ASSISTANT) for each in replies))
            same.note(pair.chosen.place, found=pair.chosen.messages == pair.rejected.messages)
            unlike.note(pair.chosen.place, found=pair.chosen.prompt != pair.rejected.prompt)
            return pair

        made = (
            (pair.chosen.place, (rendered(pair.chosen), rendered(pair.rejected), pair.margin))
            for pair in map(noted, read_pairs(data))
        )
        kept = list(self._fitting(made, lambda part: part[:2]))
        if same.count and same.count == same.looked_at:
            raise ConfigError(
                f"data set {same.first}: here and in all other rows 'chosen' and 'rejected' are the same: nothing can "
                "be learnt of them; does 'columns' name one column twice?"
            )
        self._tell(empty, same, unlike)
        return PreferenceRows(
            [(chosen, rejected) for chosen, rejected, _ in kept], margins=[margin for *_, margin in kept]
        )

    def judged(self, data: Sequence[ExamplesSettings]) -> PreferenceRows:
        """Return the rows of judged replies, each with its prompt before the next other example's reply.

        Raises:
            ConfigError: If a row of the data is not a judged reply, or there is only one.
        """
        empty = _Oddity(_EMPTY)
        found = list(read_judged(data))
        for each in found:
            empty.note(each.reply.place, found=_has_empty_reply(each.reply, _ASSISTANT))
        if len(found) == 1:
            raise ConfigError(
                f"data set {found[0].reply.place}: there is no second example, whose reply would show how far the "
                "policy is from its reference: give at least two"
            )
        made = (
            (
                each.reply.place,
                (
                    reply_row(self._renderer, each.reply),
                    reply_row(self._renderer, _answered_by(each, other)),
                    each.good,
                ),
            )
            for each, other in pairwise([*found, *found[:1]])
        )
        kept = list(self._fitting(made, lambda part: part[:2]))
        self._tell(empty)
        return PreferenceRows([(own, other) for own, other, _ in kept], good=[good for *_, good in kept])

    def tell_overlap(
        self, learnt: Sequence[TrainRow] | PreferenceRows, held_out: Sequence[TrainRow] | PreferenceRows
    ) -> None:
        """Report how many held-out examples are trained on, too: their loss does not measure generalisation."""
        held = [rows_digest(each) for each in examples_of(held_out)]
        known = {rows_digest(each) for each in examples_of(learnt)} if held else set()
        count = sum(digest in known for digest in held)
        if count:
            self._say(
                f"warning: {count} of {len(held)} held-out examples are learnt from, too: their loss will "
                "not show what carries over to others; leave them out of 'data'"
            )

    def _tell(self, *oddities: "_Oddity") -> None:
        """Report how many examples are odd, and which is the first."""
        for odd in oddities:
            if odd.count:
                self._say(f"{odd.count} of {odd.looked_at} examples {odd.what}; the first: {odd.first}")

    def _fitting(
        self, made: Iterable[tuple[str, _Part]], rows_of: Callable[[_Part], Iterable[TrainRow]]
    ) -> Iterator[_Part]:
        """Yield the examples whose rows are all short enough.

        Raises:
            ConfigError: If one is too long and that is refused, or none is left.
        """
        kept = longer = 0
        for place, part in made:
            length = max(len(row.ids) for row in rows_of(part))
            if length <= self._longest:
                kept += 1
                yield part
                continue
            longer += 1
            if self._settings.longer == "refuse":
                raise ConfigError(
                    f"data set {place}: {length} tokens, and model.max_length is {self._longest}: raise it, or set "
                    "longer to leave_out"
                )
        if longer and kept:
            self._say(
                f"{longer} of {kept + longer} examples are longer than model.max_length and are left out"
            )
        elif longer:
            raise ConfigError(
                f"all {longer} examples are longer than model.max_length {self._longest}: raise it"
            )


@dataclass(slots=True)
class _Oddity:
    """Counts examples that are usable but probably a mistake, so that the run reports them.

    Attributes:
        what: Description of the oddity.
        looked_at: Number of examples that were checked.
        count: Number of odd examples.
        first: Place of the first odd example.
    """

    what: str
    looked_at: int = 0
    count: int = 0
    first: str = ""

    def note(self, place: str, *, found: bool) -> None:
        """Count an example, and remember the first that was `found` odd."""
        self.looked_at += 1
        if found:
            self.first = self.first or place
            self.count += 1


_EMPTY = "have an empty reply, of which only the end of the turn is learnt"
_UNLIKE = "have another prompt before 'chosen' than before 'rejected', so that replies to two questions are compared"
_SAME = "have the same reply as 'chosen' and as 'rejected', of whose order nothing is learnt"


def _has_empty_reply(conversation: ExampleConversation, roles: Collection[str]) -> bool:
    """Whether a message that is learnt says nothing and calls nothing."""
    return any(
        message["role"] in roles and not message["content"].strip() and not message.get("tool_calls")
        for message in conversation.messages[conversation.learnt_from :]
    )


def examples_of(rows: Sequence[TrainRow] | PreferenceRows) -> Sequence[Sequence[TrainRow]]:
    """Return the rows of each example: one, or the two replies of a pair."""
    if not isinstance(rows, PreferenceRows):
        return [(row,) for row in rows]
    # The second row of a judged reply is another example's.
    return [pair[:1] for pair in rows.rows] if rows.good else rows.rows


def _answered_by(question: Judged, other: Judged) -> ExampleConversation:
    """Return a prompt with the reply of another example."""
    prompt, answer = question.reply, other.reply
    messages = (*prompt.messages[: prompt.learnt_from], *answer.messages[answer.learnt_from :])
    return replace(prompt, messages=messages)


def whole_text(row: TrainRow) -> TrainRow:
    """Return a row whose one output is of the state after its last token."""
    ids = torch.cat([row.ids, row.ids[-1:]])  # the id after the end is never read
    mask = torch.zeros(len(ids), dtype=torch.bool)
    mask[-1] = True
    return TrainRow(ids, mask)


def rows_digest(rows: Iterable[TrainRow]) -> str:
    """Return a digest of what is learnt from, in its order."""
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        for part in (row.ids, row.mask, *row.fields.values()):
            digest.update(part.contiguous().view(torch.uint8).numpy().tobytes())
        digest.update(b"\n")
    return digest.hexdigest()
