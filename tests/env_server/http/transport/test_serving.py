"""What `rollgym.env_server.http.transport` needs of uvicorn: when a new version has it otherwise, it is said here."""

import asyncio
import inspect
import tomllib
from typing import Any

import pytest
import uvicorn
from packaging.requirements import Requirement
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from rollgym.env_server.common.event_loop import Admissions
from rollgym.env_server.common.settings import ConfigurationError, ServerSettings
from rollgym.env_server.http.transport.connection import BoundedHttpProtocol, DescriptorWatch
from rollgym.env_server.http.transport.serving import KNOWN, DrainingServer, EmbeddedServer, http_config
from rollgym.env_server.http.transport.write_coalescing import CoalescingProtocol
from tests.support.processes import ROOT


class Wire(asyncio.Transport):
    """A transport that keeps what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def _app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


def _config() -> uvicorn.Config:
    return http_config(_app, ServerSettings())


@pytest.mark.parametrize(
    ("base", "name"),
    [(HttpToolsProtocol, "on_message_begin"), (WebSocketsSansIOProtocol, "send_receive_event_to_app")],
)
async def test_a_uvicorn_that_lacks_what_is_needed_is_refused_in_one_line(base, name, monkeypatch) -> None:
    _config()
    monkeypatch.delattr(base, name)
    message = (
        rf"^uvicorn {uvicorn.__version__} is .* has no {base.__name__}\.{name}\): pip install 'uvicorn>=.*'$"
    )
    with pytest.raises(ConfigurationError, match=message):
        _config()


@pytest.mark.parametrize("now", [lambda self: None, lambda self, one, two: None], ids=["fewer", "more"])
async def test_a_method_that_takes_something_else_is_refused(now, monkeypatch) -> None:
    monkeypatch.setattr(WebSocketsSansIOProtocol, "handle_cont", now)
    with pytest.raises(ConfigurationError, match=r"has no WebSocketsSansIOProtocol\.handle_cont"):
        _config()


def test_servers_override_what_is_there() -> None:
    for ours, name in ((EmbeddedServer, "capture_signals"), (DrainingServer, "handle_exit")):
        inspect.signature(getattr(uvicorn.Server, name)).bind(
            *inspect.signature(getattr(ours, name)).parameters
        )


async def test_http_connections_have_what_the_bounds_look_at() -> None:
    connection = BoundedHttpProtocol(
        ServerSettings(),
        DescriptorWatch(),
        Admissions(),
        config=_config(),
        server_state=ServerState(),
        app_state={},
    )
    wire = Wire()
    connection.connection_made(wire)
    assert connection in connection.connections
    assert connection.cycle is None
    connection.data_received(b"POST /there HTTP/1.1\r\nHost: here\r\nContent-Length: 2\r\n\r\n")
    assert connection.url == b"/there"
    assert connection.headers == [(b"host", b"here"), (b"content-length", b"2")]
    assert (connection.parser.get_method(), connection.parser.get_http_version()) == (b"POST", "1.1")
    assert (connection.parser.should_upgrade(), connection._should_upgrade()) == (False, False)
    assert (connection.cycle.response_started, connection.cycle.response_complete) == (False, False)
    assert connection.cycle.more_body
    connection.data_received(b"{}")
    assert not connection.cycle.more_body
    async with asyncio.timeout(5):
        while not connection.cycle.response_complete:
            await asyncio.sleep(0)
    assert wire.written.startswith(b"HTTP/1.1 204")
    connection.connection_lost(None)
    assert connection not in connection.connections


async def test_sockets_have_what_coalescing_looks_at() -> None:
    socket = CoalescingProtocol(config=_config(), server_state=ServerState(), app_state={})
    socket.connection_made(Wire())
    assert (socket.close_sent, socket.disconnected, socket.handshake_complete) == (False, False, False)
    assert (socket.read_paused, socket.queue.empty(), socket.writable.is_set()) == (False, True, True)
    assert socket.conn.data_to_send() == []
    assert socket.loop is asyncio.get_running_loop()
    assert socket.conn.writes == []
    assert {"debug", "extensions", "side", "state"} <= set(dir(socket.conn))
    assert {"max_message_size", "max_size"} & set(dir(socket.conn))


async def test_servers_end_by_what_uvicorn_looks_at() -> None:
    server = uvicorn.Server(_config())
    assert (server.should_exit, server.force_exit) == (False, False)


def test_the_installed_version_is_one_that_is_known() -> None:
    assert Requirement(KNOWN).specifier.contains(uvicorn.__version__), (
        f"extend KNOWN by {uvicorn.__version__}"
    )
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (wanted,) = (each.specifier for each in map(Requirement, needed) if each.name == "uvicorn")
    lowest = min(each.version for each in Requirement(KNOWN).specifier)
    assert wanted.contains(lowest)
    assert wanted.contains("0.999")
