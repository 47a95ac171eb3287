"""Batches: many operations in one frame."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from time import perf_counter
from typing import Any

from rollgym.clients.protocol.arrays import EncodeError
from rollgym.clients.protocol.frames import dumps
from rollgym.env_server.access.context import Context
from rollgym.env_server.common.event_loop import SLICE_S, Pending, Slices
from rollgym.env_server.common.negotiation import too_large_reply
from rollgym.env_server.common.requests import FrameId, as_problem, invalid
from rollgym.env_server.operations.operations import SOCKET_OPS, Calls, unknown_op
from rollgym.env_server.sessions.replies import Reply

Results = list[dict[str, Any]]
_Link = tuple[int, Mapping[str, Any], "Reply | Awaitable[Reply] | None"]


def read_batch(frame: Mapping[str, Any], limit: int) -> list[Any]:
    """The operations of a batch.

    Raises:
        ProblemError: `invalid_request`.
    """
    ops = frame.get("ops")
    if type(ops) is not list:
        raise invalid("ops", "a batch needs a list of operations")
    if len(ops) > limit:
        raise invalid("ops", f"at most {limit}")
    if len(frame) != 3:
        name = next(name for name in frame if name not in ("id", "op", "ops"))
        raise invalid(name, "a batch has no such field")
    return ops


class _Waiting(Pending):
    """The results of a batch, some of which are still on their way."""

    __slots__ = ("_left", "_results")

    def __init__(self, results: Results) -> None:
        super().__init__()
        self._results = results
        # One more than there are, until all are known.
        self._left = 1

    def wait_for(self, position: int, pending: Pending) -> None:
        """Wait for one more result."""
        self._left += 1
        pending.listen(self._take, position)

    def _take(self, position: int, answer: Any) -> None:
        if type(answer) is dict:
            self._results[position] = {"ok": answer}
        else:
            self._results[position] = {"error": answer.to_problem()}
        self._one_less()

    def begin(self) -> "_Waiting":
        """Wait for no more results than those that are waited for now."""
        self._one_less()
        return self

    def _one_less(self) -> None:
        self._left -= 1
        if not self._left:
            self.answer(self._results)


class Unfinished:
    """A batch that takes so long to begin that other clients get a turn before the rest of it.

    Later frames of its socket wait until all of it has begun: operations of one session run in order.
    """

    def __init__(self, batch: "_Batch") -> None:
        self._batch = batch

    async def begin(self) -> None:
        """Begin the other operations, in slices."""
        while not self._batch.is_begun:
            await asyncio.sleep(0)
            self._batch.begin()

    async def results(self) -> Results:
        """The results, once all is begun."""
        outcome = self._batch.outcome()
        return outcome if isinstance(outcome, list) else await outcome


def run_batch(
    operations: Calls, context: Context, ops: list[Any]
) -> Results | Pending | Awaitable[Results] | Unfinished:
    """Run the operations of a batch; each fails alone.

    Operations with an immediate answer run in order. Operations in workers run concurrently, but those on one session
    one after another. Operations for other servers are sent in order.
    """
    shared = operations.share_out(context, ops)
    if shared is not None:
        return shared
    batch = _Batch(operations, context, ops)
    batch.begin()
    return batch.outcome() if batch.is_begun else Unfinished(batch)


class _Chain:
    """Operations that run one after another, in the order of the batch, and the names of their sessions."""

    __slots__ = ("links", "names")

    def __init__(self, link: _Link, names: Iterable[str]) -> None:
        self.links = [link]
        self.names = list(names)

    def take_in(self, other: "_Chain") -> None:
        """Add the operations of another chain in their places, and its names."""
        self.links = sorted([*self.links, *other.links], key=_position)
        self.names += other.names


def _position(link: _Link) -> int:
    return link[0]


class _Batch:
    """A batch that is being run."""

    def __init__(self, operations: Calls, context: Context, ops: list[Any]) -> None:
        self._operations = operations
        self._context = context
        self._ops = ops
        self._results: Results = []
        self._waiting: _Waiting | None = None
        self._chains: dict[str, _Chain] = {}
        self._repeated: dict[str, int] | None = None

    @property
    def is_begun(self) -> bool:
        """Whether no operation is left to begin."""
        return len(self._results) == len(self._ops)

    def begin(self) -> None:
        """Begin operations, for no longer than a slice."""
        end = perf_counter() + SLICE_S
        call, context, results, chains = self._operations.call, self._context, self._results, self._chains
        for position in range(len(results), len(self._ops)):
            fields = self._ops[position]
            try:
                op = fields["op"]
                if op not in SOCKET_OPS:
                    raise unknown_op(op)
                chain = self._chain_of(fields) if chains else None
                reply = None if chain is not None else call(context, op, fields)
            except Exception as error:  # noqa: BLE001 - a defect of ours costs this operation, not the batch
                results.append(_failed(fields, error))
            else:
                if type(reply) is dict:
                    results.append({"ok": reply})
                elif chain is not None:
                    results.append({})
                    chain.links.append((position, fields, None))
                else:
                    results.append({})
                    self._wait_for(position, fields, reply)
            if perf_counter() >= end:
                return

    def _wait_for(self, position: int, fields: Mapping[str, Any], reply: Any) -> None:
        """Note an operation that is not answered at once."""
        if isinstance(reply, Pending) and not self._is_named_again(position, fields):
            if self._waiting is None:
                self._waiting = _Waiting(self._results)
            self._waiting.wait_for(position, reply)
            return
        chain = _Chain((position, fields, reply), _named(fields) or [f"#{position}"])
        self._chains.update(dict.fromkeys(chain.names, chain))

    def _is_named_again(self, position: int, fields: Mapping[str, Any]) -> bool:
        """Whether an operation that comes later is on the same session, and has to wait for this one."""
        if self._repeated is None:
            last: dict[str, list[int]] = {}
            for index, operation in enumerate(self._ops):
                for each in _named(operation):
                    last.setdefault(each, []).append(index)
            self._repeated = {each: indices[-1] for each, indices in last.items() if len(indices) > 1}
        repeated = self._repeated
        return bool(repeated) and any(repeated.get(each, position) > position for each in _named(fields))

    def _chain_of(self, fields: Mapping[str, Any]) -> _Chain | None:
        """The operations that an operation has to wait for: those on the same session, or on any of its sessions."""
        chains, session_id = self._chains, fields.get("session_id")
        if type(session_id) is str:
            return chains.get(session_id)
        named = _named(fields)
        # Each once, however many of the names are its own.
        found = {id(chains[each]): chains[each] for each in named if each in chains}
        if not found:
            return None
        # It waits for the operations on all of its sessions, and later ones on any of these wait for it.
        first, *others = sorted(found.values(), key=lambda chain: len(chain.names), reverse=True)
        for other in others:
            first.take_in(other)
            chains.update(dict.fromkeys(other.names, first))
        new = [each for each in dict.fromkeys(named) if each not in chains]
        first.names += new
        chains.update(dict.fromkeys(new, first))
        return first

    def outcome(self) -> Results | Pending | Awaitable[Results]:
        """The results, or an awaitable of them."""
        if self._chains:
            return self._finish()
        return self._results if self._waiting is None else self._waiting.begin()

    async def _finish(self) -> Results:
        slices = Slices()
        chains = {id(chain): chain for chain in self._chains.values()}
        await asyncio.gather(*(self._follow(chain, slices) for chain in chains.values()))
        if self._waiting is not None:
            await self._waiting.begin()
        return self._results

    async def _follow(self, chain: _Chain, slices: Slices) -> None:
        """Run the operations on one session one after another."""
        for position, fields, reply in chain.links:
            try:
                if reply is None:
                    await slices.turn()
                    reply = self._operations.call(self._context, fields["op"], fields)
                self._results[position] = {"ok": reply if isinstance(reply, dict) else await reply}
            except Exception as error:  # noqa: BLE001 - a defect of ours costs this operation, not the batch
                self._results[position] = _failed(fields, error)


def _named(fields: Any) -> list[str]:
    """The sessions that an operation is on."""
    if not isinstance(fields, dict):
        return []
    session_id, session_ids = fields.get("session_id"), fields.get("session_ids")
    named = [session_id] if session_id is not None or not isinstance(session_ids, list) else session_ids
    return [each for each in named if type(each) is str]


def _failed(fields: Any, error: Exception) -> dict[str, Any]:
    if isinstance(error, KeyError | TypeError) and not (
        isinstance(fields, dict) and type(fields.get("op")) is str
    ):
        error = invalid("op", "an operation of a batch is an object with an op, as text")
    return {"error": as_problem(error).to_problem()}


def encode_results(
    number: FrameId, results: Results, limit: int, *, binary: bool, take_back: Callable[[Reply], int]
) -> bytes:
    """The answer to a batch; operations whose replies do not fit, or cannot be sent, are answered by a problem.

    Args:
        number: The id of the frame.
        results: The results.
        limit: Bytes that the answer may have.
        binary: Whether it is MessagePack.
        take_back: Closes the sessions that a reply which cannot be sent has opened, and counts them.
    """
    with contextlib.suppress(EncodeError):
        content = dumps({"id": number, "results": results}, binary=binary)
        if len(content) <= limit:
            return content
    room = limit
    fitting = []
    for result in results:
        try:
            size = _size(result, binary)
        except EncodeError as error:
            if "ok" in result:
                take_back(result["ok"])
            result = {"error": as_problem(error).to_problem()}
            size = _size(result, binary)
        if size > room:
            closed = take_back(result["ok"]) if "ok" in result else 0
            result = {"error": too_large_reply(size, limit, closed).to_problem()}
            size = _size(result, binary)
        room -= size
        fitting.append(result)
    return dumps({"id": number, "results": fitting}, binary=binary)


def _size(result: dict[str, Any], binary: bool) -> int:
    """The bytes of a result in an answer, with the separator to the next.

    Raises:
        EncodeError: It has no form there.
    """
    brackets, parting = (2, 1) if binary else (4, 1)
    return len(dumps([[result]], binary=binary)) - brackets + parting
