"""Placement of sessions at nodes: they are made there, spread by free capacity, and closed after failures."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.common.setting_sections import TimeoutSettings
from rollgym.env_server.gateway.registry import Registration, Registry, no_server
from rollgym.env_server.gateway.relocation import PATIENCE_S
from rollgym.env_server.gateway.upstream.node import Node
from rollgym.env_server.sessions.replies import Reply, opened_sessions
from rollgym.env_server.telemetry.metrics import Metrics

# How many full or unreachable nodes a session may try, one after another.
_ROUNDS = 4


class Made(NamedTuple):
    """A session at a node that has no name here yet, and the node's answer."""

    home: Registration
    upstream_id: str
    process: int
    reply: Reply


class Placement:
    """Opens sessions at nodes.

    Args:
        settings: Time-outs.
        registry: Chooses the node of the next session.
        metrics: Counts the nodes' times and failures.
    """

    def __init__(self, settings: TimeoutSettings, registry: Registry, metrics: Metrics) -> None:
        self._settings = settings
        self._registry = registry
        self._metrics = metrics
        self._taking_back: set[asyncio.Task[None]] = set()

    async def make(
        self, env_id: str, fields: dict[str, Any], count: int, binary: bool, made: list[Made]
    ) -> None:
        """Make sessions; a node that is full or away leaves its share to the others.

        Args:
            env_id: The environment.
            fields: The fields of the request, without the environment and the count.
            count: The number of sessions.
            binary: Whether values are encoded for MessagePack.
            made: Receives the sessions made, even if some fail.

        Raises:
            ProblemError: No node accepts them, or one refuses finally.
        """
        full: dict[Registration, Exception] = {}
        for _ in range(_ROUNDS):
            homes: Counter[Registration] = Counter()
            while len(made) + homes.total() < count:
                home = await self._registry.place(env_id, 0.0 if full or homes else PATIENCE_S, without=full)
                if home is None:
                    break
                homes[home] += 1
            if not homes:
                break
            shares = list(homes.items())
            results = await asyncio.gather(
                *(self._make_share(home, fields, number, binary) for home, number in shares),
                return_exceptions=True,
            )
            refusal: BaseException | None = None
            for (home, number), result in zip(shares, results, strict=True):
                if isinstance(result, BaseException):
                    for _ in range(number):
                        self._registry.released(home)
                    if not _leaves_it_to_others(result):
                        refusal = result
                    elif isinstance(result, Exception):
                        full[home] = result
                        if not isinstance(result, ProblemError):
                            self._registry.failed(home)
                else:
                    made.extend(result)
            if refusal is not None:
                raise _as_problem(refusal)
            if len(made) == count:
                return
        refused = next(iter(full.values()), None)
        if refused is None or isinstance(refused, ConnectionError):
            raise no_server(env_id)
        raise _as_problem(refused)

    async def _make_share(
        self, home: Registration, fields: dict[str, Any], count: int, binary: bool
    ) -> list[Made]:
        """Make sessions at one node, spread over its processes."""
        caller = home.node.link(binary).caller
        pool = caller.pool
        shares = Counter([await pool.next_process() for _ in range(count)])
        op = fields["op"]
        request = dict(fields)
        if op == "restore":
            request["episode"] = {**fields["episode"], "env_id": home.upstream_env_id}
        else:
            request["env_id"] = home.upstream_env_id
        frames = []
        for process, number in shares.items():
            for first in range(0, number, pool.max_batch):
                size = min(pool.max_batch, number - first)
                frame = {**request, "request_id": caller.new_request_id()}
                if op == "make":
                    frame["count"] = size
                frames.append((process, frame))
        asked = (self._ask(home, frame, binary, process) for process, frame in frames)
        results = await asyncio.gather(*asked, return_exceptions=True)
        made = []
        failed: BaseException | None = None
        for result in results:
            if isinstance(result, BaseException):
                failed = result
                continue
            reply, process = result
            try:
                for each in reply["sessions"] if op == "make" else [reply]:
                    made.append(Made(home, str(each["session_id"]), process, each))
            except (KeyError, TypeError) as error:
                failed = unreadable(op, error)
        if failed is None:
            return made
        for each in made:
            home.node.close_session(each.upstream_id)
        raise failed

    async def fork(
        self, home: Registration, process: int | None, fields: Mapping[str, Any], made: list[Made]
    ) -> None:
        """Copy a session of a node's process there; `made` takes the copies."""
        asked = {**fields, "request_id": home.node.link(False).caller.new_request_id()}
        reply, answered_by = await self._ask(home, asked, False, process)
        for upstream_id in reply["session_ids"]:
            self._registry.took(home)
            made.append(Made(home, str(upstream_id), answered_by, {}))

    async def episode(self, made: Made) -> Reply:
        """Request the portable episode of a session."""
        reply, _ = await self._ask(
            made.home, {"op": "episode", "session_id": made.upstream_id}, False, made.process
        )
        return reply

    def discard(self, made: Sequence[Made]) -> None:
        """Close the sessions of a call that failed."""
        for each in made:
            each.home.node.close_session(each.upstream_id)
            self._registry.released(each.home)

    def _take_back(self, node: Node, fields: Mapping[str, Any], binary: bool, process: int) -> None:
        """Close the sessions of a request whose answer was lost: the node names them when the request is repeated."""
        task = asyncio.get_running_loop().create_task(_end_opened(node, fields, binary, process))
        self._taking_back.add(task)
        task.add_done_callback(self._taking_back.discard)

    async def _ask(
        self, home: Registration, fields: Mapping[str, Any], binary: bool, process: int | None
    ) -> tuple[Reply, int]:
        caller = home.node.link(binary).caller
        deadline = caller.deadline(self._settings.make_timeout_s)
        began = time.perf_counter()
        try:
            connection = await caller.pool.connection(process)
            limit = caller.pool.request_limit(fields["op"])
            asked = connection.request(dict(fields), deadline, limit)
            try:
                reply = await asked
            except (ConnectionError, TimeoutError):
                if "request_id" in fields:
                    self._take_back(home.node, fields, binary, connection.process)
                raise
        except (ConnectionError, TimeoutError):
            self._metrics.upstream_errors[self._metrics.labels.of(home.env_id), home.protocol] += 1
            raise
        self._metrics.upstream_seconds[fields["op"], home.protocol].add(time.perf_counter() - began)
        if not isinstance(reply.payload, dict):
            raise ProblemError("upstream_error", f"{fields['op']} is not answered with an object")
        return reply.payload, reply.process


async def _end_opened(node: Node, fields: Mapping[str, Any], binary: bool, process: int) -> None:
    caller = node.link(binary).caller
    try:
        reply = await caller.call(dict(fields), process, caller.deadline())
        opened = [str(each) for each in opened_sessions(reply.payload)]
    except (ConnectionError, TimeoutError, ProblemError, KeyError, TypeError, AttributeError):
        # The node's idle time-out ends those sessions.
        return
    for upstream_id in opened:
        node.close_session(upstream_id)


def _leaves_it_to_others(error: BaseException) -> bool:
    """Whether another node may accept a request that one has refused."""
    if isinstance(error, ProblemError):
        return error.kind.retry_later or error.kind.fault == "caller"
    return isinstance(error, ConnectionError | TimeoutError)


def unreadable(op: str, error: Exception) -> ProblemError:
    """The problem that the answer of a node cannot be read."""
    return ProblemError("upstream_error", f"the answer to {op} cannot be read: {error!r}")


def _as_problem(error: BaseException) -> BaseException:
    # The gateway has the environment: a node that has registered it and does not know it is broken.
    if isinstance(error, ProblemError) and (error.kind.kept_from_clients or error.code == "unknown_env"):
        return ProblemError("upstream_error", f"the node answers {error}")
    if isinstance(error, ConnectionError | TimeoutError):
        return ProblemError("upstream_error", str(error) or "a node did not answer in time")
    return error
