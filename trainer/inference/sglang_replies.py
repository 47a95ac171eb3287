"""SGLang's replies: what was drawn, how likely and by which weights, from whole answers and from streams. No I/O."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rollgym.trainer.inference.base import FinishReason, SamplingParams
from rollgym.trainer.inference.calls import (
    HttpAnswer,
    excerpt,
    list_of,
    logprob_of,
    part_of,
    read_object,
    token_ids_of,
)
from rollgym.trainer.inference.errors import FailedReplyError, MalformedReplyError, RequestRefusedError
from rollgym.trainer.inference.routed_experts import read_integers
from rollgym.trainer.inference.stretches import (
    GenerationCall,
    Stretch,
    checked_stretch,
    labels_of_spans,
    prompt_logprobs,
)

_REPLY = "SGLang's reply"
ABORTED_WHILE_COMPILED = "Aborted by AbortReq"
"""What SGLang says of a request whose grammar was not ready when it was aborted: with 400, though nothing is wrong."""
_SAMPLED = "output_token_sampling_logprobs"
"""Where log-probabilities after top-k and top-p stand, if they were asked for."""


def cuts(sampling: SamplingParams) -> bool:
    """Say whether tokens are drawn from less than the whole distribution."""
    return sampling.top_p < 1.0 or sampling.top_k > 0


def read_stretch(answer: HttpAnswer, call: GenerationCall) -> Stretch:
    """Read a reply; ids and log-probabilities come together, in triples.

    Args:
        answer: The server's, which says yes.
        call: What was asked for.

    Raises:
        MalformedReplyError: If it breaks the contract.
        FailedReplyError: If the server ended the reply by an error.
        RequestRefusedError: If it refused the request after it had begun to answer.
    """
    reply = read_object(answer.body)
    meta = part_of(reply, "meta_info", dict, _REPLY)
    finish_reason = _finish_reason(meta.get("finish_reason"))
    _require_accepted(meta.get("finish_reason"))
    token_ids, logprobs = _tokens(meta, reply, finish_reason)
    if _lacks_parts(meta, call, finish_reason):
        return Stretch([], [], None, "abort")
    if cuts(call.sampling):
        logprobs = _sampled(meta)
    labels = None
    if token_ids:
        labels = labels_of_spans(meta.get("weight_versions"), len(token_ids), _REPLY)
    experts = None
    if call.sampling.routed_experts and token_ids:
        computed = len(call.prompt_ids) + len(token_ids)
        experts = read_integers(meta.get("routed_experts"), computed, _REPLY)
    return checked_stretch(Stretch(token_ids, logprobs, labels, finish_reason, experts), call, _REPLY)


def drawn(event: Mapping[str, Any], seen: int) -> list[int]:
    """Return the ids that an event of a stream brings after the `seen` ones before it."""
    ids = [each for each in list_of(event, "output_ids") if type(each) is int]
    return ids[seen:] if seen + len(ids) > _count(event, seen + len(ids)) else ids


def joined(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return what the events amount to: the last one, with the tokens of all.

    A request that was put back into the queue and aborted there ends with an event of its own kind: its last id again,
    and the triples of all ids.
    """
    last, meta = events[-1], dict(_meta(events[-1]))
    triples = meta["output_token_logprobs"] = _whole(_of_each(events, "output_token_logprobs"), last)
    if any(_SAMPLED in _meta(event) for event in events):
        meta[_SAMPLED] = _whole(_of_each(events, _SAMPLED), last)
    if _kind(meta.get("finish_reason")) == "abort":
        ids = [triple[1] for triple in triples if isinstance(triple, list) and len(triple) > 1]
    else:
        ids = _whole([list_of(event, "output_ids") for event in events], last)
    return {**last, "output_ids": ids, "meta_info": meta}


def read_prompt_logprobs(answer: HttpAnswer, prompt_ids: Sequence[int]) -> list[float]:
    """Read the log-probabilities of a prompt's tokens after the first.

    Args:
        answer: The server's, which says yes.
        prompt_ids: The prompt.

    Raises:
        MalformedReplyError: If it breaks the contract.
    """
    meta = part_of(read_object(answer.body), "meta_info", dict, _REPLY)
    triples = part_of(meta, "input_token_logprobs", list, _REPLY)
    return prompt_logprobs(triples, prompt_ids, _of_prompt, _REPLY)


def read_named_logprobs(answer: HttpAnswer) -> list[float]:
    """Read the log-probabilities that `token_ids_logprob` asked for, of a reply of one token; NaN for what is none.

    Raises:
        MalformedReplyError: If they are not there.
    """
    meta = part_of(read_object(answer.body), "meta_info", dict, _REPLY)
    rows = part_of(meta, "output_token_ids_logprobs", list, _REPLY)
    if not rows or not isinstance(rows[0], list):
        raise MalformedReplyError(f"{_REPLY} lacks the log-probabilities of the tokens that were named")
    firsts = [each[0] if isinstance(each, list) and each else None for each in rows[0]]
    return [float(each) if isinstance(each, int | float) else math.nan for each in firsts]


def has_sampled_logprobs(answer: HttpAnswer) -> bool:
    """Say whether a reply has the log-probabilities of what was left to be drawn from."""
    return answer.ok and _SAMPLED in _meta(read_object(answer.body))


def _of_each(events: Sequence[Mapping[str, Any]], name: str) -> list[list[Any]]:
    return [list_of(_meta(event), name) for event in events]


def _meta(event: Mapping[str, Any]) -> Mapping[str, Any]:
    meta = event.get("meta_info")
    return meta if isinstance(meta, dict) else {}


def _count(event: Mapping[str, Any], otherwise: int) -> int:
    """Return how many tokens there are by an event of a stream, in all."""
    count = _meta(event).get("completion_tokens")
    return count if type(count) is int else otherwise


def _whole(parts: Sequence[list[Any]], last: Mapping[str, Any]) -> list[Any]:
    """Return what the lists of a stream's events amount to.

    With `--incremental-streaming-output` each has what is new, otherwise each has all that there is. The server says
    how many tokens there are in all: if the lists have more together, each began with the one before.
    """
    together = [each for part in parts for each in part]
    return parts[-1] if len(together) > _count(last, len(together)) else together


def _kind(reason: object) -> object:
    return reason.get("type") if isinstance(reason, dict) else None


def _require_accepted(reason: Any) -> None:
    """Refuse an abort that is the server's answer to a bad request: a stream has begun with a good status by then."""
    status = reason.get("status_code")
    if (
        type(status) is int
        and 400 <= status < 500
        and ABORTED_WHILE_COMPILED not in str(reason.get("message"))
    ):
        said = excerpt(str(reason.get("message")).encode())
        raise RequestRefusedError(f"SGLang did not generate: {status}, {said}", status)


def _finish_reason(reason: object) -> FinishReason:
    kind = _kind(reason)
    if kind == "stop":
        return "stop"
    if kind == "length":
        return "length"
    if kind == "abort":
        return "abort"
    if isinstance(kind, str):
        raise FailedReplyError(f"SGLang ended a reply by {kind[:40]!r}")
    raise MalformedReplyError(f"{_REPLY} does not say why it ended")


def _tokens(
    meta: Mapping[str, Any], reply: Mapping[str, Any], finish_reason: FinishReason
) -> tuple[list[int], list[float]]:
    triples = meta.get("output_token_logprobs")
    output = token_ids_of(part_of(reply, "output_ids", list, _REPLY), _REPLY)
    if triples is None and not output:
        return [], []
    if not isinstance(triples, list):
        raise MalformedReplyError(f"{_REPLY} has no list of log-probabilities")
    if any(not isinstance(triple, list) or len(triple) < 2 for triple in triples):
        raise MalformedReplyError(f"{_REPLY}: a log-probability is no [logprob, id, text]")
    token_ids = token_ids_of([triple[1] for triple in triples], _REPLY)
    # A matched stop token may be trimmed from the output, and from nothing else.
    if token_ids != output and not (finish_reason == "stop" and token_ids[:-1] == output):
        raise MalformedReplyError(
            f"{_REPLY}: {len(token_ids)} log-probabilities, of other tokens than the {len(output)} of the output"
        )
    return token_ids, [logprob_of(triple[0], index, _REPLY) for index, triple in enumerate(triples)]


def _lacks_parts(meta: Mapping[str, Any], call: GenerationCall, finish_reason: FinishReason) -> bool:
    """Say whether a reply was aborted after it had been put back into the queue: it then brings ids and little else.

    What it had drawn is drawn again.
    """
    wanted = [_SAMPLED] * cuts(call.sampling) + ["routed_experts"] * call.sampling.routed_experts
    return finish_reason == "abort" and any(meta.get(name) is None for name in wanted)


def _sampled(meta: Mapping[str, Any]) -> list[float]:
    """Return the log-probabilities of the tokens under what top-k and top-p had left of the distribution."""
    values = part_of(meta, _SAMPLED, list, _REPLY)
    return [logprob_of(value, index, _REPLY) for index, value in enumerate(values)]


def _of_prompt(triple: Any, token: int, index: int) -> Any:
    if not isinstance(triple, list) or len(triple) < 2 or triple[1] != token:
        raise MalformedReplyError(f"{_REPLY}: log-probability {index} is not of the prompt's token")
    return triple[0]


def read_checksums(answer: HttpAnswer) -> dict[str, str]:
    """Return the checksums of the tensors that all ranks hold alike: others are shares of a tensor.

    Args:
        answer: The server's, which says yes.

    Raises:
        MalformedReplyError: If it breaks the contract.
    """
    ranks = part_of(read_object(answer.body), "ranks", list, "SGLang's weights_checker")
    of_ranks = [_checksums_of(rank) for rank in ranks]
    if not of_ranks:
        raise MalformedReplyError("SGLang's weights_checker has no ranks")
    first, *others = of_ranks
    return {name: told for name, told in first.items() if all(each.get(name) == told for each in others)}


def _checksums_of(rank: object) -> dict[str, str]:
    where = "a rank in SGLang's weights_checker"
    told = part_of(rank if isinstance(rank, dict) else {}, "checksums", dict, where)
    return {name: each for name, each in told.items() if isinstance(each, str)}
