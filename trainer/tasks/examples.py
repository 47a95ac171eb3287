"""Examples to learn from: rows as conversations, as pairs of replies, or as replies that are good or bad."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from rollgym.trainer.config.data import ExamplesSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.tasks.rows import Row, read_rows

Message = Mapping[str, Any]
_ROLES = ("system", "user", "assistant", "tool", "developer")
# By what names others say that a message is read and not learnt.
_WEIGHTS = ("weight", "loss", "loss_mask", "train", "trainable")
_PLAIN = " plain"
"""Stands in a row for `texts: plain` of its data set; no column is called so."""
_COLUMNS = ("messages", "prompt", "completion", "chosen", "rejected", "label", "margin", "tools", "domain")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation whose last messages are to be learnt.

    Attributes:
        place: Where it stands, for messages to people.
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


@dataclass(frozen=True, slots=True)
class Pair:
    """Two replies to one prompt.

    Attributes:
        chosen: The better one.
        rejected: The other.
        margin: By how much they differ.
    """

    chosen: Conversation
    rejected: Conversation
    margin: float = 0.0


@dataclass(frozen=True, slots=True)
class Judged:
    """A reply that is good or bad."""

    reply: Conversation
    good: bool


def read_conversations(data: Sequence[ExamplesSettings]) -> Iterator[Conversation]:
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
        if odd := sorted(set(settings.columns) - set(_COLUMNS)):
            raise ConfigError(
                f"data set {settings.name}: columns names {odd[0]!r}, which is none of {', '.join(_COLUMNS)}"
            )
        found, unseen = 0, dict(settings.columns)
        for place, row in islice(read_rows(settings), settings.limit):
            found += 1
            if unseen:
                unseen = {ours: theirs for ours, theirs in unseen.items() if theirs not in row}
            yield (
                str(place),
                {name: row.get(settings.columns.get(name, name)) for name in _COLUMNS}
                | {"": ", ".join(map(str, row)), _PLAIN: settings.texts == "plain"},
            )
        if not found:
            raise ConfigError(f"data set {settings.name} has no rows")
        if unseen and found != settings.limit:
            ours, theirs = next(iter(unseen.items()))
            raise ConfigError(
                f"data set {settings.name}: columns says that '{ours}' is called '{theirs}' there, and no row has such "
                "a column"
            )


def _need(place: str, row: Row, *names: str, instead: str = "") -> None:
    if missing := [name for name in names if row.get(name) is None]:
        raise ConfigError(
            f"data set {place}: the row has no '{missing[0]}'{instead}; its columns are {row[''] or 'none'}, and "
            "'columns' says what ours are called there"
        )


def _reply(place: str, row: Row, name: str) -> Conversation:
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


def _plain(place: str, row: Row, name: str) -> Conversation:
    """Return a prompt and a reply that are texts, one behind the other."""
    for column in ("prompt", name):
        if not isinstance(row.get(column), str):
            raise ConfigError(
                f"data set {place}: with texts: plain '{column}' must be a text, not {_shown(row.get(column))}; leave "
                "texts out for messages, and have prompts of their own"
            )
    messages = ({"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[name]})
    return replace(_conversation(place, row, messages, 1), plain=True)


def _conversation(place: str, row: Row, messages: tuple[Message, ...], learnt_from: int) -> Conversation:
    tools = row.get("tools") or ()
    if isinstance(tools, str):
        tools = _json(place, tools, "tools")
    if not isinstance(tools, list | tuple) or not all(isinstance(each, dict) for each in tools):
        raise ConfigError(f"data set {place}: 'tools' must be a list of declarations, not {_shown(tools)}")
    return Conversation(
        place, messages, learnt_from, tuple(map(_without_nulls, tools)), str(row.get("domain") or "")
    )


def _messages(place: str, value: Any, name: str, role: str) -> tuple[Message, ...]:
    """Return a column as messages: a text is one message of a role."""
    if isinstance(value, str):
        return ({"role": role, "content": value},)
    if not isinstance(value, list | tuple) or not value:
        raise ConfigError(
            f"data set {place}: '{name}' must be a text or a list of messages, not {_shown(value)}"
        )
    return tuple(_message(place, each, f"{name}[{number}]") for number, each in enumerate(value))


def _message(place: str, value: Any, name: str) -> Message:
    if not isinstance(value, dict):
        raise ConfigError(
            f"data set {place}: {name} must be a message with 'role' and 'content', not {_shown(value)}"
        )
    if value.get("role") not in _ROLES:
        raise ConfigError(
            f"data set {place}: {name}.role must be one of {', '.join(_ROLES)}, not {_shown(value.get('role'))}"
        )
    calls = value.get("tool_calls")
    content = _content(place, value.get("content"), f"{name}.content", optional=bool(calls))
    # Tables fill up what a message does not have.
    message = {key: each for key, each in value.items() if each is not None and key not in _WEIGHTS}
    if calls:
        message["tool_calls"] = [
            _call(place, call, f"{name}.tool_calls[{number}]") for number, call in enumerate(calls)
        ]
    return {**message, "content": content, **_weight(place, value, name)}


def _content(place: str, content: Any, name: str, *, optional: bool) -> str:
    """Return a message's content as one text; parts of text are joined."""
    if content is None and optional:
        return ""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return "".join(texts)
    if not isinstance(content, str):
        raise ConfigError(f"data set {place}: {name} must be a text or parts of text, not {_shown(content)}")
    return content


def _call(place: str, call: Any, name: str) -> Mapping[str, Any]:
    """Return a call of a tool whose arguments are an object: OpenAI's files have them as JSON text."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ConfigError(f"data set {place}: {name} must have a function with a name, not {_shown(call)}")
    arguments = function.get("arguments")
    arguments = (
        _json(place, arguments or "{}", f"{name}.function.arguments")
        if isinstance(arguments, str)
        else _without_nulls(arguments or {})
    )
    if not isinstance(arguments, dict):
        raise ConfigError(
            f"data set {place}: {name}.function.arguments must be an object, not {_shown(arguments)}"
        )
    rest = {key: each for key, each in call.items() if each is not None and key not in function}
    return {"type": "function", **rest, "function": {"name": function["name"], "arguments": arguments}}


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
    return {}


def _json(place: str, text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"data set {place}: {name} is not JSON: {error}: {_shown(text)}") from error


def _without_nulls(value: Any) -> Any:
    """Return plain data without the nulls that tables fill in where other rows have something."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list | tuple) else value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]} ..."
