"""`roll-env register`, `unregister` and `probe` against a real gateway."""

import asyncio
import contextlib
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import orjson
import pytest

from rollgym.clients.cli import registering
from rollgym.clients.cli.main import main
from tests.support.client_server import ServerProcess
from tests.support.foreign_gem import Gem
from tests.support.foreign_servers import ForeignServer, plain, scripted
from tests.support.processes import ROOT, running
from tests.support.roll_env import roll_env
from tests.support.scripted_openenv import refusing, scripted_openenv

pytestmark = pytest.mark.usefixtures("forked_servers")


@pytest.fixture(scope="module")
def gateway() -> Iterator[ServerProcess]:
    with ServerProcess(("--gateway", "--allow-network", "loopback", "--log-level", "error")) as running:
        yield running


@pytest.fixture(scope="module")
def foreign() -> Iterator[ForeignServer]:
    with ForeignServer("python") as server:
        yield server


@contextlib.contextmanager
def handlers_kept() -> Iterator[None]:
    """Put back what a command of this process sets for signals."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def offered(gateway: ServerProcess, env_id: str) -> bool:
    return httpx.get(f"{gateway.url}/v1/envs/{env_id}").status_code == 200


def test_an_environment_comes_and_goes(gateway: ServerProcess, foreign: ForeignServer) -> None:
    done = roll_env("register", "Guess", foreign.url, "--protocol", "http", "--gateway", gateway.url)
    assert done.returncode == 0, done.stderr
    registration_id, told, following = done.stdout.splitlines()
    assert told == f"Guess is offered at {gateway.url} for 60 s; --keep sends heartbeats"
    assert f"{gateway.url}/console#/play/Guess" in following
    # What it says to type next is typed.
    shown, played = re.findall(r"`roll-env (.*?)`", following)
    assert played == f"play Guess --url {gateway.url}"
    done = roll_env(*shlex.split(shown))
    assert done.returncode == 0, done.stderr
    assert "Guess" in done.stdout
    assert offered(gateway, "Guess")
    done = roll_env("unregister", registration_id, "--gateway", gateway.url)
    assert done.returncode == 0, done.stderr
    assert not offered(gateway, "Guess")
    again = roll_env("unregister", registration_id, "--gateway", gateway.url)
    assert (again.returncode, "register again" in again.stderr) == (2, True)


class ForgetfulGateway:
    """A gateway whose registrations are over at once, and which may forget them, or be full."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, dict[str, str], bytes]] = []
        self.calls: list[str] = []
        self.registered = 0

    def __call__(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        self.calls.append(path)
        if path == "/v1/envs":
            self.registered += 1
            registration_id = f"r{self.registered}"
            return plain(
                {"registration_id": registration_id, "env_id": body["env_id"], "expires_at": 0.0, "ttl_s": 1},
                201,
            )
        if path.endswith("/heartbeat"):
            return self.answers.pop(0) if self.answers else plain({"expires_at": 0.0, "ttl_s": 1})
        return 204, {}, b""

    async def until(self, path: str) -> None:
        async with asyncio.timeout(60):
            while path not in self.calls:
                await asyncio.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
async def test_a_registration_is_kept_until_the_command_is_stopped(stop: signal.Signals) -> None:
    gateway = ForgetfulGateway()
    gateway.answers = [
        plain({"expires_at": 0.0, "ttl_s": 1}),
        plain({"code": "draining", "detail": "the gateway is starting"}, 503),
        plain({"code": "unknown_registration", "detail": "there is no registration: register again"}, 404),
    ]
    async with scripted(gateway) as url:
        words = ("register", "Kept", "http://127.0.0.1:9", "--protocol", "http", "--gateway", url, "--keep")
        keeping = [sys.executable, "-m", "rollgym.clients.cli.main", *words]
        # As a container starts it, or a shell in its background: SIGINT is ignored.
        process = subprocess.Popen(  # noqa: ASYNC220
            keeping,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        )
        with running(process):
            await gateway.until("/v1/registrations/r2/heartbeat")
            process.send_signal(stop)
            out, error = await asyncio.to_thread(process.communicate, timeout=60)
    assert process.returncode == 0, error
    assert gateway.calls[-1] == "/v1/registrations/r2"
    first, told, following, second, last = out.splitlines()
    assert (first, second, last) == ("r1", "r2", "Kept takes no new sessions any more")
    assert told == f"Kept is offered at {url} until this command is stopped"
    assert f"`roll-env play Kept --url {url}`" in following
    assert error.count("the gateway is starting; trying on") == 1
    assert "Traceback" not in error


Kept = Callable[[str, Callable[[str], None]], list[str]]


@pytest.fixture
def kept(gateway: ServerProcess, foreign: ForeignServer, monkeypatch: pytest.MonkeyPatch) -> Kept:
    """Keeps a registration, does something as soon as its id is said, and gives what is said behind that."""

    def keep(env_id: str, then: Callable[[str], None]) -> list[str]:
        said: list[str] = []

        def say(text: str, **_: Any) -> None:
            said.append(text)
            if len(said) == 1:
                then(text)

        monkeypatch.setattr(registering, "print", say, raising=False)
        keeping = ("register", env_id, foreign.url, "--protocol", "http", "--gateway", gateway.url, "--keep")
        with handlers_kept():
            assert main(keeping) == 0
        return said[1:]

    return keep


def test_who_stops_it_as_soon_as_it_has_said_the_id_leaves_no_registration(
    gateway: ServerProcess, kept: Kept
) -> None:
    assert kept("Brief", lambda _: signal.raise_signal(signal.SIGTERM)) == [
        "Brief takes no new sessions any more"
    ]
    assert not offered(gateway, "Brief")


def test_a_registration_that_another_has_ended_is_left_in_order(gateway: ServerProcess, kept: Kept) -> None:
    def end(registration_id: str) -> None:
        httpx.delete(f"{gateway.url}/v1/registrations/{registration_id}").raise_for_status()
        signal.raise_signal(signal.SIGTERM)

    assert kept("Ended", end) == ["Ended takes no new sessions any more"]


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
        (("register", "A", "http://127.0.0.1:1", "--gateway", "http://127.0.0.1:1"), 2, "cannot be reached"),
        (("register", "A", "http://127.0.0.1:1", "--gateway", "here"), 2, "is not the address of a server"),
        (("register", "A", "http://127.0.0.1:1"), 2, "--gateway"),
        (("register", "A", "http://127.0.0.1:1", "--protocol", "smoke"), 2, "there is no 'smoke'"),
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


def test_a_probe_calls_the_tools_of_an_environment() -> None:
    with ServerProcess(["--env", "tests.support.tool_envs:Raising", "--no-builtin"]) as server:
        done = roll_env("probe", "Raising", server.url, "--json")
    assert done.returncode == 1, done.stderr
    findings = orjson.loads(done.stdout)["findings"]
    failed = {each["detail"].partition("(")[0] for each in findings if each["status"] == "FAIL"}
    assert failed == {"query", "bare", "open", "bytes"}
