"""`/v1/completions`: texts that the policy continues, without a chat template. Nothing here does I/O."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from rollgym.trainer.core.numbers import MOST_IDS
from rollgym.trainer.rollout.agents.answers import Choice, Completion
from rollgym.trainer.rollout.agents.calls import (
    MOST_CHOICES,
    SAMPLING_FIELDS,
    WITHOUT_EFFECT,
    AgentCall,
    checked_body,
    flag,
    passed_over,
    sampling_wishes,
    whole,
)
from rollgym.trainer.rollout.agents.chat_completions import usage
from rollgym.trainer.rollout.agents.errors import ApiError, invalid, unsupported
from rollgym.trainer.rollout.agents.streaming import Delta
from rollgym.trainer.rollout.agents.structured import STRUCTURED_FIELDS, wanted_output

_REFUSED = ("suffix",)
_KNOWN = frozenset(
    (
        *("prompt", "max_tokens", "n", "best_of", "echo", "logprobs", "stream", "stream_options"),
        *("return_token_ids", "response_format", *SAMPLING_FIELDS, *STRUCTURED_FIELDS, *WITHOUT_EFFECT),
    )
)
_MOST_PROMPTS = 64
_USUAL_LENGTH = 16
"""Longest reply if a request names none, as this API specifies."""


def parse_completions(body: object) -> AgentCall:
    """Return what a request asks for.

    Raises:
        ApiError: If it is malformed, or asks for what is not done here.
    """
    body = checked_body(body, _REFUSED)
    wanted = wanted_output(body, body.get("response_format"), "response_format")
    prompts = _prompts(body.get("prompt"))
    choices = whole(body, "n", 1) or 1
    if choices > MOST_CHOICES:
        raise unsupported(f"n is at most {MOST_CHOICES} here", "n")
    if (whole(body, "best_of", 1) or choices) != choices:
        raise unsupported("best_of is not supported: every reply is recorded and handed over (n)", "best_of")
    logprobs = whole(body, "logprobs", 0, 5)
    if logprobs:
        raise unsupported(
            "logprobs is 0 at most: of each token only its own log-probability is known", "logprobs"
        )
    echo = flag(body, "echo")
    if echo and logprobs is not None:
        raise unsupported("echo and logprobs: those of the prompt are not known here", "logprobs")
    options = body.get("stream_options")
    return AgentCall(
        messages=[],
        prompts=prompts,
        echo=echo,
        wishes=sampling_wishes(body, whole(body, "max_tokens", 1) or _USUAL_LENGTH, choices, wanted),
        stream=flag(body, "stream"),
        usage_in_stream=flag(options, "include_usage") if isinstance(options, Mapping) else False,
        logprobs=logprobs is not None,
        token_ids=flag(body, "return_token_ids"),
        not_enforced=passed_over(body, _KNOWN),
    )


def _prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    """Return the prompts: one text, token ids, or a list of either."""
    if isinstance(value, str) or _are_ids(value):
        value = [value]
    if not isinstance(value, list) or not value:
        raise invalid("prompt must be text, token ids, or a list of one of them", "prompt")
    if len(value) > _MOST_PROMPTS:
        raise unsupported(f"prompt: at most {_MOST_PROMPTS} at one time are taken here", "prompt")
    return tuple(_prompt(each, f"prompt[{index}]") for index, each in enumerate(value))


def _prompt(value: object, param: str) -> str | tuple[int, ...]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and _are_ids(value):
        return tuple(value)
    raise invalid(f"{param} must be text or token ids, and not empty", param)


def _are_ids(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(each) is int and 0 <= each < MOST_IDS for each in value)
    )


def completion_body(
    call: AgentCall, answer: Completion, model: str, token_text: Mapping[int, str]
) -> dict[str, Any]:
    """Return the body of a complete answer; see `chat_body`."""
    choices = []
    for index, choice in enumerate(answer.choices):
        text = _echoed(call, answer, index) + choice.sampled.reply.content
        choices.append(
            _choice(index, text, finish_reason(choice)) | _details(call, answer, index, token_text)
        )
    return _head(answer, model) | {"choices": choices, "usage": usage(answer)}


class CompletionChunks:
    """An answer as the chunks of a stream: for each choice its text, then its end.

    Args:
        call: The agent's request.
        answer: The answer, with what is known at its start.
        model: The policy's name.
    """

    def __init__(self, call: AgentCall, answer: Completion, model: str) -> None:
        self._call, self._answer = call, answer
        self._head = _head(answer, model)
        if call.usage_in_stream:
            self._head["usage"] = None
        self._begun: set[int] = set()

    def says(self, choice: int, deltas: Sequence[Delta]) -> Iterator[dict[str, Any]]:
        """Yield chunks for the new part of the answer."""
        texts = [delta.text for delta in deltas]
        if choice not in self._begun:
            self._begun.add(choice)
            if echoed := _echoed(self._call, self._answer, choice):
                texts.insert(0, echoed)
        for text in texts:
            yield self._head | {"choices": [_choice(choice, text, None)]}

    def ends(self, answer: Completion, token_text: Mapping[int, str]) -> Iterator[dict[str, Any]]:
        """Yield what comes when all of it is there."""
        for index, choice in enumerate(answer.choices):
            yield from self.says(index, ())
            end = _choice(index, "", finish_reason(choice))
            yield self._head | {"choices": [end | _details(self._call, answer, index, token_text)]}
        if self._call.usage_in_stream:
            yield self._head | {"choices": [], "usage": usage(answer)}

    def fails(self, error: ApiError) -> Iterator[dict[str, Any]]:
        """Yield the events that end a stream that failed."""
        yield error.as_body()


def finish_reason(choice: Choice) -> str:
    """Return why a reply ended, as the API has it."""
    return "length" if choice.finish_reason == "length" else "stop"


def _head(answer: Completion, model: str) -> dict[str, Any]:
    identifier = f"cmpl-{answer.identifier}"
    return {"id": identifier, "object": "text_completion", "created": answer.created, "model": model}


def _choice(index: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


def _echoed(call: AgentCall, answer: Completion, index: int) -> str:
    """Return the prompt of a choice if the reply is to repeat it."""
    return answer.prompts[index // call.wishes.choices].text if call.echo else ""


def _details(
    call: AgentCall, answer: Completion, index: int, token_text: Mapping[int, str]
) -> dict[str, Any]:
    choice = answer.choices[index]
    ids = choice.sampled.token_ids
    details: dict[str, Any] = {}
    if call.logprobs:
        texts = [token_text[each] for each in ids]
        details["logprobs"] = {
            "tokens": texts,
            "token_logprobs": list(choice.logprobs),
            "top_logprobs": None,
            "text_offset": list(accumulate(map(len, texts[:-1]), initial=0)) if texts else [],
        }
    if call.token_ids:
        prompt = answer.prompts[index // call.wishes.choices]
        details |= {"prompt_token_ids": list(prompt.ids), "token_ids": list(ids)}
    return details
