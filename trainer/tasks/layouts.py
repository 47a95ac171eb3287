"""Row layouts of other libraries: detected by their columns, and converted to ours."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from rollgym.clients.protocol.json_text import read_shallow_json

Row = dict[str, Any]

ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool", "developer")},
    **dict.fromkeys(("human", "User", "Human"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "Assistant"), "assistant"),
    **dict.fromkeys(("observation", "function"), "tool"),
    "System": "system",
}
"""Roles by the names that data sets have for them."""
_ASKED = ("question", "prompt")
_TEXTS = (None, "text", "input_text", "output_text")
"""What the type of a part of text is called."""
_SEEN = ("image", "image_url", "video", "video_url", "audio", "audio_url", "input_audio", "file")
"""Fields of a part that hold something other than text."""
_CALLS = "function_call"
"""ShareGPT's role of a message that calls tools."""


@dataclass(frozen=True, slots=True)
class ExampleLayout:
    """A layout of examples to learn from.

    Attributes:
        whose: The libraries that have it.
        columns: What it is known by: a row has all of them.
        unless: A row that has one of these has another layout.
        becomes: Our columns that come of it.
        read: Returns them; ValueError says what is wrong with a row.
        applies: Whether a row with these columns is one of this layout.
    """

    whose: str
    columns: tuple[str, ...]
    becomes: str
    read: Callable[[Row], Row]
    unless: tuple[str, ...] = ()
    applies: Callable[[Row], bool] = lambda row: True

    def matches(self, row: Row) -> bool:
        """Whether a row has this layout."""
        return (
            all(row.get(name) is not None for name in self.columns)
            and all(row.get(name) is None for name in self.unless)
            and self.applies(row)
        )


@dataclass(frozen=True, slots=True)
class TaskLayout:
    """A layout of tasks that a verifier scores: where question and answer stand."""

    whose: str
    question: str
    answer: str


def with_our_columns(row: Row) -> Row:
    """Return a row with our columns beside its own, if it has one of the layouts.

    Raises:
        ValueError: If it has one, and some of its fields do not conform to that layout.
    """
    layout = next((each for each in EXAMPLES if each.matches(row)), None)
    return row if layout is None else row | layout.read(row)


def with_question_and_answer(fields: Row) -> Row:
    """Return the fields of a task with `question` and `answer` beside them, if it has one of the layouts.

    A `question` or `prompt` that is a list of messages becomes a text. Whatever else stands there is kept: verifiers of
    others may read it.

    Raises:
        ValueError: If its question is neither text nor a list of messages that makes one text.
    """
    found = dict(fields)
    if fields.get("question") is None:
        for layout in TASKS:
            question, answer = fields.get(layout.question), value_at(fields, layout.answer)
            if question is not None and answer is not None:
                found |= {"question": question, "answer": answer}
                break
    texts = {name: question_text(found[name]) for name in _ASKED if isinstance(found.get(name), list)}
    return found | texts


def question_text(value: list[Any]) -> str:
    """Return what messages of a task ask as text: the user's message, with the system's before it.

    Raises:
        ValueError: If there is more in a list of messages.
    """
    messages = [message_of(each) if isinstance(each, dict) else {} for each in value]
    roles = [each.get("role") for each in messages]
    texts = [text_of(each.get("content")) for each in messages]
    if roles not in (["user"], ["system", "user"]) or None in texts:
        raise ValueError(
            "the question is a list of messages, and only one of the user, or one of the system and one of the user, "
            "can be made a question: make it one text"
        )
    return "\n\n".join(text for text in texts if text)


def text_of(content: Any) -> str | None:
    """Return a message's content as one text, parts of text joined; None if it is something else.

    A list of texts is something else: data sets have several replies so, of which one would be made.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts = [part["text"] for part in content if _is_text(part)]
    return "".join(texts) if len(texts) == len(content) else None


def _is_text(part: Any) -> bool:
    """Whether a part of a content is text and nothing beside it: a picture may have one, too."""
    return (
        isinstance(part, Mapping)
        and part.get("type") in _TEXTS
        and isinstance(part.get("text"), str)
        and all(part.get(name) is None for name in _SEEN)
    )


def value_at(row: Mapping[str, Any], path: str) -> Any:
    """Return the value of a column, or one within it: `reward_model.ground_truth`; None if there is none."""
    if path in row:
        return row[path]
    value: Any = row
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def top_column(row: Mapping[str, Any], path: str) -> str:
    """Return the column that the value of a path is in."""
    return path if path in row else path.partition(".")[0]


def message_of(value: Any, role: str = "role", content: str = "content") -> Any:
    """Return a message by our names: ShareGPT's `from` and `value`, others' roles, and calls of tools as `tool_calls`.

    Args:
        value: The message; what is none is returned as it is.
        role: What its role is called.
        content: What its content is called.

    Raises:
        ValueError: If its calls of tools are not valid JSON.
    """
    if not isinstance(value, dict):
        return value
    if role not in value and "from" in value:
        role, content = "from", "value"
    rest = {name: each for name, each in value.items() if name not in (role, content, _CALLS)}
    text, speaker = value.get(content), value.get(role)
    if speaker == _CALLS:
        return {**rest, "role": "assistant", "content": "", "tool_calls": _calls(text)}
    if value.get(_CALLS):
        rest["tool_calls"] = _calls(value[_CALLS])
    return {**rest, "role": ROLES.get(str(speaker), speaker), "content": text}


def _calls(text: Any) -> list[Any]:
    try:
        found = read_shallow_json(text) if isinstance(text, str) else text
    except orjson.JSONDecodeError as error:
        raise ValueError(f"a message of {_CALLS} is not JSON: {error}") from error
    return found if isinstance(found, list) else [found]


def _messages(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"'{name}' must be a list of messages, not {type(value).__name__}")
    return [message_of(each) for each in value]


def _reply(value: Any) -> Any:
    """A reply: text, messages, or one message."""
    return [value] if isinstance(value, dict) else value


def _asked(row: Row) -> list[Any]:
    """The messages of a row of Alpaca's columns before the reply."""
    texts = [row["instruction"], row.get("input") or row.get("context") or ""]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("'instruction' and 'input' must be texts")
    turns = row.get("history") or []
    if not isinstance(turns, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in turns):
        raise ValueError("'history' must be a list of pairs: what was asked, and the reply")
    return [
        *({"role": role, "content": text} for turn in turns for role, text in zip(_TURN, turn, strict=True)),
        {"role": "user", "content": "\n".join(filter(None, texts))},
    ]


_TURN = ("user", "assistant")


def _alpaca(row: Row) -> Row:
    name = "output" if row.get("output") is not None else "response"
    reply = row[name]
    if isinstance(reply, list) and any(isinstance(each, str) for each in reply):
        raise ValueError(
            f"'{name}' holds {len(reply)} texts, and a reply is one: replies that are ranked go under 'chosen' and "
            "'rejected'"
        )
    return {"messages": [*_asked(row), {"role": "assistant", "content": reply}]}


def _openai_functions(row: Row) -> Row:
    return {"tools": row["functions"]}


def _sharegpt(row: Row) -> Row:
    return {"messages": _messages(row["conversations"], "conversations")}


def _tagged(row: Row) -> Row:
    name = "conversations" if row.get("conversations") is not None else "messages"
    messages = _messages(row[name], name)
    return {"messages": None, "prompt": messages[:-1], "completion": messages[-1:], "label": row["kto_tag"]}


def _sharegpt_pair(row: Row) -> Row:
    return {"prompt": _messages(row["conversations"], "conversations"), **_replies(row)}


def _messages_pair(row: Row) -> Row:
    return {"messages": None, "prompt": row["messages"], **_replies(row)}


def _replies(row: Row, chosen: str = "chosen", rejected: str = "rejected") -> Row:
    return {"chosen": _reply(row[chosen]), "rejected": _reply(row[rejected])}


def _openai_pair(row: Row) -> Row:
    given = row["input"]
    if not isinstance(given, dict):
        raise ValueError("'input' must be an object with 'messages'")
    replies = _replies(row, "preferred_output", "non_preferred_output")
    return {
        "prompt": _messages(given.get("messages"), "input.messages"),
        "tools": given.get("tools"),
        **replies,
    }


def _tinker_pair(row: Row) -> Row:
    label, both = row["label"], row["comparison"]
    if not isinstance(both, dict) or label not in ("A", "B"):
        raise ValueError(
            f"'label' must be A or B, not {label!r:.40}: of a tie nothing is learnt, leave the row out"
        )
    replies = {name: both.get(f"completion_{name}") for name in "AB"}
    chosen, rejected = (replies[label], replies["B" if label == "A" else "A"])
    return {"prompt": both.get("prompt_conversation"), "chosen": chosen, "rejected": rejected, "label": None}


def _ranked_pair(row: Row) -> Row:
    found = row["completions"]
    if not isinstance(found, list) or len(found) != 2 or not all(isinstance(each, dict) for each in found):
        raise ValueError("'completions' must be two, each with 'rank' and 'completion'")
    ranks = [each.get("rank") for each in found]
    if not all(type(rank) is int for rank in ranks) or ranks[0] == ranks[1]:
        raise ValueError(f"'completions' must have two different ranks, not {ranks}")
    chosen, rejected = sorted(found, key=lambda each: int(each["rank"]))
    return {
        "prompt": row["context"],
        "chosen": chosen.get("completion"),
        "rejected": rejected.get("completion"),
    }


def _one_message(row: Row) -> bool:
    return isinstance(row["chosen"], dict)


_PAIR = "`prompt`, `chosen`, `rejected`"
_JUDGED = "`prompt`, `completion`, `label`"
_OURS = ("messages", "prompt")

EXAMPLES: Sequence[ExampleLayout] = (
    ExampleLayout("OpenAI, former", ("messages", "functions"), "`tools`", _openai_functions, ("tools",)),
    ExampleLayout(
        "axolotl chat_template (one message each)",
        ("messages", "chosen", "rejected"),
        _PAIR,
        _messages_pair,
        ("prompt",),
        _one_message,
    ),
    ExampleLayout("LLaMA-Factory KTO", ("messages", "kto_tag"), _JUDGED, _tagged),
    ExampleLayout("LLaMA-Factory KTO", ("conversations", "kto_tag"), _JUDGED, _tagged),
    ExampleLayout(
        "LLaMA-Factory ranking", ("conversations", "chosen", "rejected"), _PAIR, _sharegpt_pair, _OURS
    ),
    ExampleLayout(
        "ShareGPT (axolotl, LLaMA-Factory, NeMo)", ("conversations",), "`messages`", _sharegpt, _OURS
    ),
    ExampleLayout(
        "LLaMA-Factory ranking",
        ("instruction", "chosen", "rejected"),
        _PAIR,
        lambda row: {"prompt": _asked(row), **_replies(row)},
        _OURS,
    ),
    ExampleLayout(
        "axolotl chatml.argilla",
        ("instruction", "chosen_response", "rejected_response"),
        _PAIR,
        lambda row: {"prompt": _asked(row), **_replies(row, "chosen_response", "rejected_response")},
        _OURS,
    ),
    ExampleLayout(
        "axolotl chatml.intel",
        ("question", "chosen", "rejected"),
        _PAIR,
        lambda row: {"prompt": row["question"]},
        _OURS,
        lambda row: isinstance(row["chosen"], str),
    ),
    ExampleLayout(
        "LLaMA-Factory KTO",
        ("instruction", "output", "kto_tag"),
        _JUDGED,
        lambda row: {"prompt": _asked(row), "completion": row["output"], "label": row["kto_tag"]},
        _OURS,
    ),
    ExampleLayout(
        "axolotl KTO",
        ("instruction", "completion", "label"),
        _JUDGED,
        lambda row: {"prompt": _asked(row)},
        _OURS,
    ),
    ExampleLayout("Alpaca (axolotl, LLaMA-Factory)", ("instruction", "output"), "`messages`", _alpaca, _OURS),
    ExampleLayout("Dolly", ("instruction", "response"), "`messages`", _alpaca, _OURS),
    ExampleLayout(
        "OpenAI preferences",
        ("input", "preferred_output", "non_preferred_output"),
        _PAIR,
        _openai_pair,
        _OURS,
    ),
    ExampleLayout("Tinker preferences", ("comparison", "label"), _PAIR, _tinker_pair, _OURS),
    ExampleLayout("NeMo-RL preferences", ("context", "completions"), _PAIR, _ranked_pair, _OURS),
    ExampleLayout(
        "verl SFT",
        ("prompt", "response"),
        "`prompt`, `completion`",
        lambda row: {"completion": row["response"]},
        ("messages", "completion", "chosen"),
    ),
    ExampleLayout(
        "OpenRLHF SFT, NeMo-RL",
        ("input", "output"),
        "`prompt`, `completion`",
        lambda row: {"prompt": row["input"], "completion": row["output"]},
        (*_OURS, "instruction"),
    ),
)
"""Layouts of examples; the first that a row has is taken."""

TASKS: Sequence[TaskLayout] = (
    TaskLayout("verl", "prompt", "reward_model.ground_truth"),
    TaskLayout("TRL, OpenRLHF, verifiers", "prompt", "answer"),
    TaskLayout("TRL, open-r1", "prompt", "solution"),
    TaskLayout("slime, OpenRLHF", "prompt", "label"),
    TaskLayout("OpenRLHF", "input", "label"),
    TaskLayout("NeMo-RL", "problem", "expected_answer"),
    TaskLayout("OpenAI reinforcement fine-tuning", "messages", "answer"),
    TaskLayout("OpenAI reinforcement fine-tuning", "messages", "reference_answer"),
)
"""Layouts of tasks; the first whose question and answer a row has is taken."""
