"""Prompts of an episode, as the stored ids plus a tail or a conversation rendered from scratch.

A chat template is append-only if rendering a longer conversation never changes what an earlier prompt and its reply
rendered to, which is proved here. Then the next prompt is the stored ids plus a tail, and nothing is ever tokenised
twice. Templates that rewrite the past (some drop earlier reasoning) fail the proof, and each of their turns opens a
segment of its own.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

from rollgym.clients.protocol.arrays import DecodeError
from rollgym.trainer.config.rollout import PromptSettings
from rollgym.trainer.core.errors import ConfigError, UnplayableTaskError
from rollgym.trainer.core.numbers import MOST_IDS
from rollgym.trainer.models.picture_processor import BLIND, PictureProcessor
from rollgym.trainer.records.images import PlacedImage
from rollgym.trainer.records.trajectory import Trajectory
from rollgym.trainer.rollout.chat_template import ChatTemplate, Tool
from rollgym.trainer.rollout.context import (
    Compaction,
    ContextPolicy,
    Exchange,
    Message,
    compaction,
    context_policy,
    example_messages,
    pictures_of,
    with_examples,
    with_instruction,
)

_PROBE_REPLIES = ("Up", "<think>first left,\nthen up</think><answer>Up</answer>", "two\nlines.")
_PROBE_TAILS: tuple[tuple[Message, ...], ...] = (
    ({"role": "user", "content": "P__\n_O_"},),
    ({"role": "user", "content": "one"}, {"role": "user", "content": "two"}),
)
_SYSTEM: tuple[Message, ...] = ({"role": "system", "content": "Play."},)
_QUESTION: tuple[Message, ...] = ({"role": "user", "content": "x"},)
_CACHE_SIZE = 8192
_LONGEST_KEPT = 4096
"""Conversations of up to so many characters are remembered with their ids: members of a group share many."""
_LONG_PIECE = 512
"""Pieces of an agent's conversation longer than this, in characters, are cached by the caller, per episode."""


_Spoken = tuple[tuple[tuple[str, str], ...], ...]
"""A conversation of texts alone: the fields of each message."""


class Prompt(NamedTuple):
    """A prompt of the policy.

    Attributes:
        ids: Token ids.
        images: Pictures among them, and the tokens that stand for them.
    """

    ids: list[int]
    images: tuple[PlacedImage, ...] = ()


class ChatRenderer:
    """Renders conversations with a tokenizer's own chat template.

    Args:
        tokenizer: A Hugging Face tokenizer with a chat template.
        options: Further variables of the template, such as `enable_thinking`.
        stop_ids: Ids that end a reply beside the closing of a turn and the tokenizer's end of text: those of the
            model's generation_config.
        pictures: The model's image processor, or the reason why it has none.
        vocabulary: Number of token ids that the model knows.

    Attributes:
        end_of_turn_id: The first id after a reply, with which the template closes it.
        stop_token_ids: All ids that end a reply.
        special_ids: Ids that are not part of a text.
        append_only: Whether a longer conversation always begins with the rendering of a shorter one.

    Raises:
        ConfigError: If the tokenizer has no chat template, or its turns have no closing token, or it writes tokens
            that the model does not know.
    """

    def __init__(
        self,
        tokenizer: Any,
        options: Mapping[str, Any] | None = None,
        stop_ids: Iterable[int] = (),
        pictures: PictureProcessor | str = BLIND,
        vocabulary: int = MOST_IDS,
    ) -> None:
        self.template = ChatTemplate(
            tokenizer, options or {}, () if isinstance(pictures, str) else (pictures.token,)
        )
        self.pictures = pictures
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._ids_of_text = lru_cache(maxsize=_CACHE_SIZE)(self._tokenize)
        self._ids_of_spoken = lru_cache(maxsize=_CACHE_SIZE)(self._ids_of_key)
        self._tells_time = "strftime_now" in str(tokenizer.chat_template)
        closing_ids = self._tokenize(self._tail_text((), generation_prompt=False))
        if not closing_ids:
            raise ConfigError(
                "the chat template does not close the assistant's turn; a stop token cannot be derived"
            )
        self.end_of_turn_id = closing_ids[0]
        stops = {self.end_of_turn_id, *stop_ids}
        if tokenizer.eos_token_id is not None:
            stops.add(tokenizer.eos_token_id)
        self.stop_token_ids = tuple(sorted(stops))
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special_ids = frozenset(each for each, token in added.items() if token.special)
        self.append_only = self._only_appends(()) and self._keeps_system_in_front()

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Return the ids of a whole conversation, ready for the policy's reply.

        Args:
            messages: The conversation.
            tools: Tool declarations, which the template places.
        """
        return self.read(messages, tools).ids

    def read(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Prompt:
        """Return the ids of a whole conversation, ready for the policy's reply, and the pictures in it.

        Args:
            messages: The conversation.
            tools: Tool declarations, which the template places.

        Raises:
            ConfigError: If it holds pictures, and the model sees none.
        """
        if not tools and (key := self._key(messages)) is not None:
            return Prompt(list(self._ids_of_spoken(key, tail=False)))
        ids = self._ids_of_text(self.template.text(messages, generation_prompt=True, tools=tools))
        return self._with_pictures(ids, messages)

    def require_tools(self) -> None:
        """Make sure that the chat template writes tools into prompts.

        Raises:
            ConfigError: If it passes over them.
        """
        function = {
            "name": "a_probing_tool",
            "description": "",
            "parameters": {"type": "object", "properties": {}},
        }
        tool: Tool = {"type": "function", "function": function}
        if "a_probing_tool" not in self.template.text(_QUESTION, generation_prompt=True, tools=[tool]):
            raise ConfigError(
                "prompt.tools is 'template', and the tokenizer's chat template passes over tools: take a tokenizer "
                "whose template knows them, or leave prompt.tools at 'none' and the tools in the instruction "
                "(the environment's describe_tools)"
            )

    def tail(self, messages: Sequence[Message], last_id: int) -> Prompt:
        """Return what follows a reply: the closing of the policy's turn, new messages, the next opening.

        Args:
            messages: The messages after the reply.
            last_id: Last id of the reply. If the policy closed its turn itself, the closing id is not repeated.
        """
        if (key := self._key(messages)) is not None:
            known = self._ids_of_spoken(key, tail=True)
            return Prompt(known[1:] if last_id == self.end_of_turn_id else list(known))
        ids = self._ids_of_text(self._tail_text(messages))
        return self._with_pictures(ids[1:] if last_id == self.end_of_turn_id else ids, messages)

    def _key(self, messages: Sequence[Message]) -> _Spoken | None:
        """Return what tells a conversation from others; None if its ids are not remembered.

        Those with parts, calls or pictures are not, and none of a template that writes the date.
        """
        if self._tells_time or not isinstance(self.pictures, str):
            return None
        characters = 0
        for message in messages:
            for value in message.values():
                if type(value) is not str:
                    return None
                characters += len(value)
        return tuple(tuple(message.items()) for message in messages) if characters <= _LONGEST_KEPT else None

    def _ids_of_key(self, key: _Spoken, *, tail: bool) -> list[int]:
        """Return the ids of a conversation by its key, or of it as what follows a reply."""
        messages = [dict(pairs) for pairs in key]
        return self._ids_of_text(
            self._tail_text(messages) if tail else self.template.text(messages, generation_prompt=True)
        )

    @property
    def vocabulary(self) -> int:
        """How many token ids the model knows."""
        return self._vocabulary

    @property
    def end_of_text_id(self) -> int:
        """The id that ends a text without a chat template: the tokenizer's end of text, or else what closes a turn."""
        end = self._tokenizer.eos_token_id
        return self.end_of_turn_id if end is None else int(end)

    @property
    def opening_ids(self) -> list[int]:
        """The ids that the tokenizer puts before a text without a chat template; most tokenizers put none."""
        begin = self._tokenizer.bos_token_id
        return [begin] if begin is not None and list(self._tokenizer("x")["input_ids"])[:1] == [begin] else []

    def text(self, ids: Sequence[int]) -> str:
        """Return a reply as text, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def ids_of(self, text: str) -> list[int]:
        """Return the ids of a piece of a conversation as the template renders it, with quoted texts.

        Only those of short pieces are kept here.
        """
        return self._tokenize(text) if len(text) > _LONG_PIECE else list(self._ids_of_text(text))

    def marked_text(self, ids: Sequence[int]) -> str:
        """Return a reply as text with its special tokens, such as the marks of calls, and without what ended it."""
        ended = bool(ids) and ids[-1] in self.stop_token_ids
        return str(self._tokenizer.decode(list(ids[:-1] if ended else ids), skip_special_tokens=False))

    def token_text(self, token_id: int) -> str:
        """Return one token as text, special ones included."""
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))

    def reply_ids(self, text: str) -> list[int]:
        """Return the ids of a reply from its text, its closing token included (for demonstrations)."""
        return [*self._ids_of_text(self.quote(text)), self.end_of_turn_id]

    def quote(self, text: str) -> str:
        """Return a text that stands in no message as `ids_of` takes it: what spells a control token in it is text."""
        return self.template.control.quote(text)

    def written(self, ids: Sequence[int]) -> str:
        """Return sampled ids as a piece of a rendered conversation, without what ended them.

        Control tokens among them stay control tokens, and texts that spell some stay texts.
        """
        text, control = self.marked_text(ids), self.template.control
        if self.quote(text) == text:
            return text
        ended = bool(ids) and ids[-1] in self.stop_token_ids
        runs = [
            (drawn, list(run)) for drawn, run in groupby(ids[:-1] if ended else ids, control.ids.__contains__)
        ]
        texts = [(drawn, str(self._tokenizer.decode(run, skip_special_tokens=False))) for drawn, run in runs]
        return "".join(each if drawn else self.quote(each) for drawn, each in texts)

    def _with_pictures(self, ids: Sequence[int], messages: Sequence[Message]) -> Prompt:
        """Put the tokens of pictures in the places of their placeholders."""
        shown = pictures_of(messages)
        if isinstance(self.pictures, str):
            if shown:
                raise ConfigError(
                    f"the environment shows pictures, and the policy sees none ({self.pictures}): name a model that "
                    "sees (model.path), set model.vision for the tiny policy, or have the environment show text"
                )
            return Prompt(list(ids))
        expanded: list[int] = []
        placed: list[PlacedImage] = []
        left = iter(shown)
        for token in ids:
            picture = next(left, None) if token == self.pictures.token_id else None
            if picture is None:
                expanded.append(token)
                continue
            tokens, read = self.pictures.read(picture)
            placed.append(PlacedImage(len(expanded), len(expanded) + len(tokens), read))
            expanded += tokens
        if not len(placed) == len(shown) == ids.count(self.pictures.token_id):
            raise ConfigError(
                f"the chat template writes {ids.count(self.pictures.token_id)} times {self.pictures.token} for "
                f"{len(shown)} pictures: set prompt.chat_template to one that writes it once for each"
            )
        return Prompt(expanded, tuple(placed))

    def _tokenize(self, text: str) -> list[int]:
        ids = self.template.control.encode(text)
        if (largest := max(ids, default=0)) >= self._vocabulary:
            # Some tokenizers have more tokens than their model has rows for, and any text may spell one of these.
            raise UnplayableTaskError(
                f"a text holds {self.token_text(largest)}, id {largest} of the tokenizer, and the model knows ids "
                f"below {self._vocabulary}: keep it out of texts, or take the tokenizer that belongs to the model"
            )
        return ids

    def _tail_text(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> str:
        place = self.template.control.place
        opening: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": place}]
        whole = self.template.text([*opening, *messages], generation_prompt=generation_prompt)
        return whole.rpartition(place)[2]

    def _keeps_system_in_front(self) -> bool:
        """Whether conversations with a system message only append; if not, it will go into the first user message.

        Some templates write the system message into the last user message, and take it away from the one before.
        """
        if self.template.takes_system and not self._only_appends(_SYSTEM):
            self.template.takes_system = False
        return self._only_appends(_SYSTEM)

    def _only_appends(self, system: Sequence[Message]) -> bool:
        for first in ("x", "P__\n_OG"):
            start: list[Message] = [*system, {"role": "user", "content": first}]
            prompt = self.template.text(start, generation_prompt=True)
            for reply in _PROBE_REPLIES:
                answered: list[Message] = [*start, {"role": "assistant", "content": reply}]
                if not all(self._continues(prompt, reply, answered, new) for new in _PROBE_TAILS):
                    return False
        return True

    def _continues(
        self, prompt: str, reply: str, answered: Sequence[Message], new: Sequence[Message]
    ) -> bool:
        tail = self._tail_text(new)
        if self.template.text([*answered, *new], generation_prompt=True) != prompt + reply + tail:
            return False
        # The border must not merge: ids of reply and tail are those of the two apart.
        return self._tokenize(reply + tail) == self._tokenize(reply) + self._tokenize(tail)


class PromptBuilder:
    """Token-in, token-out prompts of one episode.

    Args:
        renderer: The policy's chat template, and what reads pictures.
        context: Selects the parts of the episode that a prompt shows.
        settings: Places of the environment's instruction and tools, and whether the policy summarises its history.
        examples: Worked turns that every prompt shows before the episode.

    Attributes:
        renderer: The policy's chat template, and what reads pictures.
        compaction: When and how the policy is asked for a summary; None if it never is.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        context: ContextPolicy,
        settings: PromptSettings,
        examples: Sequence[Message] = (),
    ) -> None:
        self.renderer = renderer
        self.compaction = compaction(settings)
        self._context = context
        self._examples = examples
        self._placement = settings.instruction
        self._shows_tools = settings.tools == "template"
        self._messages: list[Message] = []
        self._threads: dict[int, _Thread] = {}
        self._history: list[Exchange] = []
        self._opening: list[Message] = []
        self._first: tuple[Message, ...] = ()
        self._instruction: str | None = None
        self._tools: Sequence[Tool] = ()

    def begin(self, info: Mapping[str, Any]) -> None:
        """Start a new episode.

        Args:
            info: The `info` of the reset, with the `instruction` and the `tools`, if any.

        Raises:
            DecodeError: If they are not a text and a list of declarations.
        """
        self._instruction = info.get("instruction")
        if not isinstance(self._instruction, str | None):
            raise DecodeError("the environment's info['instruction'] must be text")
        self._tools = (info.get("tools") or ()) if self._shows_tools else ()
        if not isinstance(self._tools, list | tuple) or not all(
            isinstance(each, Mapping) for each in self._tools
        ):
            raise DecodeError("the environment's info['tools'] must be a list of declarations")
        self._messages = []
        self._threads = {}
        self._history = []
        self._opening = []
        self._first = ()

    def prompt(self, trajectory: Trajectory, observation: Sequence[Message]) -> Prompt:
        """Return all ids that the policy reads at this turn, and the pictures among them.

        They are the ids of a segment and a tail if the new messages continue those that the segment stands for, and
        the template only appends; else the whole conversation is rendered.
        """
        shown = [*self._opening, *self._context(self._history, observation)]
        messages = with_instruction(with_examples(shown, self._examples), self._instruction, self._placement)
        self._messages = messages
        thread = self._continued(messages)
        if thread is None:
            return self.renderer.read(messages, self._tools)
        segment = trajectory.segments[thread.segment]
        tail = self.renderer.tail(messages[len(thread.messages) :], segment.ids[-1])
        if not (segment.images or tail.images):
            return Prompt(segment.ids + tail.ids)
        images = (*segment.images, *(image.moved(len(segment.ids)) for image in tail.images))
        return Prompt(segment.ids + tail.ids, images)

    def replied(self, observation: Sequence[Message], reply: str, segment: int) -> None:
        """Note what the policy said to the last prompt, and the segment that holds the two."""
        self._first = self._first or tuple(observation)
        self._history.append(Exchange(tuple(observation), reply))
        self._threads[segment] = _Thread(segment, [*self._messages, {"role": "assistant", "content": reply}])

    def is_too_long(self, prompt: Prompt) -> bool:
        """Whether the policy is to sum up its history before it reads this prompt; it needs one to do so."""
        return self.compaction is not None and bool(self._history) and len(prompt.ids) > self.compaction.above

    def summary_prompt(self, trajectory: Trajectory, request: str) -> Prompt:
        """Return the prompt of a summary: all up to the last reply, and the request."""
        return self.prompt(trajectory, [{"role": "user", "content": request}])

    def summarised(self, compaction: Compaction, summary: str) -> None:
        """Replace the history by a summary; the next prompt is rendered from scratch."""
        self._opening = compaction.opening(self._first, summary)
        self._history = []
        self._threads = {}

    def _continued(self, messages: list[Message]) -> "_Thread | None":
        """The longest conversation so far that `messages` are, and more; the newest of several."""
        longest = None
        for thread in self._threads.values():
            seen = len(thread.messages)
            if len(messages) <= seen or messages[seen]["role"] == "assistant":
                continue
            if (longest is None or seen >= len(longest.messages)) and messages[:seen] == thread.messages:
                longest = thread
        if longest is not None and not self.renderer.append_only:
            self.renderer.template.note("it rewrites earlier turns, so a turn may be a segment of its own")
            return None
        return longest


@dataclass(frozen=True, slots=True)
class _Thread:
    """A conversation whose ids a segment holds, the last reply included."""

    segment: int
    messages: list[Message]


def prompt_maker(renderer: ChatRenderer, settings: PromptSettings) -> Callable[[], PromptBuilder]:
    """Return what makes the prompts of one episode after the other, as settings say.

    Raises:
        ConfigError: If what they name cannot be read or imported.
    """
    context, examples = context_policy(settings), example_messages(settings)
    return lambda: PromptBuilder(renderer, context, settings, examples)
