"""`/v1/chat/completions`: its requests read, its answers and chunks built. Nothing here does I/O."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollgym.trainer.rollout.agents.answers import Choice, Completion
from rollgym.trainer.rollout.agents.calls import (
    MOST_CHOICES,
    SAMPLING_FIELDS,
    WITHOUT_EFFECT,
    AgentCall,
    chat_messages,
    checked_body,
    flag,
    other_logprobs,
    passed_over,
    read_tool_choice,
    requested_tools,
    sampling_wishes,
    whole,
)
from rollgym.trainer.rollout.agents.errors import ApiError, unsupported
from rollgym.trainer.rollout.agents.streaming import Delta
from rollgym.trainer.rollout.agents.structured import STRUCTURED_FIELDS, wanted_output

_REFUSED = ("functions", "function_call", "audio", "prediction", "web_search_options")
_KNOWN = frozenset(
    (
        *("messages", "tools", "tool_choice", "parallel_tool_calls", "stream", "stream_options", "logprobs"),
        *("top_logprobs", "return_token_ids", "n", "max_tokens", "max_completion_tokens", "response_format"),
        *("modalities", *SAMPLING_FIELDS, *STRUCTURED_FIELDS, *WITHOUT_EFFECT),
    )
)


def parse_chat(body: object) -> AgentCall:
    """Return what a request asks for.

    Raises:
        ApiError: If it is malformed, or asks for what is not done here.
    """
    body = checked_body(body, _REFUSED)
    if body.get("modalities") not in (None, ["text"]):
        raise unsupported("modalities: only text is supported", "modalities")
    wanted = wanted_output(body, body.get("response_format"), "response_format")
    unknown = other_logprobs(body)
    choices = whole(body, "n", 1)
    if choices is not None and choices > MOST_CHOICES:
        raise unsupported(f"n is at most {MOST_CHOICES} here", "n")
    longest = whole(body, "max_completion_tokens", 1)
    tools = requested_tools(body.get("tools"))
    choice = read_tool_choice(body.get("tool_choice"), tools)
    options = body.get("stream_options")
    return AgentCall(
        messages=chat_messages(body.get("messages")),
        tools=tools if choice.reads else [],
        must_call=choice.must_call,
        wishes=sampling_wishes(body, longest or whole(body, "max_tokens", 1), choices or 1, wanted),
        reads_tools=choice.reads and bool(tools),
        parallel_tools=flag(body, "parallel_tool_calls", default=True) and not choice.one,
        stream=flag(body, "stream"),
        usage_in_stream=flag(options, "include_usage") if isinstance(options, Mapping) else False,
        logprobs=flag(body, "logprobs"),
        token_ids=flag(body, "return_token_ids"),
        not_enforced=(*choice.unread, *unknown, *passed_over(body, _KNOWN)),
    )


def chat_body(
    call: AgentCall, answer: Completion, model: str, token_text: Mapping[int, str]
) -> dict[str, Any]:
    """Return the answer.

    Args:
        call: The agent's request.
        answer: The sampled answer.
        model: The policy's name.
        token_text: Tokens as text, if log-probabilities are returned.
    """
    choices = []
    for index, choice in enumerate(answer.choices):
        one = {"index": index, "message": _message(choice), "finish_reason": finish_reason(choice)}
        choices.append(one | _details(call, choice, token_text))
    body = _head(answer, model, "chat.completion") | {"choices": choices, "usage": usage(answer)}
    return body | {"prompt_token_ids": list(answer.prompt_ids)} if call.token_ids else body


class ChatChunks:
    """An answer as the chunks of a stream: for each choice its role, text, tool calls and end.

    Args:
        call: The agent's request.
        answer: The answer, with what is known at its start.
        model: The policy's name.
    """

    def __init__(self, call: AgentCall, answer: Completion, model: str) -> None:
        self._call = call
        self._head = _head(answer, model, "chat.completion.chunk")
        if call.usage_in_stream:
            self._head["usage"] = None
        self._begun = 0

    def says(self, choice: int, deltas: Sequence[Delta]) -> Iterator[dict[str, Any]]:
        """Yield chunks for the new part of the answer."""
        # OpenAI's library puts choices in the order in which they begin, and wants the first one first.
        while self._begun <= choice:
            self._begun += 1
            yield self._chunk(self._begun - 1, {"role": "assistant", "content": ""})
        for delta in deltas:
            name = "reasoning_content" if delta.kind == "reasoning" else "content"
            yield self._chunk(choice, {name: delta.text})

    def ends(self, answer: Completion, token_text: Mapping[int, str]) -> Iterator[dict[str, Any]]:
        """Yield what comes when all of it is there."""
        for index, choice in enumerate(answer.choices):
            yield from self.says(index, ())
            for position, item in enumerate(_tool_calls(choice)):
                # As OpenAI sends them: the name first, then its arguments.
                function = {"name": item["function"]["name"], "arguments": ""}
                yield self._chunk(index, {"tool_calls": [{"index": position, **item, "function": function}]})
                arguments = {"arguments": item["function"]["arguments"]}
                yield self._chunk(index, {"tool_calls": [{"index": position, "function": arguments}]})
            end = {"index": index, "delta": {}, "finish_reason": finish_reason(choice)}
            yield self._head | {"choices": [end | _details(self._call, choice, token_text)]}
        if self._call.usage_in_stream:
            last = self._head | {"choices": [], "usage": usage(answer)}
            yield last | {"prompt_token_ids": list(answer.prompt_ids)} if self._call.token_ids else last

    def fails(self, error: ApiError) -> Iterator[dict[str, Any]]:
        """Yield the events that end a stream that failed."""
        yield error.as_body()

    def _chunk(self, choice: int, delta: dict[str, Any]) -> dict[str, Any]:
        return self._head | {"choices": [{"index": choice, "delta": delta, "finish_reason": None}]}


def finish_reason(choice: Choice) -> str:
    """Return why a reply ended, as the API has it."""
    if choice.finish_reason == "length":
        return "length"
    return "tool_calls" if choice.sampled.reply.calls else "stop"


def usage(answer: Completion) -> dict[str, int]:
    """Return how many tokens were read and sampled."""
    prompt, completion = answer.prompt_tokens, answer.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _head(answer: Completion, model: str, kind: str) -> dict[str, Any]:
    identifier = f"chatcmpl-{answer.identifier}"
    return {"id": identifier, "object": kind, "created": answer.created, "model": model}


def _message(choice: Choice) -> dict[str, Any]:
    reply = choice.sampled.reply
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["content"] = reply.content or None
        message["tool_calls"] = _tool_calls(choice)
    return message


def _tool_calls(choice: Choice) -> list[dict[str, Any]]:
    sampled = choice.sampled
    return [
        {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call, call_id in zip(sampled.reply.calls, sampled.call_ids, strict=True)
    ]


def _details(call: AgentCall, choice: Choice, token_text: Mapping[int, str]) -> dict[str, Any]:
    ids = choice.sampled.token_ids
    details: dict[str, Any] = {}
    if call.logprobs:
        details["logprobs"] = {"content": token_logprobs(choice, token_text), "refusal": None}
    if call.token_ids:
        details["token_ids"] = list(ids)
    return details


def token_logprobs(choice: Choice, token_text: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return the log-probability of each token, as both APIs have it."""
    return [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(
            (token_text[each] for each in choice.sampled.token_ids), choice.logprobs, strict=True
        )
    ]
