"""The protocol `http`: the smallest contract, for servers in any language.

`POST {url}/reset {session_id, seed, options, kwargs} -> {observation, info}`,
`POST {url}/step {session_id, action} -> {observation, reward, terminated, truncated, info}`,
`POST {url}/close {session_id}`; optional `GET {url}/spec -> EnvInfo fields`; with `kind: "stateless"`,
`POST {url}/verify {items} -> {results}`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from gymnasium import Space

from rollgym.clients.protocol.arrays import DecodeError
from rollgym.clients.protocol.upstream_protocols import HTTP
from rollgym.clients.protocol.values import decode_value, encode_value
from rollgym.env_server.gateway.upstream.base import (
    LATER,
    Endpoint,
    EnvironmentSpec,
    SessionUnknownError,
    Upstream,
    UpstreamError,
    read_info,
    read_number,
    read_spec,
)
from rollgym.env_server.gateway.upstream.http_client import TargetClient, detail_of
from rollgym.env_server.gateway.upstream.targets import Target, TargetLimits
from rollgym.env_server.workers.base import EnvironmentRaised, Spaces, StepOutcome, Verdict

_SPEC_TIMEOUT_S = 20.0
_CLOSE_TIMEOUT_S = 10.0
_NO_SUCH_CALL = frozenset({404, 405, 501})
_NO_SUCH_SESSION = frozenset({404, 410})


class HttpUpstream(Upstream):
    """An environment behind three HTTP calls.

    Args:
        target: Its address.
        token: Bearer token.
        limits: The largest reply, and the number of connections.
    """

    protocol = HTTP.name
    keeps_sessions = True

    def __init__(self, target: Target, token: str | None, limits: TargetLimits) -> None:
        self._client = TargetClient(target, token, limits)
        self._spec = EnvironmentSpec()
        self._kwargs: dict[str, Mapping[str, Any]] = {}

    @classmethod
    def connect(cls, endpoint: Endpoint) -> Self:
        """Make the client of a server for one environment."""
        return cls(endpoint.target, endpoint.token, endpoint.limits)

    async def spec(self) -> EnvironmentSpec:
        """The answer of `GET /spec`; a server without it has text in and text out."""
        status, reply = await self._client.call("GET", "/spec", timeout=_SPEC_TIMEOUT_S)
        if status not in _NO_SUCH_CALL:
            self._spec = read_spec(_answer("GET /spec", status, reply))
        return self._spec

    async def acquaint(self) -> str:
        """Whether the server keeps connections, and answers on several at a time."""
        return await self._client.acquaint("/spec")

    async def make(self, key: str, kwargs: Mapping[str, Any], *, timeout: float | None) -> Spaces:
        """Note the kwargs: they go with each reset."""
        self._kwargs[key] = dict(kwargs)
        return self._spec.action_space, self._spec.observation_space

    async def reset(
        self, key: str, seed: int | None, options: dict[str, Any] | None, *, timeout: float | None
    ) -> tuple[Any, Mapping[str, Any]]:
        """Begin an episode in the server's session."""
        kwargs = self._kwargs.get(key, {})
        body = {
            "session_id": key,
            "seed": seed,
            "options": encode_value(None, options, binary=False),
            "kwargs": encode_value(None, kwargs, binary=False),
        }
        try:
            reply = await self._post("/reset", body, timeout)
        finally:
            # The session may have been ended in the meantime, and begun after that: then it is ended once more.
            self._kwargs[key] = kwargs
        return _observation(self._spec.observation_space, reply), read_info(reply)

    async def step(self, key: str, action: Any, *, timeout: float | None) -> StepOutcome:
        """Take a step in the server's session."""
        encoded = encode_value(self._spec.action_space, action, binary=False)
        status, reply = await self._client.call(
            "POST", "/step", {"session_id": key, "action": encoded}, timeout=timeout
        )
        if status in _NO_SUCH_SESSION:
            raise SessionUnknownError(f"POST /step answered {status}: {detail_of(reply)}")
        reply = _answer("POST /step", status, reply)
        observation = _observation(self._spec.observation_space, reply)
        return read_outcome(observation, read_info(reply), reply)

    async def verify(self, items: Sequence[Mapping[str, Any]], *, timeout: float | None) -> list[Verdict]:
        """Score responses at the server."""
        body = {"items": [encode_value(None, item, binary=False) for item in items]}
        return read_verdicts((await self._post("/verify", body, timeout)).get("results"), len(items))

    async def close(self, key: str) -> None:
        """End a session at the server."""
        if self._kwargs.pop(key, None) is not None:
            status, reply = await self._client.call(
                "POST", "/close", {"session_id": key}, timeout=_CLOSE_TIMEOUT_S
            )
            if status not in _NO_SUCH_CALL:
                _answer("POST /close", status, reply, empty=True)

    async def shutdown(self) -> None:
        """Close all connections to the server."""
        await self._client.close()

    async def _post(self, path: str, body: Any, timeout: float | None) -> dict[str, Any]:
        status, reply = await self._client.call("POST", path, body, timeout=timeout)
        return _answer(f"POST {path}", status, reply)


def _answer(call: str, status: int, reply: Any, *, empty: bool = False) -> dict[str, Any]:
    if not 200 <= status < 300:
        if isinstance(reply, dict) and reply.get("code") == "env_error":
            raise EnvironmentRaised(str(reply.get("error_class", "Error")), detail_of(reply))
        raise UpstreamError(f"{call} answered {status}: {detail_of(reply)}", unsent=status in LATER)
    if isinstance(reply, dict):
        return reply
    if empty and reply is None:
        return {}
    raise UpstreamError(f"{call} answered with {type(reply).__name__}, not with an object")


def _observation(space: Space[Any], reply: Mapping[str, Any]) -> Any:
    if "observation" not in reply:
        raise UpstreamError("there is no observation in the reply")
    try:
        observation = decode_value(space, reply["observation"])
    except DecodeError as error:
        raise UpstreamError(f"the observation does not fit its space: {error}") from error
    return observation


def read_outcome(observation: Any, info: Mapping[str, Any], reply: Mapping[str, Any]) -> StepOutcome:
    """Build the outcome of a step from a reply whose observation and info were parsed.

    Raises:
        UpstreamError: The reward is not a finite number, or a flag is not a boolean.
    """
    terminated, truncated = reply.get("terminated"), reply.get("truncated")
    if type(terminated) is not bool or type(truncated) is not bool:
        raise UpstreamError("terminated and truncated of a step are not both booleans")
    return StepOutcome(observation, read_number("reward", reply), terminated, truncated, info)


def read_verdicts(results: Any, count: int) -> list[Verdict]:
    """The scores of items.

    Raises:
        UpstreamError: There is not one for each item.
    """
    if not isinstance(results, list) or len(results) != count:
        raise UpstreamError(f"verify of {count} items did not answer with as many results")
    return [_verdict(result) for result in results]


def _verdict(result: Any) -> Verdict:
    if not isinstance(result, dict):
        raise UpstreamError("a result of verify is not an object")
    return {
        "score": read_number("score", result),
        "outcome": str(result.get("outcome", "")),
        "detail": result.get("detail"),
    }
