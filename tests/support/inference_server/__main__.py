"""Start a double: `python -m tests.support.inference_server --dialect vllm --model DIR --port 0`."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

import uvicorn

from tests.support.inference_server.app import NEWEST, Served, application
from tests.support.inference_server.http import Options


def parser() -> argparse.ArgumentParser:
    parsing = argparse.ArgumentParser(prog="python -m tests.support.inference_server", description=__doc__)
    add = parsing.add_argument
    add("--dialect", choices=["vllm", "sglang"], required=True)
    add("--model", type=Path, help="a folder in Hugging Face layout; without it, a model that is a hash")
    add("--port", type=int, default=0)
    add("--release", help="the version string; the newest known where none is given")
    add("--seed", type=int, default=0, help="of the hash model's weights")
    add("--max-length", type=int, default=4096, help="of the hash model")
    add("--max-rows", type=int, default=256)
    add("--step-s", type=float, default=0.0, help="seconds that each decoding step takes at least")
    add("--log-file", type=Path, help="every reply that ended is appended to it")
    add("--model-name", default="policy")
    add("--api-key")
    add("--admin-api-key")
    add("--logprobs-mode", default="raw_logprobs", choices=["raw_logprobs", "processed_logprobs"])
    add("--inference-world", type=int, default=1)
    for name in ("dev-mode", "scale-out", "lora", "memory-saver"):
        add(f"--{name}", action=argparse.BooleanOptionalAction, default=True)
    for name in ("original-logprobs", "incremental"):
        add(f"--{name}", action=argparse.BooleanOptionalAction, default=False)
    return parsing


def main() -> None:
    arguments = parser().parse_args()
    options = Options(
        arguments.release or NEWEST[arguments.dialect],
        **{
            name: getattr(arguments, name)
            for name in Options.__dataclass_fields__
            if name != "release" and hasattr(arguments, name)
        },
    )
    served = Served(
        arguments.dialect,
        options,
        arguments.model,
        arguments.seed,
        arguments.max_length,
        arguments.max_rows,
        arguments.step_s,
        arguments.log_file,
    )
    app = application(served)
    listener = socket.create_server(("127.0.0.1", arguments.port), backlog=1024)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    print(f"serving on http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
