"""Recovering sessions whose nodes do not answer, where gateways share a journal: one of them at a time moves one."""

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, Literal

from rollgym.clients.protocol.episode import PortableEpisode
from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.common.metrics import Metrics
from rollgym.env_server.common.settings import TimeoutSettings
from rollgym.env_server.gateway.journal_entries import LEASE_S, Claim, JournalAway, SharedSession, Unreadable
from rollgym.env_server.gateway.registry import Registration, Registry
from rollgym.env_server.gateway.relayed_session import RelayedSession
from rollgym.env_server.gateway.upstream.node import Node, Nodes
from rollgym.env_server.sessions.journal import EndReason
from rollgym.env_server.sessions.sessions import Sessions, session_gone

if TYPE_CHECKING:
    from rollgym.env_server.gateway.shared_journal import SharedJournal


RECONNECT_S = 1.0
"""How long a node may be away before its sessions move to another node, if there is one."""

# How long a restarted gateway waits for nodes to register, before it considers them away.
_REGISTRATION_S = 5.0
# The interval of polls whether another gateway has moved a session; Redis sends no notification.
_LOOK_S = 0.1
_RENEWALS = 3
# The longest wait before another look whether the journal has settled.
_LONGEST_SETTLING_S = 1.0

_Move = Literal["moved", "again", "nowhere"]
_log = logging.getLogger(__name__)


class SharedRelocation:
    """Recovers sessions whose nodes do not answer, if the gateways share all sessions.

    Args:
        settings: Time-outs.
        sessions: The open sessions.
        registry: The registrations.
        nodes: The nodes.
        metrics: Counts the sessions that were moved.
        journal: The journal that the gateways share.
    """

    def __init__(
        self,
        settings: TimeoutSettings,
        sessions: Sessions,
        registry: Registry,
        nodes: Nodes,
        metrics: Metrics,
        journal: "SharedJournal",
    ) -> None:
        self._settings = settings
        self._sessions = sessions
        self._registry = registry
        self._nodes = nodes
        self._metrics = metrics
        self._journal = journal
        self._loop = asyncio.get_running_loop()
        self._started_at = self._loop.time()
        # Copies of which it is not known whether the journal has them as the place of their session.
        self._unsure: dict[str, tuple[Registration, str]] = {}

    async def find(self, session_id: str) -> SharedSession:
        """A session as the gateways know it.

        Raises:
            ProblemError: `session_gone`, or `draining` while the journal is away.
        """
        found = await self._load(session_id)
        if found is None:
            raise session_gone(session_id, "lost")
        if found.ended is not None:
            raise session_gone(session_id, found.ended)
        return found

    async def bring_back(self, session: RelayedSession, *, gone: bool, deadline: float, binary: bool) -> None:
        """Make sure that this gateway knows the session's present node, and that the node answers.

        Args:
            session: The session.
            gone: Whether its node has lost it, or some of its answered steps.
            deadline: When to give up, on the loop's clock.
            binary: The encoding of the coming request: each encoding has connections of its own.

        Raises:
            ProblemError: `session_gone`, `draining` while another gateway moves it or the journal is away, or
                `upstream_error` if no node answers in time.
        """
        trouble = "its node does not have it any more"
        while True:
            answered = session.answered
            found = await self._at_rest(session, deadline)
            if found.generation != session.generation and (found.episode, found.steps) < answered:
                # Another gateway lacked the latest steps, and has rebuilt it at an earlier point.
                await self._went_back(session, found.generation)
            if (found.generation, found.upstream_id) != (session.generation, session.upstream_id):
                gone = False
            node = self._nodes.find(found.node)
            # A server that registers again while it is looked for is another one than that which is away.
            home = None if node is None else self._registry.home_at(node, session.entry.env_id)
            if node is None:
                trouble = "its node has not registered with this gateway"
            elif not gone and found.moving_s is None:
                try:
                    async with asyncio.timeout(RECONNECT_S):
                        await node.link(binary).caller.pool.connection(session.process)
                except (ConnectionError, TimeoutError, ProblemError) as error:
                    trouble = str(error) or f"{node.target.url} does not answer"
                    if home is not None:
                        self._registry.failed(home)
                else:
                    # Sessions are closed and nodes leave while one is connected to.
                    self._sessions.require_open(session)
                    if self._nodes.find(found.node) is node:
                        self._settle(session, found, node)
                        return
                    trouble = "its node has left this gateway"
                    if self._loop.time() < deadline:
                        continue
            move: _Move = "nowhere"
            if node is not None or self._loop.time() >= self._started_at + _REGISTRATION_S:
                move = await self._move(session, found, None if gone else home, gone=gone)
            if move == "moved":
                return
            left = deadline - self._loop.time()
            if left <= 0:
                raise ProblemError("upstream_error", f"{session.entry.env_id}: {trouble}")
            if move == "nowhere":
                await self._registry.changed(min(left, RECONNECT_S))

    # -- where the journal has it --------------------------------------------------------------------------------

    async def _load(self, session_id: str) -> SharedSession | None:
        try:
            found = await self._journal.load(session_id)
        except JournalAway as away:
            raise away.problem() from away
        if session_id in self._unsure:
            home, upstream_id = self._unsure.pop(session_id)
            if found is None or found.upstream_id != upstream_id:
                home.node.close_session(upstream_id)
        return found

    async def _at_rest(self, session: RelayedSession, deadline: float) -> SharedSession:
        """The session as the journal has it, once no other gateway moves it."""
        session_id = session.session_id
        while True:
            found = await self._load(session_id)
            if found is None:
                self._end(session, "lost")
                raise session_gone(session_id, "lost")
            if found.ended is not None:
                self._end(session, found.ended)
                raise session_gone(session_id, found.ended)
            if found.generation < session.generation:
                _log.error("the shared journal has lost what it had of session %s", session_id)
                await self._end_everywhere(session, "lost", found.generation)
            if not found.moving_s:
                return found
            if self._loop.time() >= deadline:
                raise ProblemError(
                    "draining", "another gateway moves the session to another node", retry_after=1
                )
            await asyncio.sleep(min(found.moving_s, _LOOK_S))

    def _settle(self, session: RelayedSession, found: SharedSession, node: Node) -> None:
        """Note where a session is."""
        if (session.node, session.upstream_id) != (node, found.upstream_id):
            home = self._registry.home_at(node, session.entry.env_id) or session.home
            if home is not session.home:
                self._registry.took(home)
                self._registry.released(session.home)
            session.live_at(home, node, found.upstream_id, None)
        if not session.is_placed or session.generation != found.generation:
            session.learn(found)
        session.is_placed = True

    def _end(self, session: RelayedSession, reason: EndReason) -> None:
        session.end_is_known = True
        self._sessions.end(session, reason)

    async def _end_everywhere(self, session: RelayedSession, reason: EndReason, generation: int) -> None:
        """End a session for all gateways, unless another one has moved it.

        Raises:
            ProblemError: `session_gone`, or `draining`.
        """
        session_id = session.session_id
        try:
            ((status, _, _),) = await self._journal.end([session_id], reason, generation)
        except JournalAway as away:
            raise away.problem() from away
        if status == "fenced":
            raise ProblemError("draining", "another gateway has moved the session", retry_after=1)
        self._end(session, reason)
        raise session_gone(session_id, reason)

    async def _went_back(self, session: RelayedSession, generation: int) -> None:
        """End a session whose journal went back, for example after a fail-over to a lagging replica.

        Raises:
            ProblemError: `session_gone`, or `draining`.
        """
        _log.error("the shared journal went back behind what session %s was answered", session.session_id)
        await self._end_everywhere(session, "lost", generation)

    # -- moving it -----------------------------------------------------------------------------------------------

    async def _move(
        self, session: RelayedSession, found: SharedSession, away: Registration | None, *, gone: bool
    ) -> _Move:
        """Rebuild a session at another node, if one accepts it and no other gateway is moving it."""
        if found.episode >= 0 and not session.entry.deterministic:
            if gone:
                await self._end_everywhere(session, "lost", found.generation)
            # Its node may come back with it.
            return "nowhere"
        if self._journal.settling_s > 0:
            await asyncio.sleep(min(self._journal.settling_s, _LONGEST_SETTLING_S))
            return "again"
        home = await self._registry.place(session.entry.env_id, 0.0, without=() if away is None else (away,))
        if home is None and found.moving_s is None:
            return "nowhere"
        try:
            claim = await self._journal.claim(session.session_id, found.generation)
        except JournalAway as error:
            self._release(home)
            raise error.problem() from error
        except Unreadable as error:
            self._release(home)
            _log.error("%s", error)
            await self._end_everywhere(session, "lost", found.generation + 1)
            raise
        if isinstance(claim, str):
            self._release(home)
            if claim == "behind":
                # Another gateway knows better than the journal.
                await self._went_back(session, found.generation)
            return "again"
        if (claim.episode, len(claim.steps)) < session.answered:
            self._release(home)
            await self._went_back(session, claim.generation)
        if home is None:
            # The gateway that was about to move it has died: it stays at its node.
            await self._give_back(session.session_id, claim)
            return "again"
        return await self._move_to(session, found, claim, home)

    async def _move_to(
        self, session: RelayedSession, found: SharedSession, claim: Claim, home: Registration
    ) -> _Move:
        session_id = session.session_id
        renewing = self._loop.create_task(self._renew(session_id, claim))
        try:
            upstream_id, process = await home.node.begin_anew(
                home.upstream_env_id,
                _episode(found, claim),
                found.about.kwargs,
                idle_timeout_s=found.about.idle_timeout_s,
                make_timeout_s=self._settings.make_timeout_s,
            )
        except (ConnectionError, TimeoutError):
            self._registry.failed(home)
            self._release(home)
            await self._give_back(session_id, claim)
            return "again"
        except ProblemError as problem:
            self._release(home)
            return await self._not_restored(session, claim, home, problem)
        except BaseException:
            self._release(home)
            raise
        finally:
            renewing.cancel()
        try:
            status = await self._journal.moved(session_id, claim.generation, home.node.key, upstream_id)
        except JournalAway as away:
            self._unsure[session_id] = home, upstream_id
            self._release(home)
            raise away.problem() from away
        if status != "ok" or self._sessions.by_id.get(session_id) is not session:
            # Too late, or it was ended while it was rebuilt.
            if status != "ok":
                home.node.close_session(upstream_id)
            self._release(home)
            return "again"
        self._leave(found)
        self._registry.released(session.home)
        session.live_at(home, home.node, upstream_id, process)
        session.generation = claim.generation
        session.is_placed = True
        self._metrics.failovers[session.entry.label] += 1
        self._metrics.rebuilds[session.entry.label, "ok"] += 1
        _log.warning("session %s goes on at %s", session_id, home.node.target.url)
        return "moved"

    async def _not_restored(
        self, session: RelayedSession, claim: Claim, home: Registration, problem: ProblemError
    ) -> _Move:
        if problem.code == "session_gone" and problem.extra.get("reason") == "replay_diverged":
            self._metrics.rebuilds[session.entry.label, "diverged"] += 1
            await self._end_everywhere(session, "replay_diverged", claim.generation)
        if problem.kind.forbids_restoring:
            _log.error(
                "session %s is lost: %s cannot restore it: %s", session.session_id, home.target.url, problem
            )
            await self._end_everywhere(session, "lost", claim.generation)
        await self._give_back(session.session_id, claim)
        if problem.kind.retry_later:
            self._registry.failed(home)
            return "again"
        raise ProblemError("upstream_error", f"{home.target.url} cannot restore it: {problem}") from problem

    def _leave(self, found: SharedSession) -> None:
        """Close the session at its former node, if that is reachable."""
        old = self._nodes.find(found.node)
        if old is not None:
            old.close_session(found.upstream_id)

    def _release(self, home: Registration | None) -> None:
        if home is not None:
            self._registry.released(home)

    async def _give_back(self, session_id: str, claim: Claim) -> None:
        # Without it, the right to move the session ends by itself.
        with contextlib.suppress(JournalAway):
            await self._journal.stays(session_id, claim.generation)

    async def _renew(self, session_id: str, claim: Claim) -> None:
        """Keep the right to move a session, as long as it is not lost."""
        while True:
            await asyncio.sleep(LEASE_S / _RENEWALS)
            with contextlib.suppress(JournalAway):
                if await self._journal.renew(session_id, claim.generation) != "ok":
                    return


def _episode(found: SharedSession, claim: Claim) -> dict[str, Any] | None:
    """The portable episode that a session is in; None before the first one."""
    head, about = claim.head, found.about
    if head is None:
        return None
    # The node that restores it looks at it, and there may be a great deal of it.
    episode = PortableEpisode.model_construct(
        env_id=about.env_id,
        env_version=about.env_version,
        kwargs=about.kwargs,
        episode=claim.episode,
        seed=head.seed,
        options=head.options,
        reset_digest=head.reset_digest,
        actions=[step.action for step in claim.steps],
        digests=[step.digest for step in claim.steps],
        reseeds=head.reseeds,
    )
    return episode.in_json()
