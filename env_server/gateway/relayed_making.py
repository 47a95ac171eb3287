"""Making sessions at nodes: make, fork and restore."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.messages import ForkRequest, MakeRequest, RestoreRequest
from rollgym.clients.protocol.spaces import parse_space
from rollgym.clients.protocol.values import decode_value, encode_value
from rollgym.env_server.access.context import Context
from rollgym.env_server.access.tokens import Caller, Tokens
from rollgym.env_server.catalog.entry import CatalogEntry
from rollgym.env_server.common.setting_sections import TimeoutSettings
from rollgym.env_server.gateway.journal_entries import JournalAway, check
from rollgym.env_server.gateway.placement import Made, Placement, unreadable
from rollgym.env_server.gateway.registry import Registry
from rollgym.env_server.gateway.relayed_session import UNREADABLE, RelayedSession
from rollgym.env_server.gateway.relocation import PATIENCE_S, Relocation, renamed
from rollgym.env_server.gateway.session_names import session_name
from rollgym.env_server.gateway.session_release import SessionRelease
from rollgym.env_server.journal.journal import Journal, journal_of
from rollgym.env_server.sessions.replies import Reply
from rollgym.env_server.sessions.sessions import Sessions
from rollgym.env_server.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from rollgym.env_server.gateway.shared_journal import SharedJournal


class RelayedOpening(NamedTuple):
    """The contents of an answer that opened a session at a node, in the encoding in which it came.

    It is remembered for long, and so holds nothing of the session, which may end before.
    """

    reply: Reply
    binary: bool

    def answer(self, context: Context) -> Reply:
        """The answer, in the caller's encoding."""
        reset = self.reply.get("reset")
        if reset is None or self.binary == context.binary:
            return self.reply
        space = parse_space(self.reply["observation_space"])
        encoded = {
            **reset,
            "observation": encode_value(
                space, decode_value(space, reset["observation"]), binary=context.binary
            ),
            "info": encode_value(None, decode_value(None, reset["info"]), binary=context.binary),
        }
        return {**self.reply, "reset": encoded}


class RelayedMaking:
    """Opens sessions at nodes.

    Args:
        settings: Time-outs.
        tokens: The keys of owners, for the ids.
        sessions: The open sessions.
        registry: Chooses the node of the next session.
        release: Ends sessions.
        metrics: Counts the nodes' times and failures.
        journal: The journal that gateways share, if there is one.
        relocation: Finds the sessions to copy.
    """

    def __init__(
        self,
        settings: TimeoutSettings,
        tokens: Tokens,
        sessions: Sessions,
        registry: Registry,
        release: SessionRelease,
        metrics: Metrics,
        journal: "SharedJournal | None",
        relocation: Relocation,
    ) -> None:
        self._journal = journal
        self._relocation = relocation
        self._tokens = tokens
        self._sessions = sessions
        self._placement = Placement(settings, registry, metrics)
        self._session_release = release

    async def make(
        self, context: Context, entry: CatalogEntry, request: MakeRequest, idle_timeout_s: float
    ) -> list[RelayedOpening]:
        """Make sessions, each at the node that is least loaded, all or none."""
        count = request.count or 1
        fields: dict[str, Any] = {
            "op": "make",
            "kwargs": request.kwargs,
            "idle_timeout_s": idle_timeout_s,
            "lingers": False,
        }
        if request.reset is not None:
            fields["reset"] = request.reset.model_dump(exclude_none=True)
        self._sessions.reserve(context.caller, count)
        made: list[Made] = []
        try:
            self._require_journal()
            await self._placement.make(entry.env_id, fields, count, context.binary, made)
            options = None if request.reset is None else request.reset.options
            opened = [
                self._begun(context, entry, each, request.kwargs or {}, options, idle_timeout_s)
                for each in made
            ]
            await self._write_down(opened)
        except BaseException:
            self._sessions.release(context.caller, count)
            self._placement.discard(made)
            raise
        openings = []
        for session, each in zip(opened, made, strict=True):
            openings.append(RelayedOpening(self._named(session, each.reply), context.binary))
            self._keep(context, session)
        return openings

    async def restore(
        self, context: Context, entry: CatalogEntry, request: RestoreRequest, idle_timeout_s: float
    ) -> list[RelayedOpening]:
        """Begin a session at the point of a portable episode."""
        episode = request.episode
        fields = {
            "op": "restore",
            "episode": episode.in_json(),
            "idle_timeout_s": idle_timeout_s,
            "lingers": False,
        }
        self._sessions.reserve(context.caller, 1)
        made: list[Made] = []
        try:
            self._require_journal()
            await self._placement.make(entry.env_id, fields, 1, context.binary, made)
            session = self._open(context, entry, made[0], episode.kwargs, idle_timeout_s)
            session.take_portable(episode, await journal_of(episode))
            await self._write_down([session])
        except BaseException:
            self._sessions.release(context.caller, 1)
            self._placement.discard(made)
            raise
        self._keep(context, session)
        return [RelayedOpening(self._named(session, made[0].reply), context.binary)]

    async def fork(
        self, context: Context, session: RelayedSession, request: ForkRequest
    ) -> list[RelayedOpening]:
        """Copy a session at its node."""
        await session.quiet()
        if self._journal is not None:
            self._require_journal()
            deadline = asyncio.get_running_loop().time() + PATIENCE_S
            await self._relocation.bring_back(session, gone=False, deadline=deadline, binary=False)
        generation = session.generation
        fields = {"op": "fork", "session_id": session.upstream_id, "count": request.count, "lingers": False}
        if request.reseed is not None:
            fields["reseed"] = request.reseed
        self._sessions.reserve(context.caller, request.count)
        home, made = session.home, list[Made]()
        try:
            try:
                await self._placement.fork(home, session.process, fields, made)
                episodes = await asyncio.gather(*map(self._placement.episode, made))
                copies = [
                    await self._copy(context, session, *each) for each in zip(made, episodes, strict=True)
                ]
                await self._write_down(copies, of=session, generation=generation)
            except ProblemError as problem:
                raise renamed(problem, session.upstream_id, session.session_id) from problem
            except UNREADABLE as error:
                raise unreadable("fork", error) from error
            except (ConnectionError, TimeoutError) as error:
                raise ProblemError("upstream_error", str(error)) from error
        except BaseException:
            self._sessions.release(context.caller, request.count)
            self._placement.discard(made)
            raise
        for copy in copies:
            self._keep(context, copy)
        return [RelayedOpening(self._named(copy, {}), context.binary) for copy in copies]

    # -- in the journal that gateways share ----------------------------------------------------------------------

    def _require_journal(self) -> None:
        if self._journal is not None:
            self._journal.require()

    async def _write_down(
        self, opened: Sequence[RelayedSession], of: RelayedSession | None = None, generation: int = 0
    ) -> None:
        """Write new sessions to the shared journal, if there is one; copies only if their original has not moved since.

        Raises:
            ProblemError: `draining`.
        """
        if self._journal is None:
            return
        try:
            if of is not None and await self._journal.written(of.session_id, check(generation)) != "ok":
                raise ProblemError(
                    "draining", "the session went on elsewhere while it was copied", retry_after=1
                )
            await self._journal.open(session.opened() for session in opened)
        except JournalAway as away:
            raise away.problem() from away
        for session in opened:
            session.generation = 1
            session.answered = session.episode, session.step

    # -- here ----------------------------------------------------------------------------------------------------

    def _open(
        self,
        context: Context,
        entry: CatalogEntry,
        made: Made,
        kwargs: dict[str, Any],
        idle_timeout_s: float,
    ) -> RelayedSession:
        lingers = context.socket is not None
        node = made.home.node
        session = RelayedSession(
            self._name(context.caller, lingers, node.key, made.upstream_id),
            entry=entry,
            owner=context.caller.name,
            idle_timeout_s=idle_timeout_s,
            now=asyncio.get_running_loop().time(),
            home=made.home,
            node=node,
            upstream_id=made.upstream_id,
            process=made.process,
            journal=Journal(entry.env_id, entry.version, kwargs),
            release=self._session_release,
        )
        if "action_space" in made.reply:
            session.take_spaces(made.reply)
        if context.socket is not None:
            session.lingers = True
            session.sockets.add(context.socket)
            context.sessions.add(session.session_id)
        return session

    def _begun(
        self,
        context: Context,
        entry: CatalogEntry,
        made: Made,
        kwargs: dict[str, Any],
        options: Mapping[str, Any] | None,
        idle_timeout_s: float,
    ) -> RelayedSession:
        session = self._open(context, entry, made, kwargs, idle_timeout_s)
        reset = made.reply.get("reset")
        if reset is not None:
            try:
                session.take_reset({"options": options}, reset, context.binary)
            except UNREADABLE as error:
                raise unreadable("make", error) from error
        return session

    async def _copy(
        self, context: Context, session: RelayedSession, made: Made, episode: Reply
    ) -> RelayedSession:
        copy = self._open(context, session.entry, made, session.journal.kwargs, session.idle_timeout_s)
        await copy.take_episode(episode)
        copy.terminated, copy.truncated = session.terminated, session.truncated
        return copy

    def _keep(self, context: Context, session: RelayedSession) -> None:
        self._sessions.add(session)
        if context.dropped and session.lingers:
            session.sockets.clear()
            self._sessions.orphan(session)

    def _name(self, owner: Caller, lingers: bool, node: str, upstream_id: str) -> str:
        try:
            return session_name(self._tokens.key(owner.name), lingers, node, upstream_id)
        except ValueError as error:
            raise ProblemError("upstream_error", f"the session cannot be named: {error}") from error

    @staticmethod
    def _named(session: RelayedSession, reply: Reply) -> Reply:
        return {**reply, "session_id": session.session_id, "env_id": session.entry.env_id}
