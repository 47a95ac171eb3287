"""vLLM's HTTP interface: calls to make, and what its replies say, for releases 0.24 to 0.33. No I/O.

Control routes exist only if the server was started with `VLLM_SERVER_DEV_MODE=1`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rollgym.trainer.inference.base import FinishReason, PauseMode, SamplingParams, StructuredOutput
from rollgym.trainer.inference.calls import (
    HttpAnswer,
    HttpCall,
    header_value,
    list_of,
    logprobs_of,
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
    read_array_file,
)
from rollgym.trainer.inference.servers.dialect import (
    Bucket,
    Conversation,
    GroupAddress,
    MemoryTag,
    ServerCapabilities,
    require,
)

_REPLY = "vLLM's reply"


def _read_stretch(answer: HttpAnswer, call: GenerationCall, *, spans: bool) -> GenerationChunk:
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
    return checked_stretch(GenerationChunk(token_ids, logprobs, labels, finish_reason, experts), call, _REPLY)


def _drawn(event: Mapping[str, Any]) -> list[int]:
    """Return the ids that an event of a stream brings."""
    return [each for choice in _choices(event) for each in list_of(choice, "token_ids") if type(each) is int]


def _joined(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
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


def _read_prompt_logprobs(
    answer: HttpAnswer, prompt_ids: Sequence[int], *, tokens_route: bool
) -> list[float]:
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
            named = entry.get("token_id", entry.get("token"))
            if named != f"token_id:{token}" and named != token:
                raise MalformedReplyError(f"{_REPLY}: log-probability {index} is of another token")
            entry = entry.get("logprob")
        values.append(entry)
    return logprobs_of(values, _REPLY)


def _of_prompt(entry: Any, token: int, _: int) -> Any:
    found = entry.get(str(token)) if isinstance(entry, dict) else None
    return found.get("logprob") if isinstance(found, dict) else None


NAMES_WEIGHTS = (0, 28)
"""The first release whose weights have a name, and that aborts requests by theirs."""
NAMES_WEIGHTS_PER_TOKEN = (0, 33)
"""The first release whose replies say which weights drew each token."""
DEV_MODE = "start vLLM with the environment variable VLLM_SERVER_DEV_MODE=1"
LORA = "start vLLM with --enable-lora and the environment variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"


class VllmDialect:
    """Calls for one vLLM server.

    Args:
        capabilities: What it can do.
    """

    def __init__(self, capabilities: ServerCapabilities) -> None:
        self.capabilities = capabilities

    # Generation

    def generate(self, call: GenerationCall) -> HttpCall:
        """Ask for tokens, with ids in and out."""
        sampling = _sampling_params(call.sampling, call.seed)
        headers = {"X-Session-ID": header_value(call.session_key)} if call.session_key else {}
        body: dict[str, Any] = {
            "model": call.adapter or self.capabilities.model,
            "request_id": call.request_id,
        }
        if call.cache_salt:
            body["cache_salt"] = call.cache_salt
        if self.capabilities.tokens_route:
            # The trainer does not use the text.
            body |= {"token_ids": list(call.prompt_ids), "sampling_params": sampling | {"detokenize": False}}
            return HttpCall(GENERATE, body, headers=headers)
        body |= {"prompt": list(call.prompt_ids), "return_token_ids": True, "add_special_tokens": False}
        if self.capabilities.spans:
            body["return_weight_versions"] = True
        return HttpCall(COMPLETIONS, body | sampling, headers=headers)

    def read_generation(self, answer: HttpAnswer, call: GenerationCall) -> GenerationChunk:
        """Read a reply of either route."""
        require(answer, "vLLM did not generate")
        return _read_stretch(answer, call, spans=self.capabilities.spans)

    def drawn(self, event: Mapping[str, Any], seen: int) -> Sequence[int]:
        """Return the ids that an event of a stream brings after the `seen` ones before it."""
        return _drawn(event)

    def joined(self, events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return what the events of a stream amount to."""
        return _joined(events)

    def score(
        self, prompt_ids: Sequence[int], cache_salt: str, adapter: str | None
    ) -> Conversation[list[float]]:
        """Return the log-probabilities of a prompt's tokens after the first, at temperature 1."""
        call = self.generate(
            GenerationCall("score", prompt_ids, SamplingParams(1), 0, cache_salt=cache_salt, adapter=adapter)
        )
        body = {key: value for key, value in (call.body or {}).items() if key != "request_id"}
        if self.capabilities.tokens_route:
            body["sampling_params"] = body["sampling_params"] | {"prompt_logprobs": 0}
        else:
            body["prompt_logprobs"] = 0
        answer = yield HttpCall(call.path, body)
        require(answer, "vLLM did not score a prompt")
        return _read_prompt_logprobs(answer, prompt_ids, tokens_route=self.capabilities.tokens_route)

    def abort(self, request_ids: Sequence[str]) -> Conversation[None]:
        """End replies with what they have."""
        if not self.capabilities.keeps_aborted:
            return
        # The engine knows a request by its route's prefix before the id that came with it.
        names = [
            name
            for each in request_ids
            for name in (each, f"generate-tokens-{each}", f"cmpl-{each}-0", f"cmpl-{each}")
        ]
        answer = yield steering("/abort_requests", {"request_ids": names})
        require(answer, "vLLM did not abort", missing=DEV_MODE)

    # Pauses

    def pause(self, mode: PauseMode) -> Conversation[None]:
        """Stop generating; all but "keep" drop what is cached."""
        server_mode = "keep" if mode in ("keep", "recompute") else mode
        # Its default has changed its meaning over releases: it is always said.
        query = {"mode": server_mode, "clear_cache": "false" if mode == "keep" else "true"}
        answer = yield steering("/pause", query=query)
        require(answer, "vLLM did not pause", missing=DEV_MODE)

    def resume(self) -> Conversation[None]:
        """Resume generating after a pause."""
        answer = yield steering("/resume")
        require(answer, "vLLM did not resume", missing=DEV_MODE)

    def _forget_prefixes(self, mode: PauseMode) -> Conversation[None]:
        if mode == "keep":
            return
        query = {"reset_running_requests": "true" if mode == "recompute" else "false"}
        answer = yield steering("/reset_prefix_cache", query=query)
        require(answer, "vLLM did not reset its prefix cache", missing=DEV_MODE)
        # Older releases answer with an empty body.
        if answer.body.strip() and read_object(answer.body).get("success") is False:
            raise RequestRefusedError("vLLM did not reset its prefix cache: requests hold parts of it")

    # Weights

    def load_folder(self, folder: str, label: str, mode: PauseMode) -> Conversation[None]:
        """Let all workers read a folder, through `collective_rpc`."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        answer = yield steering("/collective_rpc", body)
        require(answer, f"vLLM did not load {folder}", missing=DEV_MODE)
        yield from self._forget_prefixes(mode)
        yield from self._name_weights(label)

    def _name_weights(self, label: str) -> Conversation[None]:
        if self.capabilities.release < NAMES_WEIGHTS:
            return
        answer = yield steering("/update_weight_version", {"new_version": label})
        require(answer, "vLLM did not name its weights", missing=DEV_MODE)

    def join_group(self, address: GroupAddress) -> Conversation[None]:
        """Initialise the server's weight transfer engine, which joins the trainer's group."""
        info = {
            "master_address": address.master_address,
            "master_port": address.master_port,
            "rank_offset": address.rank_offset,
            "world_size": address.world_size,
            **address.options,
        }
        answer = yield steering("/init_weight_transfer_engine", {"init_info": info}, repeatable=False)
        require(
            answer,
            "vLLM did not join the group of the weights",
            missing=f"{DEV_MODE} and --weight-transfer-config",
        )

    def leave_group(self, address: GroupAddress) -> Conversation[None]:
        """Shut the transfer engine down, from 0.33 on."""
        if self.capabilities.release < NAMES_WEIGHTS_PER_TOKEN:
            return
        answer = yield steering("/shutdown_weight_transfer_engine")
        require(answer, "vLLM did not leave the group of the weights")

    def begin_update(self) -> Conversation[None]:
        """Open an update; one that is already open was left by a client that died."""
        answer = yield steering("/start_weight_update", repeatable=False)
        if not answer.ok and answer.status != 404:
            yield steering("/finish_weight_update", {}, repeatable=False)
            answer = yield steering("/start_weight_update", repeatable=False)
        require(answer, "vLLM did not begin a weight update", missing=DEV_MODE)

    def update(self, bucket: Bucket, address: GroupAddress) -> Conversation[None]:
        """Announce tensors; whether they travel packed was said when the group was joined."""
        info = {
            "names": list(bucket.names),
            "dtype_names": list(bucket.dtypes),
            "shapes": [list(shape) for shape in bucket.shapes],
        }
        answer = yield steering("/update_weights", {"update_info": info}, repeatable=False)
        require(answer, "vLLM did not take weights", missing=DEV_MODE)

    def end_update(self, label: str, mode: PauseMode) -> Conversation[None]:
        """Close an update, and name the weights if the release can."""
        body = {"weight_version": label} if self.capabilities.release >= NAMES_WEIGHTS else {}
        answer = yield steering("/finish_weight_update", body, repeatable=False)
        require(answer, "vLLM did not finish a weight update", missing=DEV_MODE)
        yield from self._forget_prefixes(mode)

    def abandon_update(self) -> Conversation[None]:
        """Close an update that failed; the answer changes nothing."""
        yield steering("/finish_weight_update", {}, repeatable=False)

    def weight_label(self) -> Conversation[str | None]:
        """Return what the weights are called, from 0.28 on."""
        return (yield from weight_label(self.capabilities.release))

    # Adapters and memory

    def checksums(self) -> Conversation[Mapping[str, str] | None]:
        """Return None: no release reports checksums of single tensors."""
        yield from ()
        return None

    def load_adapter(self, name: str, folder: str) -> Conversation[None]:
        """Load an adapter under a name that was never used: a name that is loaded again keeps its prefix cache."""
        answer = yield HttpCall(
            "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder}, repeatable=False
        )
        require(answer, f"vLLM did not load the adapter {folder}", missing=LORA)

    def unload_adapter(self, name: str) -> Conversation[None]:
        """Forget an adapter; one that is gone already is forgotten."""
        answer = yield HttpCall("/v1/unload_lora_adapter", {"lora_name": name})
        if answer.status != 404:
            require(answer, f"vLLM did not unload the adapter {name}")

    def sleep(self, *, keep_weights: bool) -> Conversation[None]:
        """Give memory back: level 1 keeps the weights in the host's memory, level 2 drops them."""
        answer = yield steering("/sleep", query={"level": "1" if keep_weights else "2"})
        require(answer, "vLLM did not go to sleep; it needs --enable-sleep-mode", missing=DEV_MODE)

    def wake(self, tags: Sequence[MemoryTag]) -> Conversation[None]:
        """Take memory again, one kind after the other."""
        for tag in tags:
            answer = yield steering("/wake_up", query={"tags": tag})
            require(answer, "vLLM did not wake up", missing=DEV_MODE)


def _sampling_params(sampling: SamplingParams, seed: int) -> dict[str, Any]:
    """Return vLLM's sampling parameters: reported are the sampled tokens' log-probabilities alone."""
    structured = sampling.structured
    return (
        common_sampling(sampling)
        | ({} if structured is None else _structured(structured))
        | {
            "max_tokens": sampling.max_new_tokens,
            "seed": seed % 2**63,
            "logprobs": 0,
            # The run names all tokens that end a reply; vLLM's stop tokens work on without its own end. A form's end is
            # written with that one, and nothing binds what is drawn behind it.
            "ignore_eos": structured is None,
        }
    )


def _structured(structured: StructuredOutput) -> dict[str, Any]:
    """Return what a reply must look like. A grammar's end is one of the stop tokens: vLLM hands them to it."""
    return {"structured_outputs": {structured.kind: structured.text}}


def weight_label(release: tuple[int, ...]) -> Conversation[str | None]:
    """Return what the weights of a server of that release are called, from 0.28 on."""
    if release < NAMES_WEIGHTS:
        return None
    answer = yield HttpCall("/weight_info", method="GET", admin=True)
    if answer.status == 404:
        return None
    require(answer, "vLLM does not say which weights it serves")
    return str(part_of(read_object(answer.body), "weight_version", str, "vLLM's weight_info"))
