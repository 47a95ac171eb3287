"""Replies of one server: requested, in as many chunks as interruptions cut them into, scored, and aborted.

An update of the weights that aborts a reply returns the tokens drawn so far, and the rest is requested again with them
as part of the prompt. Each token keeps the log-probability that it was drawn with and the version that drew it.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol
from uuid import uuid4

import orjson

from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.inference.base import FinishReason, InferenceCounters, SamplingParams, check_length
from rollgym.trainer.inference.calls import HttpAnswer, streamed
from rollgym.trainer.inference.errors import (
    FailedReplyError,
    MalformedReplyError,
    RepeatedAbortError,
    RequestRefusedError,
    StructuredOutputError,
)
from rollgym.trainer.inference.server_client.in_flight import (
    InFlightReplies,
    OngoingReply,
    PartialReply,
    all_set,
)
from rollgym.trainer.inference.server_client.link import ServerLink
from rollgym.trainer.inference.server_client.weights import ServedAdapters, ServedWeights
from rollgym.trainer.inference.servers.chunks import GenerationCall, GenerationChunk

_DATA, _DONE = b"data:", b"[DONE]"


_EMPTY_ABORTS = 8
"""Unexplained aborts in a row without a token, before the reply fails."""
_ABORT_EVERY_S = 0.5
_ABORTS = 3
_PAUSED = 503


class ServerReplies:
    """Asks one server for replies.

    Args:
        link: Talks to it.
        under_way: Replies that it draws.
        weights: Those that it has.
        adapters: Its adapters.
        vocabulary: How many token ids the policy's model knows; None if unknown.
    """

    def __init__(
        self,
        link: ServerLink,
        under_way: InFlightReplies,
        weights: ServedWeights,
        adapters: ServedAdapters,
        vocabulary: int | None,
    ) -> None:
        self._link = link
        self._under_way = under_way
        self._weights = weights
        self._adapters = adapters
        self._vocabulary = vocabulary
        self._requests = self._prompt_tokens = self._tokens_generated = self._resubmitted = 0

    @property
    def counters(self) -> InferenceCounters:
        """Totals of requests and tokens so far."""
        return InferenceCounters(
            self._requests,
            self._prompt_tokens,
            self._tokens_generated,
            self._resubmitted,
            len(self._under_way),
        )

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Refuse sampling whose log-probabilities the server would report wrongly.

        Raises:
            ConfigError: With the switch that mends it.
        """
        capabilities = self._link.capabilities
        if not capabilities.tried or not capabilities.inexact(sampling):
            return
        remedy = self._link.program.exactly(capabilities)
        raise ConfigError(
            f"{self._link.url} reports log-probabilities of the {capabilities.logprobs_of}, not of the distribution "
            f"that tokens are drawn from with temperature {sampling.temperature:g}, top_p {sampling.top_p:g} and top_k "
            f"{sampling.top_k}: {remedy}, or sample with temperature 1, top_p 1 and top_k 0"
        )

    async def extend(self, reply: PartialReply) -> FinishReason:
        """Draw what is left of a reply; see `ServerClient.extend`."""
        self._count(reply)
        ongoing = OngoingReply(reply)
        self._under_way.begin(ongoing)
        try:
            reason = await self._complete(ongoing)
            ongoing.aborted = reason == "abort"
            return reason
        finally:
            self._under_way.end(ongoing)

    def _count(self, reply: PartialReply) -> None:
        request = reply.request
        if request.images:
            raise ConfigError(
                f"request {request.request_id} shows pictures, and {self._link.url} is asked with token ids alone: "
                "take inference.kind embedded"
            )
        longest = self._link.capabilities.max_length
        check_length(request, longest, f"{self._link.url}, {longest}")
        self.check_sampling(request.sampling)
        self._requests += 1
        self._prompt_tokens += len(request.prompt_ids) + len(reply.token_ids)

    async def _complete(self, ongoing: OngoingReply) -> FinishReason:
        reply = ongoing.reply
        unexplained = 0
        while True:
            await self._under_way.until_released(ongoing)
            if ongoing.abort_asked.is_set():
                return "abort"
            self._weights.trust()
            reply.begin_again()
            holds = self._under_way.holds
            tried = self._link.capabilities.tried
            if tried:
                self.check_sampling(reply.request.sampling)
            stretch = await self._stretch(ongoing)
            if not tried and stretch is not None:
                await self._look_at_last(reply.request.sampling)
            if stretch is not None and stretch.finish_reason != "abort":
                return stretch.finish_reason
            if (finished := reply.finished()) is not None:
                return finished
            if ongoing.abort_asked.is_set():
                continue
            self._resubmitted += stretch is not None
            if holds != self._under_way.holds or (stretch is not None and stretch.token_ids):
                unexplained = 0
                continue
            unexplained += 1
            if unexplained > _EMPTY_ABORTS:
                raise RepeatedAbortError(
                    f"{self._link.url} aborted request {reply.request.request_id} {unexplained} times in a row without "
                    "a token, and nobody here asked for it: does something else pause this server?"
                )
            await asyncio.sleep(min(0.01 * 2**unexplained, 0.5))

    async def _look_at_last(self, sampling: SamplingParams) -> None:
        """Look at sampling that a server was asked for in the pause in which it was met: it could not say what it does.

        Raises:
            ConfigError: As `check_sampling` does.
        """
        await self._link.try_out()
        self.check_sampling(sampling)

    async def _stretch(self, ongoing: OngoingReply) -> GenerationChunk | None:
        """Ask for what is left of a reply and add what comes; None where the call was dropped or not admitted."""
        call = self._call(ongoing.reply)
        ongoing.rid, ongoing.adapter, ongoing.submitted_version = (
            call.request_id,
            call.adapter,
            self._weights.version,
        )
        ongoing.idle.clear()
        try:
            answer = await self._asked(ongoing, call)
        except BaseException:
            self._drop_at_server(call.request_id)
            raise
        finally:
            ongoing.rid, ongoing.limit = "", None
            ongoing.idle.set()
            self._adapters.unload_unused()
        if answer is None:
            self._drop_at_server(call.request_id)
            return None
        if answer.status == _PAUSED:
            return None
        stretch = await self._read(answer, call, ongoing.reply.request.request_id)
        versions = await self._weights.versions_of(stretch, ongoing)
        ongoing.reply.add(stretch.token_ids, stretch.logprobs, versions, stretch.experts)
        self._tokens_generated += len(stretch.token_ids)
        return stretch

    def _call(self, reply: PartialReply) -> GenerationCall:
        return GenerationCall(
            request_id=uuid4().hex,
            prompt_ids=reply.prompt_ids,
            sampling=reply.sampling,
            seed=reply.seed,
            session_key=reply.request.session_key,
            cache_salt=f"version-{self._weights.version}",
            adapter=self._adapters.current,
        )

    async def _asked(self, ongoing: OngoingReply, call: GenerationCall) -> HttpAnswer | None:
        """Make the call; None if it was dropped on the way."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                ongoing.limit = limit
                await self._weights.confirm_after_trouble()
                return await self._answered(call, ongoing.reply.request.on_tokens)
        except TimeoutError:
            if limit.expired():
                return None
            raise

    async def _answered(
        self, call: GenerationCall, on_tokens: Callable[[Sequence[int]], None] | None
    ) -> HttpAnswer:
        dialect = self._link.dialect
        asked = dialect.generate(call)
        if on_tokens is None or not dialect.capabilities.streams or self._comes_whole(call.sampling):
            return await self._link.http.call(asked, held=lambda: self._under_way.held)
        loop = asyncio.get_running_loop()
        # Errors of the callback must not fail the reply: the event loop calls it, before the reply is complete.
        events = ReplyEvents(dialect, lambda ids: loop.call_soon(on_tokens, ids))
        answer = await self._link.http.call(
            streamed(asked), held=lambda: self._under_way.held, reading=events.reading
        )
        return events.answer(answer)

    def _comes_whole(self, sampling: SamplingParams) -> bool:
        """Whether the reply is not streamed: experts come at its end, and a constrained reply may be restarted."""
        return sampling.routed_experts or (
            sampling.structured is not None and self._link.need.way is not None
        )

    async def _read(self, answer: HttpAnswer, call: GenerationCall, request_id: str) -> GenerationChunk:
        try:
            stretch = self._link.dialect.read_generation(answer, call)
        except FailedReplyError as error:
            if call.sampling.structured is None:
                raise
            raise StructuredOutputError(str(error), request_id) from error
        except RequestRefusedError as error:
            if (
                call.adapter is not None
                and error.status in (400, 404)
                and not await self._adapters.has(call.adapter)
            ):
                raise self._weights.lose(
                    f"{self._link.url} does not know the adapter of version {self._weights.version} any more"
                ) from error
            if call.sampling.structured is not None and error.status in (400, 422):
                raise StructuredOutputError(str(error), request_id) from error
            raise
        largest = max(stretch.token_ids, default=0)
        if self._vocabulary is not None and largest >= self._vocabulary:
            raise MalformedReplyError(
                f"{self._link.url} drew the token id {largest}, and the policy's model knows ids below "
                f"{self._vocabulary}: does it serve another model?"
            )
        return stretch

    async def score(self, prompt_ids: Sequence[int]) -> list[float]:
        """Return the log-probabilities of a prompt's tokens after the first, at temperature 1, from nothing cached."""
        if len(prompt_ids) < 2:
            raise ValueError("a prompt of two tokens or more can be scored")
        return await self._link.converse(
            self._link.dialect.score(prompt_ids, f"score-{uuid4().hex}", self._adapters.current)
        )

    async def abort(self, request_ids: Sequence[str] | None) -> int:
        """End replies with what they have; see `ServerClient.abort`."""
        named = None if request_ids is None else set(request_ids)
        chosen = [each for each in self._under_way if named is None or each.reply.request.request_id in named]
        for each in chosen:
            each.abort_asked.set()
        asked = 0
        while waiting := [each for each in chosen if not each.done.is_set()]:
            if asked >= _ABORTS or not self._link.capabilities.keeps_aborted:
                # Not admitted yet, or lost: there is nothing to bring back.
                for each in waiting:
                    each.drop()
            elif rids := [each.rid for each in waiting if each.rid]:
                self._link.leave(self._link.dialect.abort(rids))
            asked += 1
            # An abort may overtake the request that it names.
            await all_set([each.done for each in waiting], _ABORT_EVERY_S)
        return sum(each.aborted for each in chosen)

    def _drop_at_server(self, request_id: str) -> None:
        # The connection is closed already; SGLang looks at it from time to time only.
        self._link.leave(self._link.dialect.abort([request_id]))


class StreamingDialect(Protocol):
    """The part of a dialect that is about streams."""

    def drawn(self, event: Mapping[str, Any], seen: int) -> Sequence[int]:
        """Return the ids that an event of a stream brings after the `seen` ones before it."""
        ...

    def joined(self, events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return what the server had answered without a stream."""
        ...


class ReplyEvents:
    """Reads the stream of one reply, which may be sent more than once.

    Args:
        dialect: How the server writes.
        on_tokens: Called with ids as they arrive.
    """

    def __init__(self, dialect: StreamingDialect, on_tokens: Callable[[Sequence[int]], object]) -> None:
        self._dialect = dialect
        self._on_tokens = on_tokens
        self._told = 0
        self._on_news: Callable[[], None] = lambda: None
        self._begin()

    def _begin(self) -> None:
        self._line = bytearray()
        self._events: list[Mapping[str, Any]] = []
        self._seen = 0

    def reading(self, on_news: Callable[[], None] = lambda: None) -> Callable[[bytes], None]:
        """Begin a stream; ids that an earlier attempt has delivered are not delivered again.

        Args:
            on_news: Called whenever a token has arrived.
        """
        self._on_news = on_news
        self._begin()
        return self._take

    def answer(self, answer: HttpAnswer) -> HttpAnswer:
        """Return an answer whose body was read as one that came without a stream."""
        if not answer.ok or not self._events:
            return answer
        for event in self._events:
            if "error" in event:
                return HttpAnswer(_status_of(event["error"]), orjson.dumps(event))
        return HttpAnswer(answer.status, orjson.dumps(self._dialect.joined(self._events)))

    def _take(self, part: bytes) -> None:
        # Parts end anywhere: within a line, and within a character.
        *lines, rest = part.split(b"\n")
        for line in lines:
            self._line += line
            self._read(bytes(self._line))
            self._line.clear()
        self._line += rest

    def _read(self, line: bytes) -> None:
        data = line.removeprefix(_DATA).strip()
        if not line.startswith(_DATA) or data == _DONE:
            return
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            event = None
        if not isinstance(event, dict):
            shown = data[:80].decode(errors="replace")
            event = {"error": {"message": f"an event of its stream is no JSON object: {shown}"}}
        self._events.append(event)
        ids = self._dialect.drawn(event, self._seen)
        self._seen += len(ids)
        if ids:
            self._on_news()
        if self._seen > self._told:
            new, self._told = ids[self._told - self._seen :], self._seen
            self._on_tokens(new)


def _status_of(error: object) -> int:
    """Return the status that an answer would have had whose stream had begun with a good one."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if type(code) is int and 400 <= code < 500 else 500
