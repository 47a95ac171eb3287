"""The protocol `gem`: GEM over HTTP, as ROCK's admin serves it under `/apis/v1/envs/gem`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.upstream_protocols import GEM
from rollgym.env_server.gateway.upstream.base import (
    LATER,
    Endpoint,
    EnvironmentSpec,
    SessionUnknownError,
    Upstream,
    UpstreamError,
    as_text,
    read_foreign_info,
)
from rollgym.env_server.gateway.upstream.http import read_outcome
from rollgym.env_server.gateway.upstream.http_client import TargetClient, detail_of
from rollgym.env_server.gateway.upstream.targets import Target, TargetLimits
from rollgym.env_server.workers.base import EnvironmentRaised, Spaces, StepOutcome

PREFIX = "/apis/v1/envs/gem"

_CLOSE_TIMEOUT_S = 30.0
_FULL_RETRY_S = 5
# GEM seeds NumPy's global generator, which takes no larger ones.
_SEEDS = 2**32
_NO_SUCH_SANDBOX = frozenset({404, 410})


@dataclass(slots=True)
class _Sandbox:
    """A session there; one that has failed is not used for another episode."""

    sandbox_id: str
    failed: bool = False


class GemUpstream(Upstream):
    """An environment behind GEM's calls: text in, text out. Other values are sent as JSON text.

    Args:
        target: Its address: the base URL of ROCK's admin, with or without the prefix of the calls.
        env_id: The environment's id at the server.
        token: Bearer token.
        limits: The largest reply, and the number of connections.
    """

    protocol = GEM.name
    keeps_sessions = True

    def __init__(self, target: Target, env_id: str, token: str | None, limits: TargetLimits) -> None:
        self._env_id = env_id
        self._prefix = "" if target.url.endswith(PREFIX) else PREFIX
        self._client = TargetClient(target, token, limits)
        self._spec = EnvironmentSpec()
        self._sandboxes: dict[str, _Sandbox] = {}

    @classmethod
    def connect(cls, endpoint: Endpoint) -> Self:
        """Make the client of a server for one environment."""
        return cls(endpoint.target, endpoint.env_id, endpoint.token, endpoint.limits)

    async def spec(self) -> EnvironmentSpec:
        """GEM says nothing of an environment before it is made."""
        return self._spec

    async def make(self, key: str, kwargs: Mapping[str, Any], *, timeout: float | None) -> Spaces:
        """Make an environment; GEM takes no kwargs.

        Raises:
            ProblemError: `at_capacity`, if the server says that it is full.
        """
        self._sandboxes[key] = await self._make(timeout)
        return self._spec.action_space, self._spec.observation_space

    async def reset(
        self, key: str, seed: int | None, options: dict[str, Any] | None, *, timeout: float | None
    ) -> tuple[Any, Mapping[str, Any]]:
        """Begin an episode; GEM takes no options."""
        sandbox = self._sandbox(key)
        if sandbox.failed:
            await self._close(sandbox)
            sandbox = self._sandboxes[key] = await self._make(timeout)
        body: dict[str, Any] = {"sandbox_id": sandbox.sandbox_id}
        if seed is not None:
            body["seed"] = seed % _SEEDS
        reply = await self._run(key, sandbox, "/reset", body, timeout)
        return _observation(reply), _info(reply)

    async def step(self, key: str, action: Any, *, timeout: float | None) -> StepOutcome:
        """Take a step in the server's session."""
        sandbox = self._sandbox(key)
        body = {"sandbox_id": sandbox.sandbox_id, "action": action}
        reply = await self._run(key, sandbox, "/step", body, timeout)
        return read_outcome(_observation(reply), _info(reply), reply)

    async def close(self, key: str) -> None:
        """End a session at the server."""
        sandbox = self._sandboxes.pop(key, None)
        if sandbox is not None:
            await self._close(sandbox)

    async def shutdown(self) -> None:
        """Close all connections to the server."""
        await self._client.close()

    def _sandbox(self, key: str) -> _Sandbox:
        sandbox = self._sandboxes.get(key)
        if sandbox is None:
            raise SessionUnknownError(f"there is no session for {key}")
        return sandbox

    async def _make(self, timeout: float | None) -> _Sandbox:
        status, reply = await self._client.call(
            "POST", f"{self._prefix}/make", {"env_id": self._env_id}, timeout=timeout
        )
        if status in LATER:
            raise ProblemError(
                "at_capacity",
                f"the server has no room: {detail_of(reply)}",
                retry_after=_FULL_RETRY_S,
                limit="upstream",
            )
        made = _answer("/make", status, reply).get("sandbox_id")
        if not isinstance(made, str) or not made:
            raise UpstreamError("make answered without a sandbox_id")
        return _Sandbox(made)

    async def _run(
        self, key: str, sandbox: _Sandbox, path: str, body: dict[str, Any], timeout: float | None
    ) -> dict[str, Any]:
        """Make a call that runs the environment. Any failure in it is a 500, and leaves an unknown state."""
        status, reply = await self._client.call("POST", self._prefix + path, body, timeout=timeout)
        if status == 500:
            sandbox.failed = True
            raise EnvironmentRaised("GemError", detail_of(reply))
        if status in _NO_SUCH_SANDBOX:
            self._sandboxes.pop(key, None)
            raise SessionUnknownError(f"{path} answered {status}: {detail_of(reply)}")
        return _answer(path, status, reply)

    async def _close(self, sandbox: _Sandbox, *, timeout: float = _CLOSE_TIMEOUT_S) -> None:
        body = {"sandbox_id": sandbox.sandbox_id}
        status, reply = await self._client.call("POST", f"{self._prefix}/close", body, timeout=timeout)
        if not sandbox.failed:
            _answer("/close", status, reply)


def _answer(path: str, status: int, reply: Any) -> dict[str, Any]:
    if status != 200:
        raise UpstreamError(f"{path} answered {status}: {detail_of(reply)}", unsent=status in LATER)
    if not isinstance(reply, dict):
        raise UpstreamError(f"{path} answered with {type(reply).__name__}, not with an object")
    if reply.get("status") == "Failed":
        # ROCK's answer to fields that it cannot read.
        raise UpstreamError(f"{path} is refused: {reply.get('message')}: {reply.get('error')}")
    return reply


def _observation(reply: Mapping[str, Any]) -> str:
    if "observation" not in reply:
        raise UpstreamError("there is no observation in the reply")
    return as_text(reply["observation"])


def _info(reply: Mapping[str, Any]) -> Mapping[str, Any]:
    info = reply.get("info")
    if info is not None and not isinstance(info, dict):
        raise UpstreamError("the info is not an object")
    return read_foreign_info(info or {})
