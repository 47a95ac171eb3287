"""Agents' requests, independent of the API: a conversation, tools, which of these to call, and sampling parameters.

`tool_choice` is read as OpenAI's and Anthropic's APIs have it. Nothing here does I/O.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollgym.clients.replies.json_values import CallFault, parse_json
from rollgym.trainer.rollout.agents.errors import invalid, unsupported
from rollgym.trainer.rollout.agents.structured import RequiredForm

_FIELD = "tool_choice"
_SHOWN = 12


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which of its tools a request wants the policy to call.

    Attributes:
        reads: Whether tools are offered, and calls of them looked for.
        must_call: Tools of which one at least must be called.
        one: Whether exactly one call is wanted.
        unread: The field, if it asks for something unsupported.
    """

    reads: bool = True
    must_call: tuple[str, ...] = ()
    one: bool = False
    unread: tuple[str, ...] = ()


def read_tool_choice(value: object, tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
    """Return what a request's `tool_choice` asks for.

    Args:
        value: The field.
        tools: The tools that the request offers.

    Raises:
        ApiError: If it is malformed, or names a tool that is not offered.
    """
    names = tuple(tool["function"]["name"] for tool in tools)
    kind = value.get("type") if isinstance(value, Mapping) else value
    if value is None or kind == "auto":
        return ToolChoice()
    if kind == "none":
        return ToolChoice(reads=False)
    if kind in ("required", "any"):
        # Without offered tools, no call is possible.
        return ToolChoice(must_call=names, unread=() if names else (_FIELD,))
    if isinstance(value, Mapping):
        return _of_object(kind, value, names)
    raise invalid("tool_choice must be none, auto, required, or name a tool", _FIELD)


def _of_object(kind: object, value: Mapping[str, Any], names: tuple[str, ...]) -> ToolChoice:
    if kind in ("function", "tool"):
        return ToolChoice(must_call=(_offered(value, names),), one=True)
    if kind == "allowed_tools":
        return _of_allowed(value, names)
    return ToolChoice(unread=(_FIELD,))


def _of_allowed(value: Mapping[str, Any], names: tuple[str, ...]) -> ToolChoice:
    """Read a list of tools that alone may be called, as OpenAI has it."""
    nested = value.get("allowed_tools")
    holder = nested if isinstance(nested, Mapping) else value
    tools, mode = holder.get("tools"), holder.get("mode")
    if not isinstance(tools, list) or not tools or mode not in ("auto", "required"):
        raise invalid("tool_choice: allowed_tools need a mode, auto or required, and a list of tools", _FIELD)
    allowed = tuple(dict.fromkeys(_offered(each, names) for each in tools))
    if mode == "required":
        return ToolChoice(must_call=allowed)
    # A reply that need not call a tool is not constrained.
    return ToolChoice(unread=() if set(allowed) == set(names) else (_FIELD,))


def _offered(value: object, names: tuple[str, ...]) -> str:
    """Return the tool that is named, in either of the places that APIs have for its name."""
    holder = value.get("function", value) if isinstance(value, Mapping) else None
    name = holder.get("name") if isinstance(holder, Mapping) else None
    if not isinstance(name, str):
        raise invalid(
            "tool_choice must name a tool, such as {'type': 'function', 'function': {'name': 'a'}}", _FIELD
        )
    if name not in names:
        known = ", ".join(repr(each[:80]) for each in names[:_SHOWN]) or "none"
        more = "" if len(names) <= _SHOWN else f" and {len(names) - _SHOWN} more"
        raise invalid(f"tool_choice names the tool {name[:80]!r}; tools has {known}{more}", _FIELD)
    return name


Message = dict[str, Any]
"""A message as chat templates take it: `role`, `content` (text), of assistants `tool_calls` and `reasoning_content`."""

MOST_CHOICES = 8
"""Replies to one request (`n`)."""
_MOST_STOPS = 16
_MOST_NAMES, _LONGEST_NAME = 12, 40
SAMPLING_FIELDS = frozenset(
    (
        *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "logit_bias", "bad_words", "min_tokens"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    )
)
"""Fields of both APIs that `sampling_wishes` and `stops` read."""
WITHOUT_EFFECT = frozenset(
    (
        *("model", "user", "metadata", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    )
)
"""Fields that ask for nothing which a reply would show."""
_ROLES = {"developer": "system", "function": "tool"}
_KNOWN_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class RequestedSampling:
    """The sampling parameters that an agent asks for; None for each that it does not set.

    Attributes:
        max_tokens: Longest reply.
        stop: Texts that end a reply and are not part of it.
        choices: Number of replies to sample.
        temperature: Divides the logits.
        top_p: Smallest set of most likely tokens with this mass.
        top_k: Number of most likely tokens; 0 or less is off.
        seed: Seed of its random stream.
        structured: The required form of the reply.
        others: Names of further parameters that change the distribution.
    """

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    choices: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    structured: RequiredForm | None = None
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentCall:
    """One request of an agent.

    Attributes:
        messages: The whole conversation; empty if the prompts are plain texts.
        prompts: Texts or token ids that the policy continues, without a chat template; each gets all choices.
        echo: Whether each reply repeats its prompt.
        tools: Declarations that the chat template writes into the prompt.
        must_call: Tools of which one at least must be called; empty if a call is not required.
        wishes: The agent's sampling parameters.
        reads_tools: Whether calls of tools are looked for in the reply.
        parallel_tools: Whether there may be more than one; otherwise only the first is returned.
        stream: Whether the answer is a stream of events.
        usage_in_stream: Whether its last chunk tells the usage.
        logprobs: Whether log-probabilities are returned.
        token_ids: Whether ids are returned (vLLM's `return_token_ids`).
        not_enforced: Fields that are ignored, because the trainer cannot force a policy to heed them.
        echoed: Fields of the request that the answer repeats.
    """

    messages: list[Message]
    prompts: tuple[str | tuple[int, ...], ...] = ()
    echo: bool = False
    tools: list[Mapping[str, Any]] = field(default_factory=list)
    must_call: tuple[str, ...] = ()
    wishes: RequestedSampling = RequestedSampling()
    reads_tools: bool = False
    parallel_tools: bool = True
    stream: bool = False
    usage_in_stream: bool = False
    logprobs: bool = False
    token_ids: bool = False
    not_enforced: tuple[str, ...] = ()
    echoed: Mapping[str, Any] = field(default_factory=dict)


# -- fields ----------------------------------------------------------------------------------------------------------


def flag(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Return a truth value of a request; null is its default."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise invalid(f"{name} must be true or false", name)
    return value


def number(body: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    """Return a number of a request, or None."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise invalid(f"{name} must be a number from {low:g} to {high:g}", name)
    return float(value)


def whole(body: Mapping[str, Any], name: str, low: int, high: int = 1 << 31) -> int | None:
    """Return a whole number of a request, or None."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise invalid(f"{name} must be a whole number from {low} to {high}", name)
    return value


def stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the texts that end a reply."""
    value = body.get("stop")
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, list) or len(texts) > _MOST_STOPS or not all(_is_stop(text) for text in texts):
        raise invalid(
            f"stop must be a text, or a list of at most {_MOST_STOPS} texts, none of them empty", "stop"
        )
    return tuple(texts)


def _is_stop(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 1024


def sampling_wishes(
    body: Mapping[str, Any], max_tokens: int | None, choices: int = 1, structured: RequiredForm | None = None
) -> RequestedSampling:
    """Return the wishes that OpenAI's APIs have in common."""
    neutral = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_p": 0}
    others = [name for name, off in neutral.items() if number(body, name, -1e3, 1e3) not in (None, off)]
    others += [name for name in ("logit_bias", "bad_words", "min_tokens") if body.get(name)]
    return RequestedSampling(
        max_tokens=max_tokens,
        stop=stops(body),
        choices=choices,
        temperature=number(body, "temperature", 0.0, 100.0),
        top_p=number(body, "top_p", 0.0, 1.0),
        top_k=whole(body, "top_k", -1),
        seed=whole(body, "seed", -(1 << 63), 1 << 64),
        structured=structured,
        others=tuple(others),
    )


def checked_body(body: object, refused: Sequence[str]) -> Mapping[str, Any]:
    """Return a request's body, an object without the fields that are refused.

    Raises:
        ApiError: If it is not an object, or has one of the fields.
    """
    if not isinstance(body, Mapping):
        raise invalid("the body must be a JSON object")
    for name in refused:
        if body.get(name) is not None:
            raise unsupported(f"{name} is not supported", name)
    return body


def other_logprobs(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Name the field that asks for log-probabilities of tokens that were not sampled: those are unknown."""
    return ("top_logprobs",) if whole(body, "top_logprobs", 0, 20) else ()


def passed_over(body: Mapping[str, Any], known: Collection[str]) -> tuple[str, ...]:
    """Name the fields of a request that ask for something unsupported.

    Args:
        body: The request.
        known: Fields that are read, or that change no reply.
    """
    # A header is ASCII, and names that no API has may be long.
    names = [
        name
        for name, value in body.items()
        if name not in known and not (value is None or value is False or value in ("", [], {}))
    ]
    return tuple(name if name.isascii() and name.isprintable() else ascii(name) for name in _brief(names))


def _brief(names: Sequence[str]) -> list[str]:
    named = [name[:_LONGEST_NAME] for name in names[:_MOST_NAMES]]
    return named if len(names) <= _MOST_NAMES else [*named, f"and {len(names) - _MOST_NAMES} more"]


# -- messages --------------------------------------------------------------------------------------------------------


def chat_messages(value: object) -> list[Message]:
    """Return the messages of a chat completion as chat templates take them."""
    if not isinstance(value, list) or not value:
        raise invalid("messages must be a list with at least one message", "messages")
    return [_message(each, f"messages[{index}]") for index, each in enumerate(value)]


def _message(value: object, param: str) -> Message:
    if not isinstance(value, Mapping):
        raise invalid(f"{param} must be an object with role and content", param)
    role = value.get("role")
    role = _ROLES.get(role, role) if isinstance(role, str) else role
    if role not in _KNOWN_ROLES:
        raise invalid(f"{param}.role must be one of developer, {', '.join(_KNOWN_ROLES)}", f"{param}.role")
    message: Message = {"role": role, "content": text_of(value.get("content"), f"{param}.content")}
    if role == "tool":
        message |= {
            name: value[name] for name in ("tool_call_id", "name") if isinstance(value.get(name), str)
        }
    if role == "assistant":
        message |= assistant_parts(value.get("tool_calls"), reasoning_of(value), f"{param}.tool_calls")
    return message


def reasoning_of(value: Mapping[str, Any]) -> str | None:
    """Return an assistant's thinking, under either of the names that servers have for it."""
    for name in ("reasoning_content", "reasoning"):
        if isinstance(value.get(name), str):
            return str(value[name])
    return None


def assistant_parts(calls: object, reasoning: str | None, param: str) -> Message:
    """Return what an assistant's message has beside its content."""
    parts: Message = {}
    if reasoning:
        parts["reasoning_content"] = reasoning
    if calls:
        if not isinstance(calls, list):
            raise invalid(f"{param} must be a list", param)
        parts["tool_calls"] = [_call(each, param) for each in calls]
    return parts


def _call(value: object, param: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise invalid(f"{param}: each needs a function with a name and arguments", param)
    assert isinstance(value, Mapping)
    return made_call(str(value.get("id") or ""), function["name"], function.get("arguments"))


def made_call(call_id: str, name: str, arguments: object) -> dict[str, Any]:
    """Return a call of a tool as chat templates take it: its arguments are an object if they can be read as one."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": parsed_arguments(arguments)},
    }


def parsed_arguments(value: object) -> Any:
    """Return arguments as the object that their text encodes, or unchanged."""
    if value is None or value == "":
        return {}
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value, strict=False)
    except CallFault:
        return value


def text_of(content: object, param: str) -> str:
    """Return a message's content as one text.

    Raises:
        ApiError: It has parts that are not text, such as images.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{param} must be text or a list of parts", param)
    return "".join(_part(each, param) for each in content)


def _part(value: object, param: str) -> str:
    if isinstance(value, str):
        return value
    part = value if isinstance(value, Mapping) else {}
    kind = part.get("type")
    if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind == "refusal":
        return str(part.get("refusal") or "")
    raise unsupported(f"{param}: parts of the type {str(kind)[:40]!r} are not supported, only text is", param)


# -- tools -----------------------------------------------------------------------------------------------------------


def requested_tools(
    value: object, read: Callable[[object, str], Mapping[str, Any]] | None = None
) -> list[Mapping[str, Any]]:
    """Return declarations of tools as chat templates take them.

    Args:
        value: The field `tools` of a request.
        read: Reads one of them, by its name in messages; None for those of OpenAI's form.

    Raises:
        ApiError: If they are not what they should be.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise invalid("tools must be a list", "tools")
    return [(read or _tool)(each, f"tools[{index}]") for index, each in enumerate(value)]


def _tool(value: object, param: str) -> Mapping[str, Any]:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind != "function" or not isinstance(value, Mapping):
        raise unsupported(
            f"{param}: only tools of the type function are supported, not {str(kind)[:40]!r}", param
        )
    function = value.get("function", value)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise invalid(f"{param} needs a function with a name", param)
    kept = {
        name: function[name]
        for name in ("name", "description", "parameters")
        if function.get(name) is not None
    }
    return {"type": "function", "function": kept}


def finite(value: object) -> float | None:
    """Return a JSON value as a number; None if it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        plain = float(value)
    except OverflowError:  # whole numbers of JSON know no bound
        return None
    return plain if math.isfinite(plain) else None


def last_text(messages: Sequence[Message]) -> str:
    """Return what the policy was shown last, for people."""
    return str(messages[-1]["content"]) if messages else ""
