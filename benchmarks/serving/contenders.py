"""Who is compared: how each server is started, and how its clients talk to it."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import wire
from load import Connection, HttpConnection, OwnSocketConnection, SocketConnection
from wire import Dialect, Session

_HERE = Path(__file__).parent
OWN_SERVER = (
    "-m",
    "rollgym.env_server",
    "--port",
    "0",
    "--max-sessions",
    "65536",
    "--max-sessions-per-token",
    "65536",
)
_SIZES = (1, 64, 256)


@dataclass(frozen=True)
class Contender:
    """A server with one way of talking to it.

    Attributes:
        label: How tables call it.
        server: Arguments of the interpreter that start its server; equal ones share a server.
        kind: Its connections.
        dialect: What a session says.
        peer: The peer whose virtual environment it needs, if any.
        shared: Whether all sessions use one connection.
        batch: Sessions in one frame.
        sizes: Numbers of sessions to measure.
        idle: Whether memory of idle sessions is measured.
        plays: Whether it steps an environment.
    """

    label: str
    server: tuple[str, ...]
    kind: type[Connection]
    dialect: Dialect
    peer: str | None = None
    shared: bool = False
    batch: int = 1
    sizes: tuple[int, ...] = _SIZES
    idle: bool = True
    plays: bool = True

    def groups(self, sessions: int) -> Sequence[Sequence[Session]]:
        """Fresh conversations, one list for each connection."""
        made = [self.dialect(index) for index in range(sessions // self.batch)]
        return [made] if self.shared else [[session] for session in made]

    def python(self, pythons: dict[str, str]) -> str:
        return sys.executable if self.peer is None else pythons[self.peer]


def peer_server(name: str) -> tuple[str, ...]:
    return (str(_HERE / "other_servers" / f"{name}_server.py"),)


_BARE = (str(_HERE / "bare.py"),)
CONTENDERS = (
    Contender("rollgym, a socket each", OWN_SERVER, OwnSocketConnection, wire.rollgym),
    Contender("rollgym, one socket", OWN_SERVER, OwnSocketConnection, wire.rollgym, shared=True),
    Contender("rollgym, HTTP", OWN_SERVER, HttpConnection, wire.rollgym_http),
    Contender(
        *("rollgym, batch", OWN_SERVER, OwnSocketConnection, wire.rollgym_batch(64)),
        batch=64,
        sizes=(64,),
        idle=False,
    ),
    Contender("OpenEnv", peer_server("openenv"), SocketConnection, wire.openenv, "openenv"),
    Contender(
        *("OpenEnv, async environment", (*peer_server("openenv"), "--async"), SocketConnection, wire.openenv),
        peer="openenv",
    ),
    Contender("Aviary", peer_server("aviary"), HttpConnection, wire.aviary, "aviary"),
    Contender("NeMo Gym", peer_server("nemo_gym"), HttpConnection, wire.nemo_gym, "nemo-gym"),
    Contender("OpenReward", peer_server("openreward"), HttpConnection, wire.openreward, "openreward"),
    Contender("bare Starlette", _BARE, OwnSocketConnection, wire.bare),
    Contender(
        *("bare Starlette, batch", _BARE, OwnSocketConnection, wire.bare_batch(64)),
        batch=64,
        sizes=(64,),
        idle=False,
    ),
    Contender(
        *("bare Starlette, no environment", (*_BARE, "--env", "none"), OwnSocketConnection, wire.bare),
        idle=False,
        plays=False,
    ),
)
