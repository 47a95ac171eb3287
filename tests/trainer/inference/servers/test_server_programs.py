"""What servers that a run starts are told, and the ports that they get."""

import re
import socket
from pathlib import Path

import pytest

from rollgym.trainer.config.inference import INFERENCE_SERVERS, InferenceSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.inference.servers.dialect import ServedModel
from rollgym.trainer.inference.servers.launch import (
    ServerProcess,
    choose_ports,
    require_program,
    server_processes,
)
from tests.support import sglang_program, vllm_program


def settings_of(**values) -> InferenceSettings:
    return InferenceSettings.model_validate({"launch": {}} | values)


def started(inference: InferenceSettings, model: ServedModel) -> list[ServerProcess]:
    assert inference.launch is not None
    ports = [8000 + number for number in range(inference.launch.count)]
    return server_processes(inference, inference.launch, model, ports, Path("logs"))


def words_of(process: ServerProcess) -> str:
    return " ".join(process.command)


MODEL = ServedModel(Path("/models/m"), 4096)


def test_vllm_is_told_what_training_needs():
    inference = settings_of(
        kind="vllm", dtype="bfloat16", launch={"command": ["/opt/vllm"], "tensor_parallel": 2}
    )
    (process,) = started(inference, MODEL)
    assert process.command[:3] == ("/opt/vllm", "serve", "/models/m")
    words = words_of(process)
    for expected in (
        "--logprobs-mode processed_logprobs",
        "--enable-scale-out",
        "--generation-config vllm",
        "--max-model-len 4096",
        "--dtype bfloat16",
        "--tensor-parallel-size 2",
        "--host 127.0.0.1 --port 8000",
    ):
        assert expected in words
    assert process.environment == {"VLLM_SERVER_DEV_MODE": "1"}
    for absent in ("--quantization", "--enable-lora", "--enable-sleep-mode", "--weight-transfer-config"):
        assert absent not in words


@pytest.mark.parametrize("kind", [each.name for each in INFERENCE_SERVERS])
def test_each_is_started_from_a_release_on_that_messages_name(kind):
    (process,) = started(settings_of(kind=kind), MODEL)
    assert re.fullmatch(r"\w+ [\d.]+", process.oldest)


def test_vllm_is_told_of_everything_that_was_switched_on(monkeypatch):
    monkeypatch.setenv("ROLLGYM_INFERENCE_KEY", "secret")
    inference = settings_of(
        kind="vllm",
        quantization="fp8",
        sleep_level=1,
        launch={
            "count": 2,
            "devices": ["0", "1"],
            "memory_fraction": 0.6,
            "environment": {"VLLM_LOGGING_LEVEL": "DEBUG"},
            "arguments": ["--max-num-seqs", "64"],
        },
    )
    first, second = started(
        inference, ServedModel(Path("/m"), 64, lora_rank=16, adapters=3, broadcast="nccl")
    )
    words = words_of(second)
    for expected in (
        "--quantization fp8",
        "--enable-sleep-mode",
        "--enable-lora --max-lora-rank 16 --max-loras 3",
        '--weight-transfer-config {"backend": "nccl"}',
        "--gpu-memory-utilization 0.6",
        "--port 8001",
    ):
        assert expected in words
    assert words.endswith("--max-num-seqs 64"), "the user's words come last, so they win"
    assert "secret" not in words, "every user of the machine reads command lines"
    assert second.environment == {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_API_KEY": "secret",
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "CUDA_VISIBLE_DEVICES": "1",
    }
    assert first.environment["CUDA_VISIBLE_DEVICES"] == "0"
    assert first.log != second.log


@pytest.mark.parametrize(
    ("rank", "allowed"), [(1, 1), (4, 8), (8, 8), (12, 16), (24, 32), (257, 320), (321, 512), (512, 512)]
)
def test_vllm_is_told_of_a_rank_that_it_allows(rank, allowed):
    (process,) = started(settings_of(kind="vllm"), ServedModel(Path("/m"), 64, lora_rank=rank))
    words = process.command[process.command.index("serve") :]
    assert vllm_program.parser().parse_args(words).max_lora_rank == allowed


@pytest.mark.parametrize("rank", ["0", "4", "12", "24", "1024"])
def test_the_stand_in_for_vllm_allows_no_other_rank(rank, capsys):
    with pytest.raises(SystemExit):
        vllm_program.parser().parse_args(["serve", "/m", "--max-lora-rank", rank])
    assert "--max-lora-rank: invalid choice" in capsys.readouterr().err


def test_a_rank_that_vllm_never_allows_is_refused():
    with pytest.raises(ConfigError, match=r"model\.lora\.rank 513 is more than vLLM takes: lower it to 512"):
        started(settings_of(kind="vllm"), ServedModel(Path("/m"), 64, lora_rank=513))


def test_sglang_is_told_the_same_in_its_own_words():
    inference = settings_of(
        kind="sglang",
        quantization="fp8",
        sleep_level=1,
        launch={"memory_fraction": 0.5, "tensor_parallel": 4},
    )
    (process,) = started(inference, ServedModel(Path("/m"), 64, lora_rank=8))
    words = words_of(process)
    assert "-m sglang.launch_server --model-path /m" in words
    for expected in (
        "--context-length 71",
        "--tp-size 4",
        "--mem-fraction-static 0.5",
        "--quantization fp8",
        "--enable-memory-saver",
        "--enable-lora --max-lora-rank 8",
        "--incremental-streaming-output",
    ):
        assert expected in words
    assert process.environment == {
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    read = sglang_program.parser().parse_args(process.command[3:])
    assert (read.model_path, read.tp_size, read.max_lora_rank) == (Path("/m"), 4, 8)


def test_the_stand_in_for_sglang_takes_no_word_that_it_does_not_know(tmp_path, capsys):
    words = ["--model-path", str(tmp_path), "--incremental-streaming-outputs"]
    with pytest.raises(SystemExit):
        sglang_program.parser().parse_args(words)
    assert "unrecognized arguments: --incremental-streaming-outputs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("node-7", "http://node-7:8000"),
    ],
)
def test_a_server_is_asked_where_it_listens(host, url):
    (process,) = started(settings_of(kind="vllm", launch={"host": host}), MODEL)
    assert process.url == url


def test_a_program_that_is_not_installed_is_named_with_its_extra():
    inference = settings_of(kind="sglang")
    with pytest.raises(
        ConfigError, match=r"pip install .*\[sglang\]', name the program of another environment"
    ):
        require_program(inference, inference.launch)
    inference = settings_of(kind="vllm", launch={"command": ["/nowhere/vllm"]})
    with pytest.raises(ConfigError, match=r"inference\.launch\.command: there is no program /nowhere/vllm"):
        require_program(inference, inference.launch)


def test_a_port_that_is_taken_is_named():
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        place.listen()
        port = place.getsockname()[1]
        launch = settings_of(kind="vllm", launch={"port": port}).launch
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}"):
            choose_ports(launch)


def test_a_host_of_another_machine_is_named():
    launch = settings_of(kind="vllm", launch={"host": "192.0.2.1"}).launch
    with pytest.raises(ConfigError, match=r"set inference\.launch\.host to an address of this machine"):
        choose_ports(launch)
