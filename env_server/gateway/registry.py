"""Registrations: the servers of each environment, and the choice of the one for the next session.

Those from before a restart are kept, to distinguish an environment that is away from one that never existed.
"""

import asyncio
import contextlib
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.spaces import describe_space
from rollgym.env_server.catalog.kwargs_rules import without_descriptions
from rollgym.env_server.common.metrics import Metrics
from rollgym.env_server.gateway.upstream.base import EnvironmentSpec, Upstream
from rollgym.env_server.gateway.upstream.node import Node
from rollgym.env_server.gateway.upstream.targets import Target

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
DEFAULT_TTL_S = 60.0
PATIENCE_S = 15.0
"""A node that is started again registers again within this time, as a rule."""

_ID_BYTES = 16
# How long a server that did not answer gets no new sessions, unless it sends a heartbeat before.
_REST_S = 5.0
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


@dataclass(slots=True, eq=False)
class Registration:
    """One server that offers one environment.

    Attributes:
        env_id: The environment's id here.
        owner: The name of the token that registered it.
        protocol: The server's protocol.
        target: The server's address.
        upstream_env_id: The environment's id at the server.
        description: A sentence for lists.
        spec: The environment's spaces and properties, from the server.
        upstream: The client of the server.
        weight: Share of new sessions, relative to other replicas.
        ttl_s: How long it lives past its last heartbeat.
        registration_id: Its unguessable id.
        load: The load that the server last reported, from 0 to about 1.
        sessions: How many sessions it has from here.
        expires_at: When it ends without a heartbeat, on the loop's clock.
        rests_until: Until when it takes no new sessions because it failed, on the loop's clock.
        draining: Whether it takes no new sessions because it is leaving.
        relay: The node that operations are passed on to, if the server is a Rollgym server.
        has_other_gateways: Whether its sessions are passed on by other gateways, too.
        described_spaces: The environment's spaces, as answers describe them.
    """

    env_id: str
    owner: str
    protocol: str
    target: Target
    upstream_env_id: str
    description: str
    spec: EnvironmentSpec
    upstream: Upstream
    weight: float = 1.0
    ttl_s: float = DEFAULT_TTL_S
    registration_id: str = field(default_factory=lambda: secrets.token_hex(_ID_BYTES))
    load: float = 0.0
    sessions: int = 0
    expires_at: float = 0.0
    rests_until: float = 0.0
    draining: bool = False
    relay: Node | None = None
    has_other_gateways: bool = False
    described_spaces: tuple[dict[str, Any], dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.described_spaces = (
            describe_space(self.spec.action_space),
            describe_space(self.spec.observation_space),
        )

    @property
    def node(self) -> Node:
        """The node that operations are passed on to."""
        if self.relay is None:
            raise TypeError(f"operations are not passed on to servers that speak {self.protocol}")
        return self.relay

    @property
    def place(self) -> tuple[str, str, str]:
        """The key by which two registrations are the same server's."""
        return self.env_id, self.target.url, self.upstream_env_id


class Registry:
    """The registrations of a gateway.

    Args:
        appeared: Called with the first registration of an environment.
        vanished: Called with the id of an environment that has no registration any more.
        metrics: Counts the ends of registrations.
        roster: Remembers the environments of earlier registrations.
    """

    def __init__(
        self,
        appeared: Callable[[Registration], None],
        vanished: Callable[[str], None],
        metrics: Metrics,
        roster: Roster,
    ) -> None:
        self._metrics = metrics
        self._roster = roster
        self._appeared = appeared
        self._vanished = vanished
        self._by_id: dict[str, Registration] = {}
        self._replicas: dict[str, list[Registration]] = {}
        self._leaving: set[Registration] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Registration]:
        return iter(self._by_id.values())

    def replicas(self, env_id: str) -> int:
        """How many servers have an environment."""
        return len(self._replicas.get(env_id, ()))

    def healthy(self) -> Iterator[Registration]:
        """Those that take new sessions."""
        now = asyncio.get_running_loop().time()
        return (each for each in self._by_id.values() if each.rests_until <= now)

    def check_spec(self, env_id: str, spec: EnvironmentSpec, *, passed_on: bool) -> None:
        """Refuse a replica that is another environment than those that are here, or has its sessions kept elsewhere.

        Raises:
            ProblemError: `spec_mismatch`.
        """
        for replica in self._replicas.get(env_id, ())[:1]:
            differing = _differing(replica.spec, spec)
            if (replica.relay is not None) != passed_on:
                differing.append("protocol")
            if differing:
                raise ProblemError(
                    "spec_mismatch",
                    f"{env_id} is registered with another {', '.join(differing)}: use another env_id",
                    fields=differing,
                )

    def add(self, registration: Registration) -> Registration:
        """Take in a registration; one of the same server takes the place of the one before, and keeps its id.

        Raises:
            ProblemError: `forbidden`, if that one is another token's.
        """
        now = asyncio.get_running_loop().time()
        registration.expires_at = now + registration.ttl_s
        replicas = self._replicas.setdefault(registration.env_id, [])
        before = next((each for each in replicas if each.place == registration.place), None)
        if before is not None:
            if before.owner != registration.owner:
                raise ProblemError("forbidden", f"{before.target.url} was registered by another token")
            registration.registration_id = before.registration_id
            self._drop(before)
        self._replicas.setdefault(registration.env_id, []).append(registration)
        self._by_id[registration.registration_id] = registration
        self._roster.came(_enrolled(registration))
        if len(self._replicas[registration.env_id]) == 1:
            self._appeared(registration)
        self._announce()
        return registration

    def get(self, registration_id: str, owner: str | None) -> Registration:
        """A registration of an owner, or of any owner if None.

        Raises:
            ProblemError: `unknown_registration`.
        """
        found = self._by_id.get(registration_id)
        if found is None or owner not in (None, found.owner):
            raise ProblemError(
                "unknown_registration", f"there is no registration {registration_id!r}: register again"
            )
        return found

    def heartbeat(self, registration: Registration, load: float | None) -> None:
        """Note that a server is there."""
        registration.expires_at = asyncio.get_running_loop().time() + registration.ttl_s
        registration.rests_until = 0.0
        if load is not None:
            registration.load = load
        self._announce()

    def remove(self, registration: Registration, reason: EndOfRegistration = "left") -> None:
        """End a registration; its sessions continue until they end."""
        self._metrics.registrations_ended[self._metrics.labels.of(registration.env_id), reason] += 1
        self._drop(registration)
        self._roster.went(_enrolled(registration), reason)
        if registration.env_id not in self._replicas:
            self._vanished(registration.env_id)

    def failed(self, registration: Registration) -> None:
        """Note that a server did not answer: others take the new sessions for a while."""
        registration.rests_until = asyncio.get_running_loop().time() + _REST_S
        self._arm()

    def released(self, registration: Registration) -> None:
        """Note that a session at a server ended."""
        registration.sessions -= 1
        if registration.draining and registration.sessions <= 0:
            self._let_go(registration)

    def took(self, registration: Registration) -> None:
        """Note that a server has one more session."""
        registration.sessions += 1

    def at(self, place: tuple[str, str, str], owner: str) -> Registration | None:
        """The registration of an environment at a server, if this owner has it."""
        replicas = self._replicas.get(place[0], ())
        return next((each for each in replicas if (each.place, each.owner) == (place, owner)), None)

    def at_node(self, node: Node, upstream_env_id: str) -> Registration | None:
        """The registration of a node's environment."""
        return next(
            (
                each
                for each in self._by_id.values()
                if each.relay is node and each.upstream_env_id == upstream_env_id
            ),
            None,
        )

    def home_at(self, node: Node, env_id: str) -> Registration | None:
        """The registration of an environment at a node."""
        return next((each for each in self._replicas.get(env_id, ()) if each.relay is node), None)

    def any_home(self, env_id: str) -> Registration | None:
        """The least loaded registration of an environment at Rollgym servers."""
        ours = [each for each in self._replicas.get(env_id, ()) if each.relay is not None]
        return min(ours, key=_busyness, default=None)

    async def changed(self, patience_s: float) -> None:
        """Wait until a server has registered or sent a heartbeat, or until the patience ends."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._changed.wait()

    async def place(
        self, env_id: str, patience_s: float, *, without: Collection[Registration] = ()
    ) -> Registration | None:
        """The server that takes the next session: the least loaded one that answers.

        If no server answers at present, wait for one to come back within the patience.

        Args:
            env_id: The environment.
            patience_s: How many seconds to wait.
            without: Servers to exclude.
        """
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + patience_s
        while True:
            chosen = self._least_loaded(env_id, loop.time(), without)
            if chosen is not None:
                chosen.sessions += 1
                return chosen
            left = give_up_at - loop.time()
            if left <= 0:
                return None
            await self.changed(left)

    def lifetime(self, registration: Registration) -> dict[str, float]:
        """When a registration ends without a heartbeat, for people, and how long it lives past one, for programs.

        A client whose clock differs from this server's cannot use a time of this server.
        """
        left_s = registration.expires_at - asyncio.get_running_loop().time()
        return {"expires_at": time.time() + left_s, "ttl_s": registration.ttl_s}

    async def shutdown(self) -> None:
        """Close the connections to all servers."""
        self._roster.close()
        if self._timer is not None:
            self._timer.cancel()
        for registration in [*self._by_id.values(), *self._leaving]:
            self._let_go(registration)
        self._by_id.clear()
        self._replicas.clear()
        await asyncio.gather(*self._closing)

    def _least_loaded(
        self, env_id: str, now: float, without: Collection[Registration]
    ) -> Registration | None:
        able = [
            each for each in self._replicas.get(env_id, ()) if each.rests_until <= now and each not in without
        ]
        return min(able, key=_busyness, default=None)

    def _drop(self, registration: Registration) -> None:
        del self._by_id[registration.registration_id]
        replicas = self._replicas[registration.env_id]
        replicas.remove(registration)
        if not replicas:
            del self._replicas[registration.env_id]
        registration.draining = True
        self._leaving.add(registration)
        if registration.sessions <= 0:
            self._let_go(registration)

    def _let_go(self, registration: Registration) -> None:
        self._leaving.discard(registration)
        task = asyncio.get_running_loop().create_task(registration.upstream.shutdown())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _announce(self) -> None:
        self._changed.set()
        self._arm()

    def _arm(self) -> None:
        """Wake up when the next registration ends or has rested."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = asyncio.get_running_loop()
        times = [each.expires_at for each in self._by_id.values()]
        times += [each.rests_until for each in self._by_id.values() if each.rests_until > loop.time()]
        if times:
            self._timer = loop.call_at(min(times), self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        for registration in [each for each in self._by_id.values() if each.expires_at <= now]:
            _log.warning(
                "%s at %s is gone: no heartbeat came in %g s",
                registration.env_id,
                registration.target.url,
                registration.ttl_s,
            )
            self.remove(registration, "expired")
        self._announce()


def no_server(env_id: str) -> ProblemError:
    """The problem that no server that has an environment answers: it may be starting again."""
    return ProblemError(
        "draining", f"no server that has {env_id} answers; it may be starting again", retry_after=_RETRY_S
    )


def _enrolled(registration: Registration) -> Enrolled:
    return Enrolled(
        env_id=registration.env_id,
        url=registration.target.url,
        upstream_env_id=registration.upstream_env_id,
        returns=registration.relay is not None,
        ttl_s=registration.ttl_s,
    )


def _busyness(registration: Registration) -> float:
    return (registration.sessions + 1) * (1.0 + registration.load) / registration.weight


def _differing(one: EnvironmentSpec, other: EnvironmentSpec) -> list[str]:
    """The fields in which two specs differ, of those that a client relies on."""
    names = ["version", "stateless", "deterministic", "max_episode_steps"]
    differing = [name for name in names if getattr(one, name) != getattr(other, name)]
    # Nodes of which one describes better are alike: a fleet is renewed node by node.
    if without_descriptions(one.kwargs_schema) != without_descriptions(other.kwargs_schema):
        differing.append("kwargs_schema")
    for name in ("action_space", "observation_space"):
        if describe_space(getattr(one, name)) != describe_space(getattr(other, name)):
            differing.append(name)
    return differing
