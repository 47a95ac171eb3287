"""The handlers of register, announce, heartbeat and unregister; they refuse a gateway behind itself.

A server announces its environments in one call, which is its heartbeat, too.
"""

import asyncio
import logging
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.messages import (
    IDENTIFIER,
    AnnouncedEnvironment,
    AnnounceRequest,
    HeartbeatRequest,
    RegisterRequest,
)
from rollgym.clients.protocol.upstream_protocols import OPTIONAL_FIELDS, OURS, UpstreamProtocol
from rollgym.env_server.access.context import Context
from rollgym.env_server.access.tokens import Caller
from rollgym.env_server.catalog.catalog import Catalog, CatalogEntry
from rollgym.env_server.catalog.kwargs_rules import KwargsRules
from rollgym.env_server.common.requests import as_problem, invalid, refuse_fields, requested
from rollgym.env_server.common.settings import ServerSettings
from rollgym.env_server.gateway.registry import DEFAULT_TTL_S, Registration, Registry
from rollgym.env_server.gateway.upstream.base import Endpoint
from rollgym.env_server.gateway.upstream.node import Node, Nodes
from rollgym.env_server.gateway.upstream.probe import Check, probe
from rollgym.env_server.gateway.upstream.speaking import SpokenProtocols
from rollgym.env_server.gateway.upstream.targets import Target, TargetLimits, TargetRules
from rollgym.env_server.sessions.replies import Reply
from rollgym.env_server.workers.base import EnvSource

_ID_BYTES = 8
_ANSWER_S = 5.0
_LONGEST_TTL_S = 3600.0
_FULL_RETRY_S = 5
# A probe unfinished by then is answered as pending; the server repeats its announcement, with heartbeats for the
# others.
_ANSWER_WITHIN_S = 10.0
# Probes of one call at a time: they run environments of the server that has just been started.
_PROBES = 4
# How long the result of a probe is kept, for a server that did not wait for it.
_KEPT_S = 60.0

_Key = tuple[str, tuple[str, str, str]]

_log = logging.getLogger(__name__)


class Lineage:
    """The gateways behind this one, queried each time, since the servers behind them may have changed.

    Args:
        registry: The servers behind this gateway.

    Attributes:
        gateway_id: This gateway's id among the others, until it restarts.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.gateway_id = secrets.token_hex(_ID_BYTES)

    async def behind(self, path: Sequence[str]) -> list[str]:
        """The ids of this gateway and of all gateways behind it.

        Args:
            path: The gateways that the request has passed through; a gateway that finds itself there stops.
        """
        if self.gateway_id in path:
            return [self.gateway_id]
        nodes = {each.relay for each in self._registry if each.relay is not None}
        return sorted({self.gateway_id, *await self._behind_any(nodes, path)})

    async def refuse_circle(self, node: Node) -> None:
        """Refuse a server that passes sessions on to this gateway.

        Raises:
            ProblemError: `invalid_request`.
        """
        found = await self._behind_any([node], ())
        if self.gateway_id not in found:
            return
        url = node.target.url
        if len(found) == 1:
            raise invalid("url", f"{url} is this gateway itself: register the servers that have environments")
        raise invalid(
            "url",
            f"{url} is a gateway that has this one behind it, so that sessions would go round in a circle: gateways "
            "that stand side by side are not registered with each other; register their nodes with each of them",
        )

    async def _behind_any(self, nodes: Iterable[Node], path: Sequence[str]) -> set[str]:
        asked = (self._ask(node, [*path, self.gateway_id]) for node in nodes)
        return {gateway_id for found in await asyncio.gather(*asked) for gateway_id in found}

    @staticmethod
    async def _ask(node: Node, path: Sequence[str]) -> list[str]:
        """The gateways at a server and behind it; empty if it is not a gateway, or does not answer."""
        caller = node.link(True).caller
        try:
            async with asyncio.timeout(_ANSWER_S):
                connection = await caller.pool.connection(None)
                if caller.pool.info.get("role") != "gateway":
                    return []
                deadline = asyncio.get_running_loop().time() + _ANSWER_S
                fields = {"op": "info", "path": list(path)}
                reply = await connection.request(fields, deadline, caller.pool.max_request_bytes)
        except (ConnectionError, TimeoutError, ProblemError):
            # The probe says what is wrong with it, if it is to be registered.
            return []
        found = reply.payload.get("gateways") if isinstance(reply.payload, dict) else None
        return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []


class Registering:
    """Accepts registrations, once a probe has confirmed the server's description.

    Args:
        settings: The allowed networks and limits.
        catalog: Offers the registered environments.
        registry: Holds the registrations.
        nodes: The nodes of registered Rollgym servers.
        lineage: The gateways behind this one.
    """

    def __init__(
        self, settings: ServerSettings, catalog: Catalog, registry: Registry, nodes: Nodes, lineage: Lineage
    ) -> None:
        self._lineage = lineage
        self._settings = settings
        self._nodes = nodes
        self._catalog = catalog
        self._registry = registry
        self._rules = TargetRules(settings.allow_network)
        self._limits = TargetLimits(settings.max_reply_bytes, settings.max_upstream_connections)
        self._looking_at: Counter[str] = Counter()
        self._protocols = SpokenProtocols()

    async def register(self, context: Context, fields: Mapping[str, Any]) -> Reply:
        """Add an environment of another server."""
        request = requested(RegisterRequest, fields)
        _refuse_misfit(request, (await self._protocols.find(request.protocol)).protocol)
        target = await self.check(request.url, request.ttl_s)
        registration, report = await self.take(context.caller, request, target)
        return {
            "registration_id": registration.registration_id,
            "env_id": registration.env_id,
            **self._registry.lifetime(registration),
            "report": [check._asdict() for check in report],
        }

    async def check(self, url: str, ttl_s: float | None) -> Target:
        """The checked target of a registration.

        Raises:
            ProblemError: `invalid_request` or `forbidden`.
        """
        if ttl_s is not None and ttl_s > _LONGEST_TTL_S:
            raise invalid("ttl_s", f"at most {_LONGEST_TTL_S:g}")
        return await self._rules.check(url)

    async def take(
        self, caller: Caller, request: RegisterRequest, target: Target, *, probed: bool = False
    ) -> tuple[Registration, list[Check]]:
        """Probe an environment at a server, and add it to the catalog.

        Args:
            caller: The owner of the registration.
            request: The registration request.
            target: The checked target.
            probed: Whether it was probed before, so that only its description is requested.

        Raises:
            ProblemError: It cannot be registered.
        """
        self._refuse_local(request.env_id)
        with self._place(caller, request, target):
            return await self._take(caller, request, target, probed=probed)

    @contextmanager
    def _place(self, caller: Caller, request: RegisterRequest, target: Target) -> Iterator[None]:
        """Count a registration that is being looked at with those that its token has; one that is renewed counts once.

        Raises:
            ProblemError: `at_capacity`.
        """
        place = (request.env_id, target.url, request.upstream_env_id or request.env_id)
        held = {each.place for each in self._registry if each.owner == caller.name}
        limit = caller.quota.max_registrations or self._settings.max_registrations_per_token
        if place not in held and len(held) + self._looking_at[caller.name] >= limit:
            raise ProblemError(
                "at_capacity",
                f"this token has its {limit} registrations",
                retry_after=_FULL_RETRY_S,
                limit="max_registrations_per_token",
            )
        self._looking_at[caller.name] += 1
        try:
            yield
        finally:
            self._looking_at[caller.name] -= 1

    async def _take(
        self, caller: Caller, request: RegisterRequest, target: Target, *, probed: bool
    ) -> tuple[Registration, list[Check]]:
        spoken = await self._protocols.find(request.protocol)
        endpoint = Endpoint(target, request, caller.name, self._limits, self._nodes)
        upstream = spoken.upstream.connect(endpoint)
        node = upstream.node
        try:
            if node is not None:
                await self._lineage.refuse_circle(node)
            spec, report = await probe(upstream, spec_only=probed)
            # Others may have registered during the probe.
            self._refuse_local(request.env_id)
            self._registry.check_spec(request.env_id, spec, passed_on=node is not None)
            registration = self._registry.add(
                Registration(
                    env_id=request.env_id,
                    owner=caller.name,
                    protocol=request.protocol,
                    target=target,
                    upstream_env_id=endpoint.env_id,
                    description=request.description or spec.description,
                    spec=spec,
                    upstream=upstream,
                    weight=request.weight,
                    ttl_s=request.ttl_s or DEFAULT_TTL_S,
                    relay=node,
                    has_other_gateways=request.gateways > 1,
                )
            )
            if node is not None:
                node.is_there()
                self._compare_limits(node)
        except BaseException:
            await upstream.shutdown()
            raise
        if node is not None:
            try:
                # Two gateways that look at each other at one time find nothing before they have taken each other in.
                await self._lineage.refuse_circle(node)
            except ProblemError:
                self._registry.remove(registration, "refused")
                raise
        return registration, report

    def _compare_limits(self, node: Node) -> None:
        """Log, once for each node, that its size limit for restored episodes differs from this gateway's."""
        theirs, ours = node.largest_restore, self._settings.max_restore_bytes
        if theirs != ours and not node.was_compared:
            _log.warning(
                "%s restores episodes of %d bytes at most, and this gateway passes on %d: set the same "
                "max_episode_bytes on both, or long sessions cannot go on elsewhere",
                *(node.target.url, theirs, ours),
            )
        node.was_compared = True

    async def heartbeat(self, context: Context, fields: Mapping[str, Any]) -> Reply:
        """Note that a registered server is there."""
        registration = self._named(context, fields)
        request = requested(HeartbeatRequest, fields, "registration_id")
        self._registry.heartbeat(registration, request.load)
        if registration.relay is not None:
            registration.relay.is_there()
        return self._registry.lifetime(registration)

    async def unregister(self, context: Context, fields: Mapping[str, Any]) -> Reply:
        """End a registration at its owner's request."""
        registration = self._named(context, fields)
        refuse_fields(fields, "registration_id")
        self._registry.remove(registration)
        return {}

    def _named(self, context: Context, fields: Mapping[str, Any]) -> Registration:
        owner = None if context.caller.is_admin else context.caller.name
        return self._registry.get(fields["registration_id"], owner)

    def _refuse_local(self, env_id: str) -> None:
        entry = self._catalog.find(env_id)
        if entry is not None and entry.replicas is None:
            raise ProblemError("env_exists", f"{env_id} is an environment of this server: use another env_id")


def catalog_entry(registration: Registration, registry: Registry, settings: ServerSettings) -> CatalogEntry:
    """The catalog's entry for an environment of registered servers."""
    env_id, spec = registration.env_id, registration.spec
    metadata = {
        **spec.metadata,
        "version": spec.version,
        "description": registration.description,
        "kind": "stateless" if spec.stateless else "episodic",
        "forkable": spec.forkable,
        "protocol": registration.protocol,
    }
    return CatalogEntry(
        env_id=env_id,
        source=EnvSource(kind="registered", target=env_id),
        isolation="process",
        rules=KwargsRules(env_id, spec.kwargs_schema, frozenset(), trusted=False),
        step_timeout_s=settings.env_step_timeout_s.get(env_id, settings.step_timeout_s),
        metadata=metadata,
        max_episode_steps=spec.max_episode_steps,
        deterministic=spec.deterministic,
        replicas=lambda: registry.replicas(env_id),
        relayed=registration.relay is not None,
        action_space=spec.action_space,
        observation_space=spec.observation_space,
    )


class Announcements:
    """Registers many environments of one server at once, each by itself: a failure of one does not affect the others.

    Args:
        registering: Takes one environment.
        registry: The registrations.
    """

    def __init__(self, registering: Registering, registry: Registry) -> None:
        self._registering = registering
        self._registry = registry
        self._probes: dict[_Key, asyncio.Task[Registration]] = {}

    async def announce(self, context: Context, fields: Mapping[str, Any]) -> Reply:
        """Register the new environments, and renew the other registrations."""
        request = requested(AnnounceRequest, fields)
        _refuse_twice(request.envs)
        target = await self._registering.check(request.url, request.ttl_s)
        caller = context.caller
        room = asyncio.Semaphore(_PROBES)
        found: list[Registration | _Key] = []
        for each in request.envs:
            registration = self._known(caller, each, target)
            if registration is None:
                found.append(self._probe(caller, request, each, target, room))
            else:
                self._registry.heartbeat(registration, request.load)
                found.append(registration)
        probes = {key: self._probes[key] for key in found if not isinstance(key, Registration)}
        if probes:
            await asyncio.wait(probes.values(), timeout=_ANSWER_WITHIN_S)
        return {
            "registrations": [
                self._registered(each) if isinstance(each, Registration) else self._answer(each, probes[each])
                for each in found
            ]
        }

    async def shutdown(self) -> None:
        """Cancel the probes that still run."""
        probes = list(self._probes.values())
        for each in probes:
            each.cancel()
        await asyncio.gather(*probes, return_exceptions=True)

    def _known(self, caller: Caller, each: AnnouncedEnvironment, target: Target) -> Registration | None:
        """The registration to renew; None, for a new probe, if the server has not been probed since it started."""
        return self._registry.at(_place(each, target), caller.name) if each.probed else None

    def _probe(
        self,
        caller: Caller,
        request: AnnounceRequest,
        each: AnnouncedEnvironment,
        target: Target,
        room: asyncio.Semaphore,
    ) -> _Key:
        """Start the probe of an environment, unless one from an earlier call still runs."""
        key = (caller.name, _place(each, target))
        if key not in self._probes:
            one = RegisterRequest(
                env_id=each.env_id,
                url=request.url,
                protocol=request.protocol,
                upstream_env_id=each.upstream_env_id,
                token=request.token,
                weight=request.weight,
                ttl_s=request.ttl_s,
                gateways=request.gateways,
            )
            loop = asyncio.get_running_loop()
            probing = loop.create_task(self._take(caller, one, target, room, probed=each.probed))
            self._probes[key] = probing
            probing.add_done_callback(lambda done: loop.call_later(_KEPT_S, self._forget, key, done))
        return key

    async def _take(
        self,
        caller: Caller,
        request: RegisterRequest,
        target: Target,
        room: asyncio.Semaphore,
        *,
        probed: bool,
    ) -> Registration:
        async with room:
            registration, _ = await self._registering.take(caller, request, target, probed=probed)
        return registration

    def _answer(self, key: _Key, probing: asyncio.Task[Registration]) -> Reply:
        """The result of a probe; a finished one is reported once."""
        env_id = key[1][0]
        if not probing.done():
            return {"env_id": env_id, "pending": True}
        self._probes.pop(key, None)
        if probing.cancelled():
            problem = ProblemError("draining", "the gateway is going away", retry_after=1)
            return {"env_id": env_id, "error": problem.to_problem()}
        error = probing.exception()
        if error is None:
            return self._registered(probing.result())
        if not isinstance(error, Exception):
            raise error
        return {"env_id": env_id, "error": as_problem(error).to_problem()}

    def _registered(self, registration: Registration) -> Reply:
        return {
            "env_id": registration.env_id,
            "registration_id": registration.registration_id,
            **self._registry.lifetime(registration),
        }

    def _forget(self, key: _Key, probing: asyncio.Task[Registration]) -> None:
        if self._probes.get(key) is probing:
            del self._probes[key]
            if not probing.cancelled():
                # No caller asked for its result.
                probing.exception()


def _refuse_misfit(request: RegisterRequest, protocol: UpstreamProtocol) -> None:
    """Refuse what the protocol of a registration has no use for."""
    named = request.upstream_env_id
    if named is not None and not protocol.free_ids and re.fullmatch(IDENTIFIER, named) is None:
        free = " and ".join(each.name for each in OURS if each.free_ids)
        raise invalid("upstream_env_id", f"it must match {IDENTIFIER}; names of the protocol {free} need not")
    for name in OPTIONAL_FIELDS:
        if getattr(request, name) is not None and name not in protocol.reads:
            readers = " and ".join(each.name for each in OURS if name in each.reads)
            raise invalid(name, f"only registrations of the protocol {readers} have it")


def _place(each: AnnouncedEnvironment, target: Target) -> tuple[str, str, str]:
    return each.env_id, target.url, each.upstream_env_id or each.env_id


def _refuse_twice(envs: list[AnnouncedEnvironment]) -> None:
    seen: set[str] = set()
    for number, each in enumerate(envs):
        if each.env_id in seen:
            raise invalid(f"envs.{number}.env_id", "it is named twice")
        seen.add(each.env_id)
