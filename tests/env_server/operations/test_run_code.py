"""`POST /run_code` and interactive sessions, on a server with a sandbox of its own."""

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import websockets

from rollgym import RemoteEnv
from rollgym.env_server.access.tokens import Quota, add_token
from rollgym.sandbox.remote.run_code import RunCodeReply
from tests.support.metrics import scrape, value
from tests.support.wire import Server

SLEEP = {"language": "python", "code": "import time; time.sleep(50)", "run_timeout": 55}
FOREVER = {"language": "python", "code": "import time; time.sleep(300)", "run_timeout": 300}


class Guarded:
    """A server with few places, and the tokens that it knows."""

    def __init__(self, server: Server, tokens: dict[str, str]) -> None:
        self.server = server
        self.tokens = tokens

    def client(self, name: str = "wide") -> httpx.AsyncClient:
        return self.server.http(self.tokens[name])

    async def run(self, **body: Any) -> dict[str, Any]:
        """Run a program, whose answer must have the shape that it is said to have."""
        async with self.client() as client:
            answer = await client.post("/run_code", json=body)
        assert answer.status_code == 200, answer.text
        RunCodeReply.model_validate_json(answer.content, strict=False)
        return answer.json()

    async def ended(self, outcome: str) -> float:
        """How many runs have ended in this way."""
        samples = await scrape(self.server.url, self.tokens["root"])
        return value(samples, "rollgym_runs_total", {"outcome": outcome})

    def program(self, name: str = "wide") -> websockets.connect:
        url = f"ws://127.0.0.1:{self.server.port}/v1/sandbox/session"
        headers = {"Authorization": f"Bearer {self.tokens[name]}"}
        return websockets.connect(url, additional_headers=headers, compression=None)

    @contextlib.asynccontextmanager
    async def begun(self, **opening: Any) -> AsyncIterator[websockets.ClientConnection]:
        """A socket whose program has begun; the place of the one before it may take a while to be free."""
        async with asyncio.timeout(30):
            while True:
                socket = await self.program()
                answer = await say(socket, opening)
                if answer == {"ok": {}}:
                    break
                assert answer["error"]["code"] == "at_capacity"
                await socket.close()
        async with socket:
            yield socket


async def say(socket: websockets.ClientConnection, message: bytes | dict[str, Any]) -> Any:
    await socket.send(message if isinstance(message, bytes) else json.dumps(message))
    answer = await socket.recv()
    return answer if isinstance(answer, bytes) else json.loads(answer)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    file = tmp_path_factory.mktemp("run_code") / "tokens.yaml"
    tokens = {name: add_token(file, name, ["play"]) for name in ("wide", "other")}
    tokens["one"] = add_token(file, "one", ["play"], Quota(max_runs=1))
    tokens["node"] = add_token(file, "node", ["register"])
    tokens["root"] = add_token(file, "root", ["admin"])
    arguments = (
        *("--no-builtin", "--env", "tests.support.program_env:Programs", "--sandbox", "auto"),
        *("--max-runs", "2", "--max-waiting-runs", "1", "--max-program-sessions", "1"),
    )
    with Server(*arguments, "--token-file", str(file)) as server:
        yield Guarded(server, tokens)
        assert "failed inside the server" not in server.log()


async def test_a_program_runs_as_sandboxfusion_would_run_it(guarded: Guarded) -> None:
    files = {"in/a.txt": base64.b64encode(b"from a file").decode(), "nothing": None}
    code = "print(input(), open('in/a.txt').read()); open('b.txt', 'wb').write(bytes([255, 0]))"
    answer = await guarded.run(
        code=code, language="python", stdin="hello", files=files, fetch_files=["b.txt", "missing"]
    )
    assert (answer["status"], answer["message"], answer["compile_result"]) == ("Success", "", None)
    ran = answer["run_result"]
    assert (ran["status"], ran["return_code"], ran["stdout"]) == ("Finished", 0, "hello from a file\n")
    assert ran["execution_time"] > 0
    assert answer["files"] == {"b.txt": base64.b64encode(bytes([255, 0])).decode()}
    assert answer["executor_pod_name"]


@pytest.mark.parametrize(
    ("body", "status", "part", "expected"),
    [
        ({"language": "bash", "code": "exit 3"}, "Failed", "run_result", ("Finished", 3)),
        ({"language": "bash", "code": "kill -9 $$"}, "Failed", "run_result", ("Finished", -9)),
        (
            {"language": "bash", "code": "sleep 9", "run_timeout": 0.3},
            "Failed",
            "run_result",
            ("TimeLimitExceeded", None),
        ),
        ({"language": "cpp", "code": "int main() { return 4; }"}, "Failed", "run_result", ("Finished", 4)),
        (
            {"language": "cpp", "code": "int main() { return x; }"},
            "Failed",
            "compile_result",
            ("Finished", 1),
        ),
    ],
)
async def test_how_a_program_ends(
    guarded: Guarded, body: dict[str, Any], status: str, part: str, expected: tuple[str, int | None]
) -> None:
    answer = await guarded.run(**body)
    assert answer["status"] == status
    found = answer[part]
    assert (found["status"], found["return_code"]) == expected
    assert (answer["run_result"] is None) == (part == "compile_result")
    assert answer["outcome"] != "ok"


async def test_what_cannot_be_asked_for_is_refused_by_its_name(guarded: Guarded) -> None:
    good = {"language": "python", "code": "1"}
    bad: dict[str, dict[str, Any]] = {
        "language": {"language": "cobol"},
        "code": {"code": 3},
        "run_timeout": {"run_timeout": 600},
        "memory_limit_MB": {"memory_limit_MB": 10**6},
        "no base64": {"files": {"a": "!"}},
        "working directory": {"fetch_files": ["../secret"]},
        "not both": {"stdin": "", "stdin_base64": ""},
    }
    async with guarded.client() as client:
        for what, change in bad.items():
            answer = await client.post("/run_code", json=good | change)
            problem = answer.json()
            assert (answer.status_code, problem["code"]) == (422, "invalid_request"), what
            assert what in problem["detail"]
        assert (
            "'python', 'bash' or 'cpp'"
            in (await client.post("/run_code", json=good | bad["language"])).json()["detail"]
        )


async def test_who_may_run_programs(guarded: Guarded) -> None:
    body = {"language": "python", "code": "1"}
    async with guarded.server.http() as stranger, guarded.client("node") as node:
        assert (await stranger.post("/run_code", json=body)).status_code == 401
        assert (await stranger.get("/v1/sandbox")).status_code == 401
        assert (await node.post("/run_code", json=body)).status_code == 403


async def test_it_is_described(guarded: Guarded) -> None:
    async with guarded.client() as client:
        document = (await client.get("/openapi.json")).json()
        told = (await client.get("/v1/sandbox")).json()
    assert {"/run_code", "/v1/sandbox"} < set(document["paths"])
    request = document["components"]["schemas"]["RunCodeRequest"]
    assert {"code", "language"} == set(request["required"])
    assert told["limits"]["max_runs"] == 2
    assert told["guarantees"]["network"] is True


async def test_a_server_without_a_sandbox_names_the_remedy(server: Server) -> None:
    async with server.http() as client:
        answer = await client.post("/run_code", json={"language": "python", "code": "1"})
        assert answer.status_code == 404
        assert "--sandbox" in answer.json()["detail"]
        assert "/run_code" not in (await client.get("/openapi.json")).json()["paths"]


async def one_refused(
    client: httpx.AsyncClient, count: int
) -> tuple[dict[str, Any], set["asyncio.Task[httpx.Response]"]]:
    """Ask for so many long runs, of which there is no room for one; gives how that is told, and the others."""
    asked = [asyncio.create_task(client.post("/run_code", json=SLEEP)) for _ in range(count)]
    done, running = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    answer = done.pop().result()
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (503, "at_capacity"), problem
    assert int(answer.headers["retry-after"]) > 0
    assert len(running) == count - 1
    return problem, running


async def until_ended(guarded: Guarded, cancelled: float) -> None:
    """Wait until so many runs were ended because nobody waits for them."""
    async with asyncio.timeout(30):
        while await guarded.ended("cancelled") < cancelled:
            await asyncio.sleep(0.01)


async def test_a_full_server_says_so_and_who_leaves_makes_room(guarded: Guarded) -> None:
    cancelled = await guarded.ended("cancelled")
    async with guarded.client() as client:
        refused, running = await one_refused(client, 4)
        assert refused["limit"] == "max_runs"
        for task in running:
            task.cancel()
        await asyncio.wait(running)
    await until_ended(guarded, cancelled + 3)
    async with asyncio.timeout(30):
        # Nobody waits for the sleepers, so neither does this.
        assert (await guarded.run(language="python", code="print(1)"))["run_result"]["stdout"] == "1\n"


async def test_a_token_has_its_runs_and_no_more(guarded: Guarded) -> None:
    cancelled = await guarded.ended("cancelled")
    async with guarded.client("one") as client:
        refused, running = await one_refused(client, 2)
        assert refused["limit"] == "max_runs_per_token"
        for task in running:
            task.cancel()
        await asyncio.wait(running)
    await until_ended(guarded, cancelled + 1)


async def test_a_program_is_spoken_to_until_it_is_closed(guarded: Guarded) -> None:
    code = "import sys\nfor line in sys.stdin: print(line.upper(), end='', flush=True)"
    async with guarded.begun(language="python", code=code, run_timeout=60) as socket:
        assert await say(socket, b"one\n") == {"ok": {}}
        assert await say(socket, {"op": "read", "timeout_s": 20}) == b"ONE\n"
        assert await say(socket, {"op": "alive"}) == {"ok": {"alive": True}}
        wrong = await say(socket, {"op": "fly"})
        assert wrong["error"]["code"] == "invalid_request"
        assert (await say(socket, {"op": "close"}))["ok"]["outcome"] == "ok"
        with pytest.raises(websockets.ConnectionClosed):
            await socket.recv()


async def test_a_program_ends_with_its_socket(guarded: Guarded) -> None:
    async with guarded.begun(**FOREVER), guarded.program("other") as second:
        refused = (await say(second, FOREVER))["error"]
        assert (refused["code"], refused["limit"]) == ("at_capacity", "max_program_sessions")
    async with guarded.begun(**FOREVER):
        pass


@pytest.mark.parametrize("unanswered", [1, 4, 40, 0])
async def test_a_program_that_reads_nothing_ends_with_its_socket_too(
    guarded: Guarded, unanswered: int
) -> None:
    async with guarded.begun(**FOREVER) as socket:
        # The server ends a socket with too many of them.
        with contextlib.suppress(websockets.ConnectionClosed):
            for _ in range(unanswered):
                await socket.send(b"x" * 200_000)
    async with guarded.begun(**FOREVER):
        pass


async def test_an_ended_program_takes_nothing_more(guarded: Guarded) -> None:
    async with guarded.begun(language="bash", code="echo bye") as socket:
        assert await say(socket, {"op": "read", "timeout_s": 20}) == b"bye\n"
        while (await say(socket, {"op": "alive"}))["ok"]["alive"]:
            pass
        assert (await say(socket, b"more"))["error"]["code"] == "session_gone"
        closed = (await say(socket, {"op": "close"}))["ok"]
        assert (closed["status"], closed["run_result"]["return_code"]) == ("Success", 0)


async def test_strangers_open_no_interactive_session(guarded: Guarded, server: Server) -> None:
    for port, status in ((guarded.server.port, 401), (server.port, 404)):
        with pytest.raises(websockets.InvalidStatus) as refused:
            await websockets.connect(f"ws://127.0.0.1:{port}/v1/sandbox/session")
        assert refused.value.response.status_code == status


def test_an_environment_gets_the_sandbox_of_its_server(guarded: Guarded) -> None:
    env = RemoteEnv(guarded.server.url, "Programs", token=guarded.tokens["wide"])
    backend, _ = env.reset()
    assert backend != "unsafe"
    assert env.step("print(6 * 7)")[0] == "42\n"
    env.close()


async def test_a_server_that_stops_lets_programs_finish() -> None:
    with Server("--no-builtin", "--sandbox", "auto", "--max-runs", "1", "--max-waiting-runs", "0") as server:
        async with server.http() as client:
            slow = {"language": "bash", "code": "echo begun; sleep 1.5; echo done"}
            asked = [asyncio.create_task(client.post("/run_code", json=slow)) for _ in range(2)]
            # The one that is refused shows that the other runs.
            done, running = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            assert done.pop().result().status_code == 503
            server.process.terminate()
            answer = await running.pop()
        assert answer.json()["run_result"]["stdout"] == "begun\ndone\n"
        assert server.process.wait(30) == 0
