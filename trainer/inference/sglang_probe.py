"""What an SGLang server is and can do, found by asking it, for releases 0.5.20 to 0.5.23. No I/O."""

from collections.abc import Mapping
from typing import Any

from rollgym.trainer.inference.calls import HttpCall, part_of, read_object, steering
from rollgym.trainer.inference.dialect import (
    Capabilities,
    Conversation,
    LogprobsOf,
    Need,
    Seen,
    read_release,
    require,
)
from rollgym.trainer.inference.errors import ServerSetupError, ServerTooOldError
from rollgym.trainer.inference.sglang import SglangDialect
from rollgym.trainer.inference.sglang_replies import has_sampled_logprobs, read_named_logprobs

SIGN_OF_LIFE = "/model_info"
"""What its front end answers by itself. `/health` draws a token, unless the server is told otherwise: it says nothing
while the server is paused for an update, and its request stands in the queue that a flush wants empty."""
ENGINE_SIGN = "/server_info"
"""What its scheduler answers, between two batches and in a pause, without a token. `/v1/loads` is read without it."""

_OLDEST = (0, 5, 20)
"""The first release whose replies say which weights drew each token."""
_FLUSHES_QUEUED = (0, 5, 22)
"""The first release that flushes its cache while requests wait in a pause."""
_DIFFERENT = 1e-3
_NAMED = (0, 1, 2, 3)
"""Tokens whose log-probabilities tell whether temperature shows in them: one of them alone might be certain."""

TOKENS_KEPT_FREE = 7
"""By how many tokens `--context-length` must pass the longest row: a prompt is refused from six tokens before its end
on, and a row to score is a prompt."""


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
    # An update from disk names the model by the folder of its weights; what it was started with stays as it is.
    name = info.get("served_model_name") or model.get("served_model_name") or model.get("model_path")
    return Seen(
        server=f"SGLang {info['version']}",
        release=read_release(info["version"]),
        model=str(name or "default"),
        max_length=_longest_row(info),
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


def probe(need: Need) -> Conversation[SglangDialect]:
    """Ask a server what it can do. It goes on if somebody left it paused.

    Raises:
        ServerSetupError: If it lacks something that the run needs.
    """
    info, model = yield from _told(need)
    seen = _seen(info, model)
    # A server in a pause answers nothing else.
    answer = yield steering("/continue_generation", {})
    require(answer, "SGLang cannot be steered")
    sessions = False
    if need.way == "broadcast":
        # Nothing is open; the route's existence is what the answer tells.
        answer = yield steering("/end_weight_update", {})
        sessions = answer.status != 404
    logprobs_of = yield from _probe_temperature()
    masked_top_k = yield from _probe_cuts(info)
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
            reads_seeds=info.get("enable_deterministic_inference") is True,
            masked_top_k=masked_top_k,
        )
    )


def _refuse_old(version: str, release: tuple[int, ...], need: Need) -> None:
    if release < _OLDEST:
        raise ServerTooOldError(
            f"SGLang {version} is too old: versions of weights per token came with 0.5.20. Start that or a newer one"
        )
    if need.mode == "recompute" and need.way in ("disk", "broadcast") and release < _FLUSHES_QUEUED:
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


def _probe_temperature() -> Conversation[LogprobsOf]:
    """Find whose log-probabilities come: those of named tokens are other ones at another temperature, or they are not.

    Sampling must not be greedy: a batch of greedy requests has the model's log-probabilities whatever is asked for.
    """
    found = []
    for temperature in (1.0, 0.2):
        answer = yield _one_token({"temperature": temperature}, token_ids_logprob=list(_NAMED))
        require(answer, "SGLang did not generate a token")
        found.append(read_named_logprobs(answer))
    apart = [abs(first - second) for first, second in zip(*found, strict=True)]
    # A model that is certain of all of them tells nothing: then the narrower promise is believed.
    return "temperature" if any(each > _DIFFERENT for each in apart) else "model"


def _probe_cuts(info: Mapping[str, Any]) -> Conversation[int]:
    """Find the largest top-k for which log-probabilities after top-k and top-p come; 0 where none do."""
    most = info.get("sampling_mask_max_tokens")
    if type(most) is not int:
        return 0
    answer = yield _one_token({"top_k": 2}, return_sampling_mask=True, sampling_logprobs_mode="selected")
    # Tokens that tie with the last one count, too: the server asks for room.
    return most - 1 if has_sampled_logprobs(answer) else 0


def _one_token(sampling: Mapping[str, Any], **more: Any) -> HttpCall:
    params = {"max_new_tokens": 1, **sampling}
    return HttpCall(
        "/generate", {"input_ids": [0], "sampling_params": params, "return_logprob": True, **more}
    )
