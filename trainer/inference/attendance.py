"""Health registry of a pool: which servers are up and serving, their requirements, and messages on changes."""

import asyncio
from collections.abc import Callable, Iterator, Mapping

from rollgym.trainer.core.errors import RunError, TrainerError
from rollgym.trainer.inference.base import PauseMode
from rollgym.trainer.inference.errors import (
    ForeignWeightsError,
    InferenceError,
    NoServerError,
    SharedServerError,
    WeightsError,
    words_of,
)
from rollgym.trainer.inference.members import Member, PooledClient
from rollgym.trainer.inference.places import OrderedPlaces
from rollgym.trainer.inference.starts import Starts

FAULTS = 3
"""Answers in a row that are none: of one server, then it is gone; to one request, then it is an error."""

_TAKEN_AWAY = 5
"""The run ends when another one has overwritten a server's weights so often, with no undisturbed version in between."""


class Attendance:
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
    """

    def __init__(
        self,
        clients: Mapping[str, PooledClient],
        *,
        max_concurrent: int,
        patience_s: float,
        say: Callable[[str], None],
        starts: Starts | None = None,
    ) -> None:
        self.patience_s = patience_s
        self.version = 0
        self.paused: PauseMode | None = None
        self._max_concurrent = max_concurrent
        self._say = say
        self._members = [
            Member(name, client, OrderedPlaces(max_concurrent)) for name, client in clients.items()
        ]
        self._former: list[Member] = []
        self._changed = asyncio.Event()
        self._starts = starts or Starts()
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
        return [f"{member.name}: {member.trouble}" for member in self._members if not member.serving]

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
            await self.until_changed(deadline)

    async def until_changed(self, deadline: float) -> None:
        """Wait until a server may be back, or waiting has become pointless.

        Args:
            deadline: By the clock of the event loop; it does not come while a server is started again.

        Raises:
            NoServerError: If nothing changes before the deadline.
        """
        self._changed.clear()
        try:
            async with asyncio.timeout_at(self._starts.deadline(deadline, self.patience_s)):
                await self._changed.wait()
        except TimeoutError:
            raise self.no_server() from None

    def change(self) -> None:
        """Wake callers that wait for a server, so that they look again."""
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
        self._members.append(Member(name, client, OrderedPlaces(self._max_concurrent), is_new=True))

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
            f"looked for again: {'; '.join(f'{each.name}: {each.told}' for each in away)}"
        )

    def met(self, member: Member) -> None:
        """Note that a server answers."""
        member.connected, member.trouble = True, "it has no weights yet"

    def came(self, member: Member) -> None:
        """Note that a server has the current weights, and gets requests."""
        member.connected = member.serving = True
        member.overdue = False
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

    def put_off(self, member: Member, error: TrainerError) -> None:
        """Have a server that does not take the current weights wait for the next ones."""
        self._tell_of_waiting(member, error)
        member.waits_beyond, member.trouble = self.version, str(error)

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
