"""SGLang's HTTP interface: calls to make, for releases 0.5.20 to 0.5.23. No I/O."""

from collections.abc import Mapping, Sequence
from typing import Any

from rollgym.trainer.inference.base import PauseMode, SamplingParams
from rollgym.trainer.inference.calls import (
    HttpAnswer,
    HttpCall,
    header_value,
    message_of,
    part_of,
    read_object,
    steering,
)
from rollgym.trainer.inference.dialect import (
    Bucket,
    Capabilities,
    Conversation,
    GroupAddress,
    MemoryTag,
    require,
)
from rollgym.trainer.inference.errors import RequestRefusedError
from rollgym.trainer.inference.sglang_replies import (
    ABORTED_WHILE_COMPILED,
    cuts,
    drawn,
    joined,
    read_checksums,
    read_prompt_logprobs,
    read_stretch,
)
from rollgym.trainer.inference.stretches import GenerationCall, Stretch, common_sampling

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

    def __init__(self, capabilities: Capabilities) -> None:
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
        if cuts(call.sampling):
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

    def read_generation(self, answer: HttpAnswer, call: GenerationCall) -> Stretch:
        """Read a reply; ids and log-probabilities come together, in triples."""
        structured = call.sampling.structured is not None
        if structured and answer.status == 400 and ABORTED_WHILE_COMPILED in message_of(answer.body):
            return Stretch([], [], None, "abort")
        require(answer, "SGLang did not generate")
        return read_stretch(answer, call)

    def drawn(self, event: Mapping[str, Any], seen: int) -> Sequence[int]:
        """Return the ids that an event of a stream brings after the `seen` ones before it."""
        return drawn(event, seen)

    def joined(self, events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return what the events of a stream amount to."""
        return joined(events)

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
        return read_prompt_logprobs(answer, prompt_ids)

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
        return read_checksums(answer)

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
