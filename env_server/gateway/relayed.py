"""A session that a node has: a gateway passes its operations on, and could begin it anew on another node."""

import asyncio
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from gymnasium import Space

from clients.protocol.arrays import DecodeError
from clients.protocol.episode import PortableEpisode
from clients.protocol.spaces import parse_space
from clients.protocol.values import EncodeError, decode_value, encode_value
from env_server.actions import action_reader
from env_server.gateway.node import Node
from env_server.gateway.registry import Registration
from env_server.held import EndReason, HeldSession
from env_server.journal import Journal
from env_server.replies import Reply

if TYPE_CHECKING:
    from env_server.catalog import CatalogEntry
    from env_server.gateway.farewell import Farewell

# What reading an answer of another form than the protocol's may raise.
UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, DecodeError, EncodeError)
_SAME_IN_BOTH = frozenset({str, int, bool, type(None)})


class RelayedSession(HeldSession):
    """A session at a node.

    Its journal is what the gateway has seen go by, so that the node may be lost.

    Attributes:
        home: The registration whose session it is.
        node: The node that has it.
        upstream_id: Its id there.
        process: The node's I/O process that owns it, where that is known.
        shares_frames: Whether the node answers its steps at once.
        journal: How to begin it anew.
        incomplete: Whether others have used it, so that the journal lacks steps.
        lock: Held while it is looked for.
        in_flight: How many operations are on their way.
    """

    __slots__ = (
        "_action_space",
        "_described",
        "_farewell",
        "_observation_space",
        "_quiet",
        "home",
        "in_flight",
        "incomplete",
        "journal",
        "lock",
        "node",
        "process",
        "shares_frames",
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
        farewell: "Farewell",
    ) -> None:
        super().__init__(session_id, entry=entry, owner=owner, idle_timeout_s=idle_timeout_s, now=now)
        self.journal = journal
        self.incomplete = False
        self.lock: asyncio.Lock | None = None
        self.in_flight = 0
        self._quiet: asyncio.Future[None] | None = None
        self._farewell = farewell
        self._described: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._action_space: Space[Any] | None = None
        self._observation_space: Space[Any] | None = None
        self.live_at(home, node, upstream_id, process)

    def live_at(self, home: Registration, node: Node, upstream_id: str, process: int | None) -> None:
        """Note where it is from now on."""
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
        """Have the node end it."""
        return self._farewell.to(self, reason)

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
        """Take down the beginning of an episode; one that is answered again is known already."""
        episode = reply["episode"]
        if episode <= self.episode:
            return
        observation = self._in_json(reply["observation"], binary)
        self.journal.begin(reply["seed"], fields.get("options"), observation)
        self.episode = episode
        self.seed = reply["seed"]
        self.step = 0
        self.terminated = self.truncated = self.incomplete = False

    def take_step(self, fields: Mapping[str, Any], reply: Mapping[str, Any], binary: bool) -> None:
        """Take down a step; one that is answered again is known already."""
        episode, step = reply["episode"], reply["step"]
        if episode != self.episode or step != self.step + 1:
            if (episode, step) > (self.episode, self.step):
                self.incomplete = True
            return
        action, observation = fields["action"], reply["observation"]
        if type(action) not in _SAME_IN_BOTH:
            action = action_reader(self.action_space)(action)[1]
        if binary and type(observation) not in _SAME_IN_BOTH:
            observation = self._in_json(observation, binary)
        terminated, truncated = reply["terminated"], reply["truncated"]
        self.journal.record(action, observation, reply["reward"], terminated, truncated)
        self.step = step
        self.terminated = terminated
        self.truncated = truncated
        begun = reply.get("reset")
        if begun is not None:
            self.take_reset(fields.get("reset") or {}, begun, binary)

    def take_episode(self, reply: Reply) -> None:
        """Learn from the node what others have done with it."""
        episode = PortableEpisode.model_validate({**reply, "env_id": self.entry.env_id})
        self.journal = Journal.from_portable(episode)
        self.incomplete = False
        if episode.seed is not None:
            self.episode, self.seed, self.step = episode.episode, episode.seed, len(episode.actions)

    def portable(self) -> dict[str, Any]:
        """How another node can begin it anew."""
        return self.journal.portable(max(0, self.episode)).model_dump(mode="json")

    # -- spaces --------------------------------------------------------------------------------------------------

    @property
    def action_space(self) -> Space[Any]:
        """Its action space."""
        if self._described is None:
            return self.home.spec.action_space
        if self._action_space is None:
            self._action_space = parse_space(self._described[0])
        return self._action_space

    @property
    def observation_space(self) -> Space[Any]:
        """Its observation space."""
        if self._described is None:
            return self.home.spec.observation_space
        if self._observation_space is None:
            self._observation_space = parse_space(self._described[1])
        return self._observation_space

    def _in_json(self, observation: Any, binary: bool) -> Any:
        if not binary or type(observation) in _SAME_IN_BOTH:
            return observation
        space = self.observation_space
        return encode_value(space, decode_value(space, observation), binary=False)
