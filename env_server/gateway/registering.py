"""The handlers of register, heartbeat and unregister; they refuse a gateway behind itself."""

import asyncio
import logging
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.messages import IDENTIFIER, HeartbeatRequest, RegisterRequest
from rollgym.env_server.access.context import Context
from rollgym.env_server.access.tokens import Caller
from rollgym.env_server.catalog.catalog import Catalog
from rollgym.env_server.catalog.entry import CatalogEntry
from rollgym.env_server.catalog.kwargs_rules import KwargsRules
from rollgym.env_server.common.settings import Settings
from rollgym.env_server.gateway.registry import DEFAULT_TTL_S, Registration, Registry
from rollgym.env_server.gateway.upstream.base import Upstream
from rollgym.env_server.gateway.upstream.gem import GemUpstream
from rollgym.env_server.gateway.upstream.http import HttpUpstream
from rollgym.env_server.gateway.upstream.http_client import TargetLimits
from rollgym.env_server.gateway.upstream.node import Node, Nodes
from rollgym.env_server.gateway.upstream.openenv import OpenEnvUpstream
from rollgym.env_server.gateway.upstream.probe import Check, probe
from rollgym.env_server.gateway.upstream.rollgym import RollgymUpstream
from rollgym.env_server.gateway.upstream.targets import Target, TargetRules
from rollgym.env_server.messages.validation import invalid, refuse_fields, requested
from rollgym.env_server.sessions.replies import Reply
from rollgym.env_server.workers.base import EnvSource

_ID_BYTES = 8
_ANSWER_S = 5.0
_LONGEST_TTL_S = 3600.0
_FULL_RETRY_S = 5
_Connect = Callable[[RegisterRequest, Target], Upstream]

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
        self, settings: Settings, catalog: Catalog, registry: Registry, nodes: Nodes, lineage: Lineage
    ) -> None:
        self._lineage = lineage
        self._settings = settings
        self._nodes = nodes
        self._catalog = catalog
        self._registry = registry
        self._rules = TargetRules(settings.allow_network)
        self._limits = TargetLimits(settings.max_reply_bytes, settings.max_upstream_connections)
        self._looking_at: Counter[str] = Counter()
        self._connect: Mapping[Literal["http", "openenv", "gem"], _Connect] = {
            "http": self._connect_http,
            "openenv": self._connect_openenv,
            "gem": self._connect_gem,
        }

    async def register(self, context: Context, fields: Mapping[str, Any]) -> Reply:
        """Add an environment of another server."""
        request = requested(RegisterRequest, fields)
        named = request.upstream_env_id
        if named is not None and request.protocol != "gem" and re.fullmatch(IDENTIFIER, named) is None:
            raise invalid(
                "upstream_env_id", f"it must match {IDENTIFIER}; names of the protocol gem need not"
            )
        for name in ("action_field", "observation_field"):
            if getattr(request, name) is not None and request.protocol != "openenv":
                raise invalid(name, "only registrations of the protocol openenv have it")
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
        node: Node | None = None
        if request.protocol == "rollgym":
            node = self._nodes.take(target, request.token, caller.name)
            upstream: Upstream = RollgymUpstream(node, request.upstream_env_id or request.env_id)
        else:
            upstream = self._connect[request.protocol](request, target)
        try:
            if node is not None:
                await self._lineage.refuse_circle(node)
            spec, report = await probe(upstream, spec_only=probed)
            # Others may have registered during the probe.
            self._refuse_local(request.env_id)
            self._registry.check_spec(request.env_id, request.protocol, spec)
            registration = self._registry.add(
                Registration(
                    env_id=request.env_id,
                    owner=caller.name,
                    protocol=request.protocol,
                    target=target,
                    upstream_env_id=request.upstream_env_id or request.env_id,
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

    def _connect_http(self, request: RegisterRequest, target: Target) -> Upstream:
        return HttpUpstream(target, request.token, self._limits)

    def _connect_openenv(self, request: RegisterRequest, target: Target) -> Upstream:
        return OpenEnvUpstream(
            target,
            request.token,
            self._limits,
            action_field=request.action_field,
            observation_field=request.observation_field,
        )

    def _connect_gem(self, request: RegisterRequest, target: Target) -> Upstream:
        env_id = request.upstream_env_id or request.env_id
        return GemUpstream(target, env_id, request.token, self._limits)


def catalog_entry(registration: Registration, registry: Registry, settings: Settings) -> CatalogEntry:
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
        relayed=registration.protocol == "rollgym",
        action_space=spec.action_space,
        observation_space=spec.observation_space,
    )
