"""Requests that come again are answered as they were, also after a crash."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from gymnasium import Space

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.access.context import Context
from rollgym.env_server.operations.runner import Runner, busy, step_mismatch
from rollgym.env_server.sessions.journal_records import Opening
from rollgym.env_server.sessions.replies import Reply, reset_reply, session_reply
from rollgym.env_server.sessions.session import LocalSession, ResetRecord
from rollgym.env_server.sessions.sessions import Sessions, session_gone

_Key = tuple[str, str, str]


class IdempotencyCache:
    """The last answers to make, fork and restore, by caller, operation and request id.

    A request whose id is in flight joins the running one; an id that was answered gets the same answer. A failed
    request is forgotten: it made nothing, so the caller may retry it.

    Args:
        limit: How many sessions the kept answers of one caller may cover; the newest answer is always kept. One
            caller's requests never evict another caller's answers.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._answers: dict[str, OrderedDict[_Key, asyncio.Task[Any]]] = {}
        self._said: dict[_Key, bytes] = {}
        self._weights: Counter[str] = Counter()
        self._recalls: dict[_Key, Callable[[], Coroutine[Any, Any, Any]]] = {}

    async def once(
        self,
        caller: str,
        op: str,
        request_id: str | None,
        make: Callable[[], Coroutine[Any, Any, Any]],
        said: Callable[[], bytes] | None = None,
    ) -> Any:
        """The answer to a request: the one that is known, or the one that `make` gives.

        Args:
            caller: The caller's name.
            op: The operation.
            request_id: The id of the request.
            make: Returns the answer.
            said: Returns a fingerprint of the request; an earlier process did not keep it.

        Raises:
            ProblemError: `request_mismatch`: the id belongs to another request.
        """
        if request_id is None:
            return await make()
        key = (caller, op, request_id)
        answers = self._answers.setdefault(caller, OrderedDict())
        task = answers.get(key)
        if task is None:
            give = self._recalls.pop(key, make)
            task = asyncio.get_running_loop().create_task(give())
            answers[key] = task
            if said is not None:
                self._said[key] = said()
            task.add_done_callback(lambda done: self._settle(key, done))
        elif said is not None and key in self._said and self._said[key] != said():
            raise ProblemError(
                "request_mismatch",
                f"another {op} was asked for with this request_id: each request needs one of its own",
            )
        return await asyncio.shield(task)

    def forget(self, caller: str, belongs: Callable[[Any], bool]) -> None:
        """Forget the answers of a caller that a predicate says so of."""
        answers = self._answers.get(caller, OrderedDict())
        for key, task in list(answers.items()):
            # One that has failed will be forgotten in a moment.
            if not task.done() or task.cancelled() or task.exception() is not None:
                continue
            if belongs(task.result()):
                self._weights[caller] -= len(answers.pop(key).result())
                self._said.pop(key, None)

    def recall(
        self, caller: str, op: str, request_id: str, give: Callable[[], Coroutine[Any, Any, Any]]
    ) -> None:
        """Note how the answer that a process before this one gave is given again."""
        self._recalls[caller, op, request_id] = give

    def _settle(self, key: _Key, task: asyncio.Task[Any]) -> None:
        caller = key[0]
        answers = self._answers[caller]
        if task.cancelled() or task.exception() is not None:
            answers.pop(key, None)
            self._said.pop(key, None)
            if not answers:
                del self._answers[caller]
            return
        self._weights[caller] += len(task.result())
        while self._weights[caller] > self._limit and len(answers) > 1:
            oldest = next(iter(answers))
            if not answers[oldest].done():
                break
            self._weights[caller] -= len(answers.pop(oldest).result())
            self._said.pop(oldest, None)


class OpenedSession(NamedTuple):
    """The contents of an answer that opened a session; the session itself may end before the request is retried."""

    reply: Reply
    observation_space: Space[Any]
    episode: int
    step: int
    reset: ResetRecord | None

    @classmethod
    def of(cls, session: LocalSession, reset: ResetRecord | None) -> "OpenedSession":
        """A session as it is now."""
        return cls(session_reply(session), session.observation_space, session.episode, session.step, reset)

    def answer(self, context: Context) -> Reply:
        """The answer to the make of one session, in the caller's encoding.

        Raises:
            EncodeError: If the environment gave something that has no form on the wire.
        """
        if self.reset is None:
            return self.reply
        return {**self.reply, "reset": reset_reply(self.observation_space, self.reset, context)}


async def open_again(
    opening: Opening, opened: Sequence[LocalSession], sessions: Sessions, runner: Runner
) -> list[OpenedSession]:
    """Restore the answer that an earlier process gave to a request, by replay.

    Raises:
        ProblemError: `session_gone` or `step_mismatch`, if a session has ended or taken further steps since.
    """
    if opening.op == "fork":
        # Its answer names the copies, and says no more of them.
        return [OpenedSession.of(session, None) for session in opened]
    return list(await asyncio.gather(*(_open_again(opening, each, sessions, runner) for each in opened)))


async def _open_again(
    opening: Opening, session: LocalSession, sessions: Sessions, runner: Runner
) -> OpenedSession:
    ended = sessions.end_reason(session.session_id)
    if ended is not None:
        raise session_gone(session.session_id, ended)
    if session.running is not None:
        raise busy(session.running)
    if (session.episode, session.step) != (opening.episode, opening.step):
        raise step_mismatch(session, f"{session.session_id!r} has gone on since this {opening.op} opened it")

    async def rebuilt() -> ResetRecord | None:
        if session.attached:
            await session.worker.close(session.session_id)
            session.attached = False
        return await runner.persist(session, lambda: runner.rebuild(session, session.journal))

    began = await runner.result(runner.start(session, "recovery", rebuilt()))
    return OpenedSession.of(session, began if opening.op == "make" else None)
