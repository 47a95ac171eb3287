"""vLLM's replies: what was drawn, how likely and by which weights, from whole answers and from streams. No I/O."""

from collections.abc import Mapping, Sequence
from typing import Any

from rollgym.trainer.inference.base import FinishReason
from rollgym.trainer.inference.calls import (
    HttpAnswer,
    list_of,
    logprob_of,
    part_of,
    read_object,
    token_ids_of,
)
from rollgym.trainer.inference.errors import FailedReplyError, MalformedReplyError
from rollgym.trainer.inference.routed_experts import read_array_file
from rollgym.trainer.inference.stretches import (
    GenerationCall,
    Stretch,
    checked_stretch,
    labels_of_spans,
    prompt_logprobs,
)

_REPLY = "vLLM's reply"


def read_stretch(answer: HttpAnswer, call: GenerationCall, *, spans: bool) -> Stretch:
    """Read a reply of either route.

    Args:
        answer: The server's, which says yes.
        call: What was asked for.
        spans: Whether the server's replies say which weights drew each token.

    Raises:
        MalformedReplyError: If it breaks the contract.
        FailedReplyError: If the server ended the reply by an error.
    """
    choice = _only_choice(read_object(answer.body))
    finish_reason = _finish_reason(choice.get("finish_reason"))
    token_ids = token_ids_of(part_of(choice, "token_ids", list, _REPLY), _REPLY)
    logprobs = _logprobs(choice, token_ids)
    labels = None
    if spans and token_ids:
        labels = labels_of_spans(choice.get("weight_versions"), len(token_ids), _REPLY)
    experts = None
    if call.sampling.routed_experts and token_ids:
        computed = len(call.prompt_ids) + len(token_ids)
        experts = read_array_file(choice.get("routed_experts"), computed, _REPLY)
    return checked_stretch(Stretch(token_ids, logprobs, labels, finish_reason, experts), call, _REPLY)


def drawn(event: Mapping[str, Any]) -> list[int]:
    """Return the ids that an event of a stream brings."""
    return [each for choice in _choices(event) for each in list_of(choice, "token_ids") if type(each) is int]


def joined(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return what the events amount to: each has a part of the choice, and the last one what is known then."""
    ids: list[Any] = []
    logprobs: dict[str, list[Any]] = {}
    broken = False
    whole: dict[str, Any] = {}
    for choice in (choice for event in events for choice in _choices(event)):
        whole |= {key: value for key, value in choice.items() if value is not None}
        ids += list_of(choice, "token_ids")
        broken = broken or not isinstance(choice.get("token_ids"), list | None)
        told = choice.get("logprobs")
        for key, values in told.items() if isinstance(told, dict) else ():
            if isinstance(values, list):
                logprobs.setdefault(key, []).extend(values)
    known = whole | {"token_ids": None if broken else ids, "logprobs": logprobs}
    return {**events[-1], "choices": [known]}


def read_prompt_logprobs(answer: HttpAnswer, prompt_ids: Sequence[int], *, tokens_route: bool) -> list[float]:
    """Read the log-probabilities of a prompt's tokens after the first.

    Args:
        answer: The server's, which says yes.
        prompt_ids: The prompt.
        tokens_route: Whether it was asked by the route for ids.

    Raises:
        MalformedReplyError: If it breaks the contract.
    """
    reply = read_object(answer.body)
    holder = reply if tokens_route else _only_choice(reply)
    return prompt_logprobs(part_of(holder, "prompt_logprobs", list, _REPLY), prompt_ids, _of_prompt, _REPLY)


def read_first_logprob(answer: HttpAnswer) -> float:
    """Read the log-probability of the one token that was asked for.

    Raises:
        MalformedReplyError: If none was drawn, or the reply breaks the contract.
    """
    choice = _only_choice(read_object(answer.body))
    logprobs = _logprobs(choice, part_of(choice, "token_ids", list, _REPLY))
    if not logprobs:
        raise MalformedReplyError(f"{_REPLY} to a request of one token has none")
    return logprobs[0]


def _choices(event: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    choices = event.get("choices")
    return [each for each in choices if isinstance(each, dict)] if isinstance(choices, list) else []


def _only_choice(reply: Mapping[str, Any]) -> dict[str, Any]:
    choices = part_of(reply, "choices", list, _REPLY)
    if len(choices) != 1 or not isinstance(choices[0], dict):
        raise MalformedReplyError(f"{_REPLY} has {len(choices)} choices, and one was asked for")
    return choices[0]


def _finish_reason(reason: object) -> FinishReason:
    if reason in ("stop", "length", "abort"):
        return reason
    if reason in ("error", "repetition"):
        raise FailedReplyError(f"vLLM ended a reply by {reason!r}")
    raise MalformedReplyError(f"{_REPLY} ended by {str(reason)[:40]!r}")


def _logprobs(choice: Mapping[str, Any], token_ids: Sequence[int]) -> list[float]:
    if not token_ids:
        return []
    logprobs = part_of(choice, "logprobs", dict, _REPLY)
    entries = logprobs.get("content", logprobs.get("token_logprobs"))
    if not isinstance(entries, list):
        raise MalformedReplyError(f"{_REPLY} has no list of log-probabilities")
    if len(entries) != len(token_ids):
        raise MalformedReplyError(f"{_REPLY}: {len(entries)} log-probabilities for {len(token_ids)} tokens")
    values = []
    for index, (entry, token) in enumerate(zip(entries, token_ids, strict=True)):
        if isinstance(entry, dict):
            # Releases before 0.32 say it in words.
            if entry.get("token_id", entry.get("token")) not in (token, f"token_id:{token}"):
                raise MalformedReplyError(f"{_REPLY}: log-probability {index} is of another token")
            entry = entry.get("logprob")
        values.append(logprob_of(entry, index, _REPLY))
    return values


def _of_prompt(entry: Any, token: int, _: int) -> Any:
    found = entry.get(str(token)) if isinstance(entry, dict) else None
    return found.get("logprob") if isinstance(found, dict) else None
