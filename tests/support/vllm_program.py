"""`vllm serve MODEL ...` as far as the trainer's launching goes: the double, behind vLLM's own command line.

`python -m tests.support.vllm_program serve MODEL --port N ...`; what it does not know it refuses, as vLLM does.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from tests.support.inference_server.app import NEWEST, Served, serve
from tests.support.inference_server.http import Options


def parser() -> argparse.ArgumentParser:
    parsing = argparse.ArgumentParser(prog="vllm serve", allow_abbrev=False)
    add = parsing.add_argument
    add("--version", action="version", version=NEWEST["vllm"])
    add("verb", choices=["serve"])
    add("model", type=Path)
    add("--served-model-name", default="")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--max-model-len", type=int)
    add("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto")
    add("--tensor-parallel-size", type=int, default=1)
    add("--logprobs-mode", default="raw_logprobs")
    add("--generation-config", default="auto")
    for switch in (
        "--enable-scale-out",
        "--disable-uvicorn-access-log",
        "--enable-sleep-mode",
        "--enable-lora",
        "--enable-return-routed-experts",
        "--enforce-eager",
        "--no-enable-chunked-prefill",
    ):
        add(switch, action="store_true")
    add("--quantization", choices=["fp8"])
    add("--max-lora-rank", type=int, choices=[1, 8, 16, 32, 64, 128, 256, 320, 512], default=16)
    add("--max-loras", type=int)
    add("--max-num-batched-tokens", type=int)
    add("--weight-transfer-config", type=json.loads)
    return parsing


def main() -> None:
    arguments = parser().parse_args()
    options = Options(
        NEWEST["vllm"],
        model_name=arguments.served_model_name or str(arguments.model),
        dev_mode=os.environ.get("VLLM_SERVER_DEV_MODE") == "1",
        scale_out=arguments.enable_scale_out,
        lora=arguments.enable_lora and os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == "1",
        memory_saver=arguments.enable_sleep_mode,
        logprobs_mode=arguments.logprobs_mode,
        routed_experts=arguments.enable_return_routed_experts,
        api_key=os.environ.get("VLLM_API_KEY"),
    )
    serve(
        Served(
            "vllm",
            options,
            arguments.model,
            max_length=arguments.max_model_len,
            quantization=arguments.quantization,
        ),
        arguments.host,
        arguments.port,
    )


if __name__ == "__main__":
    main()
