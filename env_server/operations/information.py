"""What a server says about itself, its environments and its sessions."""

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from rollgym.env_server.access.context import Context
from rollgym.env_server.catalog.catalog import Catalog
from rollgym.env_server.common.io_process import ProcessRank
from rollgym.env_server.common.requests import requested
from rollgym.env_server.common.settings import ServerSettings
from rollgym.env_server.gateway.peers import Peers
from rollgym.env_server.gateway.registering import Lineage
from rollgym.env_server.sessions.replies import Reply
from rollgym.env_server.sessions.sessions import Sessions
from rollgym.version import __version__

_LIMITS = (
    "max_request_bytes",
    "max_reply_bytes",
    "max_restore_bytes",
    "max_sessions",
    "max_sessions_per_token",
    "max_batch",
    "idle_timeout_s",
    "linger_s",
    "step_timeout_s",
    "make_timeout_s",
    "verify_timeout_s",
)
_DEFAULT_PAGE = 100
_LARGEST_PAGE = 1000
_LONGEST_PATH = 16


class EnvsQuery(BaseModel):
    """Selects the environments to list."""

    model_config = ConfigDict(extra="forbid")

    env_id: str | None = None
    kind: str | None = Field(None, pattern="^(episodic|stateless)$")
    origin: str | None = Field(None, pattern="^(local|registered)$")


class InfoQuery(BaseModel):
    """The gateways that an `info` request has passed through, if a gateway sent it."""

    model_config = ConfigDict(extra="forbid")

    path: list[Annotated[str, Field(max_length=64)]] | None = Field(None, max_length=_LONGEST_PATH)


class SessionsQuery(BaseModel):
    """Which sessions to list; `after` is the last id of the page before."""

    model_config = ConfigDict(extra="forbid")

    env_id: str | None = None
    limit: int = Field(_DEFAULT_PAGE, ge=1, le=_LARGEST_PAGE)
    after: str | None = None


class Information:
    """The handlers of info, envs and of the list of sessions."""

    def __init__(
        self,
        settings: ServerSettings,
        rank: ProcessRank,
        catalog: Catalog,
        sessions: Sessions,
        peers: Peers,
        lineage: Lineage,
    ) -> None:
        self._lineage = lineage
        self._settings = settings
        self._rank = rank
        self._catalog = catalog
        self._sessions = sessions
        self._peers = peers
        self._version = __version__

    def server(self, context: Context, fields: Mapping[str, Any]) -> Reply | Awaitable[Reply]:
        """The server's name, limits and capacity; for a gateway, also the gateways behind this one."""
        path = requested(InfoQuery, fields).path
        if path is None or not self._settings.gateway:
            return self._describe()
        return self._with_gateways(path)

    async def _with_gateways(self, path: list[str]) -> Reply:
        return {**self._describe(), "gateways": await self._lineage.behind(path)}

    def _describe(self) -> Reply:
        return {
            "name": "rollgym",
            "version": self._version,
            "protocol": 1,
            "role": "gateway" if self._settings.gateway else "server",
            "processes": self._rank.processes,
            "process": self._rank.index,
            "limits": {name: getattr(self._settings, name) for name in _LIMITS},
            "capacity": {"sessions": self._sessions.count(), "max_sessions": self._settings.max_sessions},
        }

    def environments(self, context: Context, fields: Mapping[str, Any]) -> Reply:
        """The catalog, or one environment of it."""
        query = requested(EnvsQuery, fields)
        if query.env_id is not None:
            return self._catalog.get(query.env_id).describe()
        found = [entry.describe() for entry in self._catalog]
        return {
            "envs": [
                info
                for info in found
                if query.kind in (None, info["kind"]) and query.origin in (None, info["origin"])
            ]
        }

    def sessions(self, context: Context, fields: Mapping[str, Any]) -> Awaitable[Reply]:
        """The caller's sessions of all processes, in the order of their ids, one page."""
        return self._list(context, requested(SessionsQuery, fields))

    async def _list(self, context: Context, query: SessionsQuery) -> Reply:
        now = asyncio.get_running_loop().time()
        found = [
            session.describe(now)
            for session in self._sessions.of(context.caller)
            if query.env_id in (None, session.entry.env_id)
            and (query.after is None or session.session_id > query.after)
        ]
        more = False
        for reply in await self._peers.gather_all(context, "sessions", query.model_dump(exclude_none=True)):
            found.extend(reply["sessions"])
            # A process that answers with a full page has more, whether or not this page has room for it.
            more = more or "after" in reply
        found.sort(key=lambda info: info["session_id"])
        more = more or len(found) > query.limit
        found = found[: query.limit]
        page: Reply = {"sessions": found}
        if more:
            page["after"] = found[-1]["session_id"]
        return page
