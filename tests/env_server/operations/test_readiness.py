"""`/ready`: 503 with the reasons while new sessions cannot be made, and `/health` all the while."""

import asyncio
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.metrics import scrape, value
from tests.support.wire import ENVS, INLINE, MODULE, Server


async def ask(server: Server) -> tuple[int, dict[str, Any]]:
    async with server.http() as client:
        assert (await client.get("/health")).status_code == 200
        answer = await client.get("/ready")
    return answer.status_code, answer.json()


async def reach(server: Server, *codes: str) -> dict[str, Any]:
    """Wait until a server has exactly these reasons."""
    async with asyncio.timeout(40):
        while True:
            status, body = await ask(server)
            if sorted({reason["code"] for reason in body["reasons"]}) == sorted(codes):
                assert status == (503 if codes else 200)
                return body
            await asyncio.sleep(0.1)


async def test_a_server_that_is_ready_has_no_reasons() -> None:
    with Server(*ENVS, *INLINE) as server:
        assert await ask(server) == (200, {"status": "ready", "reasons": []})
        assert value(await scrape(server.url), "rollgym_ready") == 1


async def test_it_is_not_ready_before_it_has_looked_at_its_environments(tmp_path: Path) -> None:
    """The module of an environment waits for a file, while the server listens already."""
    (tmp_path / "patient_env.py").write_text(
        "import os, time\nfrom tests.support.served_envs import Count\n\n"
        "class Patient(Count):\n    def __init__(self, **kwargs):\n        super().__init__(**kwargs)\n"
        f"        while not os.path.exists({str(tmp_path / 'go')!r}):\n            time.sleep(0.05)\n"
    )
    port = await free_port()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollgym.env_server", "--port", str(port), "--env", "patient_env:Patient"),
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{os.getcwd()}"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client, asyncio.timeout(40):
            while True:
                try:
                    answer = await client.get("/ready")
                    break
                except httpx.ConnectError:
                    await asyncio.sleep(0.05)
            assert answer.status_code == 503
            body = answer.json()
            assert (body["status"], [each["code"] for each in body["reasons"]]) == ("starting", ["starting"])
            assert (await client.get("/health")).status_code == 200
            (tmp_path / "go").touch()
            assert process.stdout is not None
            assert b"serving on" in await process.stdout.readline()
            assert (await client.get("/ready")).status_code == 200
    finally:
        process.terminate()
        assert await process.wait() == 0


async def free_port() -> int:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return port


async def test_a_drain_is_a_reason() -> None:
    with Server(*ENVS, *INLINE) as server:
        async with server.socket() as socket:
            made = await socket.make("SlowCount")
            running = await socket.send("step", session_id=made, action="sleep 2")
            await asyncio.sleep(0.2)
            server.process.terminate()
            body = await reach(server, "draining")
            assert body["status"] == "draining"
            assert value(await scrape(server.url), "rollgym_ready") == 0
            assert "ok" in await socket.answer(running)
        assert await asyncio.to_thread(server.process.wait, 20) == 0


@pytest.mark.parametrize("processes", ["1", "2"])
async def test_a_disk_that_takes_nothing_is_a_reason(tmp_path: Path, processes: str) -> None:
    arguments = ("--state-dir", str(tmp_path), "--processes", processes)
    with Server(*ENVS, *INLINE, *arguments) as server:
        await reach(server)
        own = server.process.pid
        pids = [own] if processes == "1" else io_processes(own)
        before = resource.prlimit(pids[-1], resource.RLIMIT_FSIZE)
        resource.prlimit(pids[-1], resource.RLIMIT_FSIZE, (0, before[1]))
        body = await reach(server, "state_dir")
        assert body["status"] in ("unready", "ready" if processes == "2" else "unready")
        (reason,) = body["reasons"]
        assert reason["process"] in range(int(processes))
        assert str(tmp_path) not in str(body), "anybody may ask"
        resource.prlimit(pids[-1], resource.RLIMIT_FSIZE, before)
        await reach(server)


async def test_a_journal_that_was_given_up_is_a_reason(tmp_path: Path) -> None:
    with Server(*ENVS, *INLINE, "--state-dir", str(tmp_path)) as server:
        before = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (1_100_000, before[1]))
        async with server.socket() as socket:
            made = await socket.make(kwargs={"length": 100})
            for _ in range(3):
                await socket.call("step", session_id=made, action="y" * 500_000)
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, before)
        await reach(server, "journal")


def io_processes(supervisor: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()]


async def test_workers_that_cannot_be_started_are_a_reason_until_they_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with Server(*ENVS, *INLINE, "--workers", "1") as server:
        await reach(server)
        broken = tmp_path / "sitecustomize.py"
        broken.write_text("import os\nos._exit(3)\n")
        (worker,) = io_processes(server.process.pid)
        os.kill(worker, signal.SIGKILL)
        assert (await reach(server, "workers"))["status"] == "unready"
        samples = await scrape(server.url)
        assert value(samples, "rollgym_ready") == 0
        assert value(samples, "rollgym_worker_restarts_total", {"reason": "start"}) >= 1
        broken.unlink()
        # Nobody asks for a worker meanwhile: a balancer sends no calls to a server that is not ready.
        await reach(server)


async def test_threads_that_are_all_stuck_are_a_reason() -> None:
    arguments = ("--env", f"Thread={MODULE}:Count", "--isolation", "Thread=thread", "--threads", "1")
    with Server(*arguments, "--env-step-timeout-s", "Thread=0.2") as server:
        async with server.socket() as socket:
            made = await socket.make("Thread")
            assert (await socket.ask("step", session_id=made, action="sleep 2"))["error"][
                "code"
            ] == "step_timeout"
            await reach(server, "threads")
            await reach(server)


async def test_it_is_ready_only_if_all_of_its_processes_are() -> None:
    with Server(*ENVS, *INLINE, "--processes", "2") as server:
        await reach(server)
        victim = io_processes(server.process.pid)[0]
        # Stopped, it neither serves nor ends, as one that swaps or hangs.
        os.kill(victim, signal.SIGSTOP)
        try:
            async with asyncio.timeout(40):
                while True:
                    async with httpx.AsyncClient(base_url=server.url, timeout=2) as client:
                        try:
                            body = (await client.get("/ready")).json()
                            break
                        except httpx.TimeoutException:
                            # The connection went to the one that is stopped.
                            continue
            assert [reason["code"] for reason in body["reasons"]] == ["process_away"]
        finally:
            os.kill(victim, signal.SIGCONT)
        await reach(server)


async def test_a_gateway_is_ready_before_anybody_has_registered() -> None:
    """Nodes register over the address that its readiness opens."""
    with Server("--gateway", "--allow-network", "loopback") as gateway:
        assert await ask(gateway) == (200, {"status": "ready", "reasons": []})
