"""Batches of steps: the most frequent message of a training loop, passed on without an object for each step.

This is for batches that hold nothing but steps, at most one for each session, of environments that answer at once. Any
other batch is passed on operation by operation.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.access.context import Context
from rollgym.env_server.common.event_loop import Pending
from rollgym.env_server.gateway.in_flight import InFlight
from rollgym.env_server.gateway.relay import Relay
from rollgym.env_server.gateway.relayed_session import UNREADABLE, RelayedSession
from rollgym.env_server.gateway.upstream.node import Node, NodeOperation
from rollgym.env_server.sessions.session import BaseSession

_Step = tuple[int, RelayedSession, dict[str, Any]]
"""Its index in the client's batch, its session, and the operation as the node is to get it."""


class BatchOfSteps(Pending):
    """The results of a batch of steps; each node has a share of them."""

    __slots__ = ("_left", "results")

    def __init__(self, size: int, shares: int) -> None:
        super().__init__()
        self.results: list[dict[str, Any]] = [{}] * size
        self._left = shares

    def take(self, position: int, answer: Any) -> None:
        """Handle the answer to a step that was retried alone."""
        self.results[position] = {"ok": answer} if type(answer) is dict else {"error": answer.to_problem()}
        self.complete()

    def wait_for_one_more(self) -> None:
        """Wait for a step that is retried alone."""
        self._left += 1

    def complete(self) -> None:
        """Note that a share is complete."""
        self._left -= 1
        if not self._left:
            self.answer(self.results)


class Share(NodeOperation):
    """The steps of a batch that go to one process of one node, as one frame.

    It is in `underway` until it is answered or given up; what its node says later is not heard.
    """

    __slots__ = ("_batch", "_began", "_binary", "_relay", "_steps", "_underway")

    def __init__(
        self,
        relay: Relay,
        batch: BatchOfSteps,
        steps: Sequence[_Step],
        process: int | None,
        binary: bool,
        underway: "set[Share]",
    ) -> None:
        super().__init__({"op": "batch", "ops": [fields for _, _, fields in steps]}, process, False)
        self._relay = relay
        self._batch = batch
        self._steps = steps
        self._binary = binary
        self._began = time.perf_counter()
        self._underway = underway
        underway.add(self)

    def answered(self, reply: Any) -> None:
        """Take the node's results down, and pass them on as they are."""
        if self not in self._underway:
            return
        if type(reply) is not list or len(reply) != len(self._steps):
            self.refused(ProblemError("upstream_error", "the answer to a batch cannot be read"))
            return
        batch, binary, relay = self._batch, self._binary, self._relay
        results = batch.results
        answered = 0
        for step, result in zip(self._steps, reply, strict=True):
            position, session, fields = step
            try:
                taken = result["ok"]
                session.take_step(fields, taken, binary)
                relay.count_step(session, taken)
            except UNREADABLE:
                self._refused_step(step, _problem(result))
                continue
            session.landed()
            results[position] = {"ok": taken}
            answered += 1
            if session.incomplete:
                relay.learn(session)
        relay.count_batch(answered, time.perf_counter() - self._began)
        self._complete()

    def refused(self, problem: ProblemError) -> None:
        """Look after each step by itself."""
        if self not in self._underway:
            return
        # It may be small enough by itself, and one of several may be the operation that could not be passed on.
        alone = problem.code == "too_large" or (problem.code == "invalid_request" and len(self._steps) > 1)
        for step in self._steps:
            if alone:
                self._again(step, self._send_alone)
            else:
                self._again(step, lambda operation: operation.refused(problem))
        self._complete()

    def lost(self, error: Exception, *, sent: bool) -> None:
        """Look for each session by itself."""
        if self not in self._underway:
            return
        for step in self._steps:
            self._again(step, lambda operation: operation.lost(error, sent=sent))
        self._complete()

    def give_up(self) -> None:
        """Answer the steps without their results."""
        for step in self._steps:
            self._again(step, self._relay.give_up)
        self._complete()

    def _complete(self) -> None:
        self._underway.discard(self)
        self._batch.complete()

    def _refused_step(self, step: _Step, problem: ProblemError) -> None:
        if problem.code == "too_large" and step[2].get("step") is not None:
            # Its answer may be small enough by itself. It was taken, so that it is asked for also if it is cancelled.
            link = step[1].node.link(self._binary)
            self._again(step, link.send)
        else:
            self._again(step, lambda operation: operation.refused(problem))

    def _send_alone(self, operation: InFlight) -> None:
        """Send a step that was not taken as part of the batch, unless it was cancelled in the meantime."""
        if operation.is_cancelled:
            self._relay.ask_again(operation, gone=False)
        else:
            operation.session.node.link(self._binary).send(operation)

    def _again(self, step: _Step, tell: Callable[[InFlight], None]) -> None:
        position, session, fields = step
        operation = InFlight(self._relay, session, "step", fields, self._binary)
        operation.shares_frames = False
        operation.is_cancelled = session.cancelled_at >= self._began
        self._batch.wait_for_one_more()
        operation.listen(self._batch.take, position)
        tell(operation)


def _problem(result: Any) -> ProblemError:
    problem = result.get("error") if type(result) is dict else None
    if type(problem) is dict:
        return ProblemError.from_problem(problem)
    return ProblemError("upstream_error", "the answer to a step cannot be read")


class StepShares:
    """Shares the steps of a batch out to the nodes that have the sessions.

    Args:
        relay: Handles failures.
        sessions: The sessions by their ids.
    """

    def __init__(self, relay: Relay, sessions: dict[str, BaseSession]) -> None:
        self._relay = relay
        self._by_id = sessions
        self._underway: set[Share] = set()
        self._time = asyncio.get_running_loop().time

    def share_out(self, context: Context, ops: Sequence[Any]) -> BatchOfSteps | None:
        """Pass a batch of steps on; None if it is not one that can be."""
        sessions = None if self._relay.is_going else self._sessions(context, ops)
        if sessions is None:
            return None
        now, socket, binary = self._time(), context.socket, context.binary
        steps: dict[tuple[Node, int | None], list[_Step]] = {}
        for position, session in enumerate(sessions):
            session.last_used = now
            if socket is not None and socket not in session.sockets:
                session.use_from(socket)
                context.sessions.add(session.session_id)
            fields = ops[position]
            fields["session_id"] = session.upstream_id
            session.in_flight += 1
            place = session.node, session.process
            share = steps.get(place)
            if share is None:
                share = steps[place] = []
            share.append((position, session, fields))
        batch = BatchOfSteps(len(sessions), len(steps))
        for (node, process), share in steps.items():
            node.link(binary).send(Share(self._relay, batch, share, process, binary, self._underway))
        return batch

    def give_up(self) -> None:
        """Answer the steps that are underway: this gateway does not live to see what becomes of them."""
        for share in list(self._underway):
            share.give_up()

    def _sessions(self, context: Context, ops: Sequence[Any]) -> list[RelayedSession] | None:
        by_id, caller = self._by_id, context.caller
        sessions = []
        for fields in ops:
            if type(fields) is not dict or fields.get("op") != "step":
                return None
            session_id = fields.get("session_id")
            session = by_id.get(session_id) if type(session_id) is str else None
            if (
                type(session) is not RelayedSession
                or not session.shares_frames
                or session.in_flight
                or not session.is_proven
                or (session.owner != caller.name and not caller.is_admin)
                or (session.lock is not None and session.lock.locked())
            ):
                return None
            sessions.append(session)
        return sessions if sessions and len(set(sessions)) == len(sessions) else None
