"""A session that a node has: a gateway passes its operations on, can rebuild it on another node, and lets go of it."""

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from gymnasium import Space

from rollgym.clients.protocol.arrays import DecodeError
from rollgym.clients.protocol.episode import PortableEpisode, step_digest
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.spaces import parse_space
from rollgym.clients.protocol.values import EncodeError, decode_value, encode_value
from rollgym.env_server.catalog.actions import action_reader
from rollgym.env_server.common.requests import episode_of
from rollgym.env_server.gateway.journal_entries import (
    About,
    Arguments,
    EpisodeStart,
    JournalAway,
    Opened,
    SharedSession,
    Step,
    begun,
    check,
    packed_steps,
    stepped,
    stepped_on,
    whole,
)
from rollgym.env_server.gateway.moves import Moves
from rollgym.env_server.gateway.registry import Registration, Registry
from rollgym.env_server.gateway.upstream.node import Node, NodeOperation
from rollgym.env_server.sessions.journal import EndReason, Journal, journal_of
from rollgym.env_server.sessions.replies import Reply
from rollgym.env_server.sessions.session import BaseSession

if TYPE_CHECKING:
    from rollgym.env_server.catalog.catalog import CatalogEntry
    from rollgym.env_server.gateway.shared_journal import SharedJournal


# What reading an answer of another form than the protocol's may raise.
UNREADABLE = (
    *(KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError),
    *(DecodeError, EncodeError),
)
_SAME_IN_BOTH = frozenset({str, int, bool, type(None)})
_CLOCK_SKEW_S = 1.0


class RelayedSession(BaseSession):
    """A session at a node.

    Its journal holds the operations that the gateway has passed on, so that it survives the loss of the node.

    Attributes:
        home: The registration whose session it is.
        node: The node that holds it.
        upstream_id: Its id there.
        process: The node's I/O process that owns it, if that is known.
        shares_frames: Whether the node answers its steps at once.
        journal: How to rebuild it.
        incomplete: Whether others have used it, so that the journal lacks steps.
        lock: Held while its node is searched for.
        in_flight: The number of operations in flight.
        underway: Those of them that were not passed on in a batch of steps, in the order in which they came.
        cancelled_at: When all that was in flight was last cancelled, on the clock that times operations.
        is_proven: Whether the copy that its node has is known to be the one that answered last.
        generation: How often it was moved, as the journal knows that gateways share; 0 without one.
        is_placed: Whether the session is known to be at `node`.
        end_is_known: Whether the journal that gateways share has its end already.
        answered: The last episode and step that the journal has acknowledged and clients have received.
    """

    __slots__ = (
        "_action_space",
        "_described",
        "_observation_space",
        "_quiet",
        "_session_release",
        "answered",
        "cancelled_at",
        "end_is_known",
        "generation",
        "home",
        "in_flight",
        "incomplete",
        "is_placed",
        "is_proven",
        "journal",
        "lock",
        "node",
        "process",
        "shares_frames",
        "underway",
        "upstream_id",
    )

    def __init__(
        self,
        session_id: str,
        *,
        entry: "CatalogEntry",
        owner: str,
        idle_timeout_s: float,
        now: float,
        home: Registration,
        node: Node,
        upstream_id: str,
        process: int | None,
        journal: Journal,
        release: "SessionRelease",
    ) -> None:
        super().__init__(session_id, entry=entry, owner=owner, idle_timeout_s=idle_timeout_s, now=now)
        self.journal = journal
        self.incomplete = False
        self.generation = 0
        self.is_placed = True
        self.is_proven = True
        self.end_is_known = False
        self.answered = (-1, 0)
        self.lock: asyncio.Lock | None = None
        self.in_flight = 0
        self.underway: dict[NodeOperation, None] = {}
        self.cancelled_at = 0.0
        self._quiet: asyncio.Future[None] | None = None
        self._session_release = release
        self._described: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._action_space: Space[Any] | None = None
        self._observation_space: Space[Any] | None = None
        self.live_at(home, node, upstream_id, process)

    def live_at(self, home: Registration, node: Node, upstream_id: str, process: int | None) -> None:
        """Set its node and its id there, from now on."""
        self.home = home
        self.node = node
        self.upstream_id = upstream_id
        self.process = process
        self.shares_frames = home.spec.immediate

    @property
    def is_busy(self) -> bool:
        """Whether an operation is on its way."""
        return self.in_flight > 0

    @property
    def is_playing(self) -> bool:
        """Whether an episode has begun and not ended."""
        return self.episode >= 0 and not (self.terminated or self.truncated)

    def let_go(self, reason: EndReason) -> Coroutine[Any, Any, None] | None:
        """Tell the node to end the session."""
        return self._session_release.to(self, reason)

    # -- operations on their way ---------------------------------------------------------------------------------

    def landed(self) -> None:
        """Note that an operation is answered."""
        self.in_flight -= 1
        if self._quiet is not None and self.in_flight <= 0:
            self._quiet.set_result(None)
            self._quiet = None

    async def quiet(self) -> None:
        """Wait until no operation is on its way."""
        while self.in_flight > 0:
            if self._quiet is None:
                self._quiet = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._quiet)

    # -- what goes by --------------------------------------------------------------------------------------------

    def take_spaces(self, reply: Mapping[str, Any]) -> None:
        """Learn the spaces from the answer to a make; kwargs may change them."""
        described = reply["action_space"], reply["observation_space"]
        if described != self.home.described_spaces:
            self._described = described

    def take_reset(self, fields: Mapping[str, Any], reply: Mapping[str, Any], binary: bool) -> None:
        """Record the start of an episode; a repeated answer is known already."""
        episode = reply["episode"]
        if episode <= self.episode:
            return
        observation = self._in_json(reply["observation"], binary)
        self.journal.begin(reply["seed"], _options(fields, binary), observation)
        self.episode = episode
        self.seed = reply["seed"]
        self.step = 0
        self.terminated = self.truncated = self.incomplete = False

    def take_step(self, fields: Mapping[str, Any], reply: Mapping[str, Any], binary: bool) -> None:
        """Record a step; a repeated answer is known already."""
        episode, step = reply["episode"], reply["step"]
        if episode != self.episode or step != self.step + 1:
            if (episode, step) > (self.episode, self.step):
                self.incomplete = True
            return
        terminated, truncated = reply["terminated"], reply["truncated"]
        self.journal.record(
            self._action(fields["action"]),
            self._in_json(reply["observation"], binary),
            *(reply["reward"], terminated, truncated),
        )
        self.step = step
        self.terminated = terminated
        self.truncated = truncated
        begun = reply.get("reset")
        if begun is not None:
            self.take_reset(fields.get("reset") or {}, begun, binary)

    def lacks_steps_before(self, fields: Mapping[str, Any]) -> bool:
        """Whether a step names a place that it has not come to, as far as has been seen here."""
        step, episode = fields.get("step"), fields.get("episode", self.episode)
        return type(step) is int and type(episode) is int and (episode, step) > (self.episode, self.step)

    async def take_episode(self, reply: Reply) -> None:
        """Learn from the node what others have done with it.

        A long one takes a while, in which more may go by. Then it is asked for again: what was answered is old.
        """
        before = self.episode, self.step
        episode = await episode_of(reply, self.entry.env_id)
        journal = await journal_of(episode)
        if (self.episode, self.step) == before:
            self.take_portable(episode, journal)
        else:
            self.incomplete = True

    def take_portable(self, episode: PortableEpisode, journal: Journal) -> None:
        """Take over an episode, and the journal that was made of it."""
        self.journal = journal
        self.incomplete = False
        if episode.seed is not None:
            self.episode, self.seed, self.step = episode.episode, episode.seed, len(episode.actions)

    # -- what goes by, for a journal that gateways share ----------------------------------------------------------

    def opened(self) -> Opened:
        """The journal's entry for a new session."""
        journal = self.journal
        about = About(
            self.entry.env_id, self.entry.version, journal.kwargs, self.idle_timeout_s, self._described
        )
        return Opened(
            *(self.session_id, about, self.node.key, self.upstream_id, self.episode, _head(journal)),
            over=(self.terminated, self.truncated),
            actions=list(journal.actions),
            digests=journal.digests,
        )

    def note(
        self,
        op: str,
        generation: int,
        fields: Mapping[str, Any],
        reply: Mapping[str, Any],
        binary: bool,
        claim: str = "",
    ) -> Arguments:
        """The journal's entry for an answer of its node.

        Args:
            op: The operation.
            generation: Its number of moves when the node was asked.
            fields: The fields of the request.
            reply: The answer.
            binary: Whether both are in MessagePack's encoding.
            claim: The claim of a step; see `InFlight.claim`.
        """
        if op == "step":
            return self._note_step(generation, fields, reply, binary, claim)
        if op == "reset" and not fields.get("again"):
            head = self._note_head(generation, fields, reply, binary)
            return begun(self.session_id, generation, int(reply["episode"]), head)
        return check(generation)

    async def note_episode(self, generation: int, reply: Reply) -> Arguments:
        """What the journal is told where it lacks steps that the node has taken."""
        episode = await episode_of(reply, self.entry.env_id)
        head = _head(await journal_of(episode))
        if head is None:
            return check(generation)
        packed = await packed_steps(self.session_id, episode.episode, episode.actions, episode.digests)
        return whole(self.session_id, generation, episode.episode, head, (False, False), packed)

    def _note_step(
        self,
        generation: int,
        fields: Mapping[str, Any],
        reply: Mapping[str, Any],
        binary: bool,
        claim: str,
    ) -> Arguments:
        episode, index = int(reply["episode"]), int(reply["step"]) - 1
        over = bool(reply["terminated"]), bool(reply["truncated"])
        self._move_to(generation, episode, index + 1, over)
        following: EpisodeStart | None = None
        if reply.get("reset") is not None:
            following = self._note_head(generation, fields.get("reset") or {}, reply["reset"], binary)
        if not self.entry.deterministic:
            # It is never rebuilt, so that only its episodes count.
            if following is None:
                return check(generation)
            return begun(self.session_id, generation, episode + 1, following)
        digest = step_digest(self._in_json(reply["observation"], binary), float(reply["reward"]), *over)
        step = Step(self._action(fields["action"]), digest)
        if following is None:
            return stepped(self.session_id, generation, episode, index, step, over, claim)
        return stepped_on(self.session_id, generation, episode, index, step, following, claim)

    def _note_head(
        self, generation: int, fields: Mapping[str, Any], reply: Mapping[str, Any], binary: bool
    ) -> EpisodeStart:
        self._move_to(generation, int(reply["episode"]), 0, (False, False))
        self.seed = seed = int(reply["seed"])
        digest = step_digest(self._in_json(reply["observation"], binary), 0.0, False, False)
        return EpisodeStart(seed, _options(fields, binary), digest, [])

    def _move_to(self, generation: int, episode: int, step: int, over: tuple[bool, bool]) -> None:
        """Note its episode and step; answers of a node that it has left do not count."""
        if generation == self.generation:
            self.episode, self.step = episode, step
            self.terminated, self.truncated = over

    def learn(self, found: SharedSession) -> None:
        """Take over its place and its state from the journal."""
        self.generation = found.generation
        self._described = found.about.spaces
        self._action_space = self._observation_space = None
        self._move_to(found.generation, found.episode, found.steps, found.over)
        self.answered = max(self.answered, (found.episode, found.steps))
        self.seed = None if found.head is None else found.head.seed

    def portable(self) -> dict[str, Any]:
        """The portable episode from which another node can rebuild it."""
        return self.journal.portable(max(0, self.episode)).in_json()

    # -- spaces --------------------------------------------------------------------------------------------------

    @property
    def action_space(self) -> Space[Any]:
        """The action space of the session."""
        if self._described is None:
            return self.home.spec.action_space
        if self._action_space is None:
            self._action_space = parse_space(self._described[0])
        return self._action_space

    @property
    def observation_space(self) -> Space[Any]:
        """The observation space of the session."""
        if self._described is None:
            return self.home.spec.observation_space
        if self._observation_space is None:
            self._observation_space = parse_space(self._described[1])
        return self._observation_space

    def _action(self, action: Any) -> Any:
        """An action in JSON's encoding."""
        return action if type(action) in _SAME_IN_BOTH else action_reader(self.action_space)(action)[1]

    def _in_json(self, observation: Any, binary: bool) -> Any:
        if not binary or type(observation) in _SAME_IN_BOTH:
            return observation
        space = self.observation_space
        return encode_value(space, decode_value(space, observation), binary=False)


def places_answered(sessions: Iterable[BaseSession]) -> dict[str, tuple[int, int]]:
    """The last episode and step that clients have received, for each session at a node."""
    return {
        session.session_id: session.answered for session in sessions if isinstance(session, RelayedSession)
    }


def _options(fields: Mapping[str, Any], binary: bool) -> Any:
    """The options of a reset in JSON's encoding."""
    options = fields.get("options")
    return encode_value(None, decode_value(None, options), binary=False) if binary else options


def _head(journal: Journal) -> EpisodeStart | None:
    """How a journal's episode began; None before the first one."""
    if journal.seed is None or journal.reset_digest is None:
        return None
    return EpisodeStart(journal.seed, journal.options, journal.reset_digest, journal.reseeds)


class SessionRelease:
    """Ends sessions at their nodes.

    Args:
        registry: Counts the sessions of each registration.
        moves: The table of moved sessions.
        journal: The journal that gateways share, if there is one.
    """

    def __init__(self, registry: Registry, moves: Moves, journal: "SharedJournal | None" = None) -> None:
        self._moves = moves
        self._registry = registry
        self._journal = journal

    def to(self, session: RelayedSession, reason: EndReason) -> Coroutine[Any, Any, Any] | None:
        """End a session at its node; one that was not used here for long may be in use through another gateway."""
        self._moves.ended(session.session_id)
        if reason == "evicted" and not session.end_is_known:
            return self._unless_used(session)
        if reason == "lost" and session.home.has_other_gateways and self._journal is None:
            # Another gateway may know a session that this one does not.
            self._registry.released(session.home)
            return None
        session.node.close_session(session.upstream_id)
        self._registry.released(session.home)
        if self._journal is None or session.end_is_known:
            return None
        return self._tell(self._journal, session, reason, None)

    async def _unless_used(self, session: RelayedSession) -> None:
        if not await self._may_be_used(session) and (
            self._journal is None or await self._tell(self._journal, session, "evicted", session.generation)
        ):
            session.node.close_session(session.upstream_id)
        self._registry.released(session.home)

    async def _may_be_used(self, session: RelayedSession) -> bool:
        """Whether another gateway may have used a session since it was last used here."""
        if not session.is_placed:
            # Its node was never found here.
            return True
        unused_s = asyncio.get_running_loop().time() - session.last_used
        caller = session.node.link(False).caller
        try:
            reply = await caller.call(
                {"op": "session", "session_id": session.upstream_id}, session.process, caller.deadline()
            )
            return float(reply.payload["idle_s"]) < unused_s - _CLOCK_SKEW_S
        except ProblemError as problem:
            if problem.code == "unknown_session" or problem.extra.get("reason") == "lost":
                # Another gateway can rebuild it from a journal that they share. If none does, the journal forgets it.
                return self._journal is not None
            if problem.code == "session_gone":
                return False
        except (ConnectionError, TimeoutError, KeyError, TypeError, ValueError):
            pass
        # Others may get an answer of the node. If none uses it, its node ends it, and the journal forgets it.
        return self._journal is not None or session.home.has_other_gateways

    @staticmethod
    async def _tell(
        journal: "SharedJournal", session: RelayedSession, reason: EndReason, generation: int | None
    ) -> bool:
        """Write to the journal that a session has ended; return whether it has, as far as is known."""
        try:
            ((status, _, _),) = await journal.end([session.session_id], reason, generation)
        except JournalAway:
            # It ends by its idle time-out there and at its node.
            return False
        return status != "fenced"


def renamed(problem: ProblemError, upstream_id: str, session_id: str) -> ProblemError:
    """A node's problem for the client: with the client's id of the session, and without details of the node."""
    if problem.kind.kept_from_clients:
        problem = ProblemError("upstream_error", f"the node answers {problem}")
    if upstream_id not in problem.detail:
        return problem
    return ProblemError(problem.code, problem.detail.replace(upstream_id, session_id), **problem.extra)
