"""The requests in flight at one server, the gate that holds them while it is paused, and replies drawn in parts.

The tokens of a reply before an interruption become part of its next prompt, which may go to another server.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rollgym.trainer.core.seeding import derive_seed
from rollgym.trainer.inference.base import FinishReason, GenerationRequest, GenerationResult, SamplingParams
from rollgym.trainer.records.experts import Experts


@dataclass(slots=True)
class PartialReply:
    """One reply so far.

    Attributes:
        request: What was asked for.
        token_ids: Tokens of all stretches.
        logprobs: Of each, as it was drawn.
        policy_versions: Of each.
        experts: Those that tokens of the prompt and of all stretches took, if known.
    """

    request: GenerationRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    experts: Experts | None = field(default=None, compare=False)

    @property
    def prompt_ids(self) -> list[int]:
        """What the next stretch reads."""
        if not self.token_ids:
            return self.request.prompt_ids
        return self.request.prompt_ids + self.token_ids

    @property
    def sampling(self) -> SamplingParams:
        """How the next stretch is drawn: with what is left of the budget."""
        sampling = self.request.sampling
        if not self.token_ids:
            return sampling
        return replace(sampling, max_new_tokens=sampling.max_new_tokens - len(self.token_ids))

    @property
    def seed(self) -> int:
        """The next stretch's seed: the request's own for the first, one that follows from it and the place after.

        With the same seed again a stretch would draw the random numbers of the one before.
        """
        if not self.token_ids:
            return self.request.seed
        return derive_seed(self.request.seed, "stretch", len(self.token_ids))

    def begin_again(self) -> None:
        """Discard the tokens of a constrained reply: it cannot resume, since a grammar begins with the first token."""
        if self.request.sampling.structured is not None and self.token_ids:
            self.token_ids, self.logprobs, self.policy_versions = [], [], []
            self.experts = None

    def add(
        self,
        token_ids: list[int],
        logprobs: list[float],
        policy_versions: list[int],
        experts: Experts | None = None,
    ) -> None:
        """Append a stretch. What tokens of the stretches before took is known already."""
        if experts is not None:
            known = 0 if self.experts is None else len(self.experts)
            self.experts = (
                experts if self.experts is None else np.concatenate([self.experts, experts[known:]])
            )
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.policy_versions += policy_versions

    def finished(self) -> FinishReason | None:
        """Say whether what is here is a whole reply, whatever interrupted its last stretch."""
        if self.token_ids and self.token_ids[-1] in self.request.sampling.stop_token_ids:
            return "stop"
        if len(self.token_ids) >= self.request.sampling.max_new_tokens:
            return "length"
        return None

    def result(self, finish_reason: FinishReason) -> GenerationResult:
        """Return it as it is."""
        return GenerationResult(
            self.token_ids, self.logprobs, self.policy_versions, finish_reason, self.experts
        )


_SETTLE_S = 1.0
"""So long after the last of the answers that a pause brought about, what is not here was never admitted."""


@dataclass(eq=False, slots=True)
class OngoingReply:
    """One reply in flight.

    Attributes:
        reply: What is here of it.
        rid: The call that is under way, as the server knows it; empty between two calls.
        adapter: The adapter that draws it.
        submitted_version: Version that the server had when the call was made.
        limit: Ends the call.
        idle: Set while no call is under way.
        abort_asked: Set once it is to end with what it has.
        done: Set at its end.
        aborted: Whether it ended so.
    """

    reply: PartialReply
    rid: str = ""
    adapter: str | None = None
    submitted_version: int = 0
    limit: asyncio.Timeout | None = None
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    abort_asked: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: bool = False

    def drop(self) -> None:
        """Forget the call that is under way, if one is."""
        if self.limit is not None and not self.limit.expired():
            self.limit.reschedule(asyncio.get_running_loop().time())


class InFlightReplies:
    """Replies in flight at one server, with a gate: while it is closed no new call is made.

    Attributes:
        holds: How often they were held.
    """

    def __init__(self) -> None:
        self._replies: set[OngoingReply] = set()
        self._running = asyncio.Event()
        self._running.set()
        self.holds = 0

    def __len__(self) -> int:
        return len(self._replies)

    def __iter__(self) -> Iterator[OngoingReply]:
        return iter(list(self._replies))

    @property
    def calls(self) -> list[OngoingReply]:
        """Those of which a call is at the server."""
        return [each for each in self._replies if each.rid]

    def begin(self, ongoing: OngoingReply) -> None:
        """Add a reply to those in flight."""
        self._replies.add(ongoing)

    def end(self, ongoing: OngoingReply) -> None:
        """Remove a reply that was delivered or abandoned."""
        self._replies.discard(ongoing)
        ongoing.done.set()

    # The gate

    @property
    def held(self) -> bool:
        """Whether new calls wait at the gate."""
        return not self._running.is_set()

    def hold(self) -> None:
        """Let calls wait from now on."""
        self._running.clear()
        self.holds += 1

    def release(self) -> None:
        """Open the gate: calls that wait proceed."""
        self._running.set()

    async def until_released(self, ongoing: OngoingReply) -> None:
        """Wait until calls are let through, or the reply is to be aborted."""
        if self._running.is_set():
            return
        waits = [asyncio.ensure_future(event.wait()) for event in (self._running, ongoing.abort_asked)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    # Their calls

    async def idle(self) -> None:
        """Wait until no call of now is at the server any more."""
        await all_set([each.idle for each in self.calls], None)

    async def settle(self, meet: Callable[[], Awaitable[object]]) -> None:
        """Wait until every answer that a pause brought about is here.

        A request that comes to a paused server is answered after the pause, by other weights than those that it was
        sent to: it is dropped, and sent again.

        Args:
            meet: Asks the server something that it answers at once.
        """
        missing = self.calls
        answered = True
        while missing and answered:
            await all_set([each.idle for each in missing], _SETTLE_S)
            if not all(each.idle.is_set() for each in missing):
                # A server that has little processor time answers this late, too, and what it owes before it.
                await meet()
            left = [each for each in missing if not each.idle.is_set()]
            # Many answers take their time to be read.
            missing, answered = left, len(left) < len(missing)
        for each in missing:
            each.drop()
        await all_set([each.idle for each in missing], None)


async def all_set(events: Sequence[asyncio.Event], timeout_s: float | None) -> None:
    """Wait until all events are set, or time is over."""
    if not events:
        return
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=timeout_s)
    finally:
        for wait in waits:
            wait.cancel()
