"""Environments of third parties behind three HTTP calls: registered, played, lost and found again."""

import asyncio
import contextlib
import itertools
import json
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollgym.clients.client.client import EnvClient
from rollgym.clients.protocol.errors import ProblemError
from tests.support.client_server import ServerProcess
from tests.support.foreign_servers import COMMANDS, Answer, ForeignServer, Said, plain, scripted

ARGUMENTS = (
    *("--gateway", "--allow-network", "loopback", "--log-level", "error", "--step-timeout-s", "2"),
    *(
        "--env",
        "FrozenLake-v0=rollgym.envs.games.frozen_lake:FrozenLakeEnv",
        "--isolation",
        "FrozenLake-v0=inline",
    ),
)


@pytest.fixture(scope="module")
def gateway() -> Iterator[ServerProcess]:
    with ServerProcess(ARGUMENTS) as running:
        yield running


@pytest.fixture
async def http(gateway: ServerProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
        yield client


async def register(http: httpx.AsyncClient, env_id: str, url: str, **fields: Any) -> dict[str, Any]:
    body = {"env_id": env_id, "url": url, "protocol": "http", **fields}
    reply: dict[str, Any] = (await http.post("/v1/envs", json=body)).json()
    return reply


async def unregister(http: httpx.AsyncClient, *registrations: dict[str, Any]) -> None:
    for registration in registrations:
        answer = await http.delete(f"/v1/registrations/{registration['registration_id']}")
        assert answer.status_code == 204


async def solve(client: EnvClient, env_id: str, seed: int) -> list[Any]:
    session = await client.make(env_id)
    seen: list[Any] = [await session.reset(seed=seed)]
    for guess in range(10):
        seen.append(await session.step(str(guess)))
        if seen[-1].terminated:
            break
    await session.close()
    return seen


@pytest.mark.parametrize("language", COMMANDS)
async def test_a_third_partys_environment_is_played_like_ours(
    gateway: ServerProcess, http: httpx.AsyncClient, language: str
) -> None:
    with ForeignServer(language) as server:
        registered = await register(http, f"Guess-{language}", server.url)
        assert registered["env_id"] == f"Guess-{language}"
        info = (await http.get(f"/v1/envs/Guess-{language}")).json()
        assert (info["origin"], info["kind"], info["replicas"]) == ("registered", "episodic", 1)
        assert (info["deterministic"], info["description"]) == (True, "Guess a number.")
        listed = (await http.get("/v1/envs?origin=registered")).json()["envs"]
        assert [env["env_id"] for env in listed] == [f"Guess-{language}"]
        async with EnvClient(gateway.url) as client:
            seen = await solve(client, f"Guess-{language}", seed=3)
            assert seen[0].info["instruction"] == "Answer with one number."
            assert seen[-1].terminated
            assert (seen[-1].reward, seen[-1].info["success"]) == (1.0, True)
            assert await solve(client, f"Guess-{language}", seed=3) == seen
        await unregister(http, registered)
        assert (await http.get(f"/v1/envs/Guess-{language}")).json()["code"] == "unknown_env"


async def test_replicas_share_sessions_and_carry_on_for_each_other(
    gateway: ServerProcess, http: httpx.AsyncClient
) -> None:
    with ForeignServer("python") as one, ForeignServer("python") as other:
        registrations = [await register(http, "Pair", server.url) for server in (one, other)]
        assert (await http.get("/v1/envs/Pair")).json()["replicas"] == 2
        async with EnvClient(gateway.url) as client:
            undisturbed = [await solve(client, "Pair", seed) for seed in range(6)]
            sessions = [await client.make("Pair") for _ in range(6)]
            seen = [[await session.reset(seed=seed)] for seed, session in enumerate(sessions)]
            for guess in range(10):
                if guess == 1:
                    one.kill()
                playing = [
                    number for number, steps in enumerate(seen) if not getattr(steps[-1], "terminated", False)
                ]
                steps = await asyncio.gather(*(sessions[number].step(str(guess)) for number in playing))
                for number, step in zip(playing, steps, strict=True):
                    seen[number].append(step)
            assert seen == undisturbed
        await unregister(http, *registrations)


async def test_the_same_server_registered_again_keeps_its_id(http: httpx.AsyncClient) -> None:
    with ForeignServer("python") as server:
        first = await register(http, "Again", server.url)
        again = await register(http, "Again", server.url, weight=2)
        assert again["registration_id"] == first["registration_id"]
        assert (await http.get("/v1/envs/Again")).json()["replicas"] == 1
        await unregister(http, again)
        beat = await http.post(f"/v1/registrations/{first['registration_id']}/heartbeat", json={})
        assert (beat.status_code, beat.json()["code"]) == (404, "unknown_registration")


async def test_a_heartbeat_puts_the_end_of_a_registration_off(http: httpx.AsyncClient) -> None:
    with ForeignServer("python") as server:
        kept = await register(http, "Kept", server.url, ttl_s=600.0)
        beat = await http.post(f"/v1/registrations/{kept['registration_id']}/heartbeat", json={"load": 0.5})
        assert beat.json()["expires_at"] > kept["expires_at"]
        assert kept["ttl_s"] == beat.json()["ttl_s"] == 600.0
        await register(http, "Brief", server.url, ttl_s=0.2)
        async with asyncio.timeout(60):
            while (answer := await http.get("/v1/envs/Brief")).status_code == 200:
                await asyncio.sleep(0.05)
        assert answer.json()["code"] == "unknown_env"
        assert f"registration of Brief at {server.url} has expired" in answer.json()["detail"]
        await unregister(http, kept)


async def test_sessions_go_on_while_their_registration_drains(
    gateway: ServerProcess, http: httpx.AsyncClient
) -> None:
    with ForeignServer("python") as server:
        registered = await register(http, "Leaving", server.url)
        async with EnvClient(gateway.url) as client:
            session = await client.make("Leaving")
            await session.reset(seed=1)
            await unregister(http, registered)
            assert (await session.step("x")).observation == "No, not x."
            with pytest.raises(ProblemError, match="unknown_env"):
                await client.make("Leaving")


async def test_registrations_that_are_refused(http: httpx.AsyncClient) -> None:
    with ForeignServer("python") as server:
        for change, code in (
            ({"env_id": "FrozenLake-v0"}, "env_exists"),
            ({"url": "http://127.0.0.1:1"}, "probe_failed"),
            ({"url": "http://169.254.169.254"}, "forbidden"),
            ({"url": "http://10.0.0.1"}, "forbidden"),
            ({"url": "ftp://127.0.0.1"}, "invalid_request"),
            ({"protocol": "smoke"}, "invalid_request"),
            ({"ttl_s": 0}, "invalid_request"),
            ({"colour": 1}, "invalid_request"),
        ):
            answer = await register(http, **{"env_id": "Refused", "url": server.url, **change})
            assert answer["code"] == code, (change, answer)
        assert (await http.get("/v1/envs/Refused")).status_code == 404


async def test_replicas_are_alike(http: httpx.AsyncClient) -> None:
    def saying(**fields: Any) -> Answer:
        return server_with(spec={**SPEC, **fields})

    async with scripted(saying()) as one:
        first = await register(http, "Alike", one)
        for fields in (
            {"version": "2"},
            {"deterministic": False},
            {"max_episode_steps": 5},
            {"kwargs_schema": {"type": "object"}},
            {"kwargs_schema": KWARGS | {"properties": {"size": {"type": "integer", "default": 5}}}},
        ):
            async with scripted(saying(**fields)) as other:
                answer = await register(http, "Alike", other)
                assert (answer["code"], answer["fields"]) == ("spec_mismatch", list(fields))
        assert (await http.get("/v1/envs/Alike")).json()["replicas"] == 1
        described = {"size": {"type": "integer", "default": 4, "description": "How large it is."}}
        async with scripted(saying(kwargs_schema=KWARGS | {"properties": described})) as other:
            second = await register(http, "Alike", other)
            assert (await http.get("/v1/envs/Alike")).json()["replicas"] == 2
            await unregister(http, second)
        await unregister(http, first)


KWARGS = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"size": {"type": "integer", "default": 4}},
}
SPEC = {"version": "1", "deterministic": True, "kwargs_schema": KWARGS}
STEP = {"observation": "on", "reward": 0, "terminated": False, "truncated": False, "info": {}}


def server_with(**paths: Any) -> Answer:
    """Answers well, but for some paths."""
    good = {"spec": SPEC, "reset": {"observation": "begin", "info": {}}, "step": STEP, "close": {}}

    def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        reply = {**good, **paths}[path.strip("/")]
        return reply if isinstance(reply, tuple) else plain(reply)

    return answer


@pytest.mark.parametrize(
    ("paths", "check", "detail"),
    [
        ({"spec": plain(b"<html>")}, "spec", "not JSON"),
        ({"spec": plain([])}, "spec", "not with an object"),
        ({"spec": plain({}, 500)}, "spec", "answered 500"),
        ({"spec": plain({}, 302, Location="http://169.254.169.254/")}, "spec", "redirects"),
        ({"spec": plain(b"x" * 9_000_000)}, "spec", "larger than"),
        ({"spec": plain(b"", Content_Encoding="gzip")}, "spec", "compressed"),
        ({"spec": {"action_space": {"type": "Nothing"}}}, "spec", "unknown space"),
        ({"spec": {"kwargs_schema": {"type": 3}}}, "spec", "JSON Schema"),
        ({"spec": {"max_episode_steps": 0}}, "spec", "max_episode_steps"),
        ({"reset": {"info": {}}}, "reset", "no observation"),
        ({"reset": {"observation": 3, "info": {}}}, "reset", "does not fit its space"),
        ({"reset": {"observation": "", "info": []}}, "reset", "info is not an object"),
        ({"reset": plain({"detail": "out of levels"}, 503)}, "reset", "503: out of levels"),
        ({"step": {**STEP, "reward": "much"}}, "step", "not a finite number"),
        ({"step": plain(b'{"reward": 1e999}')}, "step", "JSON"),
        ({"step": {**STEP, "terminated": 1}}, "step", "booleans"),
        ({"close": plain({}, 500)}, "close", "answered 500"),
    ],
)  # fmt: skip
async def test_the_probe_says_what_is_wrong(
    http: httpx.AsyncClient, paths: dict[str, Any], check: str, detail: str
) -> None:
    async with scripted(server_with(**paths)) as url:
        answer = await register(http, "Faulty", url)
    assert answer["code"] == "probe_failed", answer
    failed = [each for each in answer["report"] if not each["ok"]]
    assert [each["check"] for each in failed] == [check]
    assert detail in failed[0]["detail"]
    assert all(each["ok"] for each in answer["report"][: answer["report"].index(failed[0])])


async def test_one_server_is_probed_for_several_environments_at_a_time(http: httpx.AsyncClient) -> None:
    begun: list[str] = []

    def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        if path == "/reset":
            begun.append(body["session_id"])
        return server_with()(path, body)

    async with scripted(answer) as url:
        registered = await asyncio.gather(*(register(http, f"Several-{number}", url) for number in range(3)))
    assert [reply.get("detail") for reply in registered] == [None] * 3
    assert len(begun) == len(set(begun)) == 6, "a probe plays in the session of another"
    await unregister(http, *registered)


async def test_resets_with_one_seed_must_agree(http: httpx.AsyncClient) -> None:
    count = iter(range(100))

    def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        if path == "/reset":
            return plain({"observation": str(next(count)), "info": {}})
        return server_with()(path, body)

    async with scripted(answer) as url:
        refused = await register(http, "Moody", url)
    assert refused["code"] == "probe_failed"
    assert "two resets with one seed agree" in refused["detail"]


async def test_a_server_that_fails_in_mid_episode(http: httpx.AsyncClient, gateway: ServerProcess) -> None:
    """Its answers go bad after the probe; another session and the gateway are untouched."""
    broken: dict[str, Any] = {}

    def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        return server_with(**broken)(path, body)

    async with scripted(answer) as url:
        registered = await register(http, "Fickle", url)
        async with EnvClient(gateway.url, timeout_s=40) as client:
            witness = await client.make("FrozenLake-v0")
            await witness.reset(seed=1)
            session = await client.make("Fickle")
            await session.reset(seed=1)
            assert (await session.step("a")).observation == "on"
            broken["step"] = {"no": "step"}
            with pytest.raises(ProblemError) as caught:
                await session.step("b")
            assert caught.value.code == "upstream_error"
            broken["step"] = plain(
                {"code": "env_error", "error_class": "ValueError", "detail": "bad move"}, 500
            )
            await session.reset(seed=1)
            with pytest.raises(ProblemError, match="ValueError: bad move"):
                await session.step("c")
            broken.clear()
            await session.reset(seed=1)
            assert (await session.step("d")).observation == "on"
            assert (await witness.step("Right")).info["action_is_valid"]
        await unregister(http, registered)


class Flaky:
    """An environment of a third party that counts its steps, and answers badly as often as a test says."""

    def __init__(self, *, deterministic: bool) -> None:
        self.deterministic = deterministic
        self.places: dict[str, int] = {}
        self.bad: list[tuple[str, Any]] = []
        self.calls: list[str] = []

    def __call__(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        self.calls.append(path)
        if self.bad and self.bad[0][0] == path:
            answer = self.bad.pop(0)[1]
            return answer if isinstance(answer, tuple) else plain(answer)
        if path == "/spec":
            return plain({"deterministic": self.deterministic})
        key = body["session_id"]
        if path == "/reset":
            self.places[key] = 0
            return plain({"observation": "0", "info": {}})
        if path == "/step":
            if key not in self.places:
                return plain({"detail": "no such session"}, 404)
            self.places[key] += 1
            return plain({**STEP, "observation": str(self.places[key])})
        self.places.pop(key, None)
        return plain({})


BAD = [
    plain(b"<html>"),
    plain({}, 500),
    plain({"observation": "1"}),
    plain({**STEP, "reward": float("nan")}),
    plain({**STEP, "reward": True}),
    plain({**STEP, "observation": 3}),
    plain(b"[" * 100_000),
    plain(b"x" * 9_000_000),
    plain(b"", Content_Encoding="gzip"),
]


@pytest.fixture(params=[True, False], ids=["deterministic", "other"])
async def flaky(request: pytest.FixtureRequest, http: httpx.AsyncClient) -> AsyncIterator[Flaky]:
    answer = Flaky(deterministic=request.param)
    async with scripted(answer) as url:
        registered = await register(http, "Flaky", url)
        assert "registration_id" in registered, registered
        answer.calls.clear()
        yield answer
        await unregister(http, registered)


@pytest.mark.parametrize("answer", BAD)
async def test_one_bad_answer_to_a_step_costs_no_session(
    gateway: ServerProcess, flaky: Flaky, answer: Any
) -> None:
    async with EnvClient(gateway.url, timeout_s=40) as client:
        session = await client.make("Flaky")
        await session.reset(seed=1)
        session_id = session.session_id
        assert (await session.step("a")).observation == "1"
        flaky.bad = [("/step", answer)]
        if flaky.deterministic:
            assert (await session.step("b")).observation == "2", "it was rebuilt, and the step taken again"
        else:
            with pytest.raises(ProblemError) as caught:
                await session.step("b")
            assert caught.value.code == "upstream_error"
            assert "may have been taken" in caught.value.detail
            assert (await session.step("b")).observation == "2"
        assert (await session.step("c")).observation == "3"
        assert session.session_id == session_id
        await session.close()


async def test_a_bad_answer_to_a_reset_is_asked_for_again(gateway: ServerProcess, flaky: Flaky) -> None:
    async with EnvClient(gateway.url, timeout_s=40) as client:
        session = await client.make("Flaky")
        flaky.bad = [("/reset", plain(b"<html>"))]
        assert (await session.reset(seed=1)).observation == "0"
        flaky.bad = [("/reset", {"no": "observation"})] * 2 * 2
        with pytest.raises(ProblemError, match="upstream_error"):
            await session.reset(seed=1)
        flaky.bad = []
        assert (await session.reset(seed=1)).observation == "0"
        assert (await session.step("a")).observation == "1"
        await session.close()


async def test_a_make_whose_reset_is_answered_badly_makes_nothing(
    http: httpx.AsyncClient, flaky: Flaky
) -> None:
    flaky.bad = [("/reset", {"no": "observation"})] * 2 * 2
    answer = await http.post("/v1/sessions", json={"env_id": "Flaky", "reset": {"seed": 1}})
    assert (answer.status_code, answer.json()["code"]) == (502, "upstream_error"), answer.text
    assert (await http.get("/v1/sessions?env_id=Flaky")).json()["sessions"] == []
    async with asyncio.timeout(20):
        while flaky.calls[-1] != "/close":
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("status", [429, 503])
async def test_a_server_that_says_later_is_asked_later(
    gateway: ServerProcess, flaky: Flaky, status: int
) -> None:
    async with EnvClient(gateway.url, timeout_s=40) as client:
        session = await client.make("Flaky")
        await session.reset(seed=1)
        flaky.calls.clear()
        flaky.bad = [("/step", plain({"detail": "busy"}, status))] * 3
        assert (await session.step("a")).observation == "1"
        assert flaky.calls == ["/step"] * 4, "nothing was rebuilt"
        await session.close()


async def test_a_server_without_the_session_has_lost_it(gateway: ServerProcess, flaky: Flaky) -> None:
    async with EnvClient(gateway.url, timeout_s=40) as client:
        session = await client.make("Flaky")
        await session.reset(seed=1)
        flaky.places.clear()
        if flaky.deterministic:
            assert (await session.step("a")).observation == "1"
        else:
            with pytest.raises(ProblemError) as caught:
                await session.step("a")
            assert (caught.value.code, caught.value.extra["reason"]) == ("session_gone", "lost")


async def test_what_is_given_up_has_ended_there_before_it_begins_anew(http: httpx.AsyncClient) -> None:
    """The server knows the session by the same name before and after: an end that came late would be that of both."""
    flaky = Flaky(deterministic=False)
    begun: asyncio.Queue[None] = asyncio.Queue()
    stepping = asyncio.Event()

    async def answer(path: str, body: dict[str, Any]) -> Said:
        if path == "/step" and body["action"] == "hang":
            stepping.set()
            await asyncio.Event().wait()
        if path == "/close" and stepping.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(begun.get(), 0.3)
        if path == "/reset" and stepping.is_set():
            begun.put_nowait(None)
        return flaky(path, body)

    async with scripted(answer) as url:
        registered = await register(http, "Slow", url)
        made = (await http.post("/v1/sessions", json={"env_id": "Slow", "reset": {"seed": 1}})).json()
        session = f"/v1/sessions/{made['session_id']}"
        hanging = asyncio.create_task(http.post(f"{session}/step", json={"action": "hang"}))
        await asyncio.wait_for(stepping.wait(), 20)
        assert (await http.post(f"{session}/cancel")).status_code == 202
        assert (await hanging).json()["code"] == "step_timeout"
        assert (await http.post(f"{session}/reset", json={"seed": 1})).json()["observation"] == "0"
        assert (await http.post(f"{session}/step", json={"action": "a"})).json()["observation"] == "1"
        await http.delete(session)
        await unregister(http, registered)


async def test_what_begins_after_its_end_is_ended_again(http: httpx.AsyncClient) -> None:
    flaky = Flaky(deterministic=False)
    go_on, resetting = asyncio.Event(), asyncio.Event()

    async def answer(path: str, body: dict[str, Any]) -> Said:
        if path == "/reset" and body["seed"] == 7:
            resetting.set()
            await go_on.wait()
        return flaky(path, body)

    async with scripted(answer) as url:
        registered = await register(http, "Late", url)
        flaky.calls.clear()
        session = (await http.post("/v1/sessions", json={"env_id": "Late"})).json()["session_id"]
        begins = asyncio.create_task(http.post(f"/v1/sessions/{session}/reset", json={"seed": 7}))
        await asyncio.wait_for(resetting.wait(), 20)
        assert (await http.delete(f"/v1/sessions/{session}")).status_code == 204
        assert (await begins).json()["code"] == "session_gone"
        go_on.set()
        async with asyncio.timeout(20):
            while not ("/reset" in flaky.calls and flaky.calls[-1] == "/close"):
                await asyncio.sleep(0.01)
        assert not flaky.places
        await unregister(http, registered)


async def test_a_session_waits_for_its_server_to_be_back(
    gateway: ServerProcess, http: httpx.AsyncClient
) -> None:
    """A server that is not deterministic is away for longer than a step is tried, and has its sessions still."""
    answer = Flaky(deterministic=False)
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(scripted(answer))
        registered = await register(http, "Away", url)
        made = (await http.post("/v1/sessions", json={"env_id": "Away", "reset": {"seed": 1}})).json()
        step = f"/v1/sessions/{made['session_id']}/step"
        await stack.aclose()
        failed = await http.post(step, json={"action": "a", "episode": 0, "step": 0})
        assert (failed.status_code, failed.json()["code"]) == (502, "upstream_error")
        async with scripted(answer, port=int(url.rpartition(":")[2])):
            taken = (await http.post(step, json={"action": "a", "episode": 0, "step": 0})).json()
            assert (taken["observation"], taken["step"]) == ("1", 1)
            again = (await http.post(step, json={"action": "a", "episode": 0, "step": 0})).json()
            assert again == taken, "a repeated step is answered again"
            await http.delete(f"/v1/sessions/{made['session_id']}")
            await unregister(http, registered)


class _Plain(BaseHTTPRequestHandler):
    """What one writes with Python's standard library."""

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(STEP)

    def _answer(self, reply: Any) -> None:
        content = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("version", ["HTTP/1.0", "HTTP/1.1"])
@pytest.mark.parametrize(
    ("server_class", "found"),
    [(HTTPServer, "one connection at a time"), (ThreadingHTTPServer, "its connection")],
)
async def test_a_plain_server_has_as_many_connections_as_it_can_take(
    gateway: ServerProcess, http: httpx.AsyncClient, version: str, server_class: type[HTTPServer], found: str
) -> None:
    """It has room for five that it has not accepted; 48 sessions step at the same time."""
    handler = type("Handler", (_Plain,), {"protocol_version": version})
    with server_class(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            registered = await register(http, "Plain", f"http://127.0.0.1:{server.server_address[1]}")
            [said] = [each for each in registered["report"] if each["check"] == "connections"]
            assert said["ok"]
            assert found in said["detail"]
            async with EnvClient(gateway.url, timeout_s=60) as client:
                sessions = await client.make_many("Plain", 48)
                await asyncio.gather(*(each.reset(seed=1) for each in sessions))
                for _ in range(3):
                    steps = await asyncio.gather(*(each.step("a") for each in sessions))
                    assert {each.observation for each in steps} == {"on"}
                await client.close_sessions(sessions)
            await unregister(http, registered)
        finally:
            await asyncio.to_thread(server.shutdown)
            await asyncio.to_thread(thread.join, 30)


async def test_a_registered_verifier_scores(http: httpx.AsyncClient) -> None:
    def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        if path == "/spec":
            return plain({"kind": "stateless"})
        results = [
            {"score": float(item["response"] == item.get("answer")), "outcome": "correct"}
            for item in body["items"]
        ]
        return plain(b"<html>") if next(calls) == 1 else plain({"results": results})

    calls = itertools.count()
    async with scripted(answer) as url:
        registered = await register(http, "Same", url)
        items = [{"response": "4", "answer": "4"}, {"response": "5", "answer": "4"}]
        reply = (await http.post("/v1/verify/Same", json={"items": items})).json()
        assert [result["score"] for result in reply["results"]] == [1.0, 0.0]
        await unregister(http, registered)


async def test_a_server_without_the_setting_takes_no_registrations() -> None:
    with ServerProcess(("--log-level", "error")) as server:
        async with httpx.AsyncClient(base_url=server.url) as http:
            answer = await register(http, "Any", "http://127.0.0.1:1")
            assert answer["code"] == "method_not_allowed"
            assert "--gateway" in answer["detail"]


async def test_a_request_that_a_killed_gateway_had_answered_is_answered_as_before(tmp_path: Path) -> None:
    """Its sessions wait until their server registers again, and so does what is known of them."""
    with (
        ForeignServer("python") as server,
        ServerProcess((*ARGUMENTS, "--state-dir", str(tmp_path))) as gateway,
    ):
        body = {"env_id": "Guess", "count": 2, "reset": {"seed": 4}, "request_id": "once"}
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
            await register(http, "Guess", server.url)
            made = (await http.post("/v1/sessions", json=body)).json()
            gateway.kill()
            gateway.start()
            first = made["sessions"][0]["session_id"]
            assert (await http.get(f"/v1/sessions/{first}")).json()["code"] == "draining"
            await register(http, "Guess", server.url)
            assert (await http.post("/v1/sessions", json=body)).json() == made
            assert len((await http.get("/v1/sessions")).json()["sessions"]) == 2


_STEP = {"observation": "on", "reward": 0, "terminated": False, "truncated": False, "info": {}}
_DEEP = b"[" * 1000 + b"]" * 1000


async def test_what_is_nested_too_deeply_is_a_failure_of_its_server(http: httpx.AsyncClient) -> None:
    steps = [plain(_STEP)]

    def answer(path: str, body: dict[str, Any]) -> Said:
        good = {"/spec": plain({}), "/reset": plain({"observation": "go", "info": {}}), "/close": plain({})}
        return good[path] if path in good else steps[-1]

    async with scripted(answer) as url:
        registered = await register(http, "Deep", url)
        made = (await http.post("/v1/sessions", json={"env_id": "Deep", "reset": {"seed": 1}})).json()
        place = f"/v1/sessions/{made['session_id']}"
        steps.append(plain(_DEEP, status=500))
        assert (await http.post(f"{place}/step", json={"action": "a"})).json()["code"] == "upstream_error"
        steps.append(plain(_STEP))
        assert (await http.post(f"{place}/step", json={"action": "a"})).json()["observation"] == "on"
        await unregister(http, registered)


async def test_a_spec_that_is_nested_too_deeply_is_refused(http: httpx.AsyncClient) -> None:
    async with scripted(lambda path, body: plain(b'{"action_space": {"type": ' + _DEEP + b"}}")) as url:
        assert (await register(http, "Deep", url))["code"] == "probe_failed"
