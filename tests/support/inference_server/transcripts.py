"""What a real server answered to a fixed list of calls, kept in a file, and the double asked the same.

Record one with `python -m tests.support.inference_server.transcripts vllm URL FOLDER FILE`, where FOLDER is that of the
model as the server sees it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import httpx

GENERATE = {
    "token_ids": [3, 4, 5],
    "sampling_params": {"max_tokens": 3, "logprobs": 0, "seed": 1, "temperature": 1.0},
}


def vllm_calls(folder: str) -> list[tuple[str, str, Any]]:
    """Method, path and body of each call, in order: they leave the server as it was."""
    reload = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
    scored = {**GENERATE, "sampling_params": {**GENERATE["sampling_params"], "prompt_logprobs": 0}}
    return [
        ("GET", "/version", None),
        ("GET", "/v1/models", None),
        ("GET", "/health", None),
        ("GET", "/is_paused", None),
        ("GET", "/weight_info", None),
        ("GET", "/get_world_size?include_dp=true", None),
        ("POST", "/inference/v1/generate", GENERATE),
        ("POST", "/inference/v1/generate", scored),
        ("POST", "/inference/v1/generate", {**GENERATE, "token_ids": []}),
        ("POST", "/inference/v1/generate", {**GENERATE, "model": "nobody"}),
        ("POST", "/abort_requests", {"request_ids": ["nobody"]}),
        ("POST", "/pause?mode=abort&clear_cache=true", None),
        ("GET", "/is_paused", None),
        ("POST", "/collective_rpc", reload),
        ("POST", "/reset_prefix_cache?reset_running_requests=false", None),
        ("POST", "/update_weight_version", {"new_version": "7"}),
        ("GET", "/weight_info", None),
        ("POST", "/resume", None),
        ("POST", "/pause?mode=soon", None),
        ("POST", "/finish_weight_update", {}),
        ("POST", "/no_such_route", {}),
        ("POST", "/update_weight_version", {"new_version": "default"}),
    ]


def record(url: str, calls: list[tuple[str, str, Any]]) -> list[dict[str, Any]]:
    """Make the calls and keep what comes."""
    entries = []
    # A real server closes the connection after an error of its own.
    headers = {"Connection": "close"}
    with httpx.Client(base_url=url, timeout=120, trust_env=False, headers=headers) as client:
        for method, path, body in calls:
            reply = client.request(method, path, json=body)
            entries.append(
                {
                    "method": method,
                    "path": path,
                    "body": body,
                    "status": reply.status_code,
                    "reply": reply.text,
                }
            )
    return entries


def shape(value: Any) -> Any:
    """What of a reply a reader may rely on: names and kinds."""
    if isinstance(value, dict):
        return {key: shape(part) for key, part in value.items()}
    if isinstance(value, list):
        return [shape(part) for part in value[:1]]
    return "number" if type(value) in (int, float) else type(value).__name__


def differences(real: Any, double: Any, where: str = "") -> list[str]:
    """Where the double says something that the real one does not, or says it otherwise.

    What the real one says beyond is left out: a double need not say all.
    """
    if isinstance(real, dict) and isinstance(double, dict):
        if double and set(map(str.isdigit, double)) == {True}:
            # Names that are token ids.
            real, double = {"id": next(iter(real.values()))}, {"id": next(iter(double.values()))}
        found = [f"{where}.{key} is not there" for key in double if key not in real]
        for key in double.keys() & real.keys():
            found += differences(real[key], double[key], f"{where}.{key}")
        return found
    if isinstance(real, list) and isinstance(double, list):
        return [
            each
            for place, (one, other) in enumerate(zip(real, double, strict=False))
            for each in differences(one, other, f"{where}[{place}]")
        ]
    same = shape(real) == shape(double)
    return [] if same else [f"{where}: {shape(double)}, and the real one has {shape(real)}"]


def main() -> None:
    dialect, url, folder, file = sys.argv[1:]
    assert dialect == "vllm"
    entries = record(url, vllm_calls(folder))
    Path(file).write_text(json.dumps(entries, indent=1) + "\n")


if __name__ == "__main__":
    main()
