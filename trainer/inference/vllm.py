"""vLLM's HTTP interface: calls to make and answers to read, for releases 0.24 to 0.33. No I/O.

Routes that steer exist only where the server was started with `VLLM_SERVER_DEV_MODE=1`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainer.inference.base import FinishReason, PauseMode, SamplingParams
from trainer.inference.calls import (
    HttpAnswer,
    HttpCall,
    header_value,
    logprob_of,
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
    ServerTooOldError,
)
from trainer.inference.routed_experts import read_array_file

OLDEST = (0, 24)
"""The first release with sessions of weight updates."""
NAMES_WEIGHTS = (0, 28)
"""The first release whose weights have a name, and that aborts requests by theirs."""
NAMES_WEIGHTS_PER_TOKEN = (0, 33)
"""The first release whose replies say which weights drew each token."""
SIGN_OF_LIFE = "/health"
"""What it answers as long as its engine has not failed, paused or not."""
ENGINE_SIGN = "/is_sleeping"
"""What its engine answers, between two steps, in a pause and asleep; without dev mode nobody asks the engine."""

_DEV_MODE = "start vLLM with the environment variable VLLM_SERVER_DEV_MODE=1"
_LORA = "start vLLM with --enable-lora and the environment variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
_GENERATE = "/inference/v1/generate"
_COMPLETIONS = "/v1/completions"
_REPLY = "vLLM's reply"
_CERTAIN = -1e-6


class VllmDialect:
    """Calls for one vLLM server.

    Args:
        capabilities: What it can do.
    """

    def __init__(self, capabilities: Capabilities) -> None:
        self.capabilities = capabilities

    # Generation

    def generate(self, call: GenerationCall) -> HttpCall:
        """Ask for tokens, with ids in and out."""
        sampling = sampling_params(call.sampling, call.seed)
        headers = {"X-Session-ID": header_value(call.session_key)} if call.session_key else {}
        body: dict[str, Any] = {
            "model": call.adapter or self.capabilities.model,
            "request_id": call.request_id,
        }
        if call.cache_salt:
            body["cache_salt"] = call.cache_salt
        if self.capabilities.tokens_route:
            # Nobody reads the text.
            body |= {"token_ids": list(call.prompt_ids), "sampling_params": sampling | {"detokenize": False}}
            return HttpCall(_GENERATE, body, headers=headers)
        body |= {"prompt": list(call.prompt_ids), "return_token_ids": True, "add_special_tokens": False}
        if self.capabilities.spans:
            body["return_weight_versions"] = True
        return HttpCall(_COMPLETIONS, body | sampling, headers=headers)

    def read_generation(self, answer: HttpAnswer, call: GenerationCall) -> Stretch:
        """Read a reply of either route."""
        require(answer, "vLLM did not generate")
        choice = _only_choice(read_object(answer.body))
        finish_reason = _finish_reason(choice.get("finish_reason"))
        token_ids = token_ids_of(part_of(choice, "token_ids", list, _REPLY), _REPLY)
        logprobs = _logprobs(choice, token_ids)
        labels = None
        if self.capabilities.spans and token_ids:
            labels = labels_of_spans(choice.get("weight_versions"), len(token_ids), _REPLY)
        experts = None
        if call.sampling.routed_experts and token_ids:
            computed = len(call.prompt_ids) + len(token_ids)
            experts = read_array_file(choice.get("routed_experts"), computed, _REPLY)
        return checked_stretch(Stretch(token_ids, logprobs, labels, finish_reason, experts), call, _REPLY)

    def streaming(self, call: HttpCall) -> HttpCall:
        """Ask for the same as a stream."""
        return replace(call, body={**(call.body or {}), "stream": True})

    def drawn(self, event: Mapping[str, Any], seen: int) -> Sequence[int]:
        """Return the ids that an event of a stream brings after the `seen` ones before it."""
        return [
            each for choice in _choices(event) for each in _list(choice, "token_ids") if type(each) is int
        ]

    def joined(self, events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return what the events amount to: each has a part of the choice, and the last one what is known then."""
        ids: list[Any] = []
        logprobs: dict[str, list[Any]] = {}
        broken = False
        whole: dict[str, Any] = {}
        for choice in (choice for event in events for choice in _choices(event)):
            whole |= {key: value for key, value in choice.items() if value is not None}
            ids += _list(choice, "token_ids")
            broken = broken or not isinstance(choice.get("token_ids"), list | None)
            told = choice.get("logprobs")
            for key, values in told.items() if isinstance(told, dict) else ():
                if isinstance(values, list):
                    logprobs.setdefault(key, []).extend(values)
        known = whole | {"token_ids": None if broken else ids, "logprobs": logprobs}
        return {**events[-1], "choices": [known]}

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
        reply = read_object(answer.body)
        holder = reply if self.capabilities.tokens_route else _only_choice(reply)
        return _prompt_logprobs(part_of(holder, "prompt_logprobs", list, _REPLY), prompt_ids)

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
        answer = yield _steer("/abort_requests", {"request_ids": names})
        require(answer, "vLLM did not abort", missing=_DEV_MODE)

    # Pauses

    def pause(self, mode: PauseMode) -> Conversation[None]:
        """Stop generating; all but "keep" drop what is cached."""
        server_mode = "keep" if mode in ("keep", "recompute") else mode
        # Its default has changed its meaning over releases: it is always said.
        query = {"mode": server_mode, "clear_cache": "false" if mode == "keep" else "true"}
        answer = yield _steer("/pause", query=query)
        require(answer, "vLLM did not pause", missing=_DEV_MODE)

    def resume(self) -> Conversation[None]:
        """Go on."""
        answer = yield _steer("/resume")
        require(answer, "vLLM did not resume", missing=_DEV_MODE)

    def _forget_prefixes(self, mode: PauseMode) -> Conversation[None]:
        if mode == "keep":
            return
        query = {"reset_running_requests": "true" if mode == "recompute" else "false"}
        answer = yield _steer("/reset_prefix_cache", query=query)
        require(answer, "vLLM did not reset its prefix cache", missing=_DEV_MODE)
        # Older releases answer with an empty body.
        if answer.body.strip() and read_object(answer.body).get("success") is False:
            raise RequestRefusedError("vLLM did not reset its prefix cache: requests hold parts of it")

    # Weights

    def load_folder(self, folder: str, label: str, mode: PauseMode) -> Conversation[None]:
        """Let all workers read a folder, through `collective_rpc`."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        answer = yield _steer("/collective_rpc", body)
        require(answer, f"vLLM did not load {folder}", missing=_DEV_MODE)
        yield from self._forget_prefixes(mode)
        yield from self._name_weights(label)

    def _name_weights(self, label: str) -> Conversation[None]:
        if self.capabilities.release < NAMES_WEIGHTS:
            return
        answer = yield _steer("/update_weight_version", {"new_version": label})
        require(answer, "vLLM did not name its weights", missing=_DEV_MODE)

    def join_group(self, address: GroupAddress) -> Conversation[None]:
        """Initialise the transfer engine."""
        info = {
            "master_address": address.master_address,
            "master_port": address.master_port,
            "rank_offset": address.rank_offset,
            "world_size": address.world_size,
            **address.options,
        }
        answer = yield _steer("/init_weight_transfer_engine", {"init_info": info}, repeatable=False)
        require(
            answer,
            "vLLM did not join the group of the weights",
            missing=f"{_DEV_MODE} and --weight-transfer-config",
        )

    def leave_group(self, address: GroupAddress) -> Conversation[None]:
        """Shut the transfer engine down, from 0.33 on."""
        if self.capabilities.release < NAMES_WEIGHTS_PER_TOKEN:
            return
        answer = yield _steer("/shutdown_weight_transfer_engine")
        require(answer, "vLLM did not leave the group of the weights")

    def begin_update(self) -> Conversation[None]:
        """Open an update; one that is open already is somebody's who died."""
        answer = yield _steer("/start_weight_update", repeatable=False)
        if not answer.ok and answer.status != 404:
            yield _steer("/finish_weight_update", {}, repeatable=False)
            answer = yield _steer("/start_weight_update", repeatable=False)
        require(answer, "vLLM did not begin a weight update", missing=_DEV_MODE)

    def update(self, bucket: Bucket, address: GroupAddress) -> Conversation[None]:
        """Announce tensors; whether they travel packed was said when the group was joined."""
        info = {
            "names": list(bucket.names),
            "dtype_names": list(bucket.dtypes),
            "shapes": [list(shape) for shape in bucket.shapes],
        }
        answer = yield _steer("/update_weights", {"update_info": info}, repeatable=False)
        require(answer, "vLLM did not take weights", missing=_DEV_MODE)

    def end_update(self, label: str, mode: PauseMode) -> Conversation[None]:
        """Close an update."""
        body = {"weight_version": label} if self.capabilities.release >= NAMES_WEIGHTS else {}
        answer = yield _steer("/finish_weight_update", body, repeatable=False)
        require(answer, "vLLM did not finish a weight update", missing=_DEV_MODE)
        yield from self._forget_prefixes(mode)

    def abandon_update(self) -> Conversation[None]:
        """Close an update that failed; the answer changes nothing."""
        yield _steer("/finish_weight_update", {}, repeatable=False)

    def weight_label(self) -> Conversation[str | None]:
        """Return what the weights are called, from 0.28 on."""
        return (yield from _weight_label(self.capabilities.release))

    # Adapters and memory

    def load_adapter(self, name: str, folder: str) -> Conversation[None]:
        """Load an adapter under a name that was never used: a name that is loaded again keeps its prefix cache."""
        answer = yield HttpCall(
            "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder}, repeatable=False
        )
        require(answer, f"vLLM did not load the adapter {folder}", missing=_LORA)

    def unload_adapter(self, name: str) -> Conversation[None]:
        """Forget an adapter; one that is gone already is forgotten."""
        answer = yield HttpCall("/v1/unload_lora_adapter", {"lora_name": name})
        if answer.status != 404:
            require(answer, f"vLLM did not unload the adapter {name}")

    def sleep(self, *, keep_weights: bool) -> Conversation[None]:
        """Give memory back: level 1 keeps the weights in the host's memory, level 2 drops them."""
        answer = yield _steer("/sleep", query={"level": "1" if keep_weights else "2"})
        require(answer, "vLLM did not go to sleep; it needs --enable-sleep-mode", missing=_DEV_MODE)

    def wake(self, tags: Sequence[MemoryTag]) -> Conversation[None]:
        """Take memory again, one kind after the other."""
        for tag in tags:
            answer = yield _steer("/wake_up", query={"tags": tag})
            require(answer, "vLLM did not wake up", missing=_DEV_MODE)


def _choices(event: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    choices = event.get("choices")
    return [each for each in choices if isinstance(each, dict)] if isinstance(choices, list) else []


def _list(holder: Mapping[str, Any], key: str) -> list[Any]:
    found = holder.get(key)
    return found if isinstance(found, list) else []


def sampling_params(sampling: SamplingParams, seed: int) -> dict[str, Any]:
    """Return vLLM's sampling parameters: reported are the sampled tokens' log-probabilities alone."""
    params: dict[str, Any] = {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "seed": seed % 2**63,
        "logprobs": 0,
        # The run names all tokens that end a reply; vLLM's stop tokens work on without its own end.
        "ignore_eos": True,
        "stop_token_ids": list(sampling.stop_token_ids),
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
    answer = yield HttpCall("/version", method="GET")
    require(
        answer,
        "no vLLM server answers here",
        missing="is it vLLM, as inference.kind says, and is this its root URL?",
    )
    version = part_of(read_object(answer.body), "version", str, "vLLM's version")
    release = read_release(version)
    _refuse_old(version, release, need)
    answer = yield HttpCall("/v1/models", method="GET")
    require(answer, "vLLM does not say which model it serves")
    model, max_length = _served_model(read_object(answer.body))
    if need.way in ("disk", "broadcast"):
        answer = yield HttpCall("/is_paused", method="GET", admin=True)
        require(answer, "weights cannot be updated", missing=_DEV_MODE)
    return Seen(f"vLLM {version}", release, model, max_length)


def probe(need: Need) -> Conversation[VllmDialect]:
    """Ask a server what it can do. It goes on if somebody left it paused.

    Raises:
        ServerSetupError: If it lacks something that the run needs.
    """
    seen = yield from look(need)
    release, model = seen.release, seen.model
    if need.way in ("disk", "broadcast") or (need.way == "adapter" and need.mode == "abort"):
        answer = yield _steer("/resume")
        require(answer, "weights cannot be updated", missing=_DEV_MODE)
    label = yield from _weight_label(release)
    if need.way == "adapter":
        answer = yield HttpCall("/v1/load_lora_adapter", {})
        if answer.status == 404:
            require(answer, "adapters cannot be loaded", missing=_LORA)
    world_size = 1
    if need.way == "broadcast":
        answer = yield HttpCall("/get_world_size", query={"include_dp": "true"}, method="GET", admin=True)
        require(answer, "vLLM does not say how many ranks it has", missing=_DEV_MODE)
        world_size = part_of(read_object(answer.body), "world_size", int, "vLLM's world size")
    # Named, because no name at all means every request.
    answer = yield _steer("/abort_requests", {"request_ids": ["nobody"]})
    keeps_aborted = answer.ok
    tokens_route, logprobs_of = yield from _probe_generation(model)
    return VllmDialect(
        Capabilities(
            server=seen.server,
            release=release,
            model=model,
            max_length=seen.max_length,
            logprobs_of=logprobs_of,
            weight_label=label,
            spans=release >= NAMES_WEIGHTS_PER_TOKEN,
            tokens_route=tokens_route,
            keeps_aborted=keeps_aborted,
            world_size=world_size,
        )
    )


def _refuse_old(version: str, release: tuple[int, ...], need: Need) -> None:
    if release < OLDEST:
        raise ServerTooOldError(
            f"vLLM {version} is too old: weight updates in sessions came with 0.24. Start that or a newer one"
        )
    in_flight = need.way in ("disk", "broadcast") and need.mode in ("keep", "recompute")
    if in_flight and release < NAMES_WEIGHTS_PER_TOKEN:
        raise ServerTooOldError(
            f"vLLM {version} is too old for pauses of the kind {need.mode!r}: replies then hold tokens of several "
            "versions, and only 0.33 says which. Pause with 'abort' or 'wait'"
        )


def _probe_generation(model: str) -> Conversation[tuple[bool, LogprobsOf]]:
    """Find the route for ids, and whose log-probabilities come: with top_k=1 a sampled token is certain."""
    tokens_route = True
    body: dict[str, Any] = {
        "model": model,
        "token_ids": [0],
        "sampling_params": {"max_tokens": 1, "logprobs": 0},
    }
    answer = yield HttpCall(_GENERATE, body)
    if answer.status in (403, 404, 405):
        tokens_route = False
    else:
        require(answer, "vLLM did not generate a token")
    found = []
    for params in ({"top_k": 1}, {"temperature": 0.0}):
        sampling = {"max_tokens": 1, "logprobs": 0, **params}
        if tokens_route:
            call = HttpCall(_GENERATE, {"model": model, "token_ids": [0], "sampling_params": sampling})
        else:
            prompt = {"model": model, "prompt": [0], "return_token_ids": True}
            call = HttpCall(_COMPLETIONS, prompt | sampling)
        answer = yield call
        require(answer, "vLLM did not generate a token")
        choice = _only_choice(read_object(answer.body))
        found.append(_logprobs(choice, part_of(choice, "token_ids", list, _REPLY))[0])
    # A model that is certain anyway tells nothing: then the server is taken at its default.
    return tokens_route, "sampled" if found[0] > _CERTAIN >= found[1] else "model"


def _weight_label(release: tuple[int, ...]) -> Conversation[str | None]:
    if release < NAMES_WEIGHTS:
        return None
    answer = yield HttpCall("/weight_info", method="GET", admin=True)
    if answer.status == 404:
        return None
    require(answer, "vLLM does not say which weights it serves")
    return str(part_of(read_object(answer.body), "weight_version", str, "vLLM's weight_info"))


def _served_model(reply: Mapping[str, Any]) -> tuple[str, int | None]:
    models = [each for each in part_of(reply, "data", list, "vLLM's models") if isinstance(each, dict)]
    base = next((each for each in models if each.get("parent") is None), None)
    if base is None:
        raise MalformedReplyError("vLLM's models name no base model")
    length = base.get("max_model_len")
    return part_of(base, "id", str, "vLLM's model"), length if type(length) is int else None


def _only_choice(reply: Mapping[str, Any]) -> dict[str, Any]:
    choices = part_of(reply, "choices", list, _REPLY)
    if len(choices) != 1 or not isinstance(choices[0], dict):
        raise MalformedReplyError(f"{_REPLY} has {len(choices)} choices, and one was asked for")
    return choices[0]


def _finish_reason(reason: object) -> FinishReason:
    if reason in ("stop", "length", "abort"):
        return reason
    if reason in ("error", "repetition"):
        raise InferenceError(f"vLLM ended a reply by {reason!r}")
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
    for place, (entry, token) in enumerate(zip(entries, token_ids, strict=True)):
        if isinstance(entry, dict):
            # Releases before 0.32 say it in words.
            if entry.get("token_id", entry.get("token")) not in (token, f"token_id:{token}"):
                raise MalformedReplyError(f"{_REPLY}: log-probability {place} is of another token")
            entry = entry.get("logprob")
        values.append(logprob_of(entry, place, _REPLY))
    return values


def _prompt_logprobs(entries: Sequence[Any], prompt_ids: Sequence[int]) -> list[float]:
    if len(entries) != len(prompt_ids):
        raise MalformedReplyError(
            f"{_REPLY}: {len(entries)} log-probabilities for a prompt of {len(prompt_ids)}"
        )
    values = []
    for place, (entry, token) in enumerate(zip(entries[1:], prompt_ids[1:], strict=True), start=1):
        found = entry.get(str(token)) if isinstance(entry, dict) else None
        value = found.get("logprob") if isinstance(found, dict) else None
        if not isinstance(value, float | int) or isinstance(value, bool):
            raise MalformedReplyError(f"{_REPLY}: no log-probability of the prompt's token {place}")
        values.append(float(value))
    return values


def _steer(
    path: str,
    body: Mapping[str, Any] | None = None,
    *,
    query: Mapping[str, str] | None = None,
    repeatable: bool = True,
) -> HttpCall:
    return HttpCall(path, body, query or {}, admin=True, repeatable=repeatable)
