"""Anthropic's `/v1/messages`: its requests read, its answers and events built. Nothing here does I/O."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollgym.trainer.rollout.agents.answers import Choice, Completion
from rollgym.trainer.rollout.agents.calls import (
    AgentCall,
    Message,
    RequestedSampling,
    ToolChoice,
    flag,
    made_call,
    number,
    parsed_arguments,
    passed_over,
    read_tool_choice,
    requested_tools,
    whole,
)
from rollgym.trainer.rollout.agents.errors import ApiError, invalid, unsupported
from rollgym.trainer.rollout.agents.streaming import Delta
from rollgym.trainer.rollout.agents.structured import STRUCTURED_FIELDS, RequiredForm, wanted_output

_KNOWN = frozenset(
    (
        *("model", "messages", "system", "max_tokens", "tools", "tool_choice", "stop_sequences", "stream"),
        *("temperature", "top_p", "top_k", "metadata", "service_tier", "cache_control", "output_format"),
        *STRUCTURED_FIELDS,
    )
)
_MOST_STOPS = 16
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
_CALL_PREFIX = "toolu_"
_NO_THREADS = "thread_unsupported_request"
"""By this code the library knows that it has to send the whole conversation, and without a thread."""


def parse_messages(body: Mapping[str, Any], *, counted: bool = False) -> AgentCall:
    """Return what a request asks for.

    Args:
        body: The request.
        counted: Whether its tokens are only counted: then it names no longest reply.

    Raises:
        ApiError: If it is malformed, or asks for what is not done here.
    """
    if body.get("thread") is not None:
        message = "thread: no conversation is held here: send all of its messages, without thread"
        raise ApiError(400, message, _NO_THREADS, "thread")
    wanted = _wanted(body)
    longest = whole(body, "max_tokens", 1)
    if longest is None and not counted:
        raise invalid("max_tokens: how long the reply may be must be said", "max_tokens")
    tools = requested_tools(body.get("tools"), _tool)
    choice = _tool_choice(body.get("tool_choice"), tools)
    unread = tuple(name for name in passed_over(body, _KNOWN) if name != "output_config" or _effort(body))
    return AgentCall(
        messages=[*_system(body.get("system")), *_messages(body.get("messages"))],
        tools=tools if choice.reads else [],
        must_call=choice.must_call,
        wishes=RequestedSampling(
            max_tokens=longest,
            stop=_stops(body.get("stop_sequences")),
            temperature=number(body, "temperature", 0.0, 100.0),
            top_p=number(body, "top_p", 0.0, 1.0),
            top_k=whole(body, "top_k", -1),
            structured=wanted,
        ),
        reads_tools=choice.reads and bool(tools),
        parallel_tools=not choice.one,
        stream=flag(body, "stream"),
        not_enforced=(*choice.unread, *unread),
    )


def _tool_choice(value: object, tools: list[Mapping[str, Any]]) -> ToolChoice:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if value is not None and kind not in ("auto", "any", "tool", "none"):
        raise invalid("tool_choice must be an object of the type auto, any, tool or none", "tool_choice")
    choice = read_tool_choice(value, tools)
    one = isinstance(value, Mapping) and flag(value, "disable_parallel_tool_use")
    return replace(choice, one=choice.one or one)


def _wanted(body: Mapping[str, Any]) -> RequiredForm | None:
    """Return what the reply shall look like, by the name of today or the former one."""
    config = body.get("output_config")
    form = config.get("format") if isinstance(config, Mapping) else None
    if form is not None and body.get("output_format") is not None:
        raise invalid(
            "output_config.format and output_format: only one of them can be asked for", "output_format"
        )
    if form is not None:
        return wanted_output(body, form, "output_config.format")
    return wanted_output(body, body.get("output_format"), "output_format")


def _effort(body: Mapping[str, Any]) -> bool:
    """Whether `output_config` asks for more than a format."""
    config = body.get("output_config")
    return not isinstance(config, Mapping) or any(
        config[name] is not None for name in config if name != "format"
    )


def _stops(value: object) -> tuple[str, ...]:
    texts = [] if value is None else value
    if (
        not isinstance(texts, list)
        or len(texts) > _MOST_STOPS
        or not all(isinstance(text, str) and 0 < len(text) <= 1024 for text in texts)
    ):
        raise invalid(
            f"stop_sequences must be a list of at most {_MOST_STOPS} texts, none of them empty",
            "stop_sequences",
        )
    return tuple(texts)


def _tool(value: object, param: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise invalid(f"{param} must be an object with a name and an input_schema", param)
    if value.get("type") not in (None, "custom"):
        raise unsupported(
            f"{param}: tools of the type {str(value['type'])[:40]!r} are not supported, only an agent's own are",
            param,
        )
    function = {"name": value["name"], "parameters": value.get("input_schema") or {"type": "object"}}
    if value.get("description") is not None:
        function["description"] = value["description"]
    return {"type": "function", "function": function}


# -- messages ----------------------------------------------------------------------------------------------------------


def _system(value: object) -> list[Message]:
    if value is None or value == "" or value == []:
        return []
    return [{"role": "system", "content": _text(value, "system")}]


def _messages(value: object) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise invalid("messages must be a list with at least one message", "messages")
    messages: list[Message] = []
    for index, each in enumerate(value):
        param = f"messages[{index}]"
        role = each.get("role") if isinstance(each, Mapping) else None
        if role == "user":
            messages += _of_user(each.get("content"), f"{param}.content")
        elif role == "assistant":
            messages.append(_of_assistant(each.get("content"), f"{param}.content"))
        elif role == "system":
            messages += _system(each.get("content"))
        else:
            raise invalid(f"{param}.role must be user or assistant", f"{param}.role")
    if not messages:
        raise invalid("messages must be a list with at least one message that says something", "messages")
    if messages[-1]["role"] == "assistant":
        raise unsupported(
            "messages: the beginning of a reply cannot be given; the last message must be the user's",
            "messages",
        )
    return messages


def _of_user(content: object, param: str) -> list[Message]:
    """Return a user's message: what tools have said first, each as a message of its own, then what the user says."""
    results: list[Message] = []
    said: list[object] = []
    for block in _blocks(content, param):
        if block.get("type") == "tool_result":
            results.append(
                {
                    "role": "tool",
                    "content": _text(block.get("content"), f"{param}.content"),
                    "tool_call_id": str(block.get("tool_use_id") or "").removeprefix(_CALL_PREFIX),
                }
            )
        else:
            said.append(block)
    if said or not results:
        results.append({"role": "user", "content": _text(said, param)})
    return results


def _of_assistant(content: object, param: str) -> Message:
    said, thought, calls = [], [], []
    for block in _blocks(content, param):
        kind = block.get("type")
        if kind == "tool_use":
            if not isinstance(block.get("name"), str):
                raise invalid(f"{param}: each tool_use needs a name and an input", param)
            call_id = str(block.get("id") or "").removeprefix(_CALL_PREFIX)
            calls.append(made_call(call_id, block["name"], block.get("input")))
        elif kind == "thinking":
            thought.append(str(block.get("thinking") or ""))
        elif kind != "redacted_thinking":
            said.append(block)
    message: Message = {"role": "assistant", "content": _text(said, param)}
    if any(thought):
        message["reasoning_content"] = "".join(thought)
    if calls:
        message["tool_calls"] = calls
    return message


def _blocks(content: object, param: str) -> list[Mapping[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise invalid(f"{param} must be text or a list of blocks", param)
    return content


def _text(content: object, param: str) -> str:
    if content is None:
        return ""
    texts = []
    for block in _blocks(content, param):
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            kind = str(block.get("type"))[:40]
            raise unsupported(
                f"{param}: blocks of the type {kind!r} are not supported here, only text is", param
            )
        texts.append(block["text"])
    return "".join(texts)


# -- answers -----------------------------------------------------------------------------------------------------------


def message_body(call: AgentCall, answer: Completion, model: str) -> dict[str, Any]:
    """Return the answer.

    Args:
        call: The agent's request.
        answer: The sampled answer.
        model: The policy's name.
    """
    choice = answer.choices[0]
    usage = _usage(answer, answer.completion_tokens)
    return _head(answer, model) | {"content": _content(choice), "usage": usage} | _ending(choice)


class MessageEvents:
    """An answer as the events of a stream: a message, its blocks one after the other, its end.

    Args:
        call: The agent's request.
        answer: The answer, with what is known at its start.
        model: The policy's name.
    """

    def __init__(self, call: AgentCall, answer: Completion, model: str) -> None:
        self._answer, self._model = answer, model
        self._begun = False
        # Kinds of the blocks that were opened; the last one is open.
        self._blocks: list[str] = []

    def says(self, choice: int, deltas: Sequence[Delta]) -> Iterator[dict[str, Any]]:
        """Yield events for the new part of the answer; there is one choice."""
        yield from self._begins()
        for delta in deltas:
            kind = "thinking" if delta.kind == "reasoning" else "text"
            if not self._blocks or self._blocks[-1] != kind:
                yield from self._opened(kind, {"type": kind, kind: ""})
            yield self._delta({"type": f"{kind}_delta", kind: delta.text})

    def ends(self, answer: Completion, token_text: Mapping[int, str]) -> Iterator[dict[str, Any]]:
        """Yield what comes when all of it is there."""
        yield from self._begins()
        choice = answer.choices[0]
        opened = len(self._blocks)
        for block in _content(choice)[opened:]:
            empty: dict[str, Any] = {"input": {}} if block["type"] == "tool_use" else {block["type"]: ""}
            yield from self._opened(block["type"], block | empty)
            if block["type"] == "tool_use":
                yield self._delta({"type": "input_json_delta", "partial_json": json.dumps(block["input"])})
            else:
                yield self._delta({"type": f"{block['type']}_delta", block["type"]: block[block["type"]]})
        if self._blocks:
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}
        usage = {"output_tokens": answer.completion_tokens}
        yield {"type": "message_delta", "delta": _ending(choice), "usage": usage}
        yield {"type": "message_stop"}

    def fails(self, error: ApiError) -> Iterator[dict[str, Any]]:
        """Yield the events that end a stream that failed."""
        yield error_body(error)

    def _begins(self) -> Iterator[dict[str, Any]]:
        if not self._begun:
            self._begun = True
            nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
            begun = _head(self._answer, self._model) | nothing | {"usage": _usage(self._answer, 0)}
            yield {"type": "message_start", "message": begun}

    def _opened(self, kind: str, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if self._blocks:
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}
        self._blocks.append(kind)
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}


def error_body(error: ApiError) -> dict[str, Any]:
    """Return a refusal in the shape of this API."""
    kind = "invalid_request_error" if error.status < 500 else "api_error"
    told: dict[str, Any] = {
        "type": _ERRORS.get(error.status, kind),
        "message": error.message,
        "code": error.code,
    }
    if error.code == _NO_THREADS:
        told["details"] = {"error_code": error.code}
    return {"type": "error", "error": told}


def _head(answer: Completion, model: str) -> dict[str, Any]:
    return {"id": f"msg_{answer.identifier}", "type": "message", "role": "assistant", "model": model}


def _usage(answer: Completion, sampled: int) -> dict[str, int]:
    nothing = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": len(answer.prompt_ids), "output_tokens": sampled} | nothing


def _content(choice: Choice) -> list[dict[str, Any]]:
    reply = choice.sampled.reply
    blocks: list[dict[str, Any]] = []
    if reply.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
    if reply.content:
        blocks.append({"type": "text", "text": reply.content})
    for call_id, call in zip(choice.sampled.call_ids, reply.calls, strict=True):
        read = parsed_arguments(call.arguments)
        given = read if isinstance(read, dict) else {"arguments": call.arguments}
        blocks.append(
            {"type": "tool_use", "id": f"{_CALL_PREFIX}{call_id}", "name": call.name, "input": given}
        )
    return blocks


def _ending(choice: Choice) -> dict[str, Any]:
    if choice.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if choice.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop}
    return {"stop_reason": "tool_use" if choice.sampled.reply.calls else "end_turn", "stop_sequence": None}
