"""Making sessions at nodes: make, fork and restore.

They are spread by free capacity, and closed after failures.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.messages import ForkRequest, MakeRequest, RestoreRequest
from rollgym.clients.protocol.spaces import parse_space
from rollgym.clients.protocol.values import decode_value, encode_value
from rollgym.env_server.access.context import Context
from rollgym.env_server.access.tokens import Caller, Tokens
from rollgym.env_server.catalog.catalog import CatalogEntry
from rollgym.env_server.common.metrics import Metrics
from rollgym.env_server.common.settings import TimeoutSettings
from rollgym.env_server.gateway.journal_entries import JournalAway, check
from rollgym.env_server.gateway.moves import session_name
from rollgym.env_server.gateway.registry import PATIENCE_S, Registration, Registry, no_server
from rollgym.env_server.gateway.relayed_session import UNREADABLE, RelayedSession, SessionRelease, renamed
from rollgym.env_server.gateway.relocation import Relocation
from rollgym.env_server.gateway.upstream.node import Node
from rollgym.env_server.sessions.journal import Journal, journal_of
from rollgym.env_server.sessions.replies import Reply, opened_sessions
from rollgym.env_server.sessions.sessions import Sessions

if TYPE_CHECKING:
    from rollgym.env_server.gateway.shared_journal import SharedJournal


# How many full or unreachable nodes a session may try, one after another.
_ROUNDS = 4


class NewSession(NamedTuple):
    """A session at a node that has no name here yet, and the node's answer."""

    home: Registration
    upstream_id: str
    process: int
    reply: Reply


class NodePlacement:
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
        self, env_id: str, fields: dict[str, Any], count: int, binary: bool, made: list[NewSession]
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
    ) -> list[NewSession]:
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
                    made.append(NewSession(home, str(each["session_id"]), process, each))
            except (KeyError, TypeError) as error:
                failed = _unreadable(op, error)
        if failed is None:
            return made
        for each in made:
            home.node.close_session(each.upstream_id)
        raise failed

    async def fork(
        self, home: Registration, process: int | None, fields: Mapping[str, Any], made: list[NewSession]
    ) -> None:
        """Copy a session of a node's process there; `made` takes the copies."""
        asked = {**fields, "request_id": home.node.link(False).caller.new_request_id()}
        reply, answered_by = await self._ask(home, asked, False, process)
        for upstream_id in reply["session_ids"]:
            self._registry.took(home)
            made.append(NewSession(home, str(upstream_id), answered_by, {}))

    async def episode(self, made: NewSession) -> Reply:
        """Request the portable episode of a session."""
        reply, _ = await self._ask(
            made.home, {"op": "episode", "session_id": made.upstream_id}, False, made.process
        )
        return reply

    def discard(self, made: Sequence[NewSession]) -> None:
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


def _unreadable(op: str, error: Exception) -> ProblemError:
    """The problem that the answer of a node cannot be read."""
    return ProblemError("upstream_error", f"the answer to {op} cannot be read: {error!r}")


def _as_problem(error: BaseException) -> BaseException:
    # The gateway has the environment: a node that has registered it and does not know it is broken.
    if isinstance(error, ProblemError) and (error.kind.kept_from_clients or error.code == "unknown_env"):
        return ProblemError("upstream_error", f"the node answers {error}")
    if isinstance(error, ConnectionError | TimeoutError):
        return ProblemError("upstream_error", str(error) or "a node did not answer in time")
    return error


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
        self._placement = NodePlacement(settings, registry, metrics)
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
        made: list[NewSession] = []
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
        made: list[NewSession] = []
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
        home, made = session.home, list[NewSession]()
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
                raise _unreadable("fork", error) from error
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
        made: NewSession,
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
        made: NewSession,
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
                raise _unreadable("make", error) from error
        return session

    async def _copy(
        self, context: Context, session: RelayedSession, made: NewSession, episode: Reply
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
