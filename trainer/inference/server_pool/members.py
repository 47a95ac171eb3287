"""Servers of a pool: what is known of each, which of them are up and serving, and the source of their list."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rollgym.trainer.config.inference import read_servers
from rollgym.trainer.core.errors import ConfigError, RunError, TrainerError
from rollgym.trainer.inference.base import FinishReason, InferenceClient, PauseMode
from rollgym.trainer.inference.errors import (
    ForeignWeightsError,
    InferenceError,
    NoServerError,
    SharedServerError,
    WeightsError,
    words_of,
)
from rollgym.trainer.inference.forwarding import PrioritySemaphore
from rollgym.trainer.inference.server_client.in_flight import PartialReply
from rollgym.trainer.inference.servers.dialect import MemoryTag
from rollgym.trainer.inference.servers.launch import RestartingServers


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
class ServerRoster:
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
        overruns: Updates in a row that did not end in time, not counting those while it was overdue.
        overdue: Whether updates of all do not wait for it, because its last one did not end in time.
        skips: Versions that do not wait for it any more before one does again, if only an update of all can reach it.
        waits_beyond: Version that could not be brought to it when it was back: it gets the next one with the others.
        is_new: Whether it was added during the run, and has not served yet.
        let_go: Set when it is taken away.
        under_way: Time-outs of the calls that wait for it; they end at once if it is removed from the pool.
    """

    name: str
    client: PooledClient
    places: PrioritySemaphore
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
    overruns: int = 0
    overdue: bool = False
    skips: int = 0
    waits_beyond: int | None = None
    is_new: bool = False
    let_go: asyncio.Event = field(default_factory=asyncio.Event)
    under_way: set[asyncio.Timeout] = field(default_factory=set)

    @property
    def waited_for(self) -> bool:
        """Whether an update of all is to reach it; one that sleeps is woken, whatever has been heard of it since."""
        return (self.connected or self.asleep) and not self.overdue

    @property
    def with_trouble(self) -> str:
        """Its name and why it does not serve; errors of its client name its address already."""
        return self.trouble if self.trouble.startswith(f"{self.name} ") else f"{self.name}: {self.trouble}"

    def overran(self) -> None:
        """Note an update that did not end in time."""
        if not self.overdue:  # while it is, only looks at it alone take that long, and nobody waits for these
            self.overruns += 1
            self.skips = 2 ** (self.overruns - 1) - 1
        self.overdue = True

    def missed(self) -> None:
        """Note that only an update of all can reach it: it sleeps, or answers while the trainer has no weights to send.

        Updates of all wait for it again. One that answers and takes none would cost each version the time limit, so it
        costs the next version, then the second, the fourth and so on.
        """
        if self.skips == 0:
            self.overdue = False
        else:
            self.skips -= 1

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


FAULTS = 3
"""Answers in a row that are none: of one server, then it is gone; to one request, then it is an error."""

_TAKEN_AWAY = 5
"""The run ends when another one has overwritten a server's weights so often, with no undisturbed version in between."""


class PoolHealth:
    """Registry of a pool's servers and their last known health.

    Args:
        clients: The servers by name, such as their addresses.
        max_concurrent: Requests under way at one server.
        patience_s: How long servers that are all gone are waited for.
        say: Called with a message when servers go and come back.
        starts: The servers that are being restarted: deadlines are suspended meanwhile.

    Attributes:
        patience_s: As above.
        version: The policy version that was brought to the servers last.
        paused: How they are paused; None while they are not.
        changes: How often something happened that callers wait for, such as a server that is back.
    """

    def __init__(
        self,
        clients: Mapping[str, PooledClient],
        *,
        max_concurrent: int,
        patience_s: float,
        say: Callable[[str], None],
        starts: RestartingServers | None = None,
    ) -> None:
        self.patience_s = patience_s
        self.version = 0
        self.paused: PauseMode | None = None
        self.changes = 0
        self._max_concurrent = max_concurrent
        self._say = say
        self._members = [
            Member(name, client, PrioritySemaphore(max_concurrent)) for name, client in clients.items()
        ]
        self._former: list[Member] = []
        self._changed = asyncio.Event()
        self._starts = starts or RestartingServers()
        self._starts.changed = self.change
        self._closed = False
        self._failure: RunError | None = None

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    @property
    def ever(self) -> list[Member]:
        """The servers, and those that were taken away."""
        return [*self._members, *self._former]

    @property
    def serving(self) -> list[Member]:
        """The servers that answer now, with the current weights."""
        return [member for member in self._members if member.serving]

    def troubles(self) -> list[str]:
        """Say what is wrong with each server that does not serve."""
        return [member.with_trouble for member in self._members if not member.serving]

    # Callers that wait for a server

    async def served(self) -> list[Member]:
        """Return the servers that serve, as soon as one does.

        Raises:
            NoServerError: If none does for too long, or the pool is closed.
            RunError: If the task that watches the servers has failed, or another run takes them away.
        """
        deadline = asyncio.get_running_loop().time() + self.patience_s
        while True:
            self.raise_if_failed()
            if serving := self.serving:
                return serving
            if self._closed:
                raise NoServerError("the inference servers are no longer used: the run ends")
            await self.until_changed(deadline, self.changes)

    async def until_changed(self, deadline: float, since: int) -> None:
        """Wait until a server may be back, or waiting has become pointless.

        Args:
            deadline: By the clock of the event loop; it does not come while a server is started again.
            since: What `changes` was when the caller looked: what has changed since is not waited for.

        Raises:
            NoServerError: If nothing changes before the deadline.
        """
        if self.changes != since:
            return
        self._changed.clear()
        try:
            async with asyncio.timeout_at(self._starts.deadline(deadline, self.patience_s)):
                await self._changed.wait()
        except TimeoutError:
            raise self.no_server() from None

    def change(self) -> None:
        """Wake callers that wait for a server, so that they look again."""
        self.changes += 1
        self._changed.set()

    def no_server(self) -> NoServerError:
        """Return the error that says that all are gone."""
        return NoServerError(
            f"no inference server answered for {self.patience_s:g} s (inference.patience_s): "
            + "; ".join(self.troubles())
        )

    def fail(self, failure: RunError) -> None:
        """End the run: callers that wait, and all later calls, get the error."""
        self._failure = failure
        self.change()

    def raise_if_failed(self) -> None:
        """Raise what the run is to end with, if it is to end."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Close the pool: callers that wait for a server fail."""
        self._closed = True
        self.change()

    # Servers that come and go

    def add(self, name: str, client: PooledClient) -> None:
        """Add a server that the roster names during the run."""
        self._say(f"inference server {name} is named now: it is given the weights before it is asked")
        self._members.append(Member(name, client, PrioritySemaphore(self._max_concurrent), is_new=True))

    def remove(self, member: Member) -> None:
        """Let go of a server that is named no more."""
        self._say(f"inference server {member.name} is named no more; {self._next_place(member)}")
        self._members.remove(member)
        self._former.append(member)
        member.leave()

    def tell_of_absent(self) -> None:
        """Say which servers were not met at the start: an address that was typed wrong looks like one still to come."""
        away = [each for each in self._members if not each.connected]
        for each in away:
            each.told = each.trouble
        self._say(
            f"{len(away)} of {len(self._members)} inference servers do not answer yet, and are "
            f"looked for again: {'; '.join(each.with_trouble for each in away)}"
        )

    def met(self, member: Member) -> None:
        """Note that a server answers."""
        member.connected = True
        if not member.overruns:  # else its trouble says why it has none
            member.trouble = "it has no weights yet"

    def came(self, member: Member) -> None:
        """Note that a server has the current weights, and gets requests."""
        member.connected = member.serving = True
        member.overdue, member.overruns = False, 0
        member.trouble, member.misses = "", 0
        self.change()
        if member.is_new or member.told:
            comes = "takes requests" if member.is_new else "is back"
            self._say(f"inference server {member.name} {comes}, with the weights of version {self.version}")
        member.is_new, member.told = False, ""

    def lost(self, member: Member, error: Exception) -> None:
        """Note that a server is gone, or has lost the weights."""
        said = words_of(error)
        if member.serving:
            member.told = said
            self._say(f"inference server {member.name} is gone ({said}); {self._next_place(member)}")
            if isinstance(error, ForeignWeightsError):
                self._note_taken_away(member, said)
        else:
            self._tell_of_waiting(member, error)
        member.connected, member.serving, member.trouble = False, False, said

    def _next_place(self, member: Member) -> str:
        if any(each.serving for each in self._members if each is not member):
            return "its requests go to others"
        return "its requests wait for a server that answers"

    def erred(self, member: Member, error: InferenceError) -> None:
        """Note an answer that is none; a server that gives such ones again and again is as good as gone."""
        member.faults += 1
        if member.faults >= FAULTS:
            member.faults = 0
            self.lost(member, error)

    def put_off(self, member: Member, error: TrainerError, version: int) -> None:
        """Have a server that does not take the weights of a version wait for the next ones."""
        self._tell_of_waiting(member, error)
        member.waits_beyond, member.trouble = version, str(error)

    def _tell_of_waiting(self, member: Member, error: Exception) -> None:
        """Say why a server that was added does not serve yet, once for each reason."""
        # Errors of weights name the version.
        reason = type(error).__name__ if isinstance(error, WeightsError) else words_of(error)
        if member.is_new and not member.let_go.is_set() and reason != member.told:
            member.told = reason
            self._say(f"inference server {member.name} is not asked yet: {words_of(error)}")

    def _note_taken_away(self, member: Member, said: str) -> None:
        """Count how often another run overwrote the server: two runs that share one would do so for ever."""
        if member.taken_at is None or self.version > member.taken_at + 1:
            member.taken_away = 0
        member.taken_away, member.taken_at = member.taken_away + 1, self.version
        if member.taken_away == _TAKEN_AWAY:
            self.fail(
                SharedServerError(
                    f"{said}; that has happened {_TAKEN_AWAY} times: give each run inference servers of its own"
                )
            )


class FileRoster:
    """Reads the servers' addresses from a file; while it is unusable, the last valid list counts.

    Args:
        path: The file.
        say: Called when the file cannot be used, once for each reason, and when it can again.

    Raises:
        ConfigError: If it cannot be used at the start.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path = path.absolute()
        self._say = say
        self._named = read_servers(self._path)
        self._trouble = ""

    async def names(self) -> Sequence[str]:
        """Return the addresses of the servers that there are to be."""
        try:
            named = await asyncio.to_thread(read_servers, self._path)
        except ConfigError as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                self._say(f"{error}; the {len(self._named)} servers that it named last stay")
            return self._named
        if self._trouble:
            self._trouble = ""
            self._say(f"inference.urls_file: {self._path} can be read again")
        self._named = named
        return named
