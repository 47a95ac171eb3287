"""Sessions begun and ended: make, fork, restore and close.

They are closed wherever they are: here, in other processes of this server, and at nodes.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
import orjson

from rollgym.clients.protocol.episode import PortableEpisode
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.messages import CloseRequest, ForkRequest, MakeRequest, RestoreRequest
from rollgym.clients.protocol.values import DecodeError, EncodeError
from rollgym.env_server.access.context import Context
from rollgym.env_server.catalog.catalog import Catalog, CatalogEntry
from rollgym.env_server.common.event_loop import Slices
from rollgym.env_server.common.requests import (
    invalid,
    kwargs_in_json,
    long_episode_in_json,
    requested,
    restore_request,
)
from rollgym.env_server.common.settings import ServerSettings
from rollgym.env_server.gateway.peers import Peers
from rollgym.env_server.gateway.relay import Relay
from rollgym.env_server.gateway.relayed_making import RelayedMaking, RelayedOpening
from rollgym.env_server.gateway.relayed_session import RelayedSession
from rollgym.env_server.operations.episodes import Resetting
from rollgym.env_server.operations.idempotency import IdempotencyCache, OpenedSession, open_again
from rollgym.env_server.operations.runner import (
    Runner,
    busy,
    environment_error,
    not_in_time,
    not_reset,
    worker_died,
)
from rollgym.env_server.sessions.journal import Journal, ReplayDiverged, journal_of
from rollgym.env_server.sessions.journal_file import JournalFile
from rollgym.env_server.sessions.journal_records import JournaledSession, Opening
from rollgym.env_server.sessions.replies import Reply, opened_sessions
from rollgym.env_server.sessions.session import BaseSession, LocalSession, ResetRecord
from rollgym.env_server.sessions.sessions import Sessions, session_gone
from rollgym.env_server.workers.base import (
    EnvironmentRaised,
    OperationTimeout,
    ServerFailed,
    ServerLost,
    Worker,
    WorkerLost,
)

_Request = MakeRequest | ForkRequest | RestoreRequest
_OPS: dict[type[_Request], str] = {MakeRequest: "make", ForkRequest: "fork", RestoreRequest: "restore"}
_Begin = Callable[[LocalSession, int], Coroutine[Any, Any, ResetRecord | None]]
_REFUSED_BY_CONSTRUCTOR = frozenset({"TypeError", "ValueError", "KeyError", "AssertionError"})
_MAX_CLOSE = 65536


class Making:
    """The handlers of make, fork, restore and close.

    Args:
        settings: Limits and time-outs.
        catalog: The environments that can be made.
        sessions: Receives new sessions.
        runner: Rebuilds environments.
        resetting: Resets new sessions if the request says so.
        relayed: Opens sessions at the registered servers of an environment.
        workers: Returns the worker of an environment.
        journal_file: The journal of sessions, if there is one.
    """

    def __init__(
        self,
        settings: ServerSettings,
        catalog: Catalog,
        sessions: Sessions,
        runner: Runner,
        resetting: Resetting,
        relayed: RelayedMaking,
        workers: Callable[[CatalogEntry], Worker],
        journal_file: JournalFile | None,
    ) -> None:
        self._settings = settings
        self._catalog = catalog
        self._sessions = sessions
        self._runner = runner
        self._resetting = resetting
        self._relayed = relayed
        self._workers = workers
        self._journal_file = journal_file
        self._slices = Slices()
        self.idempotency = IdempotencyCache(settings.max_remembered_requests)

    # -- make ----------------------------------------------------------------------------------------------------

    async def make(self, context: Context, fields: Mapping[str, Any]) -> Reply:
        """Make sessions, and reset them if requested."""
        request = requested(MakeRequest, fields)
        entry = self._catalog.get(request.env_id)
        entry.rules.check(request.kwargs or {})
        kwargs = kwargs_in_json(request.kwargs or {})
        if request.count is not None and request.count > self._settings.max_batch:
            raise invalid("count", f"at most {self._settings.max_batch}")
        if request.reset is not None:
            self._resetting.check_options(entry, request.reset.options)
        opened: list[OpenedSession | RelayedOpening] = await self.idempotency.once(
            context.caller.name,
            "make",
            request.request_id,
            lambda: self._make_many(context, entry, kwargs, request.model_copy(update={"kwargs": kwargs})),
            lambda: _said(request, kwargs),
        )
        try:
            replies = [made.answer(context) for made in opened]
        except (EncodeError, DecodeError) as error:
            session_ids = [str(made.reply["session_id"]) for made in opened]
            self.forget(context.caller.name, session_ids)
            self.close(context, session_ids)
            raise environment_error(error) from error
        return replies[0] if request.count is None else {"sessions": replies}

    async def _make_many(
        self, context: Context, entry: CatalogEntry, kwargs: dict[str, Any], request: MakeRequest
    ) -> Sequence[OpenedSession | RelayedOpening]:
        idle_timeout_s = self._idle_timeout_s(request)
        if entry.relayed:
            return await self._relayed.make(context, entry, request, idle_timeout_s)

        async def begin(session: LocalSession, number: int) -> ResetRecord | None:
            try:
                if session.inline is not None:
                    session.take_spaces(*session.inline.make_now(session.session_id, entry.source, kwargs))
                    session.attached = True
                else:
                    await self._runner.persist(session, lambda: self._runner.make(session))
            except EnvironmentRaised as error:
                raise _refused(entry, kwargs, error) from error
            if request.reset is None:
                return None
            if session.inline is not None:
                return self._resetting.inline(session, request.reset.seed, request.reset.options)
            return await self._resetting.in_worker(session, request.reset.seed, request.reset.options)

        return await self._open(context, request, entry, kwargs, request.count or 1, idle_timeout_s, begin)

    # -- fork and restore ----------------------------------------------------------------------------------------

    def fork(self, context: Context, session: BaseSession, fields: Mapping[str, Any]) -> Awaitable[Reply]:
        """Copy a session at its point: the environment is rebuilt from the journal, random state included."""
        request = requested(ForkRequest, fields)
        if not session.entry.forkable:
            raise ProblemError("fork_unsupported", f"{session.entry.env_id} cannot be copied")
        if request.count > self._settings.max_batch:
            raise invalid("count", f"at most {self._settings.max_batch}")
        return self._fork(context, session, request)

    async def _fork(self, context: Context, session: BaseSession, request: ForkRequest) -> Reply:
        opened: list[OpenedSession | RelayedOpening] = await self.idempotency.once(
            context.caller.name,
            "fork",
            request.request_id,
            lambda: self._fork_many(context, session, request),
            lambda: _said(request, session.session_id),
        )
        return {"session_ids": [copy.reply["session_id"] for copy in opened]}

    async def _fork_many(
        self, context: Context, session: BaseSession, request: ForkRequest
    ) -> Sequence[OpenedSession | RelayedOpening]:
        if isinstance(session, RelayedSession):
            return await self._relayed.fork(context, session, request)
        assert isinstance(session, LocalSession)
        self._sessions.require_open(session)
        if session.running is not None:
            raise busy(session.running)
        if session.episode < 0 and request.reseed is not None:
            # There is nothing random yet that a seed could change; the copies' resets name seeds of their own.
            raise not_reset(session)
        if session.episode >= 0 and not (session.playing or session.terminated or session.truncated):
            raise not_reset(session)
        # The session may take steps while it is copied.
        episode, last = session.journal.portable(max(0, session.episode)), session.last

        async def copied(copy: LocalSession, number: int) -> None:
            await self._rebuild(copy, episode)
            copy.last = last
            if request.reseed is not None:
                seed = _copy_seed(request.reseed, number)
                timeout = self._settings.make_timeout_s
                await copy.worker.reseed(copy.session_id, seed, timeout=timeout)
                copy.journal.reseed(seed)

        async def begin(copy: LocalSession, number: int) -> None:
            await self._runner.persist(copy, lambda: copied(copy, number))

        return await self._open(
            *(context, request, session.entry, session.kwargs, request.count, session.idle_timeout_s),
            begin,
        )

    async def restore(self, context: Context, fields: Mapping[str, Any]) -> Reply:
        """Make a session at the point of a portable episode."""
        request = await restore_request(fields)
        entry = self._catalog.get(request.episode.env_id)
        entry.rules.check(request.episode.kwargs)
        self._resetting.check_options(entry, request.episode.options)
        episode = await long_episode_in_json(request.episode)
        request = request.model_copy(update={"episode": episode})
        if not entry.deterministic:
            raise ProblemError("session_gone", f"{entry.env_id} cannot be rebuilt by replay", reason="lost")
        if episode.env_version != entry.version:
            raise ProblemError(
                "session_gone",
                f"the episode is of version {episode.env_version[:100]!r}, this server has {entry.version!r}",
                reason="replay_diverged",
            )
        opened: list[OpenedSession | RelayedOpening] = await self.idempotency.once(
            context.caller.name,
            "restore",
            request.request_id,
            lambda: self._restore(context, entry, request),
            lambda: _said(request, len(episode.actions)),
        )
        restored = opened[0]
        if isinstance(restored, RelayedOpening):
            return restored.reply
        if restored.episode < 0:
            return {**restored.reply, "episode": None, "step": None}
        return {**restored.reply, "episode": restored.episode, "step": restored.step}

    async def _restore(
        self, context: Context, entry: CatalogEntry, request: RestoreRequest
    ) -> Sequence[OpenedSession | RelayedOpening]:
        episode, idle_timeout_s = request.episode, self._idle_timeout_s(request)
        if entry.relayed:
            return await self._relayed.restore(context, entry, request, idle_timeout_s)

        async def begin(session: LocalSession, number: int) -> None:
            await self._runner.persist(session, lambda: self._rebuild(session, episode))

        return await self._open(context, request, entry, episode.kwargs, 1, idle_timeout_s, begin)

    async def _rebuild(self, session: LocalSession, episode: PortableEpisode) -> None:
        try:
            session.journal = await journal_of(episode)
            session.episode = episode.episode if episode.seed is not None else -1
            await self._runner.rebuild(session, session.journal)
        except EnvironmentRaised as error:
            raise _refused(session.entry, session.kwargs, error) from error

    def recall(self, restored: Iterable[JournaledSession]) -> None:
        """Restore the answers of the previous process whose sessions were restored."""
        groups: defaultdict[tuple[str, Opening], list[LocalSession]] = defaultdict(list)
        for journaled in restored:
            if journaled.opened_by is not None:
                session = self._sessions.by_id.get(journaled.session_id)
                if isinstance(session, LocalSession):
                    groups[journaled.owner, journaled.opened_by].append(session)
        for (owner, opening), opened in groups.items():
            # Missing sessions were still being written, or have been used and ended since.
            if len(opened) == opening.sessions:
                give = partial(open_again, opening, opened, self._sessions, self._runner)
                self.idempotency.recall(owner, opening.op, opening.request_id, give)

    # -- opening -------------------------------------------------------------------------------------------------

    async def _open(
        self,
        context: Context,
        request: _Request,
        entry: CatalogEntry,
        kwargs: dict[str, Any],
        count: int,
        idle_timeout_s: float,
        begin: _Begin,
    ) -> list[OpenedSession]:
        """Open new sessions, all or none."""
        caller = context.caller
        self._sessions.reserve(caller, count)
        now = asyncio.get_running_loop().time()
        opened = [
            LocalSession(
                self._sessions.new_id(),
                entry=entry,
                owner=caller.name,
                kwargs=kwargs,
                worker=self._workers(entry),
                journal=Journal(entry.env_id, entry.version, kwargs),
                idle_timeout_s=idle_timeout_s,
                now=now,
            )
            for _ in range(count)
        ]
        try:
            records = await self._begin_all(opened, begin)
        except BaseException as error:
            self._sessions.release(caller, count)
            closing = (session.worker.close(session.session_id) for session in opened)
            if isinstance(error, asyncio.CancelledError):
                # The caller learns at once that the server is shutting down.
                self._sessions.close_later(*closing)
            else:
                await asyncio.gather(*closing)
            raise
        opening = _opening(request, opened)
        for session in opened:
            if context.socket is not None:
                session.lingers = request.lingers
                session.sockets.add(context.socket)
                context.sessions.add(session.session_id)
            self._sessions.add(session)
            if context.dropped and session.lingers:
                session.sockets.clear()
                self._sessions.orphan(session)
            if self._journal_file is not None:
                self._journal_file.opened(
                    session.session_id,
                    owner=session.owner,
                    idle_timeout_s=session.idle_timeout_s,
                    lingers=session.lingers,
                    opened_by=opening,
                    journal=session.journal,
                    episode=session.episode,
                )
        return [OpenedSession.of(session, record) for session, record in zip(opened, records, strict=True)]

    async def _begin_all(self, opened: list[LocalSession], begin: _Begin) -> list[ResetRecord | None]:
        if opened[0].inline is not None:
            records: list[ResetRecord | None] = []
            for number, session in enumerate(opened):
                await self._slices.turn()
                records.append(await self._begin(session, number, begin))
            return records
        beginnings = (self._begin(session, number, begin) for number, session in enumerate(opened))
        # All are waited for, so that none is still being made when the others are closed.
        results = await asyncio.gather(*beginnings, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if not isinstance(result, BaseException)]

    async def _begin(self, session: LocalSession, number: int, begin: _Begin) -> ResetRecord | None:
        try:
            return await begin(session, number)
        except EnvironmentRaised as error:
            raise environment_error(error) from error
        except OperationTimeout as error:
            raise not_in_time(f"{session.entry.env_id} was not ready in time", error) from error
        except (ServerFailed, ServerLost) as error:
            raise ProblemError("upstream_error", str(error)) from error
        except WorkerLost as error:
            raise worker_died(session.entry.env_id) from error
        except ReplayDiverged as error:
            raise session_gone(session.session_id, "replay_diverged") from error

    # -- close ---------------------------------------------------------------------------------------------------

    def _idle_timeout_s(self, request: MakeRequest | RestoreRequest) -> float:
        longest = self._settings.idle_timeout_s
        return min(request.idle_timeout_s or longest, longest)

    def forget(self, caller: str, session_ids: Collection[str]) -> None:
        """Forget answers whose sessions were never sent to the caller, so that their requests may be made again."""
        unknown = frozenset(session_ids)
        self.idempotency.forget(
            caller, lambda opened: any(each.reply["session_id"] in unknown for each in opened)
        )

    def close(self, context: Context, session_ids: Iterable[str]) -> int:
        """Close those sessions that are here and the caller's, and count them; running steps are given up."""
        closed = 0
        for session_id in session_ids:
            session = self._sessions.by_id.get(session_id)
            if session is not None and self._sessions.may_use(session, context.caller):
                self._sessions.end(session, "closed")
                closed += 1
        return closed


def _said(request: _Request, more: Any) -> bytes:
    """A fingerprint of a request; for an episode, digests stand for the actions."""
    lists = {"actions", "digests", "reseeds"}
    fields = request.model_dump(exclude={"request_id": True, "kwargs": True, "episode": lists})
    content = orjson.dumps((fields, more), default=repr, option=orjson.OPT_SORT_KEYS)
    said = blake2b(content, digest_size=16)
    if isinstance(request, RestoreRequest):
        said.update("".join(request.episode.digests).encode())
        said.update(orjson.dumps(request.episode.reseeds))
    return said.digest()


def _opening(request: _Request, opened: list[LocalSession]) -> Opening | None:
    """The request as the journal keeps it; None if it cannot be repeated."""
    if request.request_id is None:
        return None
    op = _OPS[type(request)]
    return Opening(op, request.request_id, len(opened), opened[0].episode, opened[0].step)


def _copy_seed(reseed: int, number: int) -> int:
    """The seed of one copy: copies differ from each other, equal requests give equal copies."""
    return int(np.random.SeedSequence([reseed, number]).generate_state(1, np.uint64)[0] >> np.uint64(11))


def _refused(entry: CatalogEntry, kwargs: Mapping[str, Any], error: EnvironmentRaised) -> ProblemError:
    """An environment that refuses the values of its kwargs is not an environment that fails."""
    if kwargs and error.is_one_of(_REFUSED_BY_CONSTRUCTOR):
        problem = environment_error(error)
        return ProblemError(
            "invalid_kwargs",
            f"{entry.env_id} refuses its kwargs: {problem.extra['message']}",
            errors=[{"field": "kwargs", "reason": problem.extra["message"]}],
        )
    return environment_error(error)


class Closing:
    """Closes sessions.

    Args:
        sessions: Those that are here.
        making: Closes those.
        relay: Closes those at nodes that no call here was passed on to.
        peers: Closes those of other processes.
    """

    def __init__(self, sessions: Sessions, making: Making, relay: Relay, peers: Peers) -> None:
        self._sessions = sessions
        self._making = making
        self._relay = relay
        self._peers = peers
        self._running: set[asyncio.Future[Reply]] = set()

    def close(self, context: Context, fields: Mapping[str, Any]) -> Reply | Awaitable[Reply]:
        """Close one session (`session_id`) or many (`session_ids`), wherever they are."""
        if "session_id" in fields:
            if "session_ids" in fields:
                raise invalid("session_ids", "give session_id or session_ids, not both")
            fields = {**fields, "session_ids": [fields["session_id"]]}
            del fields["session_id"]
        request = requested(CloseRequest, fields)
        if len(request.session_ids) > _MAX_CLOSE:
            raise invalid("session_ids", f"at most {_MAX_CLOSE}")
        elsewhere: dict[int, list[str]] = {}
        here = []
        for session_id in dict.fromkeys(request.session_ids):
            owner = self._sessions.index_of(session_id)
            if owner is not None and self._peers.is_elsewhere(owner):
                elsewhere.setdefault(owner, []).append(session_id)
            else:
                here.append(session_id)
        if self._relay.shares_a_journal:
            return self._close_shared(context, here, elsewhere)
        unseen = [each for each in here if each not in self._sessions.by_id and self._relay.may_adopt(each)]
        closed = self._making.close(context, here) + self._relay.close_unseen(context.caller, unseen)
        if not elsewhere:
            return {"closed": closed}
        return self._close_elsewhere(context, elsewhere, closed)

    def take_back(self, context: Context, reply: Reply) -> int:
        """Close the sessions opened by an answer that cannot be sent, and count them: no client knows their ids."""
        session_ids = opened_sessions(reply)
        if session_ids:
            self._making.forget(context.caller.name, session_ids)
            closing = self.close(context, {"session_ids": session_ids})
            if not isinstance(closing, dict):
                task = asyncio.ensure_future(closing)
                self._running.add(task)
                task.add_done_callback(self._running.discard)
        return len(session_ids)

    async def _close_shared(
        self, context: Context, here: list[str], elsewhere: Mapping[int, list[str]]
    ) -> Reply:
        relayed = [each for each in here if self._relay.may_adopt(each)]
        closed = await self._relay.close_shared(context.caller, relayed)
        closed += self._making.close(context, set(here).difference(relayed))
        return await self._close_elsewhere(context, elsewhere, closed)

    async def _close_elsewhere(
        self, context: Context, elsewhere: Mapping[int, list[str]], closed: int
    ) -> Reply:
        calls = (
            self._peers.call(context, owner, "close", {"session_ids": session_ids})
            for owner, session_ids in elsewhere.items()
        )
        replies = await asyncio.gather(*calls)
        return {"closed": closed + sum(reply["closed"] for reply in replies)}
