"""What becomes of runs whose server is away, broken, full or another one than was meant."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

from rollgym.env_server.access.tokens import add_token
from rollgym.sandbox.core.base import Outcome, Program, SandboxUnavailableError
from rollgym.sandbox.core.limits import Limits
from rollgym.sandbox.remote.remote import RemoteSandbox
from rollgym.sandbox.selection import open_sandbox
from tests.support.wire import Server

PROGRAM = Program("bash", "echo hi")


@contextmanager
def answering(*answers: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A server that answers one connection after another with these bytes; gives its URL and what it was asked."""
    asked: list[bytes] = []

    def serve() -> None:
        # Closed after the last answer: who asks once more is refused, and does not wait for an answer.
        with listening:
            for answer in answers:
                connection, _ = listening.accept()
                with connection:
                    asked.append(connection.recv(65536))
                    connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", asked
        thread.join()


def http(status: str, body: str = "{}", *headers: str) -> bytes:
    lines = (f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers)
    return ("\r\n".join(lines) + "\r\n\r\n" + body).encode()


GOOD = (
    '{"status": "Failed", "message": "", "compile_result": null, "run_result": null, "executor_pod_name": null, '
    '"files": {}, "outcome": "time_limit", "detail": "late", "guarantees": null}'
)
FULL = http("503 Service Unavailable", '{"detail": "all places are taken"}', "Retry-After: 0")


def test_a_server_that_is_away_is_a_fault_of_the_sandbox() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with closing(RemoteSandbox(url, patience_s=0)) as sandbox:
        result = sandbox.run(PROGRAM)
        assert result.outcome is Outcome.SANDBOX_ERROR
        assert url in result.detail
        with pytest.raises(SandboxUnavailableError, match="cannot be reached"):
            sandbox.probe()
        with pytest.raises(SandboxUnavailableError, match="/v1/sandbox/session"):
            sandbox.open_session(PROGRAM)


def test_a_full_server_is_asked_again_when_it_says() -> None:
    with answering(FULL, FULL, http("200 OK", GOOD)) as (url, asked), closing(RemoteSandbox(url)) as sandbox:
        result = sandbox.run(PROGRAM)
        assert (result.outcome, result.detail) == (Outcome.TIME_LIMIT, "late")
        assert len(asked) == 3


def test_a_request_that_stood_still_on_its_way_is_sent_again() -> None:
    late = http("408 Request Timeout", '{"detail": "the request did not come to its end in time"}')
    with answering(late, http("200 OK", GOOD)) as (url, _), closing(RemoteSandbox(url)) as sandbox:
        assert sandbox.run(PROGRAM).outcome is Outcome.TIME_LIMIT


def test_a_full_server_is_not_waited_for_for_ever() -> None:
    with answering(FULL) as (url, _), closing(RemoteSandbox(url, patience_s=-1)) as sandbox:
        result = sandbox.run(PROGRAM)
        assert result.outcome is Outcome.SANDBOX_ERROR
        assert "all places are taken" in result.detail


def test_a_connection_that_breaks_is_tried_once_more_and_no_more() -> None:
    with answering(b"", b"") as (url, asked), closing(RemoteSandbox(url, patience_s=0)) as sandbox:
        assert sandbox.run(PROGRAM).outcome is Outcome.SANDBOX_ERROR
        assert len(asked) == 2
    with (
        answering(b"", http("200 OK", GOOD)) as (url, _),
        closing(RemoteSandbox(url, patience_s=0)) as sandbox,
    ):
        assert sandbox.run(PROGRAM).outcome is Outcome.TIME_LIMIT


@pytest.mark.parametrize("body", ["no JSON", "[]", '{"status": "Success"}'])
def test_an_answer_that_is_none_is_a_fault_of_the_sandbox(body: str) -> None:
    with answering(http("200 OK", body)) as (url, _), closing(RemoteSandbox(url)) as sandbox:
        assert sandbox.run(PROGRAM).outcome is Outcome.SANDBOX_ERROR


def test_each_refusal_names_its_remedy(tmp_path: Path) -> None:
    file, secret = tmp_path / "tokens.yaml", tmp_path / "token"
    secret.write_text(add_token(file, "node", ["register"]))
    with Server("--no-builtin", "--sandbox", "auto", "--token-file", str(file)) as server:
        for arguments, remedy in (({}, "token_file="), ({"token_file": secret}, "role")):
            with closing(RemoteSandbox(server.url, **arguments)) as sandbox:
                result = sandbox.run(PROGRAM)
                assert result.outcome is Outcome.SANDBOX_ERROR
                assert remedy in result.detail
        secret.write_text(add_token(file, "late", ["play"]))
        with pytest.raises(SandboxUnavailableError, match="HTTP 401"):
            open_sandbox(f"remote:{server.url}?token_file={secret}")
    with (
        Server("--no-builtin") as server,
        closing(RemoteSandbox(server.url)) as sandbox,
        pytest.raises(SandboxUnavailableError, match="--sandbox"),
    ):
        sandbox.probe()
    with pytest.raises(SandboxUnavailableError, match="absent"):
        RemoteSandbox("http://127.0.0.1:1", token_file=tmp_path / "absent")


def test_a_server_that_goes_takes_its_programs_along() -> None:
    with (
        Server("--no-builtin", "--sandbox", "auto") as server,
        closing(RemoteSandbox(server.url, patience_s=0)) as sandbox,
    ):
        session = sandbox.open_session(Program("bash", "cat"), limits=Limits(wall_seconds=60))
        session.write(b"there\n")
        assert session.read(20) == b"there\n"
        server.process.kill()
        server.process.wait()
        assert session.read(20) == b""
        assert not session.alive
        with pytest.raises(BrokenPipeError):
            session.write(b"more\n")
        assert session.close().outcome is Outcome.SANDBOX_ERROR


def test_a_session_that_cannot_be_begun_leaves_no_program_behind() -> None:
    left = threading.Event()

    def answer(connection: ServerConnection) -> None:
        connection.recv()
        connection.send("no JSON")
        try:
            connection.recv(timeout=20)
        except ConnectionClosed:
            left.set()

    with serve(answer, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        with closing(RemoteSandbox(url)) as sandbox, pytest.raises(json.JSONDecodeError) as failed:
            sandbox.open_session(PROGRAM)
        assert left.wait(20), failed.value
