"""Servers of a pool: what is known of each, and the source of their list."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rollgym.trainer.inference.base import FinishReason, InferenceClient
from rollgym.trainer.inference.dialect import MemoryTag
from rollgym.trainer.inference.partial_reply import PartialReply
from rollgym.trainer.inference.places import OrderedPlaces


class PooledClient(InferenceClient, Protocol):
    """The client of one server, which may be away when the client is made."""

    async def connect(self) -> object:
        """Meet the server, for the first time or again.

        Raises:
            ConnectionError: Or another of `GONE`, if it does not answer.
            ConfigError: If it lacks something that the run needs.
        """
        ...

    async def sleep(self, *, keep_weights: bool) -> None:
        """Give accelerator memory back; requests wait until `wake`."""
        ...

    async def wake(self, tags: Sequence[MemoryTag]) -> None:
        """Allocate memory again; sampling resumes once the cache is back."""
        ...

    async def extend(self, reply: PartialReply) -> FinishReason:
        """Draw what is left of a reply and return why it ended; what was drawn is in it also where this fails."""
        ...


@dataclass(frozen=True, slots=True)
class Roster:
    """Names the servers of a pool whose members may change.

    Attributes:
        names: Gives their names, at least one.
        meet: Makes the client of one.
    """

    names: Callable[[], Awaitable[Sequence[str]]]
    meet: Callable[[str], PooledClient]


@dataclass(eq=False)
class Member:
    """One server.

    Attributes:
        name: Its address.
        client: Talks to it.
        places: Requests that may be under way there.
        connected: Whether it was met, and is not known to be gone since.
        serving: Whether it also has the current weights, so that it gets requests.
        load: Tokens of the requests that run there, or wait for a place.
        trouble: Why it does not serve.
        told: The last message about why it does not serve; empty if there was none, or it serves.
        misses: How often in a row it said, while it served, that it is not well, or did not say.
        faults: How often in a row it answered a request with something malformed.
        taken_away: How often another run overwrote its weights, since the last version in which none did.
        taken_at: The version in which that happened last.
        syncing: Held while it is brought up to date.
        asleep: Whether it gave its memory back, until it gets weights again.
        overdue: Whether its last update did not end in time. Others wait for it no more until it has taken one.
        waits_beyond: Version that could not be brought to it when it was back: it gets the next one with the others.
        is_new: Whether it was added during the run, and has not served yet.
        let_go: Set when it is taken away.
        under_way: Time-outs of the calls that wait for it; they end at once if it is removed from the pool.
    """

    name: str
    client: PooledClient
    places: OrderedPlaces
    connected: bool = False
    serving: bool = False
    load: int = 0
    trouble: str = "it was never met"
    told: str = ""
    misses: int = 0
    faults: int = 0
    taken_away: int = 0
    taken_at: int | None = None
    syncing: asyncio.Lock = field(default_factory=asyncio.Lock)
    asleep: bool = False
    overdue: bool = False
    waits_beyond: int | None = None
    is_new: bool = False
    let_go: asyncio.Event = field(default_factory=asyncio.Event)
    under_way: set[asyncio.Timeout] = field(default_factory=set)

    @property
    def waited_for(self) -> bool:
        """Whether an update of all is to reach it; one that sleeps is woken, whatever has been heard of it since."""
        return (self.connected or self.asleep) and not self.overdue

    def leave(self) -> None:
        """Take the server away: whatever waits for it ends now."""
        self.connected = self.serving = False
        self.trouble = "it is named no more"
        self.let_go.set()
        now = asyncio.get_running_loop().time()
        for limit in self.under_way:
            if not limit.expired():
                limit.reschedule(now)

    async def extend(self, reply: PartialReply) -> FinishReason:
        """Draw what is left of a reply.

        Raises:
            TimeoutError: If the server is taken away meanwhile; and all that its client raises.
        """
        limit = asyncio.timeout(None)
        async with limit:
            self.under_way.add(limit)
            try:
                return await self.client.extend(reply)
            finally:
                self.under_way.discard(limit)

    async def begin_update(self) -> bool:
        """Acquire `syncing`, and return True; False if the server is removed before that."""
        if self.let_go.is_set():
            return False
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self.under_way.add(limit)
                await self.syncing.acquire()
        except TimeoutError:
            return False
        finally:
            self.under_way.discard(limit)
        return True
