"""Programs of inference servers: whether they are installed, their ports, and their command lines."""

import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rollgym.extras import install_line
from rollgym.trainer.config.inference import InferenceSettings, LaunchSettings, vllm_lora_rank
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.inference.launch import ServerProcess
from rollgym.trainer.inference.sglang_probe import TOKENS_KEPT_FREE

SERVED_NAME = "policy"
"""What the model is called on servers that we start."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a server is started with.

    Attributes:
        folder: The model's.
        max_length: Longest row in tokens.
        lora_rank: Largest rank of the adapters that it will be given; 0 for none.
        adapters: Adapters that it holds at once.
        broadcast: What weights are broadcast by; empty where they are not.
    """

    folder: Path
    max_length: int
    lora_rank: int = 0
    adapters: int = 1
    broadcast: str = ""


def require_program(inference: InferenceSettings, launch: LaunchSettings) -> None:
    """Look whether the servers' program is there.

    Raises:
        ConfigError: If it is not; the message says how to get it.
    """
    if launch.command:
        if shutil.which(launch.command[0]) is None:
            raise ConfigError(f"inference.launch.command: there is no program {launch.command[0]}")
    elif importlib.util.find_spec(inference.kind) is None:
        raise ConfigError(
            f"inference.launch: {inference.kind} is not installed beside the trainer: "
            f"{install_line(inference.kind)}, name the program of another environment by inference.launch.command, "
            "or name servers that run by inference.urls"
        )


def choose_ports(launch: LaunchSettings) -> list[int]:
    """Return the servers' ports: those that the settings name, or free ones.

    Raises:
        ConfigError: If one that they name is taken.
    """
    wanted = [0 if launch.port is None else launch.port + number for number in range(launch.count)]
    # All are held until the last is chosen: no two are one.
    with ExitStack() as held:
        return [_bound(held, launch.host, port) for port in wanted]


def _bound(held: ExitStack, host: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    place = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        place.bind((host, port))
    except OSError as error:
        raise ConfigError(
            f"inference.launch: cannot listen on {host}:{port}: {error.strerror}; leave inference.launch.port out, and "
            "free ones are taken"
        ) from error
    number: int = place.getsockname()[1]
    return number


def server_processes(
    inference: InferenceSettings, launch: LaunchSettings, model: ServedModel, ports: Sequence[int], logs: Path
) -> list[ServerProcess]:
    """Return the servers that settings ask for. No I/O.

    Args:
        inference: Which servers, and what is asked of them.
        launch: How they are started.
        model: What they serve.
        ports: One for each.
        logs: Folder of what they say.

    Raises:
        ConfigError: If a server of this kind takes no adapters of such a rank.
    """
    build = _BUILDERS[inference.kind]
    processes = []
    for number, port in enumerate(ports):
        words, variables = build(inference, launch, model, port)
        variables |= launch.environment
        if launch.devices:
            variables[launch.devices_variable] = launch.devices[number]
        log = logs / f"{inference.kind}-{number}.log"
        command = (*words, *launch.arguments)
        processes.append(ServerProcess(command, _url(launch.host, port), log, variables))
    return processes


def _url(host: str, port: int) -> str:
    """Where a server that listens on `host` is reached from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _vllm(
    inference: InferenceSettings, launch: LaunchSettings, model: ServedModel, port: int
) -> tuple[list[str], dict[str, str]]:
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


def _sglang(
    inference: InferenceSettings, launch: LaunchSettings, model: ServedModel, port: int
) -> tuple[list[str], dict[str, str]]:
    words = [
        *(launch.command or [sys.executable, "-m", "sglang.launch_server"]),
        *("--model-path", str(model.folder), "--served-model-name", SERVED_NAME),
        *("--host", launch.host, "--port", str(port)),
        *("--context-length", str(model.max_length + TOKENS_KEPT_FREE), "--dtype", inference.dtype),
        *("--tp-size", str(launch.tensor_parallel)),
        # Without it each event of a stream repeats all tokens so far, and replies are not told as they are drawn.
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
        # Otherwise whoever asks for its health has it draw a token, and waits for as long as it is paused.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        # What it keeps free may pass the model's own length: no row reaches there.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }


_BUILDERS = {"vllm": _vllm, "sglang": _sglang}
