"""SGLang's HTTP interface: calls to make and answers to read, for releases 0.5.20 to 0.5.23. No I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainer.inference.base import FinishReason, PauseMode, SamplingParams
from trainer.inference.calls import (
    HttpAnswer,
    HttpCall,
    header_value,
    logprob_of,
    message_of,
    part_of,
    read_object,
    token_ids_of,
)
from trainer.inference.dialect import (
    Bucket,
    Capabilities,
    Conversation,
    GenerationCall,
    GroupAddress,
    LogprobsOf,
    MemoryTag,
    Need,
    Seen,
    Stretch,
    checked_stretch,
    labels_of_spans,
    read_release,
    require,
)
from trainer.inference.errors import (
    InferenceError,
    MalformedReplyError,
    RequestRefusedError,
    ServerSetupError,
    ServerTooOldError,
)
from trainer.inference.routed_experts import read_integers

OLDEST = (0, 5, 20)
"""The first release whose replies say which weights drew each token."""
FLUSHES_QUEUED = (0, 5, 22)
"""The first release that flushes its cache while requests wait in a pause."""
SIGN_OF_LIFE = "/model_info"
"""What its front end answers by itself. `/health` draws a token, unless the server is told otherwise: it says nothing
while the server is paused for an update, and its request stands in the queue that a flush wants empty."""
ENGINE_SIGN = "/server_info"
"""What its scheduler answers, between two batches and in a pause, without a token. `/v1/loads` is read without it."""

_REPLY = "SGLang's reply"
_MODES: Mapping[PauseMode, str] = {
    # It has no mode that waits: the client has waited, and what others sent is put back.
    "wait": "retract",
    "abort": "abort",
    "keep": "in_place",
    "recompute": "retract",
}
_DIFFERENT = 1e-3


class SglangDialect:
    """Calls for one SGLang server.

    Args:
        capabilities: What it can do.
    """

    def __init__(self, capabilities: Capabilities) -> None:
        self.capabilities = capabilities

    # Generation

    def generate(self, call: GenerationCall) -> HttpCall:
        """Ask for tokens, with ids in and out."""
        body: dict[str, Any] = {
            "rid": call.request_id,
            "input_ids": list(call.prompt_ids),
            "sampling_params": sampling_params(call.sampling, call.seed),
            "return_logprob": True,
            "logprob_start_len": -1,
        }
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

    def read_generation(self, answer: HttpAnswer, call: GenerationCall) -> Stretch:
        """Read a reply; ids and log-probabilities come together, in triples."""
        require(answer, "SGLang did not generate")
        reply = read_object(answer.body)
        meta = part_of(reply, "meta_info", dict, _REPLY)
        finish_reason = _finish_reason(meta.get("finish_reason"))
        token_ids, logprobs = _tokens(meta, reply, finish_reason)
        labels = None
        if token_ids:
            labels = labels_of_spans(meta.get("weight_versions"), len(token_ids), _REPLY)
        experts = None
        if call.sampling.routed_experts and token_ids:
            computed = len(call.prompt_ids) + len(token_ids)
            experts = read_integers(meta.get("routed_experts"), computed, _REPLY)
        return checked_stretch(Stretch(token_ids, logprobs, labels, finish_reason, experts), call, _REPLY)

    def streaming(self, call: HttpCall) -> HttpCall:
        """Ask for the same as a stream."""
        return replace(call, body={**(call.body or {}), "stream": True})

    def drawn(self, event: Mapping[str, Any], seen: int) -> Sequence[int]:
        """Return the ids that an event of a stream brings after the `seen` ones before it."""
        ids = [each for each in _list(event, "output_ids") if type(each) is int]
        return ids[seen:] if seen + len(ids) > _count(event, seen + len(ids)) else ids

    def joined(self, events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return what the events amount to: the last one, with the tokens of all."""
        last = events[-1]
        ids = _whole([_list(event, "output_ids") for event in events], last)
        triples = _whole([_list(_meta(event), "output_token_logprobs") for event in events], last)
        return {**last, "output_ids": ids, "meta_info": {**_meta(last), "output_token_logprobs": triples}}

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
        meta = part_of(read_object(answer.body), "meta_info", dict, _REPLY)
        return _prompt_logprobs(part_of(meta, "input_token_logprobs", list, _REPLY), prompt_ids)

    def abort(self, request_ids: Sequence[str]) -> Conversation[None]:
        """End replies with what they have. Ids of one length: the server matches by prefix."""
        for each in request_ids:
            answer = yield _steer("/abort_request", {"rid": each})
            require(answer, "SGLang did not abort")

    # Pauses

    def pause(self, mode: PauseMode) -> Conversation[None]:
        """Stop generating; for "wait", the client's own replies must have ended."""
        answer = yield _steer("/pause_generation", {"mode": _MODES[mode]})
        require(answer, "SGLang did not pause")

    def resume(self) -> Conversation[None]:
        """Go on."""
        answer = yield _steer("/continue_generation", {})
        require(answer, "SGLang did not go on")

    def _forget_prefixes(self, mode: PauseMode) -> Conversation[None]:
        if mode == "keep":
            return
        answer = yield _steer("/flush_cache", {})
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
        answer = yield _steer("/update_weights_from_disk", body)
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
        answer = yield _steer("/init_weights_update_group", body, repeatable=False)
        if not answer.ok:
            # A trainer that died has left its group behind.
            yield _steer(
                "/destroy_weights_update_group", {"group_name": address.group_name}, repeatable=False
            )
            answer = yield _steer("/init_weights_update_group", body, repeatable=False)
        _require_success(answer, "SGLang did not join the group of the weights")

    def leave_group(self, address: GroupAddress) -> Conversation[None]:
        """Destroy the group of the update."""
        answer = yield _steer("/destroy_weights_update_group", {"group_name": address.group_name})
        _require_success(answer, "SGLang did not leave the group of the weights")

    def begin_update(self) -> Conversation[None]:
        """Open an update, where the release has sessions; one that is open already is somebody's who died."""
        if not self.capabilities.sessions:
            return
        answer = yield _steer("/begin_weight_update", {}, repeatable=False)
        if not answer.ok:
            yield _steer("/end_weight_update", {}, repeatable=False)
            answer = yield _steer("/begin_weight_update", {}, repeatable=False)
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
        answer = yield _steer("/update_weights_from_distributed", body, repeatable=False)
        _require_success(answer, "SGLang did not take weights")

    def end_update(self, label: str, mode: PauseMode) -> Conversation[None]:
        """Close an update and name the weights, without the aborts that naming brings by default."""
        if self.capabilities.sessions:
            answer = yield _steer("/end_weight_update", {}, repeatable=False)
            _require_success(answer, "SGLang did not end a weight update")
        body = {"new_version": label, "abort_all_requests": False}
        answer = yield _steer("/update_weight_version", body)
        _require_success(answer, "SGLang did not name its weights")
        yield from self._forget_prefixes(mode)

    def abandon_update(self) -> Conversation[None]:
        """Close an update that failed; the answer changes nothing."""
        if self.capabilities.sessions:
            yield _steer("/end_weight_update", {}, repeatable=False)

    def weight_label(self) -> Conversation[str | None]:
        """Return what the weights are called."""
        answer = yield HttpCall("/model_info", method="GET")
        require(answer, "SGLang does not say which weights it serves")
        return str(part_of(read_object(answer.body), "weight_version", str, "SGLang's model_info"))

    # Adapters and memory

    def load_adapter(self, name: str, folder: str) -> Conversation[None]:
        """Load an adapter."""
        body = {"lora_name": name, "lora_path": folder}
        answer = yield _steer("/load_lora_adapter", body, repeatable=False)
        _require_success(answer, f"SGLang did not load the adapter {folder}; it needs --enable-lora")

    def unload_adapter(self, name: str) -> Conversation[None]:
        """Forget an adapter."""
        answer = yield _steer("/unload_lora_adapter", {"lora_name": name}, repeatable=False)
        _require_success(answer, f"SGLang did not unload the adapter {name}")

    def sleep(self, *, keep_weights: bool) -> Conversation[None]:
        """Give memory back; released weights are lost, so keeping them releases the cache alone."""
        answer = yield _steer("/release_memory_occupation", {"tags": ["kv_cache"] if keep_weights else None})
        require(answer, "SGLang did not release its memory; it needs --enable-memory-saver")

    def wake(self, tags: Sequence[MemoryTag]) -> Conversation[None]:
        """Take memory again."""
        answer = yield _steer("/resume_memory_occupation", {"tags": list(tags)})
        require(answer, "SGLang did not take its memory again")


def _meta(event: Mapping[str, Any]) -> Mapping[str, Any]:
    meta = event.get("meta_info")
    return meta if isinstance(meta, dict) else {}


def _list(holder: Mapping[str, Any], key: str) -> list[Any]:
    found = holder.get(key)
    return found if isinstance(found, list) else []


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


def sampling_params(sampling: SamplingParams, seed: int) -> dict[str, Any]:
    """Return SGLang's sampling parameters.

    `ignore_eos` would ignore the stop tokens too, so the model's own end always ends a reply here.
    """
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "sampling_seed": seed % 2**63,
        "stop_token_ids": list(sampling.stop_token_ids),
        "skip_special_tokens": False,
    }
    if sampling.top_p < 1.0:
        params["top_p"] = sampling.top_p
    if sampling.top_k > 0:
        params["top_k"] = sampling.top_k
    return params


def look(need: Need) -> Conversation[Seen]:
    """Ask a server who it is, by calls that change nothing there.

    Raises:
        ServerSetupError: If it is seen to lack something that the run needs.
    """
    info, model = yield from _told(need)
    return _seen(info, model)


def _told(need: Need) -> Conversation[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    answer = yield HttpCall("/server_info", method="GET")
    require(
        answer,
        "no SGLang server answers here",
        missing="is it SGLang, as inference.kind says, and is this its root URL?",
    )
    info = read_object(answer.body)
    version = info.get("version")
    if not isinstance(version, str):
        raise ServerSetupError(
            "no SGLang server answers here: /server_info names no version; is it another's, and inference.kind "
            "to be changed?"
        )
    _refuse_old(version, read_release(version), need)
    _refuse_setup(info, need)
    answer = yield HttpCall("/model_info", method="GET")
    require(answer, "SGLang does not say which model it serves")
    return info, read_object(answer.body)


def _seen(info: Mapping[str, Any], model: Mapping[str, Any]) -> Seen:
    length = info.get("context_length")
    return Seen(
        server=f"SGLang {info['version']}",
        release=read_release(info["version"]),
        model=str(model.get("served_model_name") or model.get("model_path") or "default"),
        max_length=length if type(length) is int else None,
    )


def probe(need: Need) -> Conversation[SglangDialect]:
    """Ask a server what it can do. It goes on if somebody left it paused.

    Raises:
        ServerSetupError: If it lacks something that the run needs.
    """
    info, model = yield from _told(need)
    seen = _seen(info, model)
    # A server in a pause answers nothing else.
    answer = yield _steer("/continue_generation", {})
    require(answer, "SGLang cannot be steered")
    sessions = False
    if need.way == "broadcast":
        # Nothing is open; the route's existence is what the answer tells.
        answer = yield _steer("/end_weight_update", {})
        sessions = answer.status != 404
    logprobs_of = yield from _probe_generation()
    return SglangDialect(
        Capabilities(
            server=seen.server,
            release=seen.release,
            model=seen.model,
            max_length=seen.max_length,
            logprobs_of=logprobs_of,
            weight_label=part_of(model, "weight_version", str, "SGLang's model_info"),
            spans=True,
            sessions=sessions,
            drains=False,
            world_size=info["tp_size"] if type(info.get("tp_size")) is int else 1,
            streams=info.get("incremental_streaming_output") is True,
        )
    )


def _refuse_old(version: str, release: tuple[int, ...], need: Need) -> None:
    if release < OLDEST:
        raise ServerTooOldError(
            f"SGLang {version} is too old: versions of weights per token came with 0.5.20. Start that or a newer one"
        )
    if need.mode == "recompute" and need.way in ("disk", "broadcast") and release < FLUSHES_QUEUED:
        raise ServerTooOldError(
            f"SGLang {version} is too old for pauses of the kind 'recompute': it cannot flush its cache while "
            "requests wait, and 0.5.22 can. Pause with 'abort', 'wait' or 'keep'"
        )


def _refuse_setup(info: Mapping[str, Any], need: Need) -> None:
    if need.way == "adapter" and info.get("enable_lora") is False:
        raise ServerSetupError("adapters cannot be loaded; start SGLang with --enable-lora")
    if need.way == "broadcast":
        for key in ("dp_size", "pp_size"):
            if type(info.get(key)) is int and info[key] > 1:
                raise ServerSetupError(
                    f"SGLang takes broadcast weights with {key} 1 only, and this server has {info[key]}; start "
                    "several servers, or let weights travel by disk"
                )


def _probe_generation() -> Conversation[LogprobsOf]:
    """Find whose log-probabilities come: a sharper temperature shows in them, or it does not."""
    found = []
    for params in ({"temperature": 0.0}, {"temperature": 0.2, "top_k": 1}):
        sampling = {"max_new_tokens": 1, **params}
        body = {"input_ids": [0], "sampling_params": sampling, "return_logprob": True}
        answer = yield HttpCall("/generate", body)
        require(answer, "SGLang did not generate a token")
        reply = read_object(answer.body)
        _, logprobs = _tokens(part_of(reply, "meta_info", dict, _REPLY), reply, "length")
        if not logprobs:
            raise MalformedReplyError(f"{_REPLY} to a request of one token has none")
        found.append(logprobs[0])
    # A model that is certain anyway tells nothing: then the narrower promise is believed.
    return "temperature" if abs(found[0] - found[1]) > _DIFFERENT else "model"


def _finish_reason(reason: object) -> FinishReason:
    kind = reason.get("type") if isinstance(reason, dict) else None
    if kind == "stop":
        return "stop"
    if kind == "length":
        return "length"
    if kind == "abort":
        return "abort"
    if isinstance(kind, str):
        raise InferenceError(f"SGLang ended a reply by {kind[:40]!r}")
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
    return token_ids, [logprob_of(triple[0], place, _REPLY) for place, triple in enumerate(triples)]


def _prompt_logprobs(triples: Sequence[Any], prompt_ids: Sequence[int]) -> list[float]:
    if len(triples) != len(prompt_ids):
        raise MalformedReplyError(
            f"{_REPLY}: {len(triples)} log-probabilities for a prompt of {len(prompt_ids)}"
        )
    values = []
    for place, (triple, token) in enumerate(zip(triples[1:], prompt_ids[1:], strict=True), start=1):
        if not isinstance(triple, list) or len(triple) < 2 or triple[1] != token:
            raise MalformedReplyError(f"{_REPLY}: log-probability {place} is not of the prompt's token")
        if type(triple[0]) not in (float, int):
            raise MalformedReplyError(f"{_REPLY}: no log-probability of the prompt's token {place}")
        values.append(float(triple[0]))
    return values


def _require_success(answer: HttpAnswer, what: str) -> None:
    require(answer, what)
    if read_object(answer.body).get("success") is not True:
        raise RequestRefusedError(f"{what}: {message_of(answer.body)}")


def _steer(path: str, body: Mapping[str, Any], *, repeatable: bool = True) -> HttpCall:
    return HttpCall(path, body, admin=True, repeatable=repeatable)
