"""vLLM as a server of the trainer: what it can do, for releases 0.24 to 0.33, and how it is started. No I/O."""

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rollgym.trainer.config.inference import InferenceSettings, LaunchSettings, vllm_lora_rank
from rollgym.trainer.inference.calls import HttpCall, part_of, read_object, steering
from rollgym.trainer.inference.errors import MalformedReplyError, ServerSetupError, ServerTooOldError
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
from rollgym.trainer.inference.servers.vllm import (
    COMPLETIONS,
    DEV_MODE,
    GENERATE,
    LORA,
    NAMES_WEIGHTS_PER_TOKEN,
    VllmDialect,
    read_first_logprob,
    weight_label,
)

SIGN_OF_LIFE = "/health"
"""What it answers as long as its engine has not failed, paused or not."""
ENGINE_SIGN = "/is_sleeping"
"""A route that its engine answers, between two steps, in a pause and asleep; unused without dev mode."""

_OLDEST = (0, 24)
"""The first release with sessions of weight updates."""
_CERTAIN = -1e-6


def look(need: ServerRequirements) -> Conversation[InspectedServer]:
    """Ask a server for its name, release and model, by read-only calls.

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
    model, max_length, source = _served_model(read_object(answer.body))
    if need.way in ("disk", "broadcast"):
        answer = yield HttpCall("/is_paused", method="GET", admin=True)
        require(answer, "weights cannot be updated", missing=DEV_MODE)
    return InspectedServer(f"vLLM {version}", release, model, max_length, source=source)


def probe(need: ServerRequirements) -> Conversation[VllmDialect]:
    """Ask a server what it can do.

    A server that is found paused stays paused, and is not asked for a token: another run may be in the middle of an
    update there, or have died in it, and an engine with partly overwritten weights may crash on a token. The first
    weights that it is sent resume it.

    Raises:
        ServerSetupError: If it lacks something that the run needs.
    """
    seen = yield from look(need)
    paused = yield from _is_paused(need)
    label = yield from weight_label(seen.release)
    if need.way == "adapter":
        answer = yield HttpCall("/v1/load_lora_adapter", {})
        if answer.status == 404:
            require(answer, "adapters cannot be loaded", missing=LORA)
    world_size = 1
    if need.way == "broadcast":
        answer = yield HttpCall("/get_world_size", query={"include_dp": "true"}, method="GET", admin=True)
        require(answer, "vLLM does not say how many ranks it has", missing=DEV_MODE)
        world_size = part_of(read_object(answer.body), "world_size", int, "vLLM's world size")
    # Named, because no name at all means every request.
    answer = yield steering("/abort_requests", {"request_ids": ["nobody"]})
    keeps_aborted = answer.ok
    capabilities = ServerCapabilities(
        server=seen.server,
        release=seen.release,
        model=seen.model,
        max_length=seen.max_length,
        source=seen.source,
        logprobs_of="model",
        weight_label=label,
        spans=seen.release >= NAMES_WEIGHTS_PER_TOKEN,
        keeps_aborted=keeps_aborted,
        world_size=world_size,
        tried=False,
    )
    return VllmDialect(capabilities) if paused else (yield from try_out(need, capabilities))


def try_out(need: ServerRequirements, capabilities: ServerCapabilities) -> Conversation[VllmDialect]:
    """Ask a server for tokens, to find capabilities that only a reply shows."""
    tokens_route, logprobs_of = yield from _probe_generation(capabilities.model, need)
    return VllmDialect(replace(capabilities, tokens_route=tokens_route, logprobs_of=logprobs_of, tried=True))


def _refuse_old(version: str, release: tuple[int, ...], need: ServerRequirements) -> None:
    if release < _OLDEST:
        raise ServerTooOldError(
            f"vLLM {version} is too old: weight updates in sessions came with 0.24. Start that or a newer one"
        )
    in_flight = need.way in ("disk", "broadcast") and need.mode in ("keep", "recompute")
    if in_flight and release < NAMES_WEIGHTS_PER_TOKEN:
        raise ServerTooOldError(
            f"vLLM {version} is too old for pauses of the kind {need.mode!r}: replies then hold tokens of several "
            "versions, and only 0.33 says which. Pause with 'abort' or 'wait'"
        )


def _is_paused(need: ServerRequirements) -> Conversation[bool]:
    """Say whether the server is paused; one outside of its development mode has no pauses.

    Raises:
        ServerSetupError: If it is paused, and this run would never resume it: requests would wait for ever.
    """
    pauses = need.way is not None and (need.way != "adapter" or need.mode == "abort")
    answer = yield HttpCall("/is_paused", method="GET", admin=True, patient=pauses)
    if not pauses and not answer.ok:
        return False
    require(answer, "weights cannot be updated", missing=DEV_MODE)
    paused: bool = part_of(read_object(answer.body), "is_paused", bool, "vLLM's pause")
    if paused and need.way is None:
        raise ServerSetupError(
            "vLLM is paused by somebody else, and no weights are sent that would let it go on"
        )
    return paused


def _probe_generation(model: str, need: ServerRequirements) -> Conversation[tuple[bool, LogprobsOf]]:
    """Find the route for ids, and whose log-probabilities come: with top_k=1 a sampled token is certain."""
    tokens_route, token = True, need.tried_with
    body: dict[str, Any] = {
        "model": model,
        "token_ids": [token],
        "sampling_params": {"max_tokens": 1, "logprobs": 0},
    }
    answer = yield HttpCall(GENERATE, body)
    if answer.status in (403, 404, 405):
        tokens_route = False
    else:
        require_token(answer, "vLLM did not generate a token", need)
    found = []
    for params in ({"top_k": 1}, {"temperature": 0.0}):
        sampling = {"max_tokens": 1, "logprobs": 0, **params}
        if tokens_route:
            call = HttpCall(GENERATE, {"model": model, "token_ids": [token], "sampling_params": sampling})
        else:
            prompt = {"model": model, "prompt": [token], "return_token_ids": True}
            call = HttpCall(COMPLETIONS, prompt | sampling)
        answer = yield call
        require_token(answer, "vLLM did not generate a token", need)
        found.append(read_first_logprob(answer))
    # A model that is certain anyway tells nothing: then the server is taken at its default.
    return tokens_route, "sampled" if found[0] > _CERTAIN >= found[1] else "model"


def _served_model(reply: Mapping[str, Any]) -> tuple[str, int | None, str | None]:
    models = [each for each in part_of(reply, "data", list, "vLLM's models") if isinstance(each, dict)]
    base = next((each for each in models if each.get("parent") is None), None)
    if base is None:
        raise MalformedReplyError("vLLM's models name no base model")
    length, root = base.get("max_model_len"), base.get("root")
    return (
        part_of(base, "id", str, "vLLM's model"),
        length if type(length) is int else None,
        root if isinstance(root, str) else None,
    )


def _command(
    inference: InferenceSettings, launch: LaunchSettings, model: ServedModel, port: int
) -> StartCommand:
    words = [
        *(launch.command or [sys.executable, "-m", "vllm.entrypoints.cli.main"]),
        *("serve", str(model.folder), "--served-model-name", SERVED_NAME),
        *("--host", launch.host, "--port", str(port)),
        *("--max-model-len", str(model.max_length), "--dtype", inference.dtype),
        *("--tensor-parallel-size", str(launch.tensor_parallel)),
        # Log-probabilities of the distribution that tokens are drawn from, and requests of token ids.
        *("--logprobs-mode", "processed_logprobs", "--enable-scale-out"),
        # How tokens are drawn is said by each request, never by a file of the model's.
        *("--generation-config", "vllm", "--disable-uvicorn-access-log"),
    ]
    # Pauses and weight updates are routes of this mode alone.
    variables = {"VLLM_SERVER_DEV_MODE": "1"}
    if launch.memory_fraction is not None:
        words += ["--gpu-memory-utilization", str(launch.memory_fraction)]
    if inference.quantization is not None:
        words += ["--quantization", inference.quantization]
    if model.broadcast:
        words += ["--weight-transfer-config", f'{{"backend": "{model.broadcast}"}}']
    if inference.sleep_level:
        words.append("--enable-sleep-mode")
    if inference.routed_experts:
        words.append("--enable-return-routed-experts")
    if model.lora_rank:
        words += ["--enable-lora", "--max-lora-rank", str(vllm_lora_rank(model.lora_rank))]
        words += ["--max-loras", str(model.adapters)]
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if key := os.environ.get(inference.api_key_variable):
        variables["VLLM_API_KEY"] = key
    return words, variables


VLLM = ServerProgram(
    probe=probe,
    look=look,
    try_out=try_out,
    sign_of_life=SIGN_OF_LIFE,
    engine_sign=ENGINE_SIGN,
    command=_command,
    row_switch=lambda tokens: f"--max-model-len {tokens}",
    exactly=lambda _: "start vLLM with --logprobs-mode processed_logprobs",
)
"""What the trainer needs to start and use a vLLM server; found by its kind."""
