"""SGLang as a server of the trainer: what it can do, for releases 0.5.20 to 0.5.23, and how it is started. No I/O."""

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rollgym.trainer.config.inference import InferenceSettings, LaunchSettings
from rollgym.trainer.inference.calls import HttpCall, part_of, read_object, steering
from rollgym.trainer.inference.errors import ServerSetupError, ServerTooOldError
from rollgym.trainer.inference.servers.dialect import (
    SERVED_NAME,
    Conversation,
    InspectedServer,
    LogprobsOf,
    ServedModel,
    ServerCapabilities,
    ServerProgram,
    ServerRequirements,
    StartCommand,
    read_release,
    require,
    require_token,
)
from rollgym.trainer.inference.servers.sglang import SglangDialect, has_sampled_logprobs, read_named_logprobs

SIGN_OF_LIFE = "/model_info"
"""A route that its front end answers by itself. `/health` draws a token, unless the server is configured otherwise: it
does not answer while the server is paused for an update, and its request keeps a queue filled that a flush wants
empty."""
ENGINE_SIGN = "/server_info"
"""What its scheduler answers, between two batches and in a pause, without a token. `/v1/loads` is read without it."""

_OLDEST = (0, 5, 20)
"""The first release whose replies say which weights drew each token."""
_FLUSHES_QUEUED = (0, 5, 22)
"""The first release that flushes its cache while requests wait in a pause."""
_DIFFERENT = 1e-3
_NAMED = (0, 1, 2, 3)
"""Tokens whose log-probabilities show whether temperature is applied: a single one might have probability 1."""

TOKENS_KEPT_FREE = 7
"""By how many tokens `--context-length` must pass the longest row: a prompt is refused from six tokens before its end
on, and a row to score is a prompt."""


def look(need: ServerRequirements) -> Conversation[InspectedServer]:
    """Ask a server for its name, release and model, by read-only calls.

    Raises:
        ServerSetupError: If it is seen to lack something that the run needs.
    """
    info, model = yield from _told(need)
    return _seen(info, model)


def _told(need: ServerRequirements) -> Conversation[tuple[Mapping[str, Any], Mapping[str, Any]]]:
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


def _seen(info: Mapping[str, Any], model: Mapping[str, Any]) -> InspectedServer:
    # An update from disk names the model by the folder of its weights; what it was started with stays as it is.
    name = info.get("served_model_name") or model.get("served_model_name") or model.get("model_path")
    return InspectedServer(
        server=f"SGLang {info['version']}",
        release=read_release(info["version"]),
        model=str(name or "default"),
        max_length=_longest_row(info),
        source=model["model_path"] if isinstance(model.get("model_path"), str) else None,
        config={"model_type": model.get("model_type")},
    )


def _longest_row(info: Mapping[str, Any]) -> int | None:
    """Return the longest row of which any part may be the prompt.

    A prompt must be shorter than `max_req_input_len`, which is six below the context's length, and lower where the
    cache is small; a reply is cut two tokens before the context's end.
    """
    below, context = info.get("max_req_input_len"), info.get("context_length")
    if type(below) is int:
        return below - 1
    return context - TOKENS_KEPT_FREE if type(context) is int else None


def probe(need: ServerRequirements) -> Conversation[SglangDialect]:
    """Ask a server what it can do.

    A server that is found paused stays paused, and is not asked for a token: another run may be in the middle of an
    update there, or have died in it. The first weights that it is sent resume it.

    Raises:
        ServerSetupError: If it lacks something that the run needs.
    """
    info, model = yield from _told(need)
    seen = _seen(info, model)
    # Whether the key for steering is right is found by a call that does nothing.
    answer = yield steering("/abort_request", {"rid": "no request has this name"})
    require(answer, "SGLang cannot be steered")
    paused = yield from _is_paused()
    if paused and need.way is None:
        # This run never resumes it: it is waited for as long as a server that is away.
        answer = yield HttpCall("/ready", method="GET")
        require(answer, "SGLang is paused")
        paused = False
    sessions = False
    if need.way == "broadcast":
        # Nothing is open; the route's existence is what the answer tells.
        answer = yield steering("/end_weight_update", {})
        sessions = answer.status != 404
    capabilities = ServerCapabilities(
        server=seen.server,
        release=seen.release,
        model=seen.model,
        max_length=seen.max_length,
        source=seen.source,
        config=seen.config,
        logprobs_of="model",
        weight_label=part_of(model, "weight_version", str, "SGLang's model_info"),
        spans=True,
        sessions=sessions,
        drains=False,
        world_size=info["tp_size"] if type(info.get("tp_size")) is int else 1,
        streams=info.get("incremental_streaming_output") is True,
        reads_seeds=info.get("enable_deterministic_inference") is True,
        masked_top_k=_largest_mask(info),
        tried=False,
    )
    return SglangDialect(capabilities) if paused else (yield from try_out(need, capabilities))


def try_out(need: ServerRequirements, capabilities: ServerCapabilities) -> Conversation[SglangDialect]:
    """Ask a server for tokens, to find capabilities that only a reply shows."""
    logprobs_of = yield from _probe_temperature(need)
    masks = capabilities.masked_top_k > 0 and (yield from _probe_cuts(need))
    return SglangDialect(
        replace(
            capabilities,
            logprobs_of=logprobs_of,
            masked_top_k=capabilities.masked_top_k if masks else 0,
            tried=True,
        )
    )


def _is_paused() -> Conversation[bool]:
    answer = yield HttpCall("/ready", method="GET", patient=False)
    return answer.status == 503


def _largest_mask(info: Mapping[str, Any]) -> int:
    """Return the largest top-k whose tokens a mask may name; those that tie with the last one need room, too."""
    most = info.get("sampling_mask_max_tokens")
    return most - 1 if type(most) is int else 0


def _refuse_old(version: str, release: tuple[int, ...], need: ServerRequirements) -> None:
    if release < _OLDEST:
        raise ServerTooOldError(
            f"SGLang {version} is too old: versions of weights per token came with 0.5.20. Start that or a newer one"
        )
    if need.mode == "recompute" and need.way in ("disk", "broadcast") and release < _FLUSHES_QUEUED:
        raise ServerTooOldError(
            f"SGLang {version} is too old for pauses of the kind 'recompute': it cannot flush its cache while "
            "requests wait, and 0.5.22 can. Pause with 'abort', 'wait' or 'keep'"
        )


def _refuse_setup(info: Mapping[str, Any], need: ServerRequirements) -> None:
    if need.way == "adapter" and info.get("enable_lora") is False:
        raise ServerSetupError("adapters cannot be loaded; start SGLang with --enable-lora")
    if need.way == "broadcast":
        for key in ("dp_size", "pp_size"):
            if type(info.get(key)) is int and info[key] > 1:
                raise ServerSetupError(
                    f"SGLang takes broadcast weights with {key} 1 only, and this server has {info[key]}; start "
                    "several servers, or let weights travel by disk"
                )


def _probe_temperature(need: ServerRequirements) -> Conversation[LogprobsOf]:
    """Find whose log-probabilities come: those of named tokens are other ones at another temperature, or they are not.

    Sampling must not be greedy: a batch of greedy requests has the model's log-probabilities whatever is asked for.
    """
    found = []
    for temperature in (1.0, 0.2):
        answer = yield _one_token(need, {"temperature": temperature}, token_ids_logprob=list(_NAMED))
        require_token(answer, "SGLang did not generate a token", need)
        found.append(read_named_logprobs(answer))
    apart = [abs(first - second) for first, second in zip(*found, strict=True)]
    # A model that is certain of all of them tells nothing: then the narrower promise is believed.
    return "temperature" if any(each > _DIFFERENT for each in apart) else "model"


def _probe_cuts(need: ServerRequirements) -> Conversation[bool]:
    """Find whether the server returns log-probabilities after top-k and top-p if they are requested."""
    answer = yield _one_token(
        need, {"top_k": 2}, return_sampling_mask=True, sampling_logprobs_mode="selected"
    )
    return has_sampled_logprobs(answer)


def _one_token(need: ServerRequirements, sampling: Mapping[str, Any], **more: Any) -> HttpCall:
    params = {"max_new_tokens": 1, **sampling}
    ids = {"input_ids": [need.tried_with], "sampling_params": params, "return_logprob": True}
    return HttpCall("/generate", ids | more)


def _command(
    inference: InferenceSettings, launch: LaunchSettings, model: ServedModel, port: int
) -> StartCommand:
    words = [
        *(launch.command or [sys.executable, "-m", "sglang.launch_server"]),
        *("--model-path", str(model.folder), "--served-model-name", SERVED_NAME),
        *("--host", launch.host, "--port", str(port)),
        *("--context-length", str(model.max_length + TOKENS_KEPT_FREE), "--dtype", inference.dtype),
        *("--tp-size", str(launch.tensor_parallel)),
        # Without it each event of a stream repeats all tokens so far, and replies are not streamed.
        "--incremental-streaming-output",
    ]
    if launch.memory_fraction is not None:
        words += ["--mem-fraction-static", str(launch.memory_fraction)]
    if inference.quantization is not None:
        words += ["--quantization", inference.quantization]
    if inference.sleep_level:
        words.append("--enable-memory-saver")
    if inference.routed_experts:
        words.append("--enable-return-routed-experts")
    if model.lora_rank:
        words += ["--enable-lora", "--max-lora-rank", str(model.lora_rank), "--lora-target-modules", "all"]
        words += ["--max-loras-per-batch", str(model.adapters)]
    if key := os.environ.get(inference.api_key_variable):
        words += ["--api-key", key]
    return words, {
        # Otherwise a health check makes it draw a token, and blocks for as long as it is paused.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        # What it keeps free may pass the model's own length: no row reaches there.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }


def _exactly(capabilities: ServerCapabilities) -> str:
    """Return how to have SGLang report log-probabilities of the distribution that tokens are drawn from."""
    remedies = []
    if capabilities.logprobs_of == "model":
        remedies.append("start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB")
    if capabilities.masked_top_k:
        remedies.append(f"give top_k a value of 1 to {capabilities.masked_top_k} beside top_p")
    return ", or ".join(remedies) or "this SGLang has none after top-p and top-k"


SGLANG = ServerProgram(
    probe=probe,
    look=look,
    try_out=try_out,
    sign_of_life=SIGN_OF_LIFE,
    engine_sign=ENGINE_SIGN,
    command=_command,
    row_switch=lambda tokens: f"--context-length {tokens + TOKENS_KEPT_FREE}",
    exactly=_exactly,
)
"""What the trainer needs to start and use an SGLang server; found by its kind."""
