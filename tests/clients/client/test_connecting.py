"""How long clients wait for a server that was never there, and for one that was."""

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection as SyncServerConnection
from websockets.sync.server import serve as serve_in_threads

from rollgym.clients.client.client import EnvClient
from rollgym.clients.client.env import RemoteEnv
from rollgym.clients.client.vector import RemoteVectorEnv
from rollgym.clients.client.verifier import RemoteVerifier
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.frames import SUBPROTOCOLS
from tests.support.client_envs import Walk
from tests.support.client_server import ServerProcess


def make_env(url: str, **limit: float) -> None:
    RemoteEnv(url, "Walk-v0", **limit).close()


def make_vector_env(url: str, **limit: float) -> None:
    RemoteVectorEnv(url, "Walk-v0", 2, **limit).close()


def score(url: str, **limit: float) -> None:
    with RemoteVerifier(url, "Arithmetic-v0", **limit) as verifier:
        verifier.score([{"response": "<answer>4</answer>", "question": "2 + 2"}])


CLIENTS = pytest.mark.parametrize("use", [make_env, make_vector_env, score])


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a socket that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def started_after(server: ServerProcess, seconds: float) -> Iterator[None]:
    """A server that is started in a while."""

    def start() -> None:
        time.sleep(seconds)
        server.start()

    starting = threading.Thread(target=start)
    starting.start()
    try:
        yield
    finally:
        starting.join()
        server.stop()


def refusal(use: Callable[..., Any], url: str, limit: float) -> str:
    with pytest.raises(ConnectionError) as caught:
        use(url, connect_timeout_s=limit)
    return str(caught.value)


@CLIENTS
def test_a_port_that_refuses(use: Callable[..., Any]) -> None:
    url = ServerProcess().url
    said = refusal(use, url, 0.5)
    assert said.startswith(f"no server answers at {url}: ")
    assert re.search(r"waited 0\.[3-9] s: start one with `roll-serve`, or mend the address", said), said


@CLIENTS
def test_a_socket_that_accepts_and_never_answers(silent: str, use: Callable[..., Any]) -> None:
    said = refusal(use, silent, 0.5)
    assert said.startswith(f"no server answers at {silent}: ")
    assert re.search(r"did not answer in 0\.5 s; waited \d\.\d s: start one with `roll-serve`", said), said


def test_a_later_try_has_no_more_time_than_is_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up_once() -> None:
            listener.accept()[0].close()

        hanging_up = threading.Thread(target=hang_up_once)
        hanging_up.start()
        said = refusal(make_env, f"http://127.0.0.1:{listener.getsockname()[1]}", 1.0)
        hanging_up.join()
    tried = re.search(r"did not answer in (\S+) s; waited \d\.\d s", said)
    assert tried is not None, said
    assert float(tried[1]) < 1.0


async def test_a_server_that_shakes_hands_and_says_no_more() -> None:
    async def listen(connection: ServerConnection) -> None:
        async for _ in connection:
            pass

    async with serve(listen, "127.0.0.1", 0, subprotocols=list(SUBPROTOCOLS.values())) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(
            ConnectionError, match=f"no server answers at {url}.*did not say who it is; waited"
        ):
            async with EnvClient(url, connect_timeout_s=1.0):
                pass


@contextmanager
def full(retry_after: float) -> Iterator[tuple[str, list[float]]]:
    """A server that has no room, and when it was asked."""
    asked: list[float] = []

    def refuse(connection: SyncServerConnection, _: Request) -> Response:
        asked.append(time.monotonic())
        problem = ProblemError("at_capacity", "the server has its sessions", retry_after=retry_after)
        return connection.respond(503, json.dumps(problem.to_problem()))

    with serve_in_threads(lambda _: None, "127.0.0.1", 0, process_request=refuse) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}", asked
        server.shutdown()
        serving.join()


@CLIENTS
def test_a_server_that_is_full_does_answer(use: Callable[..., Any]) -> None:
    """It is asked again for as long as it may be, and not where it says to come back later than that."""
    for retry_after, most in ((30.0, 1), (0.2, 20)):
        refused = pytest.raises(ProblemError, match="at_capacity: the server has its sessions")
        with full(retry_after) as (url, asked), refused:
            use(url, connect_timeout_s=1.5)
        assert 1 <= len(asked) <= most
        assert (len(asked) > 1) == (most > 1)


@CLIENTS
def test_a_server_that_comes_up_a_second_later(use: Callable[..., Any]) -> None:
    server = ServerProcess()
    with started_after(server, 1.0):
        use(server.url, connect_timeout_s=60.0)


def test_a_session_outlives_a_server_that_is_away_for_longer_than_that() -> None:
    local = Walk(risk=0.0)
    local.reset(seed=3)
    with ServerProcess() as server:
        env = RemoteEnv(server.url, "Walk-v0", {"risk": 0.0}, connect_timeout_s=0.3)
        env.reset(seed=3)
        server.kill()
        with started_after(server, 2.0):
            assert env.step("left") == local.step("left")
            env.close()


@pytest.mark.parametrize("limit", [0, -1, float("nan")])
@CLIENTS
def test_a_limit_of_nothing_is_refused(use: Callable[..., Any], limit: float) -> None:
    with pytest.raises(ValueError, match="connect_timeout_s must be more than 0"):
        use("http://127.0.0.1:8000", connect_timeout_s=limit)
