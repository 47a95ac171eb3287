"""`roll-env register`, `unregister` and `probe` against a real gateway."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator

import httpx
import orjson
import pytest

from tests.support.client_server import ROOT, ServerProcess
from tests.support.foreign_gem import Gem
from tests.support.foreign_servers import ForeignServer, scripted
from tests.support.processes import running
from tests.support.scripted_openenv import refusing, scripted_openenv


@pytest.fixture(scope="module")
def gateway() -> Iterator[ServerProcess]:
    with ServerProcess(("--gateway", "--allow-network", "loopback", "--log-level", "error")) as running:
        yield running


@pytest.fixture(scope="module")
def foreign() -> Iterator[ForeignServer]:
    with ForeignServer("python") as server:
        yield server


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "clients.commands.main", *arguments]


def roll_env(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def offered(gateway: ServerProcess, env_id: str) -> bool:
    return httpx.get(f"{gateway.url}/v1/envs/{env_id}").status_code == 200


def test_an_environment_comes_and_goes(gateway: ServerProcess, foreign: ForeignServer) -> None:
    done = roll_env("register", "Guess", foreign.url, "--protocol", "http", "--gateway", gateway.url)
    assert done.returncode == 0, done.stderr
    registration_id, told = done.stdout.splitlines()
    assert "Guess is offered" in told
    assert offered(gateway, "Guess")
    done = roll_env("unregister", registration_id, "--gateway", gateway.url)
    assert done.returncode == 0, done.stderr
    assert not offered(gateway, "Guess")
    again = roll_env("unregister", registration_id, "--gateway", gateway.url)
    assert (again.returncode, "register again" in again.stderr) == (1, True)


def test_a_registration_that_is_kept_outlives_its_time(
    gateway: ServerProcess, foreign: ForeignServer
) -> None:
    arguments = (
        "Kept",
        foreign.url,
        "--protocol",
        "http",
        "--gateway",
        gateway.url,
        "--ttl-s",
        "3",
        "--keep",
    )
    keeping = command("register", *arguments)
    with running(subprocess.Popen(keeping, cwd=ROOT, stdout=subprocess.PIPE, text=True)) as keeper:
        assert keeper.stdout is not None
        registration_id = keeper.stdout.readline().strip()
        path = f"{gateway.url}/v1/registrations/{registration_id}/heartbeat"
        first = httpx.post(path, json={}).json()["expires_at"]
        with pytest.raises(subprocess.TimeoutExpired):
            keeper.wait(5)
        assert offered(gateway, "Kept")
        assert httpx.post(path, json={}).json()["expires_at"] > first
        keeper.send_signal(signal.SIGINT)
        assert keeper.wait(20) == 0
    assert not offered(gateway, "Kept")


def test_a_probe_needs_no_gateway(foreign: ForeignServer) -> None:
    done = roll_env("probe", "Guess", foreign.url, "--protocol", "http", "--json")
    assert done.returncode == 0, done.stderr
    report = orjson.loads(done.stdout)
    assert report["ok"]
    assert {"spec", "reset", "step", "close"} <= {finding["check"] for finding in report["findings"]}
    lost = roll_env("probe", "Guess", "http://127.0.0.1:1", "--protocol", "http")
    assert lost.returncode == 1
    assert "cannot be reached" in lost.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("register", "A", "http://127.0.0.1:1", "--gateway", "http://127.0.0.1:1"), 1, "cannot be reached"),
        (("register", "A", "http://127.0.0.1:1", "--gateway", "here"), 1, "cannot be reached"),
        (("register", "A", "http://127.0.0.1:1"), 2, "--gateway"),
        (("register", "A", "http://127.0.0.1:1", "--protocol", "smoke"), 2, "invalid choice"),
    ],
)
def test_mistakes_are_told(arguments: tuple[str, ...], code: int, message: str) -> None:
    done = roll_env(*arguments)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr


async def test_a_probe_of_an_openenv_server() -> None:
    async with scripted_openenv() as server:
        probe = ("probe", "Scripted", server.url, "--protocol", "openenv")
        done = await asyncio.to_thread(roll_env, *probe, "--action-field", "move", "--json")
        assert done.returncode == 0, done.stderr
        assert orjson.loads(done.stdout)["findings"][-1]["check"] == "two resets with one seed agree"
        server.scripts["reset"] = refusing("EXECUTION_ERROR", "out of levels")
        done = await asyncio.to_thread(roll_env, *probe)
        assert (done.returncode, "out of levels" in done.stdout) == (1, True)


async def test_a_gem_server_is_registered(gateway: ServerProcess) -> None:
    answer = Gem()
    async with scripted(answer) as url:
        arguments = ("--protocol", "gem", "--upstream-env-id", "game:Box-v0", "--gateway", gateway.url)
        done = await asyncio.to_thread(roll_env, "register", "Box", url, *arguments)
        assert done.returncode == 0, done.stderr
        assert answer.named("make")[0] == {"env_id": "game:Box-v0"}
        assert offered(gateway, "Box")
        registration_id = done.stdout.splitlines()[0]
        await asyncio.to_thread(roll_env, "unregister", registration_id, "--gateway", gateway.url)
