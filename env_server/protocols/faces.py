"""The faces of a server: ours, each declared once, and those of other packages that an operator asks for."""

import re
from collections.abc import Iterable
from functools import partial

from rollgym.env_server.common.settings import ConfigurationError
from rollgym.env_server.http.openapi import EnvironmentDocument, Tag
from rollgym.env_server.protocols.face import Face, MessageRoute, SocketRoute
from rollgym.env_server.protocols.gem import GEM_CALLS
from rollgym.env_server.protocols.mcp import MCP_METHODS, MCP_PATH, McpAdapter, described_mcp
from rollgym.env_server.protocols.openenv import OPENENV_CALLS, OPENENV_HEALTH
from rollgym.env_server.protocols.openenv import PREFIX as OPENENV_PREFIX
from rollgym.env_server.protocols.openenv_socket import OpenEnvRpcSocket, serve_openenv_socket
from rollgym.env_server.protocols.ors import ORS_CALLS
from rollgym.extensions import Capabilities
from rollgym.suggestions import did_you_mean

GROUP = "rollgym.faces"

_LONGEST_SHOWN = 60
_OPENENV_RPC = f"{OPENENV_PREFIX}/mcp"

OPENENV = Face(
    name="OpenEnv",
    clients="OpenEnv",
    address=OPENENV_PREFIX,
    page="other_protocols.md#openenv",
    tag=Tag("/openenv", "OpenEnv", "For OpenEnv's clients.", "docs/other_protocols.md"),
    calls=(*OPENENV_CALLS.routes, *OPENENV_HEALTH.routes),
    sockets=(
        SocketRoute(
            f"{OPENENV_PREFIX}/ws",
            "OpenEnv's; one socket is one session (docs/other_protocols.md)",
            serve_openenv_socket,
        ),
        SocketRoute(
            _OPENENV_RPC,
            "OpenEnv's JSON-RPC; one socket is one session (docs/other_protocols.md)",
            partial(serve_openenv_socket, socket_class=OpenEnvRpcSocket),
        ),
    ),
    messages=(
        MessageRoute(
            _OPENENV_RPC,
            MCP_METHODS,
            described_mcp(openenv=True),
            lambda services: McpAdapter(services, openenv=True).respond,
        ),
    ),
    # OpenEnv's validator takes the version for that of its API, not of the environment.
    document=EnvironmentDocument(OPENENV_PREFIX, "OpenEnv", "1.0.0"),
)
GEM = Face(
    name="GEM",
    clients="ROCK, for GEM's environments",
    address="/",
    page="other_protocols.md#gem-over-http",
    tag=Tag("/apis", "GEM", "For GEM's clients.", "docs/other_protocols.md"),
    hot=GEM_CALLS.routes,
)
MCP = Face(
    name="MCP",
    clients="the Model Context Protocol",
    address=MCP_PATH,
    page="mcp.md",
    tag=Tag("/mcp", "MCP", "For agents with the Model Context Protocol.", "docs/mcp.md"),
    messages=(
        MessageRoute(MCP_PATH, MCP_METHODS, described_mcp(), lambda services: McpAdapter(services).respond),
    ),
)
ORS = Face(
    name="ORS",
    clients="the Open Reward Standard: OpenReward, TRL, ROLL",
    address="/",
    page="ors.md",
    calls=ORS_CALLS.routes,
    # An environment's id may be anything at the begin of its paths.
    at_root=True,
)
OURS = (OPENENV, GEM, MCP, ORS)
"""Those that every server has."""

FACES = Capabilities("face", GROUP, Face, OURS)
"""All faces by name."""


def served_faces(names: Iterable[str]) -> list[Face]:
    """The faces of a server: ours, and those of other packages that its operator asks for.

    Raises:
        ConfigurationError: There is none of a name, or the package that adds it is broken.
    """
    return [*OURS, *(_added(name) for name in dict.fromkeys(names))]


def refuse_shared_paths(own: Iterable[str], faces: Iterable[Face]) -> None:
    """Refuse a face with a path that something else has: one of the two would never be asked.

    Args:
        own: The paths of the server's own protocol, and of its pages.
        faces: The faces that it is to have.

    Raises:
        ConfigurationError: There is such a path.
    """
    owners = dict.fromkeys(map(_form, own), "the server itself")
    for face in faces:
        for path in face.paths:
            if (owner := owners.setdefault(_form(path), face.name)) != face.name:
                raise ConfigurationError(f"face: {face.name!r} has the path {path}, which belongs to {owner}")


def _form(path: str) -> str:
    """A path without the names of its parameters."""
    return re.sub(r"\{\w+", "{", path)


def _added(name: str) -> Face:
    added = FACES.added()
    if name in added:
        try:
            return FACES[name]
        except ValueError as error:
            raise ConfigurationError(f"face: {error}") from error
    if name in FACES:
        raise ConfigurationError(f"face: every server has {name!r}: leave it out")
    there = f"there are {', '.join(added)}" if added else f"none adds any (entry points of {GROUP})"
    raise ConfigurationError(
        f"face: no installed package adds {name[:_LONGEST_SHOWN]!r}; {did_you_mean(name, added) or there}"
    )
