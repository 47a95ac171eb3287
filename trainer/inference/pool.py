"""Several inference servers as one client. They may come and go while a run goes on.

A server answers requests while it is reachable and has the current weights. One that is lost keeps nothing that the
trainer lacks: its requests are sent again elsewhere, from the ids that the trainer holds. When it is back it is given
the current weights first. So is one that is added while the run goes on; one that is taken away is let go as if lost.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

from trainer.core.errors import RunError, TrainerError
from trainer.inference.base import (
    GenerationRequest,
    GenerationResult,
    InferenceClient,
    InferenceCounters,
    InferenceHealth,
    PauseMode,
    WeightSource,
)
from trainer.inference.calls import all_or_cancel
from trainer.inference.errors import (
    ForeignWeightsError,
    InferenceError,
    RequestRefusedError,
    ServerGoneError,
    WeightsError,
    WeightUpdateError,
    WrongWeightsError,
    words_of,
)
from trainer.inference.members import Member, PooledClient, Roster
from trainer.inference.partial_reply import PartialReply
from trainer.inference.places import OrderedPlaces
from trainer.inference.routing import Router

GONE = (ConnectionError, TimeoutError, ServerGoneError, WeightsError)
"""What a client raises where its server does not answer, or not with this run's weights: not the request's fault, and
another server may do better."""

_MISSES = 3
_FAULTS = 3
"""Answers in a row that are none: of one server, then it is gone; to one request, then it is an error."""
_TAKEN_AWAY = 5
"""Versions in a row in which somebody else gave a server weights."""
_OWN_FAULT = (400, 413, 422)
"""Statuses by which a server refuses what it is asked, and would anywhere."""

Check = Callable[[str, InferenceClient], Awaitable[object]]
"""Looks whether a server has the weights that it was sent; raises `RunError` if not."""


class SharedServerError(RunError):
    """Another run gives a server its weights again and again."""


class NoServerError(ConnectionError):
    """No inference server answers; the message says of each why."""


class ServerPool:
    """An inference client that spreads requests over several others.

    Args:
        clients: The servers by name, such as their addresses.
        max_concurrent: Requests under way at one server; more wait, by priority.
        patience_s: How long servers that are all gone are waited for.
        update_timeout_s: How long one server may take for an update, verified; then it is lost, and others go on.
        check: Looks whether a server has the weights that it was sent.
        attempts: Updates of one server before its wrong weights are an error.
        look_every_s: How often servers that are gone are looked for, and others asked how they are.
        say: Told of servers that go and come back.
        roster: Says which servers there are to be, at each look and before each update; without it they stay the same.
    """

    def __init__(
        self,
        clients: Mapping[str, PooledClient],
        *,
        max_concurrent: int,
        patience_s: float,
        update_timeout_s: float = 1800.0,
        check: Check | None = None,
        attempts: int = 2,
        look_every_s: float = 5.0,
        say: Callable[[str], None] = lambda _: None,
        roster: Roster | None = None,
    ) -> None:
        self._members = [
            Member(name, client, OrderedPlaces(max_concurrent)) for name, client in clients.items()
        ]
        self._max_concurrent = max_concurrent
        self._roster = roster
        self._mustering = asyncio.Lock()
        self._look_now = asyncio.Event()
        self._former: list[Member] = []
        self._partings: list[asyncio.Task[None]] = []
        self._patience_s = patience_s
        self._update_timeout_s = update_timeout_s
        self._check = check
        self._attempts = attempts
        self._look_every_s = look_every_s
        self._say = say
        self._router = Router()
        self._version = 0
        self._source: WeightSource | None = None
        self._paused: PauseMode | None = None
        self._changed = asyncio.Event()
        self._closed = False
        self._failure: RunError | None = None
        self._watch: asyncio.Task[None] | None = None
        self._looks: dict[Member, asyncio.Task[None]] = {}
        self._resubmitted = 0

    async def __aenter__(self) -> Self:
        """Look for the servers until one answers; those that come later are welcome, too.

        Raises:
            NoServerError: If none does in time.
            ConfigError: If one lacks something that the run needs.
        """
        deadline = asyncio.get_running_loop().time() + self._patience_s
        told = False
        while True:
            await self._muster()
            await all_or_cancel([self._connect(member) for member in self._members])
            away = [each for each in self._members if not each.connected]
            if away and not told:  # an address that was typed wrong looks like a server that is still to come
                told = True
                for each in away:
                    each.told = each.trouble
                self._say(
                    f"{len(away)} of {len(self._members)} inference servers do not answer yet, and are "
                    f"looked for again: {'; '.join(f'{each.name}: {each.told}' for each in away)}"
                )
            if len(away) < len(self._members):
                break
            if asyncio.get_running_loop().time() >= deadline:
                raise self._no_server()
            await asyncio.sleep(min(1.0, self._look_every_s))
        self._watch = asyncio.get_running_loop().create_task(self._look_after())
        self._watch.add_done_callback(self._watch_ended)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def version(self) -> int:
        """The policy version that was brought to the servers last."""
        return self._version

    @property
    def counters(self) -> InferenceCounters:
        """What all servers together have done."""
        each = [member.client.counters for member in (*self._members, *self._former)]
        return InferenceCounters(
            requests=sum(counters.requests for counters in each),
            prompt_tokens=sum(counters.prompt_tokens for counters in each),
            tokens_generated=sum(counters.tokens_generated for counters in each),
            resubmitted=self._resubmitted + sum(counters.resubmitted for counters in each),
            running=sum(counters.running for counters in each),
        )

    @property
    def serving(self) -> list[str]:
        """Names of the servers that answer now."""
        return [member.name for member in self._members if member.serving]

    async def health(self) -> InferenceHealth:
        """Say which servers answer, and what is wrong with the others."""
        serving = self.serving
        detail = f"{len(serving)} of {len(self._members)} inference servers answer"
        return InferenceHealth(bool(serving), "; ".join([detail, *self._troubles()]))

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Return one reply, from whichever server; where one is lost, another one goes on from what is here.

        Raises:
            NoServerError: If no server answers for too long.
            SharedServerError: If another run takes the servers away.
            InferenceError: If servers refuse the request, or answer it with what is no answer, again and again.
        """
        reply = PartialReply(request)
        tokens = len(request.prompt_ids) + request.sampling.max_new_tokens
        erred: list[str] = []
        while True:
            loads = await self._loads()
            loads = {name: load for name, load in loads.items() if name not in erred} or loads
            name = self._router.choose(request.session_key, request.prompt_ids, tokens, loads)
            member = next(each for each in self._members if each.name == name)
            member.load += tokens
            try:
                async with member.places.held(request.priority):
                    if not member.serving:
                        continue  # it was lost while the request waited for its place
                    reason = await member.extend(reply)
                member.faults = 0
                return reply.result(reason)
            except GONE as error:
                self._lost(member, error)
                self._resubmitted += 1
            except InferenceError as error:
                erred.append(name)
                if len(erred) == _FAULTS or _is_own_fault(error):
                    raise
                self._erred(member, error)
                self._resubmitted += 1
            finally:
                member.load -= tokens

    async def generate_together(self, requests: list[GenerationRequest]) -> list[GenerationResult]:
        """Return the replies in the order given; each server batches what it gets by itself."""
        return await all_or_cancel([self.generate(request) for request in requests])

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """End replies with what they have on all servers, and return how many."""
        ended = await self._on_all("abort", lambda client: client.abort(request_ids))
        return sum(ended)

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating on all servers, and on those that come back meanwhile."""
        self._paused = mode
        await self._on_all("pause", lambda client: client.pause(mode))

    async def resume(self) -> None:
        """Go on, on all servers."""
        self._paused = None
        await self._on_all("resume", lambda client: client.resume())

    async def sleep(self, *, keep_weights: bool) -> None:
        """Have all servers give their memory back until the next `sync`; requests that come meanwhile wait."""

        async def send_to_sleep(member: Member) -> None:
            member.asleep = True
            await self._ask(member, "sleep", lambda client: client.sleep(keep_weights=keep_weights))

        await all_or_cancel([send_to_sleep(member) for member in self._members if member.serving])

    async def sync(self, source: WeightSource, version: int) -> None:
        """Bring new weights to all servers that answer, and have each verified; the others get them when they are back.

        Raises:
            NoServerError: If none answers for too long.
            SharedServerError: If another run takes the servers away.
            RunError: If one that has served answers with other weights than it was sent, however often.
        """
        await self._muster()
        self._source, self._version = source, version
        deadline = asyncio.get_running_loop().time() + self._patience_s
        while True:
            self._raise_if_failed()
            known = [member for member in self._members if member.waited_for]
            if any(await all_or_cancel([self._bring_along(member) for member in known])):
                return
            self._changed.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()  # for a server that is back
            except TimeoutError:
                raise self._no_server() from None

    async def close(self) -> None:
        """Stop talking to the servers; requests that wait end with an error."""
        self._closed = True
        self._changed.set()
        watching = [*([] if self._watch is None else [self._watch]), *self._looks.values()]
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        for member in self._members:
            member.serving = False
            await member.client.close()
        await asyncio.gather(*self._partings)

    async def _muster(self) -> None:
        """Let go of servers that are named no more, and have those that are named anew looked at soon."""
        if self._roster is None:
            return
        async with self._mustering:
            names = await self._roster.names()
            for member in [each for each in self._members if each.name not in names]:
                self._let_go(member)
            known = {member.name for member in self._members}
            for name in names:
                if name not in known:
                    self._say(
                        f"inference server {name} is named now: it is given the weights before it is asked"
                    )
                    client, places = self._roster.meet(name), OrderedPlaces(self._max_concurrent)
                    self._members.append(Member(name, client, places, is_new=True))
                    self._look_now.set()

    def _let_go(self, member: Member) -> None:
        self._say(f"inference server {member.name} is named no more; its requests go to others")
        self._members.remove(member)
        self._former.append(member)
        member.connected = member.serving = False
        member.trouble = "it is named no more"
        member.let_go.set()
        now = asyncio.get_running_loop().time()
        for limit in member.under_way:
            if not limit.expired():
                limit.reschedule(now)
        self._partings.append(asyncio.get_running_loop().create_task(self._part(member)))

    async def _part(self, member: Member) -> None:
        """Leave a server when the update that is under way there has ended; one that does not is broken off."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s), member.syncing:
                pass
        await member.client.close()

    async def _loads(self) -> dict[str, int]:
        """Return the loads of the servers that answer, as soon as one does."""
        try:
            async with asyncio.timeout(self._patience_s):
                while True:
                    self._raise_if_failed()
                    if loads := {each.name: each.load for each in self._members if each.serving}:
                        return loads
                    if self._closed:
                        raise NoServerError("the inference servers are no longer used: the run ends")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise self._no_server() from None

    async def _bring_along(self, member: Member) -> bool:
        """Bring the current weights to one server of several; the run goes on without one that never served."""
        try:
            return await self._bring_up_to_date(member)
        except TrainerError as error:
            if not (member.is_new or member.let_go.is_set()):
                raise
            self._put_off(member, error)
            return False

    async def _bring_up_to_date(self, member: Member) -> bool:
        """Bring the current weights to a server, and return whether it has them; False where it is gone."""
        if not await member.begin_update():
            return False
        try:
            if not await self._take_weights(member):
                return False
        finally:
            member.syncing.release()
        if member.let_go.is_set():
            return False
        if not member.serving:
            # A request may have found it gone while it took the weights: it is there, as it has them.
            member.connected = member.serving = True
            member.overdue = False
            member.trouble, member.misses = "", 0
            self._changed.set()
            self._tell_of_coming(member)
        return True

    async def _take_weights(self, member: Member) -> bool:
        """Have a server take the current weights; `syncing` is held."""
        limit = asyncio.timeout(self._update_timeout_s)
        try:
            async with limit:
                await self._sync(member)
                if not member.serving:
                    await self._stand_as_others(member)
            return True
        except (WeightUpdateError, WrongWeightsError) as error:
            if not member.let_go.is_set() and not isinstance(error.__cause__, ServerGoneError):
                member.serving = False
                raise  # it is there, and does not take them
            self._lost(member, error)
        except (*GONE, InferenceError) as error:
            member.overdue = limit.expired()
            self._lost(member, self._overdue() if member.overdue else error)
        except RunError:
            member.serving = False  # what it would answer with is undefined
            raise
        member.asleep = False  # who is started again is awake
        return False

    async def _sync(self, member: Member) -> None:
        assert self._source is not None
        for attempt in range(1, self._attempts + 1):
            try:
                if member.asleep:
                    await member.client.wake(("weights",))
                await member.client.sync(self._source, self._version)
                if member.asleep:
                    # Only now: what it caches is computed by the new weights.
                    await member.client.wake(("kv_cache",))
                    member.asleep = False
                if self._check is not None:
                    await self._check(member.name, member.client)
                return
            except InferenceError as error:
                gone = isinstance(error, ServerGoneError) or isinstance(error.__cause__, ServerGoneError)
                if attempt == self._attempts or gone or member.let_go.is_set():
                    raise
                if not (member.is_new and member.told):
                    self._say(f"{error}; it is sent them again")

    async def _stand_as_others(self, member: Member) -> None:
        """Pause a server that is about to serve, or let it go on, as the pool is, which may change meanwhile."""
        while True:
            paused = self._paused
            await (member.client.resume() if paused is None else member.client.pause(paused))
            if paused == self._paused:
                return

    def _overdue(self) -> TimeoutError:
        return TimeoutError(
            f"it has not taken the weights of version {self._version} in {self._update_timeout_s:g} s "
            "(inference.update_timeout_s)"
        )

    def _lost(self, member: Member, error: Exception) -> None:
        said = words_of(error)
        if member.serving:
            member.told = said
            self._say(f"inference server {member.name} is gone ({said}); its requests go to others")
            if isinstance(error, ForeignWeightsError):
                self._note_taken_away(member, said)
        else:
            self._tell_of_waiting(member, error)
        member.connected, member.serving, member.trouble = False, False, said

    def _tell_of_waiting(self, member: Member, error: Exception) -> None:
        """Say why a server that was added does not serve yet, once for each reason."""
        # Errors of weights name the version.
        reason = type(error).__name__ if isinstance(error, WeightsError) else words_of(error)
        if member.is_new and not member.let_go.is_set() and reason != member.told:
            member.told = reason
            self._say(f"inference server {member.name} is not asked yet: {words_of(error)}")

    def _tell_of_coming(self, member: Member) -> None:
        if member.is_new or member.told:
            comes = "takes requests" if member.is_new else "is back"
            self._say(f"inference server {member.name} {comes}, with the weights of version {self._version}")
        member.is_new, member.told = False, ""

    def _note_taken_away(self, member: Member, said: str) -> None:
        """Two runs that share a server go on taking it from each other, at the cost of both."""
        if member.taken_at is None or self._version > member.taken_at + 1:
            member.taken_away = 0
        member.taken_away, member.taken_at = member.taken_away + 1, self._version
        if member.taken_away == _TAKEN_AWAY:
            self._failure = SharedServerError(
                f"{said}; that has happened {_TAKEN_AWAY} times: give each run inference servers of its own"
            )
            self._changed.set()

    def _erred(self, member: Member, error: InferenceError) -> None:
        """A server answered with what is no answer; one that does it again and again is as good as gone."""
        member.faults += 1
        if member.faults >= _FAULTS:
            member.faults = 0
            self._lost(member, error)

    async def _look_after(self) -> None:
        """Look for servers that are gone, and bring those that are back up to date."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._look_every_s):
                    await self._look_now.wait()
            self._look_now.clear()
            await self._muster()
            for member in self._members:
                self._begin_look(member)

    def _begin_look(self, member: Member) -> None:
        """Look at a server while others are looked at: to bring one up to date may take long, or never end."""
        if member in self._looks:
            return

        def ended(look: asyncio.Task[None]) -> None:
            del self._looks[member]
            self._watch_ended(look)

        look = self._looks[member] = asyncio.get_running_loop().create_task(self._look_at(member))
        look.add_done_callback(ended)

    def _watch_ended(self, watch: asyncio.Task[None]) -> None:
        """Have the run end where nobody looks after the servers any more: those that are lost would stay so."""
        if not watch.cancelled() and (error := watch.exception()) is not None:
            self._failure = RunError(
                f"the inference servers are no longer looked after, because of {type(error).__name__}: {error}"
            )
            self._failure.__cause__ = error
            self._changed.set()

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _look_at(self, member: Member) -> None:
        if member.syncing.locked() or member.asleep:
            return  # to meet one that sleeps is to generate on memory that it has given back
        if member.serving:
            if self._paused is not None:
                return  # it says that it does not answer, as it should not
            health = await self._health(member)
            member.misses = 0 if health.ready else member.misses + 1
            if member.misses == _MISSES:  # a busy one may be late now and then
                self._lost(member, ConnectionError(health.detail))
            return
        try:
            await self._bring_back(member)
        except TrainerError as error:
            self._put_off(member, error)

    def _put_off(self, member: Member, error: TrainerError) -> None:
        """Have a server that does not take the current weights wait for the next ones."""
        self._tell_of_waiting(member, error)
        member.waits_beyond, member.trouble = self._version, str(error)

    async def _bring_back(self, member: Member) -> None:
        if not member.connected:
            if not await self._connect(member):
                return
            self._changed.set()
        if self._source is None or member.waits_beyond == self._version:
            return
        await self._bring_up_to_date(member)

    async def _connect(self, member: Member) -> bool:
        """Meet a server, and return whether it is there."""
        try:
            await member.client.connect()
        except GONE as error:
            self._lost(member, error)
            return False
        member.connected, member.trouble = True, "it has no weights yet"
        return True

    async def _health(self, member: Member) -> InferenceHealth:
        try:
            return await member.client.health()
        except GONE as error:
            return InferenceHealth(False, words_of(error))

    async def _on_all(self, what: str, ask: Callable[[PooledClient], Coroutine[Any, Any, Any]]) -> list[Any]:
        """Ask all servers that answer."""
        asked = [self._ask(member, what, ask) for member in self._members if member.serving]
        return await all_or_cancel(asked)

    async def _ask(
        self, member: Member, what: str, ask: Callable[[PooledClient], Coroutine[Any, Any, Any]]
    ) -> Any:
        """Ask a server; one that cannot be asked any more is gone, and its answer is 0."""
        try:
            return await ask(member.client)
        except GONE as error:
            self._lost(member, ConnectionError(f"{what}: {error}"))
            return 0

    def _troubles(self) -> list[str]:
        return [f"{member.name}: {member.trouble}" for member in self._members if not member.serving]

    def _no_server(self) -> NoServerError:
        return NoServerError(
            f"no inference server answered for {self._patience_s:g} s (inference.patience_s): "
            + "; ".join(self._troubles())
        )


def _is_own_fault(error: InferenceError) -> bool:
    return isinstance(error, RequestRefusedError) and error.status in _OWN_FAULT
