"""Programs of servers choose their port where they run, and are told their own model, address and devices."""

import asyncio
import socket
import sys
from pathlib import Path

import pytest

from rollgym.trainer.cluster.server_host import InferenceProgram, JudgeProgram, ServerHost
from rollgym.trainer.config.cluster import JudgeSettings
from rollgym.trainer.config.inference import InferenceSettings, LaunchSettings
from rollgym.trainer.core.errors import RunError
from rollgym.trainer.inference.servers.dialect import ServedModel

LOGS = Path("logs")


def judge(*command, **more):
    return JudgeSettings(devices=[6, 7], model="m", command=list(command), **more)


def test_a_judge_is_told_its_model_and_where_it_listens():
    process = JudgeProgram("Rubric", judge("serve", "{model}", "--at={host}:{port}"), (6, 7)).process(
        0, "127.0.0.1", LOGS
    )
    port = process.url.rpartition(":")[2]
    assert process.command == ("serve", "m", f"--at=127.0.0.1:{port}")
    assert process.url == f"http://127.0.0.1:{port}"
    assert dict(process.environment) == {"CUDA_VISIBLE_DEVICES": "6,7"}
    assert process.log == LOGS / "judge-Rubric.log"


def test_a_server_that_samples_listens_on_its_node():
    launch = LaunchSettings(count=2, tensor_parallel=2, port=40_100)
    inference = InferenceSettings(kind="vllm", launch=launch)
    program = InferenceProgram(inference, launch, ServedModel(Path("/model"), 64))
    process = program.process(1, "127.0.0.1", LOGS)
    assert process.url == "http://127.0.0.1:40101"
    words = list(process.command)
    assert words[words.index("--tensor-parallel-size") + 1] == "2"
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert "CUDA_VISIBLE_DEVICES" not in process.environment, "its process sees its own devices already"


async def test_a_judge_that_ends_before_it_answers_is_named_with_its_last_words(tmp_path):
    program = JudgeProgram("Rubric", judge("sh", "-c", "echo out of memory; exit 3"))
    host = ServerHost(program, 0, "127.0.0.1", tmp_path)
    with pytest.raises(RunError, match=r"ended with code 3(.|\n)*out of memory"):
        await host.start()
    await host.stop()


ENDING = """
import http.server, pathlib, sys

class Once(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

started = pathlib.Path(sys.argv[2])
if not started.exists():
    started.touch()
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Once).handle_request()
sys.exit("out of memory")
"""


async def test_a_server_that_keeps_ending_is_told_of_with_its_last_words(tmp_path):
    program = JudgeProgram("Rubric", judge(sys.executable, "-c", ENDING, "{port}", str(tmp_path / "started")))
    host = ServerHost(program, 0, "127.0.0.1", tmp_path)
    async with asyncio.timeout(60):
        await host.start()
        said = await host.gone()
    assert "with code 1 once too often" in said
    assert "out of memory" in said
    await host.stop()


async def test_a_server_that_others_know_by_its_address_waits_for_it(tmp_path):
    command = [sys.executable, "-m", "tests.support.judge_program", "{host}", "{port}"]
    program = JudgeProgram("Rubric", judge(*command))
    async with asyncio.timeout(60):
        with socket.socket() as before:
            before.bind(("127.0.0.1", 0))
            before.listen()
            port = before.getsockname()[1]
            host = ServerHost(program, 0, "127.0.0.1", tmp_path, port)
            starting = asyncio.ensure_future(host.start())
            await asyncio.sleep(0.3)
            assert not starting.done()
        assert await starting == f"http://127.0.0.1:{port}"
        await host.stop()
