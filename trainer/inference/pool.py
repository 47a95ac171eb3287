"""Several inference servers as one client. They may come and go while a run goes on.

A server answers requests while it is reachable and has the current weights. One that is lost keeps nothing that the
trainer lacks: its requests are sent again elsewhere, from the ids that the trainer holds. When it is back it is given
the current weights first.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from trainer.core.errors import RunError
from trainer.inference.base import (
    GenerationRequest,
    GenerationResult,
    InferenceClient,
    InferenceCounters,
    InferenceHealth,
    PauseMode,
    WeightSource,
)
from trainer.inference.places import OrderedPlaces
from trainer.inference.routing import Router

GONE = (ConnectionError, TimeoutError)
"""What a client raises where its server does not answer: not the request's fault, and another server may do better."""

_MISSES = 3

Check = Callable[[str, InferenceClient], Awaitable[object]]
"""Looks whether a server has the weights that it was sent; raises `RunError` if not."""


class NoServerError(ConnectionError):
    """No inference server answers."""


@dataclass
class _Member:
    """One server.

    Attributes:
        name: Its address.
        client: Talks to it.
        places: Requests that may be under way there.
        serving: Whether it answers, and has the current weights.
        load: Tokens of the requests that run there, or wait for a place.
        trouble: Why it does not serve.
        misses: How often in a row it said, while it served, that it is not well, or did not say.
        syncing: Held while it is brought up to date.
    """

    name: str
    client: InferenceClient
    places: OrderedPlaces
    serving: bool = False
    load: int = 0
    trouble: str = "it has no weights yet"
    misses: int = 0
    syncing: asyncio.Lock = field(default_factory=asyncio.Lock)


class ServerPool:
    """An inference client that spreads requests over several others.

    Args:
        clients: The servers by name, such as their addresses.
        max_concurrent: Requests under way at one server; more wait, by priority.
        patience_s: How long servers that are all gone are waited for.
        check: Looks whether a server has the weights that it was sent.
        attempts: Updates of one server before its wrong weights are an error.
        look_every_s: How often servers that are gone are looked for, and others asked how they are.
        say: Told of servers that go and come back.
    """

    def __init__(
        self,
        clients: Mapping[str, InferenceClient],
        *,
        max_concurrent: int,
        patience_s: float,
        check: Check | None = None,
        attempts: int = 2,
        look_every_s: float = 5.0,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._members = [
            _Member(name, client, OrderedPlaces(max_concurrent)) for name, client in clients.items()
        ]
        self._patience_s = patience_s
        self._check = check
        self._attempts = attempts
        self._look_every_s = look_every_s
        self._say = say
        self._router = Router()
        self._version = 0
        self._source: WeightSource | None = None
        self._paused: PauseMode | None = None
        self._changed = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._resubmitted = 0
        self._closed = False

    async def __aenter__(self) -> Self:
        """Look for the servers until one answers.

        Raises:
            NoServerError: If none does in time.
        """
        try:
            async with asyncio.timeout(self._patience_s):
                while True:
                    if await self._any_healthy():
                        break
                    await asyncio.sleep(min(1.0, self._look_every_s))
        except TimeoutError:
            raise self._no_server() from None
        self._watch = asyncio.get_running_loop().create_task(self._look_after())
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
        each = [member.client.counters for member in self._members]
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
        """Return one reply, from whichever server; where one is lost, another one begins it anew.

        Raises:
            NoServerError: If no server answers for too long.
        """
        tokens = len(request.prompt_ids) + request.sampling.max_new_tokens
        while True:
            loads = await self._loads()
            name = self._router.choose(request.session_key, request.prompt_ids, tokens, loads)
            member = next(each for each in self._members if each.name == name)
            member.load += tokens
            try:
                async with member.places.held(request.priority):
                    if not member.serving:
                        continue  # it was lost while the request waited for its place
                    return await member.client.generate(request)
            except GONE as error:
                self._lost(member, error)
                self._resubmitted += 1
            finally:
                member.load -= tokens

    async def generate_together(self, requests: list[GenerationRequest]) -> list[GenerationResult]:
        """Return the replies in the order given; each server batches what it gets by itself."""
        return await _all_or_cancel([self.generate(request) for request in requests])

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

    async def sync(self, source: WeightSource, version: int) -> None:
        """Bring new weights to all servers that answer, and have each verified; the others get them when they are back.

        Raises:
            NoServerError: If none answers for too long.
            RunError: If one answers with other weights than it was sent, however often.
        """
        self._source, self._version = source, version
        deadline = asyncio.get_running_loop().time() + self._patience_s
        while True:
            outcomes = await _all_or_cancel([self._sync_if_there(member) for member in self._members])
            self._changed.set()
            if any(outcomes):
                return
            if asyncio.get_running_loop().time() >= deadline:
                raise self._no_server()
            await asyncio.sleep(min(1.0, self._look_every_s))

    async def close(self) -> None:
        """Stop talking to the servers; requests that wait end with an error."""
        self._closed = True
        self._changed.set()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        for member in self._members:
            member.serving = False
            await member.client.close()

    async def _loads(self) -> dict[str, int]:
        """Return the loads of the servers that answer, as soon as one does."""
        try:
            async with asyncio.timeout(self._patience_s):
                while not (loads := {each.name: each.load for each in self._members if each.serving}):
                    if self._closed:
                        raise NoServerError("the inference servers are no longer used: the run ends")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise self._no_server() from None
        return loads

    async def _sync_if_there(self, member: _Member) -> bool:
        """Bring the current weights to a server, and return whether it has them; False where it is gone."""
        async with member.syncing:
            if not member.serving and not (await self._health(member)).ready:
                return False
            try:
                await self._sync(member)
            except GONE as error:
                self._lost(member, error)
                return False
            except RunError:
                member.serving = False  # what it would answer with is undefined
                raise
        if not member.serving:
            member.serving, member.trouble, member.misses = True, "", 0
            self._changed.set()
        return True

    async def _sync(self, member: _Member) -> None:
        assert self._source is not None
        for attempt in range(1, self._attempts + 1):
            await member.client.sync(self._source, self._version)
            if self._check is None:
                return
            try:
                await self._check(member.name, member.client)
                return
            except RunError as error:
                if attempt == self._attempts:
                    raise
                self._say(f"{error}; it is sent them again")

    def _lost(self, member: _Member, error: Exception) -> None:
        said = str(error) or type(error).__name__
        if member.serving:
            self._say(f"inference server {member.name} is gone ({said}); its requests go to others")
        member.serving, member.trouble = False, said

    async def _look_after(self) -> None:
        """Look for servers that are gone, and bring those that are back up to date."""
        while True:
            await asyncio.sleep(self._look_every_s)
            await asyncio.gather(*(self._look_at(member) for member in self._members))

    async def _look_at(self, member: _Member) -> None:
        if member.syncing.locked():
            return
        health = await self._health(member)
        if member.serving:
            member.misses = 0 if health.ready else member.misses + 1
            if member.misses == _MISSES:  # a busy one may be late now and then
                self._lost(member, ConnectionError(health.detail))
        elif health.ready and self._source is not None:
            await self._bring_back(member)

    async def _bring_back(self, member: _Member) -> None:
        version = self._version
        try:
            if await self._sync_if_there(member):
                if self._paused is not None:
                    await member.client.pause(self._paused)
                self._say(f"inference server {member.name} is back, with the weights of version {version}")
        except RunError as error:
            # Nobody waits for this one: it gets the next weights with the others, who do.
            member.trouble = str(error)

    async def _health(self, member: _Member) -> InferenceHealth:
        try:
            return await member.client.health()
        except GONE as error:
            return InferenceHealth(False, str(error) or type(error).__name__)

    async def _any_healthy(self) -> bool:
        states = await asyncio.gather(*(self._health(member) for member in self._members))
        for member, state in zip(self._members, states, strict=True):
            member.trouble = "it has no weights yet" if state.ready else state.detail
        return any(state.ready for state in states)

    async def _on_all(
        self, what: str, ask: Callable[[InferenceClient], Coroutine[Any, Any, Any]]
    ) -> list[Any]:
        """Ask all servers that answer; one that cannot be asked any more is gone."""

        async def asked(member: _Member) -> Any:
            try:
                return await ask(member.client)
            except GONE as error:
                self._lost(member, ConnectionError(f"{what}: {error}"))
                return 0

        return await _all_or_cancel([asked(member) for member in self._members if member.serving])

    def _troubles(self) -> list[str]:
        return [f"{member.name}: {member.trouble}" for member in self._members if not member.serving]

    def _no_server(self) -> NoServerError:
        return NoServerError(
            f"no inference server answered for {self._patience_s:g} s (inference.patience_s): "
            + "; ".join(self._troubles())
        )


async def _all_or_cancel(calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Return all answers; where one call fails, the others are cancelled first."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
