"""`/v1/responses`: its requests read, its answers and events built. Nothing here does I/O."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rollgym.trainer.rollout.agents.answers import Choice, Completion
from rollgym.trainer.rollout.agents.calls import (
    SAMPLING_FIELDS,
    WITHOUT_EFFECT,
    AgentCall,
    Message,
    assistant_parts,
    checked_body,
    flag,
    made_call,
    other_logprobs,
    passed_over,
    read_tool_choice,
    requested_tools,
    sampling_wishes,
    text_of,
    whole,
)
from rollgym.trainer.rollout.agents.chat_completions import token_logprobs
from rollgym.trainer.rollout.agents.errors import ApiError, invalid, unsupported
from rollgym.trainer.rollout.agents.streaming import Delta
from rollgym.trainer.rollout.agents.structured import STRUCTURED_FIELDS, wanted_output

FindConversation = Callable[[str], Sequence[Message] | None]
"""Finds the conversation up to and with an answer, by its identifier without `resp_`."""

_PREFIX = "resp_"
_ECHOED = (
    "instructions",
    "metadata",
    "previous_response_id",
    "user",
    "truncation",
    "store",
    "max_output_tokens",
)
_REFUSED = ("prompt", "conversation")
_KNOWN = frozenset(
    (
        *("input", "tools", "tool_choice", "parallel_tool_calls", "stream", "text", "background", "include"),
        *("top_logprobs", "return_token_ids", *_ECHOED, *SAMPLING_FIELDS, *STRUCTURED_FIELDS),
        *WITHOUT_EFFECT,
    )
)


def parse_responses(body: object, conversation: FindConversation) -> AgentCall:
    """Return what a request asks for.

    Args:
        body: The request.
        conversation: Finds what `previous_response_id` names.

    Raises:
        ApiError: If it is malformed, or asks for what is not done here.
    """
    body = checked_body(body, _REFUSED)
    if flag(body, "background"):
        raise unsupported("background is not supported: wait for the answer", "background")
    text = body.get("text")
    form = text.get("format") if isinstance(text, Mapping) else None
    wanted = wanted_output(body, form, "text.format")
    unknown = other_logprobs(body)
    tools = requested_tools(body.get("tools"))
    choice = read_tool_choice(body.get("tool_choice"), tools)
    return AgentCall(
        messages=_conversation(body, conversation),
        tools=tools if choice.reads else [],
        must_call=choice.must_call,
        wishes=sampling_wishes(body, whole(body, "max_output_tokens", 1), structured=wanted),
        reads_tools=choice.reads and bool(tools),
        parallel_tools=flag(body, "parallel_tool_calls", default=True) and not choice.one,
        stream=flag(body, "stream"),
        logprobs="message.output_text.logprobs" in _listed(body, "include", "include"),
        token_ids=flag(body, "return_token_ids"),
        not_enforced=(*choice.unread, *unknown, *passed_over(body, _KNOWN)),
        echoed={name: body[name] for name in _ECHOED if name in body}
        | {"tools": body.get("tools") or [], "tool_choice": body.get("tool_choice") or "auto"}
        | ({} if form is None else {"text": {"format": form}}),
    )


def _conversation(body: Mapping[str, Any], conversation: FindConversation) -> list[Message]:
    messages = _earlier(body.get("previous_response_id"), conversation) + _messages(body.get("input"))
    instructions = body.get("instructions")
    if instructions is not None:
        # They hold for this answer only: those of an earlier one are not carried on.
        messages = [{"role": "system", "content": text_of(instructions, "instructions")}, *messages]
    if not messages:
        raise invalid("input must be text, or a list with at least one item", "input")
    return messages


def _earlier(identifier: object, conversation: FindConversation) -> list[Message]:
    if identifier is None:
        return []
    found = conversation(identifier.removeprefix(_PREFIX)) if isinstance(identifier, str) else None
    if found is None:
        raise ApiError(
            404,
            f"previous_response_id: this session has no response {str(identifier)[:80]!r}",
            "previous_response_not_found",
            "previous_response_id",
        )
    return list(found)


def _listed(holder: Mapping[str, Any], name: str, param: str) -> list[Any]:
    """Return a list of a request; null is an empty one."""
    value = holder.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise invalid(f"{param} must be a list", param)
    return value


# -- items -> messages -------------------------------------------------------------------------------------------------


def _messages(value: object) -> list[Message]:
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise invalid("input must be text, or a list of items", "input")
    reader = _ItemReader()
    for index, item in enumerate(value):
        reader.read(item, f"input[{index}]")
    return reader.messages


class _ItemReader:
    """Puts the items of one reply (thinking, what is said, calls of tools) into one message again."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._speaks = False
        self._said = False

    def read(self, item: object, param: str) -> None:
        """Add the next item of the request's `input` to the conversation."""
        if not isinstance(item, Mapping):
            raise invalid(f"{param} must be an object", param)
        kind = item.get("type", "message")
        if kind == "message":
            self._message(item, param)
        elif kind == "reasoning":
            self._reasoning(item, param)
        elif kind == "function_call":
            self._call(item, param)
        elif kind == "function_call_output":
            self._output(item, param)
        else:
            raise unsupported(f"{param}: items of the type {str(kind)[:40]!r} are not supported", param)

    def _message(self, item: Mapping[str, Any], param: str) -> None:
        role = item.get("role")
        content = text_of(item.get("content"), f"{param}.content")
        if role == "assistant":
            if self._said:
                self._speaks = False
            self._assistant()["content"] = content
            self._said = True
        elif role in ("user", "system", "developer"):
            self._other({"role": "system" if role == "developer" else role, "content": content})
        else:
            raise invalid(f"{param}.role must be user, assistant, system or developer", f"{param}.role")

    def _reasoning(self, item: Mapping[str, Any], param: str) -> None:
        parts = [
            part
            for name in ("content", "summary")
            for part in _listed(item, name, f"{param}.{name}")
            if isinstance(part, Mapping)
        ]
        thought = "".join(str(part.get("text") or "") for part in parts)
        if self._said:
            self._speaks = False
        message = self._assistant()
        if thought:
            message["reasoning_content"] = thought

    def _call(self, item: Mapping[str, Any], param: str) -> None:
        if not isinstance(item.get("name"), str):
            raise invalid(f"{param} needs a name", f"{param}.name")
        call = made_call(str(item.get("call_id") or ""), item["name"], item.get("arguments"))
        self._assistant().setdefault("tool_calls", []).append(call)

    def _output(self, item: Mapping[str, Any], param: str) -> None:
        if not isinstance(item.get("call_id"), str):
            raise invalid(f"{param} needs a call_id", f"{param}.call_id")
        content = text_of(item.get("output"), f"{param}.output")
        self._other({"role": "tool", "content": content, "tool_call_id": item["call_id"]})

    def _assistant(self) -> Message:
        if not self._speaks:
            self.messages.append({"role": "assistant", "content": ""} | assistant_parts(None, None, ""))
            self._speaks, self._said = True, False
        return self.messages[-1]

    def _other(self, message: Message) -> None:
        self._speaks = self._said = False
        self.messages.append(message)


# -- answers -----------------------------------------------------------------------------------------------------------


def response_body(
    call: AgentCall, answer: Completion, model: str, token_text: Mapping[int, str]
) -> dict[str, Any]:
    """Return the body of a complete answer; see `chat_body`."""
    choice = answer.choices[0]
    cut = choice.finish_reason == "length"
    body = _head(call, answer, model, "incomplete" if cut else "completed")
    body["output"] = _items(call, answer, choice, token_text)
    body["usage"] = _usage(answer)
    if cut:
        body["incomplete_details"] = {"reason": "max_output_tokens"}
    if call.token_ids:
        body["prompt_token_ids"] = list(answer.prompt_ids)
        body["token_ids"] = list(choice.sampled.token_ids)
    return body


class ResponseEvents:
    """An answer as the numbered events of a stream, in the order that the API has them.

    Args:
        call: The agent's request.
        answer: The answer, with what is known at its start.
        model: The policy's name.
    """

    def __init__(self, call: AgentCall, answer: Completion, model: str) -> None:
        self._call, self._answer, self._model = call, answer, model
        self._number = 0
        self._begun = False
        # For each opened item its kind, and the part that was sent; the last one is open.
        self._items: list[tuple[str, list[str]]] = []

    def says(self, choice: int, deltas: Sequence[Delta]) -> Iterator[dict[str, Any]]:
        """Yield events for the new part of the answer; there is one choice."""
        yield from self._begins()
        for delta in deltas:
            yield from self._numbered(self._said(delta))

    def ends(self, answer: Completion, token_text: Mapping[int, str]) -> Iterator[dict[str, Any]]:
        """Yield what comes when all of it is there."""
        yield from self._begins()
        whole_answer = response_body(self._call, answer, self._model, token_text)
        opened = len(self._items)
        for index, item in enumerate(whole_answer["output"]):
            if index == opened - 1:
                yield from self._numbered(_closing_events(index, item))
            elif index >= opened:
                yield from self._numbered(_item_events(index, item))
        yield from self._numbered([{"type": f"response.{whole_answer['status']}", "response": whole_answer}])

    def fails(self, error: ApiError) -> Iterator[dict[str, Any]]:
        """Yield the events that end a stream that failed."""
        yield from self._begins()
        failure = {"code": "server_error", "message": error.message}
        body = _head(self._call, self._answer, self._model, "failed") | {"error": failure}
        yield from self._numbered([{"type": "response.failed", "response": body}])

    def _begins(self) -> Iterator[dict[str, Any]]:
        if not self._begun:
            self._begun = True
            begun = _head(self._call, self._answer, self._model, "in_progress")
            kinds = ("response.created", "response.in_progress")
            yield from self._numbered({"type": kind, "response": begun} for kind in kinds)

    def _said(self, delta: Delta) -> Iterator[dict[str, Any]]:
        if not self._items or self._items[-1][0] != delta.kind:
            yield from self._opened(delta.kind)
        index = len(self._items) - 1
        self._items[index][1].append(delta.text)
        thinks = delta.kind == "reasoning"
        kind, more = ("reasoning_text", {}) if thinks else ("output_text", {"logprobs": list[Any]()})
        place = {"output_index": index, "item_id": self._item(delta.kind, "")["id"], "content_index": 0}
        yield {"type": f"response.{kind}.delta", **place, "delta": delta.text, **more}

    def _opened(self, kind: str) -> Iterator[dict[str, Any]]:
        if self._items:  # what was thought before what is said
            index, (earlier, parts) = len(self._items) - 1, self._items[-1]
            yield from _closing_events(index, self._item(earlier, "".join(parts)))
        self._items.append((kind, []))
        yield from _opening_events(len(self._items) - 1, self._item(kind, ""))

    def _item(self, kind: str, text: str) -> dict[str, Any]:
        make = _reasoning_item if kind == "reasoning" else _message_item
        return make(self._answer.identifier, text)

    def _numbered(self, events: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for event in events:
            yield event | {"sequence_number": self._number}
            self._number += 1


def _item_events(index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield an item that was not sent before."""
    if item["type"] == "function_call":
        opened = item | {"status": "in_progress", "arguments": ""}
        yield {"type": "response.output_item.added", "output_index": index, "item": opened}
        place = {"output_index": index, "item_id": item["id"]}
        yield {"type": "response.function_call_arguments.delta", **place, "delta": item["arguments"]}
        done = {"name": item["name"], "arguments": item["arguments"]}
        yield {"type": "response.function_call_arguments.done", **place, **done}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    else:
        yield from _opening_events(index, item)
        (part,) = item["content"]
        kind, place, logprobs = _of_part(index, item, part)
        yield {"type": f"response.{kind}.delta", **place, "delta": part["text"], **logprobs}
        yield from _closing_events(index, item)


def _opening_events(index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    opened = item | {"status": "in_progress", "content": []}
    yield {"type": "response.output_item.added", "output_index": index, "item": opened}
    (part,) = item["content"]
    _, place, logprobs = _of_part(index, item, part)
    empty = part | {"text": ""} | ({"logprobs": []} if logprobs else {})
    yield {"type": "response.content_part.added", **place, "part": empty}


def _closing_events(index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    (part,) = item["content"]
    kind, place, logprobs = _of_part(index, item, part)
    yield {"type": f"response.{kind}.done", **place, "text": part["text"], **logprobs}
    yield {"type": "response.content_part.done", **place, "part": part}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _of_part(
    index: int, item: dict[str, Any], part: dict[str, Any]
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return what the events of an item's one part are called and have in common."""
    place = {"output_index": index, "item_id": item["id"], "content_index": 0}
    if item["type"] == "message":
        return "output_text", place, {"logprobs": part["logprobs"]}
    return "reasoning_text", place, {}


def _head(call: AgentCall, answer: Completion, model: str, status: str) -> dict[str, Any]:
    """Return the fields that all states of an answer have."""
    nothing = dict.fromkeys(("error", "incomplete_details", "instructions", "previous_response_id", "usage"))
    head: dict[str, Any] = {
        "id": f"{_PREFIX}{answer.identifier}",
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "model": model,
        "output": [],
        "parallel_tool_calls": call.parallel_tools,
        "metadata": {},
        "text": {"format": {"type": "text"}},
    }
    return nothing | head | dict(call.echoed)


def _items(
    call: AgentCall, answer: Completion, choice: Choice, token_text: Mapping[int, str]
) -> list[dict[str, Any]]:
    reply, names = choice.sampled.reply, answer.identifier
    items: list[dict[str, Any]] = []
    if reply.reasoning is not None:
        items.append(_reasoning_item(names, reply.reasoning))
    if reply.content or not reply.calls:
        logprobs = token_logprobs(choice, token_text) if call.logprobs else []
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        items.append(_message_item(names, reply.content, logprobs, status))
    for call_id, each in zip(choice.sampled.call_ids, reply.calls, strict=True):
        item = {"type": "function_call", "id": f"fc_{call_id}", "call_id": call_id, "status": "completed"}
        items.append(item | {"name": each.name, "arguments": each.arguments})
    return items


def _reasoning_item(names: str, text: str) -> dict[str, Any]:
    thought = {"type": "reasoning_text", "text": text}
    return {
        "type": "reasoning",
        "id": f"rs_{names}",
        "summary": [],
        "content": [thought],
        "status": "completed",
    }


def _message_item(
    names: str, text: str, logprobs: Sequence[dict[str, Any]] = (), status: str = "completed"
) -> dict[str, Any]:
    said = {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
    return {"type": "message", "id": f"msg_{names}", "role": "assistant", "content": [said], "status": status}


def _usage(answer: Completion) -> dict[str, Any]:
    prompt, completion = len(answer.prompt_ids), answer.completion_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }
