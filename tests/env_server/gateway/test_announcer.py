"""Nodes tell gateways in one call what they have; what one environment fails is its own."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollgym.clients.client.client import EnvClient
from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.common.settings import ServerSettings
from rollgym.env_server.gateway.announcer import Announcer, CallRefused, Patience, pause_s
from tests.support.client_server import ServerProcess
from tests.support.clock import clock, on_a_clock
from tests.support.foreign_servers import plain, scripted

QUIET = ("--log-level", "error")
# The one that fails is the first of its node, and takes its worker with it.
NODE = (
    *("--no-builtin", "--workers", "1"),
    *("--env", "Dies=tests.support.client_envs:Dies", "--env", "Raises=tests.support.client_envs:Raises"),
    *("--env", "Walk-v0=tests.support.client_envs:Walk", "--isolation", "Walk-v0=inline"),
    *("--env", "Slow-v0=tests.support.client_envs:Slow"),
)


class Gateway:
    """A gateway that answers announcements as a test says, and notes what it was told."""

    def __init__(self) -> None:
        self.refused: set[str] = set()
        self.report: list[Any] = [{"check": each, "ok": each == "spec"} for each in ("spec", "make")]
        self.pending: set[str] = set()
        self.down = False
        self.told: list[dict[str, bool]] = []
        self.left: list[str] = []

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        if self.down:
            return plain({"code": "unauthorized", "detail": "this token is not known"}, 401)
        if path != "/v1/registrations":
            self.left.append(path.rpartition("/")[2])
            return 204, {}, b""
        self.told.append({each["env_id"]: each["probed"] for each in body["envs"]})
        return plain({"registrations": [self._answer(each["env_id"]) for each in body["envs"]]})

    def _answer(self, env_id: str) -> dict[str, Any]:
        if env_id in self.refused:
            return {
                "env_id": env_id,
                "error": {
                    "code": "probe_failed",
                    "detail": f"{env_id}: reset: it broke",
                    "report": self.report,
                },
            }
        if env_id in self.pending:
            return {"env_id": env_id, "pending": True}
        return {"env_id": env_id, "registration_id": f"r-{env_id}", "expires_at": 0.0}

    async def until(self, calls: int) -> None:
        """Let time pass, a second at a time, until it was called so often."""
        for _ in range(20_000):
            if len(self.told) >= calls:
                return
            await clock().forward(1.0)
            await asyncio.sleep(0.001)
        raise AssertionError(f"{len(self.told)} calls, not {calls}")


async def announcing(gateway: Gateway, url: str) -> Announcer:
    announcer = Announcer(
        ServerSettings(register_with=(url,)), "http://127.0.0.1:1", ["Good", "Bad", "Late"], lambda: 0.25
    )
    announcer.start()
    await gateway.until(1)
    return announcer


def test_what_is_refused_is_offered_ever_more_seldom_and_keeps_nobody_back() -> None:
    async def announce() -> None:
        gateway = Gateway()
        gateway.refused = {"Bad"}
        gateway.pending = {"Late"}
        async with scripted(gateway.answer) as url:
            announcer = await announcing(gateway, url)
            await gateway.until(2)
            assert gateway.told[:2] == [
                {"Good": False, "Bad": False, "Late": False},
                {"Good": True, "Late": False},
            ]
            gateway.pending.clear()
            await gateway.until(50)
            assert all(each["Good"] for each in gateway.told[1:])
            offers = sum("Bad" in each for each in gateway.told)
            assert offers < 14, "after 2 s, 4 s, 8 s, ... and five minutes at most"
            gateway.refused.clear()
            while not gateway.told[-1].get("Bad"):
                await gateway.until(len(gateway.told) + 1)
            await announcer.leave()
            assert sorted(gateway.left) == ["r-Bad", "r-Good", "r-Late"]

    on_a_clock(announce())


def test_a_gateway_that_says_no_is_asked_again() -> None:
    async def announce() -> None:
        gateway = Gateway()
        gateway.down = True
        async with scripted(gateway.answer) as url:
            announcer = Announcer(
                ServerSettings(register_with=(url,)), "http://127.0.0.1:1", ["Good"], lambda: 0.0
            )
            announcer.start()
            await asyncio.sleep(0.1)
            gateway.down = False
            # With the second call, the answer to the first one has come.
            await gateway.until(2)
            await announcer.leave()
            assert gateway.left == ["r-Good"]

    on_a_clock(announce())


def test_what_a_gateway_could_not_look_at_is_offered_again_soon() -> None:
    """That it was too busy to reach this server says nothing of the environment, and costs no worker."""

    async def announce() -> None:
        gateway = Gateway()
        gateway.refused = {"Bad"}
        gateway.report = [{"check": "spec", "ok": False, "detail": "no server answers"}]
        async with scripted(gateway.answer) as url:
            announcer = await announcing(gateway, url)
            await gateway.until(40)
            assert sum("Bad" in each for each in gateway.told) >= 30, "at most a quarter of a minute apart"
            await announcer.leave()

    on_a_clock(announce())


def test_nothing_that_goes_wrong_once_is_the_last_that_a_gateway_hears_of_a_node() -> None:
    async def announce() -> None:
        gateway = Gateway()
        failures = iter([AttributeError("no socket"), RuntimeError("closed"), ZeroDivisionError()])

        def load() -> float:
            for error in failures:
                raise error
            return 0.5

        async with scripted(gateway.answer) as url:
            announcer = Announcer(ServerSettings(register_with=(url,)), "http://127.0.0.1:1", ["Good"], load)
            announcer.start()
            # With the second call, the answer to the first one has come.
            await gateway.until(2)
            await announcer.leave()
            assert gateway.left == ["r-Good"]

    on_a_clock(announce())


AWAY = httpx.ConnectError("All connection attempts failed")
STARTING = CallRefused("the server is starting", {"code": "draining", "retry_after": 1})
UNKNOWN = CallRefused("this token is not known", {"code": "unauthorized"})


def test_a_gateway_that_is_started_again_is_asked_at_once() -> None:
    """However long it was away: neither that nor that it is starting is a no."""
    patience = Patience()
    away = [pause_s(patience, AWAY) for _ in range(20)]
    assert away[0] <= 0.1
    assert max(away) <= 1.0
    assert [pause_s(patience, STARTING) for _ in range(20)] == [1.0] * 20
    no = [pause_s(patience, UNKNOWN) for _ in range(20)]
    assert (no[0], no[-1]) == (1.0, 15.0)
    assert pause_s(patience, STARTING) <= 1.0
    assert pause_s(patience, AWAY) <= 1.0


@pytest.mark.parametrize("says_later", [float("nan"), float("inf"), -1, "soon", True, 10**400, [1], None])
def test_what_a_gateway_says_of_later_is_bounded(says_later: Any) -> None:
    problem = {"code": "rate_limited", "retry_after": says_later}
    assert 1.0 <= pause_s(Patience(), CallRefused("not so often", problem)) <= 15.0


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def gateway(state: Path) -> Iterator[ServerProcess]:
    arguments = ("--gateway", "--allow-network", "loopback", "--state-dir", str(state), *QUIET)
    with ServerProcess(arguments) as running:
        yield running


@pytest.fixture(scope="module")
def node(gateway: ServerProcess) -> Iterator[ServerProcess]:
    with ServerProcess((*NODE, "--register", gateway.url, *QUIET)) as running:
        yield running


@pytest.fixture
async def http(gateway: ServerProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
        yield client


async def offered(http: httpx.AsyncClient, *env_ids: str) -> None:
    """Wait until a gateway offers exactly these."""
    async with asyncio.timeout(60):
        while sorted(env["env_id"] for env in (await http.get("/v1/envs")).json()["envs"]) != sorted(env_ids):
            await asyncio.sleep(0.05)


async def written(state: Path, *env_ids: str) -> None:
    """Wait until a gateway has written down that these are registered, which it does a moment later."""
    path = state / "registrations.json"
    async with asyncio.timeout(60):
        while not path.exists() or not set(env_ids) <= {
            each["env_id"] for each in json.loads(path.read_text())
        }:
            await asyncio.sleep(0.05)


async def test_an_environment_that_fails_its_probe_keeps_no_other_out(
    gateway: ServerProcess, node: ServerProcess, http: httpx.AsyncClient
) -> None:
    await offered(http, "Walk-v0", "Slow-v0")
    async with EnvClient(gateway.url) as client:
        for env_id in ("Walk-v0", "Slow-v0"):
            session = await client.make(env_id)
            await session.reset(seed=1)
            await session.close()
    await offered(http, "Walk-v0", "Slow-v0")


async def test_one_call_says_what_became_of_each(node: ServerProcess, http: httpx.AsyncClient) -> None:
    await offered(http, "Walk-v0", "Slow-v0")
    envs = [{"env_id": env_id} for env_id in ("Raises", "Nothing", "Slow-v0")]
    envs.append({"env_id": "Stroll", "upstream_env_id": "Walk-v0"})
    answer = await http.post("/v1/registrations", json={"url": node.url, "envs": envs})
    assert answer.status_code == 200
    raises, nothing, slow, stroll = answer.json()["registrations"]
    assert [each["error"]["code"] for each in (raises, nothing)] == ["probe_failed"] * 2
    assert raises["error"]["report"][-1]["ok"] is False
    known = [{"env_id": "Stroll", "upstream_env_id": "Walk-v0", "probed": True}]
    again = await http.post("/v1/registrations", json={"url": node.url, "envs": known, "load": 0.5})
    [renewed] = again.json()["registrations"]
    assert renewed["registration_id"] == stroll["registration_id"]
    assert renewed["expires_at"] >= stroll["expires_at"]
    assert slow["registration_id"]
    assert (await http.delete(f"/v1/registrations/{stroll['registration_id']}")).status_code == 204


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"envs": []}, "invalid_request"),
        ({"envs": [{"env_id": "A"}, {"env_id": "A"}]}, "invalid_request"),
        ({"envs": [{"env_id": "A", "probed": 1}]}, "invalid_request"),
        ({"envs": [{"env_id": "/"}]}, "invalid_request"),
        ({"url": "http://10.0.0.1"}, "forbidden"),
        ({"ttl_s": 3601}, "invalid_request"),
        ({"ttl_s": "NaN"}, "invalid_request"),
        ({"colour": 1}, "invalid_request"),
    ],
)
async def test_announcements_that_are_refused(
    http: httpx.AsyncClient, change: dict[str, Any], code: str
) -> None:
    body = {"url": "http://127.0.0.1:1", "envs": [{"env_id": "A"}], **change}
    assert (await http.post("/v1/registrations", json=body)).json()["code"] == code


async def test_a_gateway_that_was_started_anew_waits_for_what_it_had(
    gateway: ServerProcess, node: ServerProcess, http: httpx.AsyncClient, state: Path
) -> None:
    """Its nodes are stopped, so that they come back when the test says so."""
    await offered(http, "Walk-v0", "Slow-v0")
    await written(state, "Walk-v0", "Slow-v0")
    async with EnvClient(gateway.url) as client:
        session = await client.make("Walk-v0")
        await session.reset(seed=3)
        gateway.kill()
        node.pause()
        try:
            gateway.start()
            ready = await http.get("/ready")
            assert (ready.status_code, ready.json()["status"]) == (503, "unready")
            assert [reason["code"] for reason in ready.json()["reasons"]] == ["registrations"]
            for answer in (
                await http.post("/v1/sessions", json={"env_id": "Walk-v0"}),
                await http.get("/v1/envs/Slow-v0"),
                await http.post("/v1/verify/Walk-v0", json={"items": []}),
            ):
                assert (answer.status_code, answer.json()["code"]) == (503, "draining")
                assert int(answer.headers["Retry-After"]) >= 1
            never = await http.post("/v1/sessions", json={"env_id": "Never"})
            assert (never.status_code, never.json()["code"]) == (404, "unknown_env")
            making = asyncio.create_task(client.make("Walk-v0"))
            await asyncio.sleep(0)
        finally:
            node.resume()
        assert (await (await making).reset(seed=3)).info is not None
        assert (await session.step("a")).observation is not None
    await offered(http, "Walk-v0", "Slow-v0")
    assert (await http.get("/ready")).status_code == 200


@pytest.mark.slow
async def test_make_while_all_replicas_restart_says_when_to_ask_again(
    gateway: ServerProcess, node: ServerProcess, http: httpx.AsyncClient
) -> None:
    await offered(http, "Walk-v0", "Slow-v0")
    async with EnvClient(gateway.url, timeout_s=60) as client:
        node.stop()
        await offered(http)
        answer = await http.post("/v1/sessions", json={"env_id": "Walk-v0"})
        assert (answer.status_code, answer.json()["code"]) == (503, "draining")
        assert int(answer.headers["Retry-After"]) >= 1
        making = asyncio.create_task(client.make("Walk-v0"))
        await asyncio.to_thread(node.start)
        await (await making).reset(seed=1)
    await offered(http, "Walk-v0", "Slow-v0")


async def test_registrations_are_written_down_without_tokens(tmp_path: Path, node: ServerProcess) -> None:
    arguments = ("--gateway", "--allow-network", "loopback", "--state-dir", str(tmp_path), *QUIET)
    with ServerProcess(arguments) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
            body = {"url": node.url, "token": "secret", "envs": [{"env_id": "Walk-v0"}]}
            assert (await http.post("/v1/registrations", json=body)).status_code == 200
    path = tmp_path / "registrations.json"
    assert [each["env_id"] for each in json.loads(path.read_text())] == ["Walk-v0"]
    assert "secret" not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0


async def test_a_client_that_gives_up_is_told_why(http: httpx.AsyncClient, gateway: ServerProcess) -> None:
    async with EnvClient(gateway.url, timeout_s=1) as client:
        with pytest.raises(ProblemError, match="unknown_env"):
            await client.make("Never")
