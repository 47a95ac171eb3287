"""Several inference servers as one client. They may join and leave during a run.

A server answers requests while it is reachable and has the current weights. One that is lost keeps nothing that the
trainer lacks: its requests are retried elsewhere, from the ids that the trainer holds. When it is back it receives
the current weights first. So does a server that joins during the run; one that is removed is treated as lost.
Requests go where a cache holds their past, unless that overloads a server.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Self

from rollgym.trainer.inference.base import (
    GenerationRequest,
    GenerationResult,
    InferenceCounters,
    InferenceHealth,
    PauseMode,
    WeightSource,
)
from rollgym.trainer.inference.calls import all_or_cancel
from rollgym.trainer.inference.errors import GONE, InferenceError, RequestRefusedError, StructuredOutputError
from rollgym.trainer.inference.server_client.in_flight import PartialReply
from rollgym.trainer.inference.server_pool.members import (
    FAULTS,
    Member,
    PooledClient,
    PoolHealth,
    ServerRoster,
)
from rollgym.trainer.inference.server_pool.upkeep import Check, PoolWatch, PoolWeights
from rollgym.trainer.inference.servers.launch import RestartingServers

_REMEMBERED = 65_536
_SLACK_REQUESTS = 16
_SLACK_SHARE = 1.5


class Router:
    """Assigns requests to servers, and remembers the assignments of sessions and prompts.

    An episode stays on its first server, whose prefix cache holds its past (AReaL, verl, SGLang's router). The first
    turns of a group have one prompt, and go to one server, which computes it once; if that server is much busier
    than the least busy one, they go to the latter.

    Args:
        remembered: Sessions, and prompts, that are remembered; the ones that were not seen for longest are forgotten.
    """

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._prompts: OrderedDict[bytes, str] = OrderedDict()
        self._remembered = remembered

    def choose(
        self, session_key: str, prompt_ids: Sequence[int], tokens: int, loads: Mapping[str, int]
    ) -> str:
        """Return the server that a request goes to, and remember it.

        Args:
            session_key: The episode; empty if the request belongs to none.
            prompt_ids: All that the policy reads.
            tokens: The request's own load.
            loads: Tokens that run and wait at each server that answers now; at least one.
        """
        server = self._sessions.get(session_key) if session_key else None
        if server is None or server not in loads:
            server = self._by_prompt(prompt_ids, tokens, loads)
        if session_key:
            _remember(self._sessions, session_key, server, self._remembered)
        return server

    def _by_prompt(self, prompt_ids: Sequence[int], tokens: int, loads: Mapping[str, int]) -> str:
        digest = hashlib.blake2b(array("q", prompt_ids).tobytes(), digest_size=16).digest()
        least = min(loads, key=lambda name: loads[name])
        server = self._prompts.get(digest, least)
        if server not in loads or _much_busier(loads[server], loads[least], tokens):
            server = least
        _remember(self._prompts, digest, server, self._remembered)
        return server


def _much_busier(load: int, least: int, tokens: int) -> bool:
    return load > _SLACK_SHARE * least + _SLACK_REQUESTS * tokens


def _remember(places: OrderedDict[Any, str], key: object, server: str, limit: int) -> None:
    places[key] = server
    places.move_to_end(key)
    if len(places) > limit:
        places.popitem(last=False)


_OWN_FAULT = (400, 413, 422)
"""Statuses by which a server refuses what it is asked, and would anywhere."""


class ServerPool:
    """An inference client that spreads requests over several others.

    Args:
        clients: The servers by name, such as their addresses.
        max_concurrent: Requests under way at one server; more wait, by priority.
        patience_s: How long servers that are all gone are waited for.
        update_timeout_s: How long one server may take for an update and its verification; then it counts as lost, and
            the others continue.
        check: Looks whether a server has the weights that it was sent.
        attempts: Updates of one server before its wrong weights are an error.
        look_every_s: How often servers that are gone are looked for, and others asked how they are.
        say: Called with a message when servers go and come back.
        roster: Says which servers there are to be, at each look and before each update; without it they stay the same.
        starts: Which of them are being started again: patience does not run out meanwhile.
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
        roster: ServerRoster | None = None,
        starts: RestartingServers | None = None,
    ) -> None:
        self._servers = PoolHealth(
            clients, max_concurrent=max_concurrent, patience_s=patience_s, say=say, starts=starts
        )
        self._weights = PoolWeights(
            self._servers, check, attempts=attempts, update_timeout_s=update_timeout_s, say=say
        )
        self._watch = PoolWatch(self._servers, self._weights, look_every_s, roster)
        self._router = Router()
        self._resubmitted = 0

    async def __aenter__(self) -> Self:
        """Look for the servers until one answers; those that come later are welcome, too.

        Raises:
            NoServerError: If none does in time.
            ConfigError: If one lacks something that the run needs.
        """
        try:
            await self._watch.begin()
        except BaseException:
            await self.close()  # clients go on looking for servers that are gone
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def version(self) -> int:
        """The policy version that was brought to the servers last."""
        return self._servers.version

    @property
    def counters(self) -> InferenceCounters:
        """What all servers together have done."""
        each = [member.client.counters for member in self._servers.ever]
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
        return [member.name for member in self._servers.serving]

    async def health(self) -> InferenceHealth:
        """Say which servers answer, and what is wrong with the others."""
        serving = self.serving
        detail = f"{len(serving)} of {len(self._servers)} inference servers answer"
        return InferenceHealth(bool(serving), "; ".join([detail, *self._servers.troubles()]))

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Return one reply, from any server; if that is lost, another one continues from the tokens received.

        Raises:
            NoServerError: If no server answers for too long.
            SharedServerError: If another run takes the servers away.
            InferenceError: If servers refuse the request, or give malformed answers to it, again and again.
        """
        reply = PartialReply(request)
        tokens = len(request.prompt_ids) + request.sampling.max_new_tokens
        erred: list[str] = []
        while True:
            serving = await self._servers.served()
            loads = {each.name: each.load for each in serving}
            loads = {name: load for name, load in loads.items() if name not in erred} or loads
            name = self._router.choose(request.session_key, request.prompt_ids, tokens, loads)
            member = next(each for each in serving if each.name == name)
            member.load += tokens
            try:
                async with member.places.held(request.priority):
                    if not member.serving:
                        continue  # it was lost while the request waited for its place
                    reason = await member.extend(reply)
                member.faults = 0
                return reply.result(reason)
            except GONE as error:
                self._servers.lost(member, error)
                self._resubmitted += 1
            except InferenceError as error:
                erred.append(name)
                if len(erred) == FAULTS or _is_own_fault(error):
                    raise
                self._servers.erred(member, error)
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
        self._servers.paused = mode
        await self._on_all("pause", lambda client: client.pause(mode))

    async def resume(self) -> None:
        """Resume generating on all servers."""
        self._servers.paused = None
        await self._on_all("resume", lambda client: client.resume())

    async def sleep(self, *, keep_weights: bool) -> None:
        """Have all servers give their memory back until the next `sync`; requests that come meanwhile wait."""

        async def send_to_sleep(member: Member) -> None:
            member.asleep = True
            await self._ask(member, "sleep", lambda client: client.sleep(keep_weights=keep_weights))

        await all_or_cancel([send_to_sleep(member) for member in self._servers.serving])

    async def sync(self, source: WeightSource, version: int) -> None:
        """Bring new weights to all servers that answer, and have each verified; the others get them when they are back.

        Raises:
            NoServerError: If none answers for too long.
            SharedServerError: If another run takes the servers away.
            RunError: If one that has served answers with other weights than it was sent, however often.
        """
        await self._watch.muster()
        await self._weights.sync(source, version)

    async def close(self) -> None:
        """Stop talking to the servers; requests that wait end with an error."""
        self._servers.close()
        await self._watch.end()

    async def _on_all(self, what: str, ask: Callable[[PooledClient], Coroutine[Any, Any, Any]]) -> list[Any]:
        """Ask all servers that answer."""
        asked = [self._ask(member, what, ask) for member in self._servers.serving]
        return await all_or_cancel(asked)

    async def _ask(
        self, member: Member, what: str, ask: Callable[[PooledClient], Coroutine[Any, Any, Any]]
    ) -> Any:
        """Ask a server; one that cannot be asked any more is gone, and its answer is 0."""
        try:
            return await ask(member.client)
        except GONE as error:
            self._servers.lost(member, ConnectionError(f"{what}: {error}"))
            return 0


def _is_own_fault(error: InferenceError) -> bool:
    if isinstance(error, StructuredOutputError):
        return True
    return isinstance(error, RequestRefusedError) and error.status in _OWN_FAULT
