"""SGLang's HTTP interface: calls to make, and what its replies say, for releases 0.5.20 to 0.5.23. No I/O."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rollgym.trainer.inference.base import FinishReason, PauseMode, SamplingParams
from rollgym.trainer.inference.calls import (
    HttpAnswer,
    HttpCall,
    excerpt,
    header_value,
    list_of,
    logprobs_of,
    message_of,
    part_of,
    read_object,
    steering,
    token_ids_of,
)
from rollgym.trainer.inference.errors import FailedReplyError, MalformedReplyError, RequestRefusedError
from rollgym.trainer.inference.servers.chunks import (
    GenerationCall,
    GenerationChunk,
    checked_stretch,
    common_sampling,
    labels_of_spans,
    prompt_logprobs,
    read_integers,
)
from rollgym.trainer.inference.servers.dialect import (
    Bucket,
    Conversation,
    GroupAddress,
    MemoryTag,
    ServerCapabilities,
    require,
)

_REPLY = "SGLang's reply"
_ABORTED_WHILE_COMPILED = "Aborted by AbortReq"
"""What SGLang says of a request whose grammar was not ready when it was aborted: with 400, though nothing is wrong."""
_SAMPLED = "output_token_sampling_logprobs"
"""Where log-probabilities after top-k and top-p stand, if they were asked for."""


def _cuts(sampling: SamplingParams) -> bool:
    """Say whether tokens are drawn from less than the whole distribution."""
    return sampling.top_p < 1.0 or sampling.top_k > 0


def _read_stretch(answer: HttpAnswer, call: GenerationCall) -> GenerationChunk:
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
        return GenerationChunk([], [], None, "abort")
    if _cuts(call.sampling):
        logprobs = _sampled(meta)
    labels = None
    if token_ids:
        labels = labels_of_spans(meta.get("weight_versions"), len(token_ids), _REPLY)
    experts = None
    if call.sampling.routed_experts and token_ids:
        computed = len(call.prompt_ids) + len(token_ids)
        experts = read_integers(meta.get("routed_experts"), computed, _REPLY)
    return checked_stretch(GenerationChunk(token_ids, logprobs, labels, finish_reason, experts), call, _REPLY)


def _drawn(event: Mapping[str, Any], seen: int) -> list[int]:
    """Return the ids that an event of a stream brings after the `seen` ones before it."""
    ids = [each for each in list_of(event, "output_ids") if type(each) is int]
    return ids[seen:] if seen + len(ids) > _count(event, seen + len(ids)) else ids


def _joined(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
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


def _read_prompt_logprobs(answer: HttpAnswer, prompt_ids: Sequence[int]) -> list[float]:
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
        and _ABORTED_WHILE_COMPILED not in str(reason.get("message"))
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
    return token_ids, logprobs_of([triple[0] for triple in triples], _REPLY)


def _lacks_parts(meta: Mapping[str, Any], call: GenerationCall, finish_reason: FinishReason) -> bool:
    """Say whether a reply was aborted after it had been put back into the queue: it then brings ids and little else.

    What it had drawn is drawn again.
    """
    wanted = [_SAMPLED] * _cuts(call.sampling) + ["routed_experts"] * call.sampling.routed_experts
    return finish_reason == "abort" and any(meta.get(name) is None for name in wanted)


def _sampled(meta: Mapping[str, Any]) -> list[float]:
    """Return the log-probabilities of the tokens under what top-k and top-p had left of the distribution."""
    return logprobs_of(part_of(meta, _SAMPLED, list, _REPLY), _REPLY)


def _of_prompt(triple: Any, token: int, index: int) -> Any:
    if not isinstance(triple, list) or len(triple) < 2 or triple[1] != token:
        raise MalformedReplyError(f"{_REPLY}: log-probability {index} is not of the prompt's token")
    return triple[0]


def _read_checksums(answer: HttpAnswer) -> dict[str, str]:
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


_STRUCTURES = {
    "json": "json_schema",
    "regex": "regex",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
}
_MODES: Mapping[PauseMode, str] = {
    # It has no mode that waits: the client has waited, and what others sent is put back.
    "wait": "retract",
    "abort": "abort",
    "keep": "in_place",
    "recompute": "retract",
}

_CHECKSUMS = (0, 5, 23)
"""The first release whose checksums are known to be as they are read here."""


class SglangDialect:
    """Calls for one SGLang server.

    Args:
        capabilities: What it can do.
    """

    def __init__(self, capabilities: ServerCapabilities) -> None:
        self.capabilities = capabilities

    # Generation

    def generate(self, call: GenerationCall) -> HttpCall:
        """Ask for tokens, with ids in and out."""
        body: dict[str, Any] = {
            "rid": call.request_id,
            "input_ids": list(call.prompt_ids),
            "sampling_params": _sampling_params(call.sampling, call.seed),
            "return_logprob": True,
            "logprob_start_len": -1,
        }
        if _cuts(call.sampling):
            body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
        if call.sampling.routed_experts:
            body["return_routed_experts"] = True
        if call.adapter is not None:
            body["lora_path"] = call.adapter
        if call.cache_salt:
            body["cache_salt"] = call.cache_salt
        headers = {}
        if call.session_key:
            body["routing_key"] = call.session_key
            headers["X-SMG-Routing-Key"] = header_value(call.session_key)
        return HttpCall("/generate", body, headers=headers)

    def read_generation(self, answer: HttpAnswer, call: GenerationCall) -> GenerationChunk:
        """Read a reply; ids and log-probabilities come together, in triples."""
        structured = call.sampling.structured is not None
        if structured and answer.status == 400 and _ABORTED_WHILE_COMPILED in message_of(answer.body):
            return GenerationChunk([], [], None, "abort")
        require(answer, "SGLang did not generate")
        return _read_stretch(answer, call)

    def drawn(self, event: Mapping[str, Any], seen: int) -> Sequence[int]:
        """Return the ids that an event of a stream brings after the `seen` ones before it."""
        return _drawn(event, seen)

    def joined(self, events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return what the events of a stream amount to."""
        return _joined(events)

    def score(
        self, prompt_ids: Sequence[int], cache_salt: str, adapter: str | None
    ) -> Conversation[list[float]]:
        """Return the log-probabilities of a prompt's tokens after the first, at temperature 1."""
        body: dict[str, Any] = {
            "input_ids": list(prompt_ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "cache_salt": cache_salt,
        }
        if adapter is not None:
            body["lora_path"] = adapter
        answer = yield HttpCall("/generate", body)
        require(answer, "SGLang did not score a prompt")
        return _read_prompt_logprobs(answer, prompt_ids)

    def abort(self, request_ids: Sequence[str]) -> Conversation[None]:
        """End replies with what they have. Ids of one length: the server matches by prefix."""
        for each in request_ids:
            answer = yield steering("/abort_request", {"rid": each})
            require(answer, "SGLang did not abort")

    # Pauses

    def pause(self, mode: PauseMode) -> Conversation[None]:
        """Stop generating; for "wait", the client's own replies must have ended."""
        answer = yield steering("/pause_generation", {"mode": _MODES[mode]})
        require(answer, "SGLang did not pause")

    def resume(self) -> Conversation[None]:
        """Resume generating after a pause."""
        answer = yield steering("/continue_generation", {})
        require(answer, "SGLang did not go on")

    def _forget_prefixes(self, mode: PauseMode) -> Conversation[None]:
        if mode == "keep":
            return
        answer = yield steering("/flush_cache", {})
        require(answer, "SGLang did not flush its cache")

    # Weights

    def load_folder(self, folder: str, label: str, mode: PauseMode) -> Conversation[None]:
        """Let the server read a folder; it goes back to what it had if that fails."""
        body = {
            "model_path": folder,
            "weight_version": label,
            # A flush that is refused inside of the update ends the server's scheduler: it is asked for apart.
            "flush_cache": False,
            "abort_all_requests": False,
            "keep_pause": True,
        }
        answer = yield steering("/update_weights_from_disk", body)
        _require_success(answer, f"SGLang did not load {folder}")
        yield from self._forget_prefixes(mode)

    def join_group(self, address: GroupAddress) -> Conversation[None]:
        """Initialise the group of the update."""
        body = {
            "master_address": address.master_address,
            "master_port": address.master_port,
            "rank_offset": address.rank_offset,
            "world_size": address.world_size,
            "group_name": address.group_name,
            "backend": address.backend,
        }
        answer = yield steering("/init_weights_update_group", body, repeatable=False)
        if not answer.ok:
            # A trainer that died has left its group behind.
            yield steering(
                "/destroy_weights_update_group", {"group_name": address.group_name}, repeatable=False
            )
            answer = yield steering("/init_weights_update_group", body, repeatable=False)
        _require_success(answer, "SGLang did not join the group of the weights")

    def leave_group(self, address: GroupAddress) -> Conversation[None]:
        """Destroy the group of the update."""
        answer = yield steering("/destroy_weights_update_group", {"group_name": address.group_name})
        _require_success(answer, "SGLang did not leave the group of the weights")

    def begin_update(self) -> Conversation[None]:
        """Open an update if the release has sessions; one that is already open was left by a client that died."""
        if not self.capabilities.sessions:
            return
        answer = yield steering("/begin_weight_update", {}, repeatable=False)
        if not answer.ok:
            yield steering("/end_weight_update", {}, repeatable=False)
            answer = yield steering("/begin_weight_update", {}, repeatable=False)
        _require_success(answer, "SGLang did not begin a weight update")

    def update(self, bucket: Bucket, address: GroupAddress) -> Conversation[None]:
        """Announce tensors: one broadcast for each, or one for the bytes of all."""
        body: dict[str, Any] = {
            "names": list(bucket.names),
            "dtypes": list(bucket.dtypes),
            "shapes": [list(shape) for shape in bucket.shapes],
            "group_name": address.group_name,
            "flush_cache": False,
        }
        if bucket.flattened:
            body["load_format"] = "flattened_bucket"
        answer = yield steering("/update_weights_from_distributed", body, repeatable=False)
        _require_success(answer, "SGLang did not take weights")

    def end_update(self, label: str, mode: PauseMode) -> Conversation[None]:
        """Close an update and name the weights, without the aborts that naming brings by default."""
        if self.capabilities.sessions:
            answer = yield steering("/end_weight_update", {}, repeatable=False)
            _require_success(answer, "SGLang did not end a weight update")
        body = {"new_version": label, "abort_all_requests": False}
        answer = yield steering("/update_weight_version", body)
        _require_success(answer, "SGLang did not name its weights")
        yield from self._forget_prefixes(mode)

    def abandon_update(self) -> Conversation[None]:
        """Close an update that failed; the answer changes nothing."""
        if self.capabilities.sessions:
            yield steering("/end_weight_update", {}, repeatable=False)

    def weight_label(self) -> Conversation[str | None]:
        """Return what the weights are called."""
        answer = yield HttpCall("/model_info", method="GET")
        require(answer, "SGLang does not say which weights it serves")
        return str(part_of(read_object(answer.body), "weight_version", str, "SGLang's model_info"))

    def checksums(self) -> Conversation[Mapping[str, str] | None]:
        """Return the checksum of each tensor that all ranks hold alike, by SGLang's own name."""
        if self.capabilities.release < _CHECKSUMS:
            return None
        answer = yield steering("/weights_checker", {"action": "checksum"})
        _require_success(
            answer, "SGLang did not compute checksums of its weights; weights.checksums=false asks none"
        )
        return _read_checksums(answer)

    # Adapters and memory

    def load_adapter(self, name: str, folder: str) -> Conversation[None]:
        """Load an adapter from a folder, and serve it under a name."""
        body = {"lora_name": name, "lora_path": folder}
        answer = yield steering("/load_lora_adapter", body, repeatable=False)
        _require_success(answer, f"SGLang did not load the adapter {folder}; it needs --enable-lora")

    def unload_adapter(self, name: str) -> Conversation[None]:
        """Unload the adapter of that name."""
        answer = yield steering("/unload_lora_adapter", {"lora_name": name}, repeatable=False)
        _require_success(answer, f"SGLang did not unload the adapter {name}")

    def sleep(self, *, keep_weights: bool) -> Conversation[None]:
        """Give memory back; released weights are lost, so keeping them releases the cache alone."""
        answer = yield steering(
            "/release_memory_occupation", {"tags": ["kv_cache"] if keep_weights else None}
        )
        require(answer, "SGLang did not release its memory; it needs --enable-memory-saver")

    def wake(self, tags: Sequence[MemoryTag]) -> Conversation[None]:
        """Allocate again what `sleep` freed, by its tags."""
        answer = yield steering("/resume_memory_occupation", {"tags": list(tags)})
        require(answer, "SGLang did not take its memory again")


def _sampling_params(sampling: SamplingParams, seed: int) -> dict[str, Any]:
    """Return SGLang's sampling parameters.

    `ignore_eos` would ignore the stop tokens too, so the model's own end always ends a reply here.
    """
    structured = sampling.structured
    form = {} if structured is None else {_STRUCTURES[structured.kind]: structured.text}
    return (
        common_sampling(sampling)
        | form
        | {
            "max_new_tokens": sampling.max_new_tokens,
            "sampling_seed": seed % 2**63,
            "skip_special_tokens": False,
        }
    )


def _require_success(answer: HttpAnswer, what: str) -> None:
    require(answer, what)
    if read_object(answer.body).get("success") is not True:
        raise RequestRefusedError(f"{what}: {message_of(answer.body)}")
