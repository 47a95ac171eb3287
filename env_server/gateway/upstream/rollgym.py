"""The protocol `rollgym`: any Rollgym server, including other gateways."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from gymnasium import Space

from rollgym.clients.net.caller import ServerCalls
from rollgym.clients.protocol.arrays import DecodeError
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.spaces import parse_space
from rollgym.clients.protocol.upstream_protocols import ROLLGYM
from rollgym.clients.protocol.values import decode_value, encode_value
from rollgym.env_server.common.logs import CURRENT_TRACE
from rollgym.env_server.gateway.upstream.base import (
    Endpoint,
    EnvironmentSpec,
    Upstream,
    UpstreamError,
    read_spec,
)
from rollgym.env_server.gateway.upstream.http import read_outcome, read_verdicts
from rollgym.env_server.gateway.upstream.node import Node
from rollgym.env_server.workers.base import EnvironmentRaised, OperationTimeout, Spaces, StepOutcome, Verdict

_PATIENCE_S = 60.0
# The server's own time-out comes first, with a better message.
_GRACE_S = 5.0
# The client gets a node's `overloaded`, since a queue here would only be another one; and its `too_large`, since the
# client can split its request.
_PASSED_ON = frozenset({"overloaded", "too_large"})


@dataclass(slots=True)
class _Session:
    """A session at the node.

    Attributes:
        session_id: Its id there.
        process: The server's I/O process that owns it.
        action_space: Its action space.
        observation_space: Its observation space.
        episode: The index of its episode there.
        step: The index of the next step.
    """

    session_id: str
    process: int
    action_space: Space[Any]
    observation_space: Space[Any]
    episode: int = -1
    step: int = 0


class RollgymUpstream(Upstream):
    """An environment of another Rollgym server, over one WebSocket to each of its I/O processes.

    Steps name their index and everything else has a request id, so operations that a broken connection may have lost
    are retried.

    The probe and verifiers use it; sessions are passed on by the relay.

    Args:
        node: The server.
        env_id: The environment's id at the server.
    """

    protocol = ROLLGYM.name

    def __init__(self, node: Node, env_id: str) -> None:
        self._env_id = env_id
        self.node: Node = node
        self._sessions: dict[str, _Session] = {}

    @classmethod
    def connect(cls, endpoint: Endpoint) -> Self:
        """Make the client of a server for one environment, over the connections of the server's other ones."""
        node = endpoint.nodes.take(endpoint.target, endpoint.token, endpoint.owner)
        return cls(node, endpoint.env_id)

    async def spec(self) -> EnvironmentSpec:
        """The spec from the server's catalog."""
        reply, _ = await self._call({"op": "envs", "env_id": self._env_id}, None, _PATIENCE_S)
        return read_spec(reply)

    async def make(self, key: str, kwargs: Mapping[str, Any], *, timeout: float | None) -> Spaces:
        """Make a session on one of the server's processes, each in its turn."""
        fields = {
            "op": "make",
            "env_id": self._env_id,
            "kwargs": encode_value(None, dict(kwargs), binary=True),
            "request_id": self._caller.new_request_id(),
        }
        try:
            process: int | None = await self._caller.pool.next_process()
        except (ConnectionError, ProblemError) as error:
            raise UpstreamError(str(error)) from error
        reply, process = await self._call(fields, process, timeout)
        try:
            spaces = parse_space(reply["action_space"]), parse_space(reply["observation_space"])
            self._sessions[key] = _Session(str(reply["session_id"]), process, *spaces)
        except (DecodeError, KeyError, TypeError) as error:
            raise UpstreamError(f"the answer to make cannot be read: {error}") from error
        return spaces

    async def reset(
        self, key: str, seed: int | None, options: dict[str, Any] | None, *, timeout: float | None
    ) -> tuple[Any, Mapping[str, Any]]:
        """Begin an episode in the node's session."""
        session = self._session(key)
        fields = {
            "op": "reset",
            "session_id": session.session_id,
            "seed": seed,
            "options": encode_value(None, options, binary=True),
            "request_id": self._caller.new_request_id(),
        }
        reply, _ = await self._call(fields, session.process, timeout)
        session.episode, session.step = _integer("episode", reply), 0
        return self._decoded(session, reply)

    async def step(self, key: str, action: Any, *, timeout: float | None) -> StepOutcome:
        """Take a step in the node's session."""
        session = self._session(key)
        fields = {
            "op": "step",
            "session_id": session.session_id,
            "action": encode_value(session.action_space, action, binary=True),
            "episode": session.episode,
            "step": session.step,
        }
        if timeout is not None:
            fields["timeout_s"] = timeout
        reply, _ = await self._call(fields, session.process, timeout)
        session.step = _integer("step", reply)
        observation, info = self._decoded(session, reply)
        return read_outcome(observation, info, reply)

    async def render(self, key: str, mode: str | None, *, timeout: float | None) -> Any:
        """Render the state of the node's session."""
        session = self._session(key)
        fields = {"op": "render", "session_id": session.session_id, "mode": mode}
        reply, _ = await self._call(fields, session.process, timeout)
        try:
            return decode_value(None, reply["frame"])
        except (DecodeError, KeyError) as error:
            raise UpstreamError(f"a drawing cannot be read: {error}") from error

    async def verify(self, items: Sequence[Mapping[str, Any]], *, timeout: float | None) -> list[Verdict]:
        """Score responses at the node."""
        fields: dict[str, Any] = {
            "op": "verify",
            "env_id": self._env_id,
            "items": [encode_value(None, item, binary=True) for item in items],
        }
        if timeout is not None:
            fields["timeout_s"] = timeout
        reply, _ = await self._call(fields, None, None if timeout is None else timeout * max(1, len(items)))
        return read_verdicts(reply.get("results"), len(items))

    async def close(self, key: str) -> None:
        """End a session at the node."""
        session = self._sessions.pop(key, None)
        if session is not None:
            fields = {"op": "close", "session_ids": [session.session_id]}
            await self._call(fields, session.process, _GRACE_S)

    async def shutdown(self) -> None:
        """Need the connections no more."""
        await self.node.release()

    @property
    def _caller(self) -> ServerCalls:
        return self.node.link(True).caller

    def _session(self, key: str) -> _Session:
        session = self._sessions.get(key)
        if session is None:
            raise UpstreamError(f"there is no session for {key}")
        return session

    @staticmethod
    def _decoded(session: _Session, reply: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        try:
            observation = decode_value(session.observation_space, reply["observation"])
            info = decode_value(None, reply["info"])
        except (DecodeError, KeyError) as error:
            raise UpstreamError(f"an answer cannot be read: {error}") from error
        if not isinstance(info, dict):
            raise UpstreamError("an answer's info is not an object")
        return observation, info

    async def _call(
        self, fields: dict[str, Any], process: int | None, timeout: float | None
    ) -> tuple[dict[str, Any], int]:
        patience = _PATIENCE_S if timeout is None else timeout + _GRACE_S
        deadline = asyncio.get_running_loop().time() + patience
        if (traceparent := CURRENT_TRACE.get()) is not None:
            fields["traceparent"] = traceparent
        try:
            passed_on = _PASSED_ON if fields["op"] == "verify" else ()
            reply = await self._caller.call(fields, process, deadline, passed_on=passed_on)
        except ProblemError as problem:
            if problem.code in passed_on:
                raise
            if problem.code == "step_timeout":
                raise OperationTimeout(problem.detail) from problem
            if _is_of_the_environment(problem):
                message = str(problem.extra.get("message", problem.detail))
                raise EnvironmentRaised(
                    str(problem.extra.get("error_class", problem.code)), message
                ) from problem
            raise UpstreamError(f"{fields['op']} is answered {problem}") from problem
        except TimeoutError as error:
            raise OperationTimeout(f"{fields['op']} was not answered in {patience:g} s") from error
        except ConnectionError as error:
            raise UpstreamError(str(error)) from error
        if not isinstance(reply.payload, dict):
            raise UpstreamError(f"{fields['op']} is answered with {type(reply.payload).__name__}")
        return reply.payload, reply.process


def _is_of_the_environment(problem: ProblemError) -> bool:
    """Whether the environment has refused its input or failed, while the node works."""
    # Some environments' experts are forbidden; a token without the role for them has registered nothing.
    return problem.kind.fault in ("values", "action", "environment") or problem.code == "forbidden"


def _integer(name: str, reply: Mapping[str, Any]) -> int:
    value = reply.get(name)
    if type(value) is not int:
        raise UpstreamError(f"an answer's {name} is not an integer")
    return value
