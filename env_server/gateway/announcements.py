"""The handler of announce: a server lists its environments in one call, which is its heartbeat, too."""

import asyncio
from collections.abc import Mapping
from typing import Any

from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.messages import AnnouncedEnvironment, AnnounceRequest, RegisterRequest
from rollgym.env_server.access.context import Context
from rollgym.env_server.access.tokens import Caller
from rollgym.env_server.gateway.registering import Registering
from rollgym.env_server.gateway.registry import Registration, Registry
from rollgym.env_server.gateway.upstream.targets import Target
from rollgym.env_server.messages.envelope import as_problem
from rollgym.env_server.messages.validation import invalid, requested
from rollgym.env_server.sessions.replies import Reply

# A probe unfinished by then is answered as pending; the server repeats its announcement, with heartbeats for the
# others.
_ANSWER_WITHIN_S = 10.0
# Probes of one call at a time: they run environments of the server that has just been started.
_PROBES = 4
# How long the result of a probe is kept, for a server that did not wait for it.
_KEPT_S = 60.0

_Key = tuple[str, tuple[str, str, str]]


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
        for probe in probes:
            probe.cancel()
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
            probe = loop.create_task(self._take(caller, one, target, room, probed=each.probed))
            self._probes[key] = probe
            probe.add_done_callback(lambda done: loop.call_later(_KEPT_S, self._forget, key, done))
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

    def _answer(self, key: _Key, probe: asyncio.Task[Registration]) -> Reply:
        """The result of a probe; a finished probe is reported once."""
        env_id = key[1][0]
        if not probe.done():
            return {"env_id": env_id, "pending": True}
        self._probes.pop(key, None)
        if probe.cancelled():
            problem = ProblemError("draining", "the gateway is going away", retry_after=1)
            return {"env_id": env_id, "error": problem.to_problem()}
        error = probe.exception()
        if error is None:
            return self._registered(probe.result())
        if not isinstance(error, Exception):
            raise error
        return {"env_id": env_id, "error": as_problem(error).to_problem()}

    def _registered(self, registration: Registration) -> Reply:
        return {
            "env_id": registration.env_id,
            "registration_id": registration.registration_id,
            **self._registry.lifetime(registration),
        }

    def _forget(self, key: _Key, probe: asyncio.Task[Registration]) -> None:
        if self._probes.get(key) is probe:
            del self._probes[key]
            if not probe.cancelled():
                # No caller asked for its result.
                probe.exception()


def _place(each: AnnouncedEnvironment, target: Target) -> tuple[str, str, str]:
    return each.env_id, target.url, each.upstream_env_id or each.env_id


def _refuse_twice(envs: list[AnnouncedEnvironment]) -> None:
    seen: set[str] = set()
    for number, each in enumerate(envs):
        if each.env_id in seen:
            raise invalid(f"envs.{number}.env_id", "it is named twice")
        seen.add(each.env_id)
