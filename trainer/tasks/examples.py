"""Examples to learn from: rows as conversations, as pairs of replies, or as replies that are good or bad."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import orjson

from rollgym.clients.protocol.json_text import read_shallow_json
from rollgym.trainer.config.data import ExamplesSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.tasks.layouts import message_of, text_of, top_column, value_at, with_our_columns
from rollgym.trainer.tasks.rows import Row, columns_of, read_rows

Message = Mapping[str, Any]
_ROLES = ("system", "user", "assistant", "tool", "developer")
_ROLE, _CONTENT = "messages.role", "messages.content"
"""Keys of `columns` that say what role and content of a message are called."""
# By what names others say that a message is read and not learnt.
_WEIGHTS = (
    "weight",
    "loss",
    "loss_mask",
    "step_loss_mask",
    "loss_scale",
    "train",
    "trainable",
    "training",
)
_MASKED = "masked"
"""The same, the other way round."""
# What may be another name for it, where its value is one that says yes or no.
_LIKE_A_WEIGHT = re.compile(r"loss|mask|weight|learn|train|ignore", re.IGNORECASE)
_MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](?:role|from)["']\s*:""")
# What says that only a part of a message is learnt, and what is seen beside the text.
_NOT_LEARNT_SO = ("train_detail", "training_detail")
_MEDIA = ("images", "videos", "audios", "image", "video", "audio")
_LISTS = ("messages", "conversations")
"""Columns that hold messages, and never a text that is one."""
_ARGUMENTS = ("arguments", "parameters")
"""What the arguments of a call are called, by OpenAI and by Llama."""
_OF_CALLS = frozenset({"name", "id", "type", "index", "description", "strict", *_ARGUMENTS})
_PLAIN = " plain"
"""Stands in a row for `texts: plain` of its data set; no column is called so."""
_COLUMNS = (
    "messages",
    "prompt",
    "completion",
    "chosen",
    "rejected",
    "label",
    "margin",
    "tools",
    "system",
    "domain",
)


@dataclass(frozen=True, slots=True)
class ExampleConversation:
    """A conversation whose last messages are to be learnt.

    Attributes:
        place: File and row that it was read from, for error messages.
        messages: All of it.
        learnt_from: The first message that may be learnt; those before it are the prompt.
        tools: Declarations that the chat template is given.
        domain: What it is about, by which teachers are chosen.
        plain: Whether its messages are texts that are written one behind the other, and no chat.
    """

    place: str
    messages: tuple[Message, ...]
    learnt_from: int = 0
    tools: tuple[Mapping[str, Any], ...] = ()
    domain: str = ""
    plain: bool = False

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The messages before the first that may be learnt."""
        return self.messages[: self.learnt_from]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two replies to one prompt.

    Attributes:
        chosen: The better one.
        rejected: The other.
        margin: By how much they differ.
    """

    chosen: ExampleConversation
    rejected: ExampleConversation
    margin: float = 0.0


@dataclass(frozen=True, slots=True)
class Judged:
    """A reply that is good or bad."""

    reply: ExampleConversation
    good: bool


def read_conversations(data: Sequence[ExamplesSettings]) -> Iterator[ExampleConversation]:
    """Read conversations: of `messages`, or of `prompt` and `completion`.

    Raises:
        ConfigError: If a row is none; the message has its place and what it lacks.
    """
    for place, row in _rows(data):
        if row.get("messages") is not None and not row[_PLAIN]:
            yield _conversation(place, row, _messages(place, row["messages"], "messages", "user"), 0)
        else:
            _need(place, row, "prompt", "completion", instead=" (or 'messages')")
            yield _reply(place, row, "completion")


def read_pairs(data: Sequence[ExamplesSettings]) -> Iterator[Pair]:
    """Read pairs: of `prompt`, `chosen` and `rejected`, or of whole conversations under the latter two.

    Raises:
        ConfigError: If a row is none.
    """
    for place, row in _rows(data):
        _need(place, row, "chosen", "rejected")
        chosen, rejected = _reply(place, row, "chosen"), _reply(place, row, "rejected")
        margin = 0.0 if row.get("margin") is None else row["margin"]
        if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
            raise ConfigError(f"data set {place}: 'margin' must be a number, not {_shown(margin)}")
        yield Pair(chosen, rejected, float(margin))


def read_judged(data: Sequence[ExamplesSettings]) -> Iterator[Judged]:
    """Read judged replies: of `prompt`, `completion` and `label`; a pair is one good and one bad reply.

    Raises:
        ConfigError: If a row is none.
    """
    for place, row in _rows(data):
        if row.get("chosen") is not None and row.get("label") is None:
            _need(place, row, "chosen", "rejected")
            yield Judged(_reply(place, row, "chosen"), good=True)
            yield Judged(_reply(place, row, "rejected"), good=False)
            continue
        _need(place, row, "completion", "label", instead=" (or 'chosen' and 'rejected')")
        if not isinstance(row["label"], bool) and row["label"] not in (0, 1):
            raise ConfigError(f"data set {place}: 'label' must be true or false, not {_shown(row['label'])}")
        yield Judged(_reply(place, row, "completion"), good=bool(row["label"]))


def _rows(data: Sequence[ExamplesSettings]) -> Iterator[tuple[str, Row]]:
    for settings in data:
        known = (*_COLUMNS, _ROLE, _CONTENT)
        if odd := sorted(set(settings.columns) - set(known)):
            raise ConfigError(
                f"data set {settings.name}: columns names {odd[0]!r}, which is none of {', '.join(known)}"
            )
        found = 0
        unseen = {ours: theirs for ours, theirs in settings.columns.items() if ours in _COLUMNS}
        for place, row in islice(read_rows(settings), settings.limit):
            found += 1
            if unseen:
                unseen = {
                    ours: theirs for ours, theirs in unseen.items() if top_column(row, theirs) not in row
                }
            yield str(place), _our_row(str(place), row, settings)
        if not found:
            raise ConfigError(f"data set {settings.name} has no rows")
        if unseen and found != settings.limit:
            ours, theirs = next(iter(unseen.items()))
            raise ConfigError(
                f"data set {settings.name}: columns says that '{ours}' is called '{theirs}' there, and no row has such "
                "a column"
            )


def _our_row(place: str, row: Row, settings: ExamplesSettings) -> Row:
    """Return a row by our columns, whatever its layout; under an empty name, what its columns are called."""
    if seen := next((name for name in _MEDIA if row.get(name)), None):
        raise ConfigError(
            f"data set {place}: '{seen}' holds what is seen beside the text, and examples are learnt as text alone: "
            "leave the row out"
        )
    named = {ours: value_at(row, theirs) for ours, theirs in settings.columns.items() if ours in _COLUMNS}
    listed = {
        name: _json(place, value, name)
        for name in _LISTS
        if isinstance(value := {**row, **named}.get(name), str) and value.lstrip().startswith("[")
    }
    try:
        given = with_our_columns({**row, **named, **listed})
        if settings.columns.keys() & {_ROLE, _CONTENT} and isinstance(given.get("messages"), list):
            keys = settings.columns.get(_ROLE, "role"), settings.columns.get(_CONTENT, "content")
            given["messages"] = [message_of(each, *keys) for each in given["messages"]]
    except ValueError as error:
        raise ConfigError(f"data set {place}: {error}") from error
    ours = {name: given.get(name) for name in _COLUMNS}
    return ours | {"": columns_of(row), _PLAIN: settings.texts == "plain"}


def _need(place: str, row: Row, *names: str, instead: str = "") -> None:
    if missing := [name for name in names if row.get(name) is None]:
        raise ConfigError(
            f"data set {place}: the row has no '{missing[0]}'{instead}; its columns are {row[''] or 'none'}, and "
            "'columns' says what ours are called there"
        )


def _reply(place: str, row: Row, name: str) -> ExampleConversation:
    """Return the conversation that ends with the reply of a column."""
    given = row.get("prompt")
    if row[_PLAIN]:
        return _plain(place, row, name)
    prompt = () if given is None else _messages(place, given, "prompt", "user")
    reply = _messages(place, row[name], name, "assistant")
    if not prompt:
        # The whole conversation stands under the column: its last message is the reply.
        if len(reply) < 2:
            raise ConfigError(
                f"data set {place}: '{name}' is a reply alone and there is no 'prompt': give one, or whole "
                "conversations"
            )
        return _conversation(place, row, reply, len(reply) - 1)
    # Some data sets have the prompt under its own column, and before each reply once more.
    system = int(reply[0]["role"] == "system" != prompt[0]["role"])
    behind = system + len(prompt)
    if reply[system:behind] == prompt and len(reply) > behind:
        return _conversation(place, row, reply, behind)
    return _conversation(place, row, (*prompt, *reply), len(prompt))


def _plain(place: str, row: Row, name: str) -> ExampleConversation:
    """Return a prompt and a reply that are texts, one behind the other."""
    for column in ("prompt", name):
        if not isinstance(row.get(column), str):
            raise ConfigError(
                f"data set {place}: with texts: plain '{column}' must be a text, not {_shown(row.get(column))}; leave "
                "texts out for messages, and have prompts of their own"
            )
    messages = ({"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[name]})
    return replace(_conversation(place, row, messages, 1), plain=True)


def _conversation(
    place: str, row: Row, messages: tuple[Message, ...], learnt_from: int
) -> ExampleConversation:
    if (system := row.get("system")) and messages[0]["role"] not in ("system", "developer"):
        content = _content(place, system, "system", optional=False)
        messages, learnt_from = (
            ({"role": "system", "content": content}, *messages),
            learnt_from + bool(learnt_from),
        )
    tools = row.get("tools") or ()
    if isinstance(tools, str):
        tools = _json(place, tools, "tools")
    if isinstance(tools, list):
        tools = [_json(place, each, "tools") if isinstance(each, str) else each for each in tools]
    if not isinstance(tools, list | tuple) or not all(isinstance(each, dict) for each in tools):
        raise ConfigError(f"data set {place}: 'tools' must be a list of declarations, not {_shown(tools)}")
    return ExampleConversation(
        place,
        messages,
        learnt_from,
        tuple(_declaration(place, tool) for tool in tools),
        str(row.get("domain") or ""),
    )


def _declaration(place: str, tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the declaration of a tool as chat templates know it; a bare function's declaration is wrapped."""
    tool = _plain_data(place, tool, "tools")
    function = tool.get("function", tool)
    if not isinstance(function, dict) or not isinstance(function.get("name", ""), str):
        raise ConfigError(
            f"data set {place}: a declaration in 'tools' must have a function with a name, not {_shown(tool)}"
        )
    if "function" in tool or "name" not in tool:
        return tool
    return {"type": "function", "function": {key: each for key, each in tool.items() if key != "type"}}


def _messages(place: str, value: Any, name: str, role: str) -> tuple[Message, ...]:
    """Return a column as messages: a text is one message of a role."""
    if isinstance(value, str) and name not in _LISTS:
        if name == "prompt" and _MESSAGES_AS_TEXT.match(value) is not None:
            raise ConfigError(
                f"data set {place}: 'prompt' is a list of messages written as JSON text, and would be learnt as that "
                "text: write it as a list, or its one message as text"
            )
        return ({"role": role, "content": value},)
    if not isinstance(value, list | tuple) or not value:
        raise ConfigError(
            f"data set {place}: '{name}' must be {'' if name in _LISTS else 'a text or '}a list of messages, not "
            f"{_shown(value)}"
        )
    return tuple(_message(place, each, f"{name}[{number}]") for number, each in enumerate(value))


def _message(place: str, value: Any, name: str) -> Message:
    if not isinstance(value, dict):
        raise ConfigError(
            f"data set {place}: {name} must be a message with 'role' and 'content', not {_shown(value)}"
        )
    try:
        value = message_of(value)
    except ValueError as error:
        raise ConfigError(f"data set {place}: {name}: {error}") from error
    if value.get("role") not in _ROLES:
        raise ConfigError(
            f"data set {place}: {name}.role must be one of {', '.join(_ROLES)}, not {_shown(value.get('role'))}; "
            f"'columns' says what role and content are called there ({_ROLE}, {_CONTENT})"
        )
    if odd := next((key for key in _NOT_LEARNT_SO if value.get(key)), None):
        raise ConfigError(
            f"data set {place}: {name}.{odd} has parts of a message learnt, and here a message is learnt or it is not: "
            "leave the row out, or give the message a 'weight' of 0 or 1"
        )
    if odd := next((key for key in value if _is_unknown_weight(key, value[key])), None):
        raise ConfigError(
            f"data set {place}: {name}.{odd} may say whether the message is learnt, and that name is not known here: "
            f"call it 'weight', with 0 for a message that is not learnt, or leave it out"
        )
    thoughts = value.get("reasoning_content")
    if thoughts is not None and not isinstance(thoughts, str):
        raise ConfigError(
            f"data set {place}: {name}.reasoning_content must be a text, not {_shown(thoughts)}"
        )
    calls = value.get("tool_calls")
    if isinstance(calls, str) and calls:
        calls = _json(place, calls, f"{name}.tool_calls")
    if calls and not isinstance(calls, list):
        raise ConfigError(
            f"data set {place}: {name}.tool_calls must be a list of calls, or that as JSON text, not {_shown(calls)}"
        )
    content = _content(place, value.get("content"), f"{name}.content", optional=bool(calls))
    # Tables fill up what a message does not have.
    odd_ones = (*_WEIGHTS, _MASKED, "tool_calls")
    message = {key: each for key, each in value.items() if each is not None and key not in odd_ones}
    if calls:
        message["tool_calls"] = [
            _call(place, call, f"{name}.tool_calls[{number}]") for number, call in enumerate(calls)
        ]
    return {**message, "content": content, **_weight(place, value, name)}


def _is_unknown_weight(key: str, value: Any) -> bool:
    known = (*_WEIGHTS, _MASKED, *_NOT_LEARNT_SO)
    return key not in known and _LIKE_A_WEIGHT.search(key) is not None and value in (0, 1)


def _content(place: str, content: Any, name: str, *, optional: bool) -> str:
    """Return a message's content as one text; parts of text are joined."""
    if content is None and optional:
        return ""
    if (text := text_of(content)) is None:
        raise ConfigError(
            f"data set {place}: {name} must be a text or parts of text, not {_shown(content)}; leave the row out where "
            "it holds what is seen or heard"
        )
    return text


def _call(place: str, call: Any, name: str) -> Mapping[str, Any]:
    """Return a call of a tool whose arguments are an object: OpenAI's files have them as JSON text."""
    if isinstance(call, str):
        call = _json(place, call, name)
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ConfigError(f"data set {place}: {name} must have a function with a name, not {_shown(call)}")
    arguments = _arguments(place, function, name)
    rest = {key: each for key, each in call.items() if each is not None and key not in function}
    if odd := next((key for key in _ARGUMENTS if key in rest), None):
        raise ConfigError(f"data set {place}: {name}.{odd} stands beside its function, and belongs into it")
    return {"type": "function", **rest, "function": {"name": function["name"], "arguments": arguments}}


def _arguments(place: str, function: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the arguments of a call.

    Arguments under an unknown name are an error: otherwise the call would be learnt without its arguments.
    """
    named = {key: function[key] for key in _ARGUMENTS if function.get(key) is not None}
    if not named and (odd := [key for key in function if function[key] is not None and key not in _OF_CALLS]):
        raise ConfigError(
            f"data set {place}: {name} has no 'arguments'; what it has is called {', '.join(odd)[:60]}: call its "
            "arguments 'arguments'"
        )
    found = []
    for key, given in named.items():
        place_there = f"{name}.function.{key}"
        if isinstance(given, str):
            given = _json(place, given or "{}", place_there)
        else:
            given = _plain_data(place, given, place_there) or {}
        if not isinstance(given, dict):
            raise ConfigError(f"data set {place}: {place_there} must be an object, not {_shown(given)}")
        found.append(given)
    if len(found) == 2 and found[0] != found[1]:
        raise ConfigError(
            f"data set {place}: {name} has other 'arguments' than 'parameters': keep one of them"
        )
    return found[0] if found else {}


def _weight(place: str, message: Mapping[str, Any], name: str) -> Mapping[str, int]:
    """Return the weight of a message that is not to be learnt."""
    for key in _WEIGHTS:
        value = message.get(key)
        if value is not None and value not in (0, 1):
            raise ConfigError(
                f"data set {place}: {name}.{key} must be 0 or 1, true or false: a message is learnt or it is not; "
                f"not {_shown(value)}"
            )
        if value is not None and not value:
            return {"weight": 0}
    masked = message.get(_MASKED)
    if masked is not None and masked not in (0, 1):
        raise ConfigError(f"data set {place}: {name}.{_MASKED} must be true or false, not {_shown(masked)}")
    return {"weight": 0} if masked else {}


def _json(place: str, text: str, name: str) -> Any:
    try:
        return read_shallow_json(text)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"data set {place}: {name} is not JSON: {error}: {_shown(text)}") from error


def _plain_data(place: str, value: Any, name: str) -> Any:
    """Return plain data without the nulls that tables fill in where other rows have something.

    Tables also hold what JSON has no form for, and a template would write it in a form that no tool reads.
    """
    try:
        return _without_nulls(value)
    except ValueError as error:
        raise ConfigError(f"data set {place}: {name} {error}") from error


def _without_nulls(value: Any) -> Any:
    match value:
        case dict():
            return {key: _without_nulls(each) for key, each in value.items() if each is not None}
        case list() | tuple():
            return [_without_nulls(each) for each in value]
        case str() | int() | None:
            return value
        case float() if math.isfinite(value):
            return value
    raise ValueError(f"holds {_shown(value)}, which JSON has no form for: mend the row")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]} ..."
