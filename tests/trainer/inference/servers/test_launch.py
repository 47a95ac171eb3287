"""Inference servers that a run starts: waited for, started again, and never left behind."""

import asyncio
import os
import shutil
import signal
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from rollgym.trainer.config.inference import LaunchSettings
from rollgym.trainer.inference.servers import launch
from rollgym.trainer.inference.servers.launch import (
    LaunchError,
    RestartingServers,
    ServerProcess,
    choose_ports,
    launched,
)

# A server that answers /health, and has a process of its own, as real ones do. It says where both are.
SERVER = """
import http.server, os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("processes", os.getpid(), child.pid, os.environ.get("WHO", ""), flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/die":
            os._exit(7)
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def process_of(tmp_path: Path, code: str = SERVER, name: str = "server", **environment: str) -> ServerProcess:
    (port,) = choose_ports(LaunchSettings())
    command = (sys.executable, "-c", textwrap.dedent(code), str(port))
    return ServerProcess(command, f"http://127.0.0.1:{port}", tmp_path / "logs" / f"{name}.log", environment)


def open_servers(processes, said=None, **options):
    options = {"startup_timeout_s": 30.0, "restarts": 2, "status": lambda _: None} | options
    return launched(processes, say=(said if said is not None else []).append, **options)


def processes_in(log: Path) -> list[list[int]]:
    """Process ids of each server that was started, and of its child."""
    lines = [line.split() for line in log.read_text().splitlines() if line.startswith("processes")]
    return [[int(line[1]), int(line[2])] for line in lines]


def alive(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone, perhaps while it was read
        return False


def parent_of(number: int) -> int:
    return int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1])


async def gone(numbers: list[int]) -> None:
    async with asyncio.timeout(30):
        while any(map(alive, numbers)):
            await asyncio.sleep(0.02)


async def test_servers_answer_and_end_with_the_context(tmp_path):
    said = []
    processes = [process_of(tmp_path, name=name, WHO=name) for name in ("a", "b")]
    async with open_servers(processes, said) as urls:
        assert urls == [process.url for process in processes]
        async with httpx.AsyncClient(trust_env=False) as client:
            for url in urls:
                assert (await client.get(f"{url}/health")).status_code == 200
    assert "a" in processes[0].log.read_text().split()
    for process in processes:
        await gone(processes_in(process.log)[0])
    assert any("answers after" in line for line in said)
    assert any(str(processes[1].log) in line for line in said)


async def test_a_server_that_ends_at_its_start_says_why(tmp_path):
    code = "import sys; print('before'); sys.exit('no such model: nowhere')"
    fine = process_of(tmp_path, name="fine")
    with pytest.raises(LaunchError, match=r"(?s)ended with code 1.*bad\.log:.*no such model: nowhere"):
        async with open_servers([fine, process_of(tmp_path, code, "bad")]):
            raise AssertionError("it opened")
    for numbers in processes_in(fine.log):
        await gone(numbers)


async def test_a_server_without_enough_memory_says_what_to_do(tmp_path):
    code = "import sys; sys.exit('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB')"
    with pytest.raises(LaunchError, match=r"(?s)Tried to allocate 2 GiB.*launch\.memory_fraction") as caught:
        async with open_servers([process_of(tmp_path, code)]):
            raise AssertionError("it opened")
    assert "model.max_length" in str(caught.value)
    fine = process_of(tmp_path, "import sys; sys.exit('no such model')", "other")
    with pytest.raises(LaunchError) as caught:
        async with open_servers([fine]):
            raise AssertionError("it opened")
    assert "memory_fraction" not in str(caught.value)


async def test_why_an_engine_ended_is_told_however_much_is_said_behind_it(tmp_path):
    """As vLLM does: its server tells of the engine's end by a long traceback of its own."""
    code = (
        "import sys; say = lambda *words: print(*words, file=sys.stderr); "
        "say('(EngineCore) torch.OutOfMemoryError: CUDA out of memory.'); "
        "[say('(APIServer)   File', place) for place in range(60)]; sys.exit('RuntimeError: See root cause above')"
    )
    with pytest.raises(
        LaunchError, match=r"(?s)See root cause above.*Said before: \(EngineCore\) torch"
    ) as caught:
        async with open_servers([process_of(tmp_path, code)]):
            raise AssertionError("it opened")
    assert "memory_fraction" in str(caught.value)


async def test_a_release_that_is_too_old_to_be_started_is_told_of(tmp_path):
    code = "import sys; sys.exit('vllm: error: unrecognized arguments: --enable-scale-out')"
    process = process_of(tmp_path, code)
    with pytest.raises(LaunchError, match=r"runs start vLLM 0\.31 or newer.*inference\.urls"):
        async with open_servers([replace(process, oldest="vLLM 0.31")]):
            raise AssertionError("it opened")
    # Of a program whose releases are not known, nothing is said but what it said itself.
    with pytest.raises(LaunchError) as caught:
        async with open_servers([process]):
            raise AssertionError("it opened")
    assert "or newer" not in str(caught.value)


async def test_a_server_that_never_answers_is_not_waited_for_for_ever(tmp_path):
    code = "import time; print('loading weights', flush=True); time.sleep(600)"
    shown = []
    with pytest.raises(
        LaunchError, match=r"(?s)did not answer within 1 s.*startup_timeout_s.*loading weights"
    ):
        async with open_servers([process_of(tmp_path, code)], startup_timeout_s=1.0, status=shown.append):
            raise AssertionError("it opened")
    assert any(line and line.endswith("loading weights") for line in shown)
    assert shown[-1] is None


async def test_a_program_that_is_not_there_says_so(tmp_path):
    process = ServerProcess(("/nowhere/vllm",), "http://127.0.0.1:9", tmp_path / "log")
    with pytest.raises(
        LaunchError, match=r"cannot start '/nowhere/vllm': No such file or directory"
    ) as caught:
        async with open_servers([process]):
            raise AssertionError("it opened")
    assert "Traceback" not in str(caught.value)


async def test_a_server_that_dies_is_started_again_and_leaves_nothing(tmp_path):
    said = []
    process = process_of(tmp_path)
    async with open_servers([process], said, restarts=1), httpx.AsyncClient(trust_env=False) as client:
        with pytest.raises(httpx.HTTPError):
            await client.get(f"{process.url}/die")
        async with asyncio.timeout(30):
            while len(processes_in(process.log)) < 2:
                await asyncio.sleep(0.02)
        first, second = processes_in(process.log)
        await gone(first)
        again = "ended by itself, with code 7; it is started again in 1 s (1 times more at most)"
        assert sum(again in line for line in said) == 1
        os.kill(second[0], signal.SIGKILL)
        await gone(second)
        async with asyncio.timeout(30):
            while "once too often" not in said[-1]:
                await asyncio.sleep(0.02)
    assert len(processes_in(process.log)) == 2


# Serves the first time that it is started, and ends at once each further time.
SERVES_ONCE = """
import os, pathlib, sys
once = pathlib.Path(os.environ["ONCE"])
if once.exists():
    sys.exit(3)
once.touch()
"""


async def test_a_server_that_ends_at_once_is_started_again_later_each_time(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "_FIRST_WAIT_S", 0.1)
    said, ended = [], asyncio.Event()
    process = process_of(tmp_path, SERVES_ONCE + SERVER, ONCE=str(tmp_path / "once"))
    async with open_servers([process], said, restarts=3, gone=lambda _: ended.set()):
        os.kill(processes_in(process.log)[0][0], signal.SIGKILL)
        await asyncio.wait_for(ended.wait(), 30)
    again = [line.split("; ")[1] for line in said if "it is started again" in line]
    assert again == [
        "it is started again in 0.1 s (3 times more at most)",
        "it is started again in 0.2 s (2 times more at most)",
        "it is started again in 0.4 s (1 times more at most)",
    ]


# Serves the first time that it is started and the third, and the second time it stands still.
SERVES_NOT_AGAIN = """
import os, pathlib, time
times = pathlib.Path(os.environ["TIMES"])
with times.open("a") as file:
    file.write("started ")
if len(times.read_text().split()) == 2:
    time.sleep(600)
"""


class Noted(RestartingServers):
    """Which starts began and ended, in order."""

    def __init__(self):
        super().__init__()
        self.noted = []

    def begin(self, url):
        super().begin(url)
        self.noted.append("begins")

    def end(self, url):
        super().end(url)
        self.noted.append("ends")


async def test_a_server_that_stands_still_when_it_is_started_again_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "_FIRST_WAIT_S", 0.1)
    said, starts = [], Noted()
    process = process_of(tmp_path, SERVES_NOT_AGAIN + SERVER, TIMES=str(tmp_path / "times"))
    async with open_servers([process], said, restarts=20, startup_timeout_s=5.0, starts=starts):
        os.kill(processes_in(process.log)[0][0], signal.SIGKILL)
        async with asyncio.timeout(60):
            while "ends" not in starts.noted:
                await asyncio.sleep(0.02)
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(f"{process.url}/health")).status_code == 200
    assert starts.noted == ["begins", "ends"]
    assert any("did not answer within 5 s (inference.launch.startup_timeout_s)" in line for line in said)
    assert len((tmp_path / "times").read_text().split()) >= 3


async def test_a_log_that_cannot_be_written_is_told_with_its_server(tmp_path):
    process = process_of(tmp_path)
    process.log.parent.write_text("no folder")
    with pytest.raises(LaunchError, match=f"on {process.url} could not be started: .*logs"):
        async with open_servers([process]):
            pass


async def test_a_server_that_cannot_be_started_again_is_told_of(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "_FIRST_WAIT_S", 0.1)
    said, gone_for = [], asyncio.Queue()
    process = process_of(tmp_path)
    async with open_servers([process], said, restarts=2, gone=gone_for.put_nowait):
        ((number, _),) = processes_in(process.log)
        shutil.rmtree(process.log.parent)
        process.log.parent.write_text("no folder any more")
        os.kill(number, signal.SIGKILL)
        what = await asyncio.wait_for(gone_for.get(), 30)
    assert "could not be started: " in what
    assert "once too often" in what
    assert said[-1] == what


STARTER = """
import asyncio, sys
from pathlib import Path
from rollgym.trainer.inference.servers.launch import ServerProcess, launched
async def main():
    process = ServerProcess(tuple(sys.argv[2:]), "http://127.0.0.1:" + sys.argv[-1], Path(sys.argv[1]))
    async with launched([process], startup_timeout_s=60, restarts=0, say=print, status=lambda _: None):
        print("open", flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_a_server_whose_keeper_is_killed_makes_way_for_the_next(tmp_path):
    process = process_of(tmp_path)
    async with asyncio.timeout(60), open_servers([process]):
        ((server, child),) = processes_in(process.log)
        os.kill(parent_of(server), signal.SIGKILL)
        await gone([server])
        os.kill(child, signal.SIGKILL)
        while len(processes_in(process.log)) < 2:
            await asyncio.sleep(0.05)
        async with httpx.AsyncClient(trust_env=False) as client:
            while True:
                try:
                    assert (await client.get(f"{process.url}/health")).status_code == 200
                    break
                except httpx.ConnectError:
                    await asyncio.sleep(0.05)
    await gone(processes_in(process.log)[1])


async def test_a_trainer_that_is_killed_leaves_no_server_behind(tmp_path):
    process = process_of(tmp_path)
    command = [sys.executable, "-c", STARTER, str(process.log), *process.command]
    starter = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert starter.stdout is not None
    async with asyncio.timeout(60):
        while (await starter.stdout.readline()).strip() != b"open":
            assert starter.returncode is None
    (numbers,) = processes_in(process.log)
    assert all(map(alive, numbers))
    starter.kill()
    await starter.wait()
    await gone(numbers)
