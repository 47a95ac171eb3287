"""The environments that servers have registered, to distinguish one that is away from one that never existed."""

import asyncio
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from rollgym.clients.protocol.errors import ProblemError

EndOfRegistration = Literal["left", "expired", "refused"]

# Servers register again with a restarted gateway within this time, or are gone for good.
_RETURN_S = 120.0
# Readiness does not wait this long for servers that are gone for good.
_READY_WITHIN_S = 30.0
# A node that stops is started again within this time, as a rule.
_RESTART_S = 60.0
_RETRY_S = 1
_SAVE_AFTER_S = 0.1
_SAVE_AGAIN_S = 10.0
_MOST_EXPIRED = 1024
_log = logging.getLogger(__name__)


class Enrolled(BaseModel):
    """A registration as the file keeps it. It holds no token: a server presents its own when it registers again.

    Attributes:
        env_id: The environment's id.
        url: The server that has it.
        upstream_env_id: The environment's id at the server.
        returns: Whether that server registers again by itself, as nodes do.
        ttl_s: How long the registration lives past its last heartbeat.
    """

    model_config = ConfigDict(frozen=True)

    env_id: str
    url: str
    upstream_env_id: str
    returns: bool
    ttl_s: float

    @property
    def place(self) -> tuple[str, str, str]:
        """The key by which two of them are the same."""
        return self.env_id, self.url, self.upstream_env_id


class _Expired(NamedTuple):
    """A registration that ended because no heartbeats came."""

    url: str
    ttl_s: float


_FILE = TypeAdapter(list[Enrolled])


class Roster:
    """Explains why an environment is missing from the catalog.

    With a file, a restarted gateway knows the registrations of its previous run: it is not ready, and answers
    `draining`, until the servers have come back or their time is over.

    Args:
        path: The file; None for a gateway that keeps no state.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._started_at = self._loop.time()
        self._present: dict[tuple[str, str, str], Enrolled] = {}
        self._expected: dict[tuple[str, str, str], tuple[Enrolled, float]] = {}
        self._away: dict[str, float] = {}
        self._expired: dict[str, _Expired] = {}
        self._saving: asyncio.TimerHandle | None = None
        for enrolled in [] if path is None else _read(path):
            until = self._started_at + min(enrolled.ttl_s, _RETURN_S)
            self._expected[enrolled.place] = (enrolled, until)

    def came(self, enrolled: Enrolled) -> None:
        """Record a new registration in the file."""
        self._expected.pop(enrolled.place, None)
        self._away.pop(enrolled.env_id, None)
        self._expired.pop(enrolled.env_id, None)
        self._present[enrolled.place] = enrolled
        self._save_soon()

    def went(self, enrolled: Enrolled, reason: EndOfRegistration) -> None:
        """Note the end of a registration."""
        self._present.pop(enrolled.place, None)
        self._save_soon()
        if self._is_present(enrolled.env_id):
            return
        if reason == "expired":
            self._expired.pop(enrolled.env_id, None)
            self._expired[enrolled.env_id] = _Expired(enrolled.url, enrolled.ttl_s)
            if len(self._expired) > _MOST_EXPIRED:
                del self._expired[next(iter(self._expired))]
        if enrolled.returns and reason != "refused":
            self._away = {env_id: until for env_id, until in self._away.items() if until > self._loop.time()}
            self._away[enrolled.env_id] = self._loop.time() + _RESTART_S

    def absence(self, env_id: str) -> ProblemError | None:
        """The problem of a request for an environment that has no server at present; None if it never had one.

        It is `draining` as long as a server may come back, and names the registration that has expired after that.
        """
        now = self._loop.time()
        if any(enrolled.env_id == env_id for enrolled in self._still_expected()):
            return _awaited(
                f"{env_id} was registered before this gateway was started anew; its server has not come back yet"
            )
        if self._away.get(env_id, 0.0) > now:
            return _awaited(f"the servers that have {env_id} are away; they may be starting again")
        expired = self._expired.get(env_id)
        if expired is None:
            return None
        return ProblemError(
            "unknown_env",
            f"the registration of {env_id} at {expired.url} has expired: no heartbeat came in {expired.ttl_s:g} s. "
            "Register it again; `roll-env register --keep` sends heartbeats",
            suggestions=[],
        )

    def missing(self) -> list[str]:
        """The environments that keep this gateway from being ready: they were registered before it restarted."""
        if self._loop.time() >= self._started_at + _READY_WITHIN_S:
            return []
        expected = {enrolled.env_id for enrolled in self._still_expected()}
        return sorted(env_id for env_id in expected if not self._is_present(env_id))

    def close(self) -> None:
        """Write the present registrations; they are expected after the next start."""
        if self._saving is not None:
            self._save()
        if self._saving is not None:
            # The write failed, and no retry will follow.
            self._saving.cancel()

    def _save_soon(self) -> None:
        """Servers register many environments at a time, which are written once."""
        if self._path is not None and self._saving is None:
            self._saving = self._loop.call_later(_SAVE_AFTER_S, self._save)

    def _save(self) -> None:
        assert self._path is not None
        assert self._saving is not None
        self._saving.cancel()
        self._saving = None
        fresh = self._path.with_suffix(".new")
        try:
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(_FILE.dump_json([*self._present.values(), *self._still_expected()]))
            fresh.replace(self._path)
        except OSError as error:
            _log.error("the registrations cannot be written to %s: %s", self._path, error)
            self._saving = self._loop.call_later(_SAVE_AGAIN_S, self._save)

    def _still_expected(self) -> Iterator[Enrolled]:
        """Registrations of the previous gateway that have not come back; the next start expects them, too."""
        now = self._loop.time()
        return (enrolled for enrolled, until in self._expected.values() if until > now)

    def _is_present(self, env_id: str) -> bool:
        return any(enrolled.env_id == env_id for enrolled in self._present.values())


def _awaited(detail: str) -> ProblemError:
    return ProblemError("draining", detail, retry_after=_RETRY_S)


def _read(path: Path) -> list[Enrolled]:
    """The registrations that the previous gateway wrote; empty if they cannot be read."""
    try:
        return _FILE.validate_json(path.read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, ValidationError, json.JSONDecodeError) as error:
        _log.warning("the registrations in %s cannot be read: %s", path, error)
        return []
