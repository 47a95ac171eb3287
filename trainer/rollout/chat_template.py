"""A tokenizer's chat template, and conversations brought into the form that it accepts."""

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollgym.clients.replies.thinking import CLOSING, OPENING, mentioned_tags
from rollgym.trainer.core.errors import ConfigError, UnplayableTaskError
from rollgym.trainer.rollout.context import Message, prefixed

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class ControlTokens:
    """Keeps the control tokens of a tokenizer apart from texts that spell them.

    Quoted texts can be cut, joined and compared like any others. They hold for this object alone.

    Args:
        tokenizer: A Hugging Face tokenizer.
        marks: Spellings of control tokens beside those that the tokenizer itself calls special: what the template
            writes around turns, and what stands for a picture.

    Attributes:
        ids: Their ids.
        place: A word that no message holds, to find a place in a rendered conversation by.
    """

    def __init__(self, tokenizer: Any, marks: Iterable[str] = ()) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = (str(token) for token in added.values() if token.special)
        spellings = sorted({mark for mark in (*special, *marks) if mark})
        self.ids = frozenset(id_ for id_, token in added.items() if str(token) in spellings)
        word = self._word = f"q{secrets.token_hex(16)}"
        self.place = f"{word}rz"
        self._nothing = f"{word}z"
        self._stand_ins = {mark: f"{word}{index}z" for index, mark in enumerate(spellings)}
        self._spelt = {stand_in: mark for mark, stand_in in self._stand_ins.items()} | {self._nothing: ""}
        self._names = {mark: f"{word}t{index}z" for index, mark in enumerate(spellings)}
        self._stand_in = re.compile(f"{word}[0-9]*z")
        self._mark = re.compile(_any_of(spellings) if spellings else r"(?!)")
        beginnings = {mark[:length] for mark in spellings for length in range(1, len(mark))}
        self._begun = re.compile(f"(?:{_any_of(beginnings)})\\Z" if beginnings else r"(?!)")
        self._first_characters = sorted({mark[0] for mark in spellings})
        self._longest = max(map(len, spellings), default=1)
        self._literal: Tokenizer | None = None

    def quote(self, text: str) -> str:
        """Return a text in which no control token is spelt, and none together with what may follow it."""
        for character in self._first_characters:
            if character in text:
                break
        else:
            return text  # This is the way of nearly all texts.
        if self._mark.search(text) is not None:
            text = self._mark.sub(lambda found: self._stand_ins[found[0]], text)
        # A text in parts may spell one across them.
        return f"{text}{self._nothing}" if self._begun.search(text[-self._longest :]) else text

    def quoted(self, value: Any) -> Any:
        """Return plain data with all texts in it quoted; the same object if nothing needs quoting."""
        if isinstance(value, str):
            return self.quote(value)
        if isinstance(value, Mapping):
            pairs = [(self.quoted(key), self.quoted(each)) for key, each in value.items()]
            same = all(new[0] is key and new[1] is value[key] for new, key in zip(pairs, value, strict=True))
            return value if same else dict(pairs)
        if isinstance(value, list | tuple):
            parts = [self.quoted(each) for each in value]
            return value if all(new is old for new, old in zip(parts, value, strict=True)) else parts
        return value

    def unquote(self, text: str) -> str:
        """Return a quoted text as it reads."""
        return self._stand_in.sub(lambda found: self._spelt[found[0]], text) if self._word in text else text

    def encode(self, text: str) -> list[int]:
        """Return the ids of a rendered conversation, or of a piece of one.

        Control tokens that it spells get their ids; quoted ones are encoded as text.

        Raises:
            UnplayableTaskError: If it quotes some, and the tokenizer cannot encode them as text.
        """
        if self._word not in text:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        if self._literal is None:
            self._literal = _renamed(self._tokenizer, self._names)
        text = self._mark.sub(lambda found: self._names[found[0]], text)
        return list(self._literal.encode(self.unquote(text), add_special_tokens=False).ids)


def _renamed(tokenizer: Any, names: Mapping[str, str]) -> "Tokenizer":
    """Return a tokenizer with the same ids in which control tokens have other names: their spellings are text."""
    from tokenizers import Tokenizer  # An extra brings it, and what plays without a model does without.

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnplayableTaskError(
            f"a text spells a control token, and {type(tokenizer).__name__} cannot encode it as text: take a model "
            "with a fast tokenizer (tokenizer.json), or keep it out of texts"
        )
    core = json.loads(backend.to_str())
    for token in core["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = core["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(token, token): id_ for token, id_ in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    core["post_processor"] = None  # It adds control tokens around texts, which is never asked for here.
    return Tokenizer.from_str(json.dumps(core))


def _any_of(words: Iterable[str]) -> str:
    """Return a pattern of the longest of some words: a trie, so that other text is refused after a few characters."""
    trie: dict[str, Any] = {}
    for word in words:
        node = trie
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    return _pattern(trie)


def _pattern(trie: Mapping[str, Any]) -> str:
    branches = [re.escape(character) + _pattern(rest) for character, rest in trie.items() if character]
    if not branches:
        return ""
    pattern = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
    return f"(?:{pattern})?" if "" in trie else pattern


_OFFER = """You can call these tools, each described by a line of JSON:
<tools>
{tools}
</tools>
To call one, write its name and its arguments in this form, once for each call:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""


def _with_tools_in_words(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return a conversation whose first message offers the tools, and whose calls of them stand in their messages.

    Args:
        messages: The conversation.
        tools: Declarations, as chat templates have them.
    """
    written: list[Message] = [_with_calls(message) for message in messages]
    if not tools:
        return written
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    offer = _OFFER.format(tools=lines)
    if written and written[0].get("role") == "system":
        first = written[0]
        return [{**first, "content": prefixed(first.get("content") or "", offer)}, *written[1:]]
    return [{"role": "system", "content": offer}, *written]


def _with_calls(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    lines = [json.dumps(_plain(call.get("function", call)), ensure_ascii=False) for call in calls]
    marked = "\n".join(f"<tool_call>\n{line}\n</tool_call>" for line in lines)
    said = message.get("content") or ""
    content = f"{said}\n{marked}" if said else marked
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": content}


def _plain(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": function.get("name"), "arguments": function.get("arguments", {})}


Tool = Mapping[str, Any]
"""A tool's name, description and parameters, in the form of chat templates."""

_JOINED = ("system", "user", "assistant")
_FIRST, _SECOND, _THIRD = "first-probe", "second-probe", "third-probe"
_OPENING = ("system", "developer")
"""Who may speak before the user."""
_OFFERED: Sequence[Tool] = [
    {
        "type": "function",
        "function": {
            "name": _SECOND,
            "description": _THIRD,
            "parameters": {"type": "object", "properties": {}},
        },
    }
]
_CALLING: Message = {
    "role": "assistant",
    "content": "",
    "reasoning_content": _FIRST,
    "tool_calls": [
        {"id": "probe0000", "type": "function", "function": {"name": _SECOND, "arguments": {_THIRD: 1}}}
    ],
}
"""A turn with all that a policy writes: thinking and a call."""


class ChatTemplate:
    """Writes conversations as text.

    Args:
        tokenizer: A Hugging Face tokenizer with a chat template.
        options: Further variables of the template, such as `enable_thinking`.
        marks: Spellings of control tokens beside the tokenizer's special ones and those around turns.

    Attributes:
        control: Keeps the control tokens that the template writes apart from texts that spell them.
        say: Called once for each way in which conversations had to be changed; None during the trial.
        takes_system: Whether a conversation may begin with a system message.
        writes_time: Whether what it writes may depend on the time, such as the day.

    Raises:
        ConfigError: If the tokenizer has no chat template, or it refuses a user's message and its answer.
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any], marks: Sequence[str] = ()) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "the tokenizer has no chat template: set one, or use the model's instruct tokenizer"
            )
        from jinja2 import TemplateError  # Imported late: episodes without a model have no template.

        self.say: Callable[[str], None] | None = None
        self._refusals = (TemplateError, TypeError, ValueError, AttributeError)
        self.writes_time = "strftime_now" in str(tokenizer.chat_template)
        self._said: set[str] = set()
        self._shows_declarations: bool | None = None
        self._shows_calls: bool | None = None
        self._in_words = False
        word = f"q{secrets.token_hex(16)}"
        self._tag_words = {OPENING: f"{word}oz", CLOSING: f"{word}cz"}
        self._tokenizer = tokenizer
        self._options = dict(options)
        user, reply = _message("user", _FIRST), _message("assistant", _SECOND)
        self._apply([user, reply], generation_prompt=False, tools=())
        self.takes_system = self._shows(_message("system", _FIRST), _message("user", _SECOND))
        self._takes_late_system = self._shows(user, reply, _message("system", _THIRD), user)
        self._takes_repeats = self._shows(user, _message("user", _SECOND))
        self._takes_tools = self._shows(user, reply, _message("tool", _THIRD))
        self.control = ControlTokens(tokenizer, (*marks, *self._written_around_turns()))

    def text(
        self,
        messages: Sequence[Message],
        *,
        generation_prompt: bool,
        tools: Sequence[Tool] = (),
        opening: Sequence[Message] = (),
    ) -> str:
        """Return a conversation as the template writes it, with the texts of messages quoted (`control`).

        Args:
            messages: The conversation.
            generation_prompt: Whether the opening of the assistant's turn is appended.
            tools: Tool declarations, which the template places.
            opening: What stands before the messages, as `quoted` returned it.

        Raises:
            ConfigError: If the template refuses the conversation in every form.
        """
        try:
            quoted = [*opening, *self.quoted(messages)]
            tools = self.control.quoted(tools) if tools else ()
        except RecursionError as error:
            raise _too_deep() from error
        if self._in_words:
            if tools:
                self.note(
                    "it passes over tools; they are offered in the system message, and calls stand in replies"
                )
            quoted, tools = _with_tools_in_words(quoted, tools), ()
        text = self._apply(self._adapted(quoted), generation_prompt=generation_prompt, tools=tools)
        for tag, word in self._tag_words.items():
            text = text.replace(word, tag)
        return text

    def quoted(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages of which all texts are quoted."""
        return [self._with_words(self._quoted(message)) for message in messages]

    def write_tools(self) -> None:
        """Write tools and calls of them into messages from now on, if the template passes over declarations."""
        if self._in_words:
            return
        question = _message("user", _FIRST)
        try:
            self._in_words = not self._differ([question], _OFFERED, [question], ())
        except ConfigError:
            self._in_words = (
                True  # it refuses tools; what else it refuses, it does so with them in words, too
            )

    def note(self, text: str) -> None:
        """Report a fact about the template, once."""
        if self.say is not None and text not in self._said:
            self._said.add(text)
            self.say(f"chat template: {text}")

    def note_unshown(self, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
        """Report which parts of a conversation's tools the template ignores, as templates do so silently.

        The first conversation that has some stands for all.
        """
        if tools and self._shows_declarations is None:
            self._shows_declarations = self._differ(messages, tools, messages, ())
            if not self._shows_declarations:
                self.note("it passes over declarations of tools; what is learnt is learnt without them")
        if self._shows_calls is None and any(message.get("tool_calls") for message in messages):
            silent = [{key: message[key] for key in message if key != "tool_calls"} for message in messages]
            self._shows_calls = self._differ(messages, tools, silent, tools)
            if not self._shows_calls:
                self.note("it passes over calls of tools; they are neither read nor learnt")

    def _differ(
        self, one: Sequence[Message], its: Sequence[Tool], other: Sequence[Message], their: Sequence[Tool]
    ) -> bool:
        written = self.text(one, generation_prompt=False, tools=its)
        try:
            return written != self.text(other, generation_prompt=False, tools=their)
        except ConfigError:
            return True  # it misses what the other conversation lacks

    def _apply(self, messages: Sequence[Message], *, generation_prompt: bool, tools: Sequence[Tool]) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=[dict(tool) for tool in tools] or None,
                    tokenize=False,
                    add_generation_prompt=generation_prompt,
                    **self._options,
                )
            )
        except self._refusals as error:
            roles = ", ".join(str(message.get("role")) for message in messages[:12])
            raise ConfigError(
                f"the tokenizer's chat template refuses a conversation of {len(messages)} messages ({roles}): {error}"
            ) from error
        except RecursionError as error:
            raise _too_deep() from error

    def _written_around_turns(self) -> list[str]:
        """Return the tokens that the template writes between messages, whether the tokenizer calls them special or not.

        What it writes within the policy's own turns, such as the marks of thinking and of calls, is the policy's
        to write: these stay words of texts, too.
        """
        turns = [_message("user", _FIRST), _message("assistant", _SECOND)]
        if self._takes_tools:
            turns.append(_message("tool", _THIRD))
        turns.append(turns[0])
        opened = [self._tried([_message(role, _THIRD), *turns]) for role in _OPENING]
        around = "\n".join([self._apply(turns, generation_prompt=False, tools=()), *opened])
        # Beside tools, and before a reply, templates also write what a policy writes itself.
        declared, asked = self._tried(turns, _OFFERED), self._tried(turns, generation_prompt=True)
        own = self._tried([turns[0], _CALLING, turns[0]])
        added = [str(token) for token in getattr(self._tokenizer, "added_tokens_decoder", {}).values()]
        return [
            each
            for each in filter(None, added)
            if each in around
            or (
                each not in own and (each in declared or (each in asked and not _closing_of(each) & {*added}))
            )
        ]

    def _tried(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generation_prompt: bool = False
    ) -> str:
        """Return what the template makes of a conversation; nothing where it refuses it."""
        try:
            return self._apply(messages, generation_prompt=generation_prompt, tools=tools)
        except ConfigError:
            return ""

    def _shows(self, *messages: Message) -> bool:
        """Whether the template accepts a conversation, and writes every message of it."""
        try:
            text = self._apply(messages, generation_prompt=False, tools=())
        except ConfigError:
            return False
        return all(str(message["content"]) in text for message in messages)

    def _quoted(self, message: Message) -> Message:
        changed = {}
        for key, value in message.items():
            # Templates compare roles, so these stay as they are; only one that is not a word can spell a control token.
            if key != "role" or not str(value).isidentifier():
                quoted = self.control.quoted(value)
                if quoted is not value:
                    changed[key] = quoted
        return {**message, **changed} if changed else message

    def _with_words(self, message: Message) -> Message:
        """Keep tags of thinking that a reply mentions from templates that cut a reply at its last one."""
        content = message.get("content")
        if message["role"] != "assistant" or not isinstance(content, str) or "think>" not in content:
            return message
        place, parts = 0, []
        for tag in mentioned_tags(content):
            parts += [content[place : tag.start()], self._tag_words.get(tag[0], tag[0])]
            place = tag.end()
        return {**message, "content": "".join([*parts, content[place:]])} if parts else message

    def _adapted(self, messages: Sequence[Message]) -> list[Message]:
        adapted = list(messages)
        if not self._takes_tools:
            adapted = [
                self._as_user(message) if message["role"] == "tool" else message for message in adapted
            ]
        if adapted and adapted[0]["role"] == "system" and not self.takes_system:
            self.note("it takes no system message in this place; it is put before the first user message")
            adapted = _merged_into_user(adapted[0], adapted[1:])
        if not self._takes_late_system:
            adapted[1:] = [
                self._as_user(message) if message["role"] == "system" else message for message in adapted[1:]
            ]
        return adapted if self._takes_repeats else self._joined(adapted)

    def _as_user(self, message: Message) -> Message:
        self.note(f"it takes no {message['role']} message in this place; it is given as the user's")
        return {"role": "user", "content": message["content"]}

    def _joined(self, messages: Sequence[Message]) -> list[Message]:
        """Put messages of one role that follow each other into one."""
        joined: list[Message] = []
        for message in messages:
            last = joined[-1] if joined else None
            if last is not None and last["role"] == message["role"] and message["role"] in _JOINED:
                self.note("it demands that user and assistant alternate; messages of one role are joined")
                joined[-1] = dict(last) | {"content": _together(last["content"], message["content"])}
            else:
                joined.append(message)
        return joined


def _closing_of(mark: str) -> set[str]:
    """Return how a mark may be called that closes what another opens: a thought that a prompt opens is the policy's."""
    pairs = (
        ("<", "</"),
        ("<|", "<|/"),
        ("[", "[/"),
        ("begin", "end"),
        ("start", "end"),
        ("START", "END"),
        ("BEGIN", "END"),
    )
    return {mark.replace(opening, closing, 1) for opening, closing in pairs if opening in mark}


def _too_deep() -> ConfigError:
    return ConfigError(
        "a conversation's calls or tools are nested too deep for the chat template: write what is as text"
    )


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _merged_into_user(system: Message, messages: Sequence[Message]) -> list[Message]:
    for index, message in enumerate(messages):
        if message["role"] == "user":
            content = _together(system["content"], message["content"])
            return [*messages[:index], dict(message) | {"content": content}, *messages[index + 1 :]]
        if message["role"] == "assistant":
            break
    return [_message("user", system["content"]), *messages]


def _together(first: Any, second: Any) -> Any:
    """Return the content of two messages as that of one: texts with an empty line between, or lists of parts."""
    if isinstance(first, str):
        return prefixed(first, second)
    parts = second if isinstance(second, list) else [{"type": "text", "text": str(second)}]
    return [*first, *parts]
