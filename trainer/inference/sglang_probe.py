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
from rollgym.trainer.inference.sglang_replies import read_first_logprob

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
    answer = yield steering("/continue_generation", {})
    require(answer, "SGLang cannot be steered")
    sessions = False
    if need.way == "broadcast":
        # Nothing is open; the route's existence is what the answer tells.
        answer = yield steering("/end_weight_update", {})
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


def _probe_generation() -> Conversation[LogprobsOf]:
    """Find whose log-probabilities come: a sharper temperature shows in them, or it does not."""
    found = []
    for params in ({"temperature": 0.0}, {"temperature": 0.2, "top_k": 1}):
        sampling = {"max_new_tokens": 1, **params}
        body = {"input_ids": [0], "sampling_params": sampling, "return_logprob": True}
        answer = yield HttpCall("/generate", body)
        require(answer, "SGLang did not generate a token")
        found.append(read_first_logprob(answer))
    # A model that is certain anyway tells nothing: then the narrower promise is believed.
    return "temperature" if abs(found[0] - found[1]) > _DIFFERENT else "model"
