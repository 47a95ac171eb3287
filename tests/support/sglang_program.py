"""`python -m sglang.launch_server ...` as far as the trainer's launching goes: the double, behind its command line.

`python -m tests.support.sglang_program --model-path MODEL --port N ...`; what it does not know it refuses.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from tests.support.inference_server.app import NEWEST, Served, serve
from tests.support.inference_server.http import Options


def parser() -> argparse.ArgumentParser:
    parsing = argparse.ArgumentParser(prog="launch_server.py", allow_abbrev=False)
    add = parsing.add_argument
    add("--model-path", type=Path, required=True)
    add("--served-model-name", default="")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=30000)
    add("--context-length", type=int)
    add("--dtype", choices=["auto", "half", "float16", "bfloat16", "float", "float32"], default="auto")
    add("--tp-size", type=int, default=1)
    add("--mem-fraction-static", type=float)
    add("--quantization", choices=["fp8"])
    add("--api-key")
    add("--admin-api-key")
    for switch in (
        "--incremental-streaming-output",
        "--enable-memory-saver",
        "--enable-return-routed-experts",
        "--enable-lora",
        "--enable-deterministic-inference",
    ):
        add(switch, action="store_true")
    add("--max-lora-rank", type=int)
    add("--lora-target-modules", nargs="*", choices=["all", "q_proj", "k_proj", "v_proj", "o_proj"])
    add("--max-loras-per-batch", type=int, default=8)
    return parsing


def longest(arguments: argparse.Namespace) -> int | None:
    """The longest row, which passes what the model's configuration has only where that is allowed."""
    given = arguments.context_length
    config = json.loads((arguments.model_path / "config.json").read_text())
    own = config.get("max_position_embeddings", 4096)
    if given and given > own and os.environ.get("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN") != "1":
        sys.exit(
            f"User-specified context_length ({given}) is greater than the derived context_length ({own})."
        )
    return given


def main() -> None:
    arguments = parser().parse_args()
    options = Options(
        NEWEST["sglang"],
        model_name=arguments.served_model_name or str(arguments.model_path),
        api_key=arguments.api_key,
        admin_api_key=arguments.admin_api_key,
        lora=arguments.enable_lora,
        deterministic=arguments.enable_deterministic_inference,
        memory_saver=arguments.enable_memory_saver,
        incremental=arguments.incremental_streaming_output,
        health_generates=os.environ.get("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION") != "false",
        routed_experts=arguments.enable_return_routed_experts,
    )
    serve(
        Served(
            "sglang",
            options,
            arguments.model_path,
            max_length=longest(arguments),
            quantization=arguments.quantization,
        ),
        arguments.host,
        arguments.port,
    )


if __name__ == "__main__":
    main()
