"""The client of one inference server, vLLM or SGLang, behind a URL.

A reply may come in several stretches: an update of the weights that aborts it hands back what was drawn, and the rest
is asked for again with that as part of the prompt. Each token keeps the log-probability that it was drawn with and the
version that drew it.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self
from uuid import uuid4

from trainer.core.errors import ConfigError, TrainerError
from trainer.inference import sglang, vllm
from trainer.inference.base import (
    AdapterSource,
    GenerationRequest,
    GenerationResult,
    InferenceCounters,
    InferenceHealth,
    PauseMode,
    SamplingParams,
    WeightSource,
)
from trainer.inference.dialect import (
    Bucket,
    Capabilities,
    Conversation,
    Dialect,
    GenerationCall,
    GroupAddress,
    MemoryTag,
    Need,
    Stretch,
    UpdateWay,
)
from trainer.inference.errors import (
    InferenceError,
    MalformedReplyError,
    RepeatedAbortError,
    RequestRefusedError,
    WeightsError,
    WeightsLostError,
    WeightUpdateError,
)
from trainer.inference.partial_reply import PartialReply
from trainer.inference.server_http import ServerHttp

DialectName = Literal["vllm", "sglang"]

_UNNAMED = "default"
"""What servers call weights that they started with."""
_EMPTY_ABORTS = 8
"""Aborts without a token, one after the other, that nobody explains."""
_SETTLE_S = 0.3
"""Answers that a pause brought about are here by then; what is not was never admitted."""
_ABORT_EVERY_S = 0.5
_ABORTS = 3
_FAREWELL_S = 5.0


class TensorCarrier(Protocol):
    """The trainer's end of a group that carries tensors to a server's ranks, outside of HTTP.

    Whatever it sends is announced over HTTP at the same time, bucket by bucket and in order.
    """

    def address(self, world_size: int) -> GroupAddress:
        """Say where to meet, for a server with that many ranks."""
        ...

    async def join(self) -> None:
        """Meet the server, which is told to come at the same time."""
        ...

    def buckets(self, source: WeightSource) -> Iterator[Bucket]:
        """Cut the weights into what one announcement names."""
        ...

    async def send(self, bucket: Bucket) -> None:
        """Send the tensors of the bucket that `buckets` gave last."""
        ...

    async def leave(self) -> None:
        """Part; nothing where nobody has met."""
        ...


@dataclass(eq=False, slots=True)
class _Ongoing:
    """One request that somebody waits for."""

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


class ServerClient:
    """Samples from one server; use it in `async with`.

    Args:
        url: The server's root.
        dialect: What it speaks.
        way: How new weights reach it; None for weights that stay as they are.
        pause_mode: What becomes of replies under way while weights are taken.
        carrier: Carries tensors, where `way` is "broadcast" and `sync` is used.
        api_key: The server's key.
        admin_api_key: SGLang's key for the routes that steer, where it is another.
        patience_s: How long the server may be away, or busy, before a request fails.
        watch_every_s: How often it is asked whether it lives while requests are under way.
        version: Version of the weights that it started with.

    Raises:
        ConfigError: If `way` and `pause_mode` do not go together.
    """

    def __init__(
        self,
        url: str,
        dialect: DialectName,
        *,
        way: UpdateWay | None = "disk",
        pause_mode: PauseMode = "abort",
        carrier: TensorCarrier | None = None,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        patience_s: float = 60.0,
        watch_every_s: float = 5.0,
        version: int = 0,
    ) -> None:
        if way == "adapter" and pause_mode in ("keep", "recompute"):
            raise ConfigError(
                f"adapters and pauses of the kind {pause_mode!r} do not go together: a reply keeps its adapter to its "
                "end. Pause with 'wait' or 'abort'"
            )
        self._kind: DialectName = dialect
        self._need = Need(way, pause_mode)
        self._carrier = carrier
        self._group: GroupAddress | None = None
        self._http = ServerHttp(
            url,
            api_key=api_key,
            admin_api_key=admin_api_key,
            patience_s=patience_s,
            watch_every_s=watch_every_s,
        )
        self._dialect: Dialect | None = None
        self._version = version
        self._labels = {_UNNAMED: version, str(version): version}
        self._adapter: str | None = None
        self._retired: set[str] = set()
        self._synced = False
        self._distrust: WeightsError | None = None
        self._ongoing: set[_Ongoing] = set()
        self._left: set[asyncio.Task[None]] = set()
        self._undoing: asyncio.Task[None] | None = None
        self._steering = asyncio.Lock()
        self._confirming = asyncio.Lock()
        self._confirmed_at = -1.0
        self._troubles_seen = 0
        self._running = asyncio.Event()
        self._running.set()
        self._paused: PauseMode | None = None
        self._paused_by_caller = False
        self._pauses = 0
        self._requests = self._prompt_tokens = self._tokens_generated = self._resubmitted = 0

    async def __aenter__(self) -> Self:
        try:
            await self.connect()
        except BaseException:
            await self._http.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def connect(self) -> Capabilities:
        """Ask the server what it can do.

        Raises:
            ServerSetupError: If it lacks something that the run needs; the message names the switch or the release.
            ServerGoneError: If nobody answers.
        """
        probe = vllm.probe if self._kind == "vllm" else sglang.probe
        try:
            self._dialect = await self._http.converse(probe(self._need))
        except RequestRefusedError as error:
            raise InferenceError(f"{self.url}: {error}") from error
        label = self.capabilities.weight_label
        if label is not None and label not in self._labels:
            if self._need.way is None:
                self._labels = {label: self._version}
            else:
                self._distrust = WeightsLostError(
                    f"{self.url} serves weights called {label[:40]!r}, which this run has not sent: send its own first"
                )
        self._troubles_seen = self._http.troubles
        return self.capabilities

    @property
    def url(self) -> str:
        """Root of the server."""
        return self._http.url

    @property
    def version(self) -> int:
        """The policy version that answers now."""
        return self._version

    @property
    def capabilities(self) -> Capabilities:
        """What the server can do."""
        return self._speaking.capabilities

    @property
    def _speaking(self) -> Dialect:
        if self._dialect is None:
            raise RuntimeError(f"the client of {self.url} is not connected: use it in `async with`")
        return self._dialect

    @property
    def counters(self) -> InferenceCounters:
        """What it has done."""
        return InferenceCounters(
            self._requests, self._prompt_tokens, self._tokens_generated, self._resubmitted, len(self._ongoing)
        )

    async def health(self) -> InferenceHealth:
        """Say whether the server answers, with this run's weights."""
        if self._distrust is not None:
            return InferenceHealth(False, str(self._distrust))
        if not await self._http.alive():
            return InferenceHealth(False, f"{self.url} does not answer")
        state = f"at version {self._version}" if self._paused is None else f"paused ({self._paused})"
        return InferenceHealth(self._paused is None, f"{self.capabilities.server} at {self.url}, {state}")

    # Generation

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Refuse sampling whose log-probabilities the server would report wrongly.

        Raises:
            ConfigError: With the switch that mends it.
        """
        capabilities = self.capabilities
        if not capabilities.inexact(sampling):
            return
        remedy = (
            "start vLLM with --logprobs-mode processed_logprobs"
            if self._kind == "vllm"
            else "SGLang's are never those after top-p and top-k"
            + (
                ", and before temperature with SGLANG_RETURN_ORIGINAL_LOGPROB"
                * (capabilities.logprobs_of == "model")
            )
        )
        raise ConfigError(
            f"{self.url} reports log-probabilities of the {capabilities.logprobs_of}, not of the distribution that "
            f"tokens are drawn from with temperature {sampling.temperature:g}, top_p {sampling.top_p:g} and top_k "
            f"{sampling.top_k}: {remedy}, or sample with temperature 1, top_p 1 and top_k 0"
        )

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Return one reply, in as many stretches as interruptions cut it into.

        If it is cancelled, the server drops the request.

        Raises:
            ValueError: If the prompt is empty or leaves no room for the reply.
            ConfigError: If the server cannot report the log-probabilities of this sampling.
            InferenceError: If the server did not answer as it should; each kind has its class.
        """
        self._count(request)
        ongoing = _Ongoing(PartialReply(request))
        self._ongoing.add(ongoing)
        try:
            result = await self._complete(ongoing)
            ongoing.aborted = result.finish_reason == "abort"
            return result
        finally:
            self._ongoing.discard(ongoing)
            ongoing.done.set()

    async def generate_together(self, requests: list[GenerationRequest]) -> list[GenerationResult]:
        """Return the replies of one batch in order; the server decides which of them it computes together."""
        tasks = [asyncio.ensure_future(self.generate(request)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _count(self, request: GenerationRequest) -> None:
        if not request.prompt_ids:
            raise ValueError(f"request {request.request_id} has an empty prompt")
        longest = self.capabilities.max_length
        if longest is not None and len(request.prompt_ids) + request.sampling.max_new_tokens > longest:
            raise ValueError(
                f"request {request.request_id}: a prompt of {len(request.prompt_ids)} tokens and a reply of up to "
                f"{request.sampling.max_new_tokens} pass the longest row of {self.url}, {longest}"
            )
        self.check_sampling(request.sampling)
        self._requests += 1
        self._prompt_tokens += len(request.prompt_ids)

    async def _complete(self, ongoing: _Ongoing) -> GenerationResult:
        reply = ongoing.reply
        unexplained = 0
        while True:
            await self._until_running(ongoing)
            if ongoing.abort_asked.is_set():
                return reply.result("abort")
            self._trust()
            pauses = self._pauses
            stretch = await self._stretch(ongoing)
            if stretch is not None and stretch.finish_reason != "abort":
                return reply.result(stretch.finish_reason)
            if (finished := reply.finished()) is not None:
                return reply.result(finished)
            if ongoing.abort_asked.is_set():
                continue
            self._resubmitted += stretch is not None
            if pauses != self._pauses or (stretch is not None and stretch.token_ids):
                unexplained = 0
                continue
            unexplained += 1
            if unexplained > _EMPTY_ABORTS:
                raise RepeatedAbortError(
                    f"{self.url} aborted request {reply.request.request_id} {unexplained} times in a row without a "
                    "token, and nobody here asked for it: does something else pause this server?"
                )
            await asyncio.sleep(min(0.01 * 2**unexplained, 0.5))

    async def _until_running(self, ongoing: _Ongoing) -> None:
        if self._running.is_set():
            return
        waits = [asyncio.ensure_future(event.wait()) for event in (self._running, ongoing.abort_asked)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _stretch(self, ongoing: _Ongoing) -> Stretch | None:
        """Ask for what is left of a reply and add what comes; None where the call was dropped or not admitted."""
        reply = ongoing.reply
        call = GenerationCall(
            request_id=uuid4().hex,
            prompt_ids=reply.prompt_ids,
            sampling=reply.sampling,
            seed=reply.seed,
            session_key=reply.request.session_key,
            cache_salt=f"version-{self._version}",
            adapter=self._adapter,
        )
        ongoing.rid, ongoing.adapter, ongoing.submitted_version = call.request_id, call.adapter, self._version
        ongoing.idle.clear()
        try:
            answer = await self._asked(ongoing, call)
        except BaseException:
            self._drop_at_server(call.request_id)
            raise
        finally:
            ongoing.rid, ongoing.limit = "", None
            ongoing.idle.set()
            self._unload_retired(ongoing)
        if answer is None:
            self._drop_at_server(call.request_id)
            return None
        if answer.status == 503:
            return None
        try:
            stretch = self._speaking.read_generation(answer, call)
        except RequestRefusedError as error:
            if (
                call.adapter is not None
                and error.status in (400, 404)
                and not await self._has_adapter(call.adapter)
            ):
                raise self._lose(
                    f"{self.url} does not know the adapter of version {self._version} any more"
                ) from error
            raise
        versions = await self._versions(stretch, ongoing)
        reply.add(stretch.token_ids, stretch.logprobs, versions)
        self._tokens_generated += len(stretch.token_ids)
        return stretch

    async def _asked(self, ongoing: _Ongoing, call: GenerationCall) -> Any:
        """Make the call; None if it was dropped on the way."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                ongoing.limit = limit
                await self._confirm_after_trouble()
                return await self._http.call(
                    self._speaking.generate(call), held=lambda: not self._running.is_set()
                )
        except TimeoutError:
            if limit.expired():
                return None
            raise

    # Aborts

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """End replies with what they have, and return how many.

        A server that cannot abort by name (vLLM before 0.28) loses what the last stretch had drawn.
        """
        named = None if request_ids is None else set(request_ids)
        chosen = [each for each in self._ongoing if named is None or each.reply.request.request_id in named]
        for each in chosen:
            each.abort_asked.set()
        asked = 0
        while waiting := [each for each in chosen if not each.done.is_set()]:
            if asked >= _ABORTS or not self.capabilities.keeps_aborted:
                # Not admitted yet, or lost: there is nothing to bring back.
                for each in waiting:
                    each.drop()
            elif rids := [each.rid for each in waiting if each.rid]:
                self._leave(self._speaking.abort(rids))
            asked += 1
            # An abort may overtake the request that it names.
            await _all_set([each.done for each in waiting], _ABORT_EVERY_S)
        return sum(each.aborted for each in chosen)

    def _drop_at_server(self, request_id: str) -> None:
        # The connection is closed already; SGLang looks at it from time to time only.
        self._leave(self._speaking.abort([request_id]))

    def _leave(
        self, conversation: Conversation[None], after: asyncio.Task[None] | None = None
    ) -> asyncio.Task[None]:
        """Talk to the server while nobody waits for it, once `after` has ended, until the client is closed."""

        async def quietly() -> None:
            if after is not None:
                await asyncio.gather(after, return_exceptions=True)
            with suppress(TrainerError, TimeoutError):
                async with asyncio.timeout(_FAREWELL_S):
                    await self._http.converse(conversation)

        task = asyncio.create_task(quietly())
        self._left.add(task)
        task.add_done_callback(self._left.discard)
        return task

    def _undo(self, conversation: Conversation[None], after: asyncio.Task[None] | None = None) -> None:
        """Take back what broke off, without holding up whoever hears of it; the next pause waits for it."""
        self._undoing = self._leave(conversation, after)

    # Versions

    def _trust(self) -> None:
        if self._distrust is not None:
            raise type(self._distrust)(str(self._distrust)) from self._distrust

    def distrust(self, error: WeightsError) -> None:
        """Refuse all requests with `error` until an update has succeeded; those under way fail, too."""
        self._distrust = error
        self._http.interrupt(error)
        # Whoever is held must hear of it.
        self._running.set()

    def _lose(self, message: str) -> WeightsLostError:
        # Who is started again is in no group.
        self._group = None
        error = WeightsLostError(
            f"{message}: it was started again, or somebody else updates it. Send the weights"
        )
        if self._distrust is None:
            self.distrust(error)
        return error

    async def _versions(self, stretch: Stretch, ongoing: _Ongoing) -> list[int]:
        submitted = ongoing.submitted_version
        if ongoing.adapter is not None or self._need.way is None:
            return [submitted] * len(stretch.token_ids)
        if stretch.labels is None:
            if stretch.token_ids and self._need.mode in ("keep", "recompute"):
                raise MalformedReplyError(f"{self.url} does not say which weights drew the tokens of a reply")
            if stretch.token_ids:
                await self._confirm_weights()
            return [submitted] * len(stretch.token_ids)
        known = {label: self._labels.get(label, -1) for label in set(stretch.labels)}
        for label, version in known.items():
            if version < submitted:
                raise self._lose(
                    f"{self.url} drew tokens with weights called {label[:40]!r} after those of version {submitted}"
                )
        return [known[label] for label in stretch.labels]

    async def _confirm_after_trouble(self) -> None:
        # A server that was away may have been started again, with the weights of its start.
        if self._troubles_seen != self._http.troubles and self._need.way in ("disk", "broadcast"):
            troubles = self._http.troubles
            await self._confirm_weights()
            self._troubles_seen = troubles

    async def _confirm_weights(self) -> None:
        """Ask what the weights are called. Those who ask at the same time ask once."""
        loop = asyncio.get_running_loop()
        wanted = loop.time()
        async with self._confirming:
            if self._confirmed_at >= wanted:
                return
            started = loop.time()
            version = self._version
            label = await self._http.converse(self._speaking.weight_label())
            if label is None and self._synced and self._troubles_seen != self._http.troubles:
                raise self._lose(f"{self.url} was away, and its release does not say which weights it serves")
            if label is not None and self._labels.get(label, -1) < version:
                raise self._lose(
                    f"{self.url} serves weights called {label[:40]!r}, and not version {version}"
                )
            self._confirmed_at = started

    async def score(self, prompt_ids: Sequence[int]) -> list[float]:
        """Return the log-probabilities of a prompt's tokens after the first, at temperature 1, from nothing cached."""
        if len(prompt_ids) < 2:
            raise ValueError("a prompt of two tokens or more can be scored")
        return await self._http.converse(
            self._speaking.score(prompt_ids, f"score-{uuid4().hex}", self._adapter)
        )

    # Pauses

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating; requests that come meanwhile wait here.

        Raises:
            ConfigError: If replies would go on with other weights and the server would not say which token is whose.
        """
        if mode in ("keep", "recompute") and not self.capabilities.spans and self._need.way is not None:
            raise ConfigError(
                f"{self.capabilities.server} does not say which weights drew which token: pause with 'abort' or 'wait'"
            )
        async with self._steering:
            if self._paused is None:
                await self._pause(mode)
            self._paused_by_caller = True

    async def resume(self) -> None:
        """Go on.

        Raises:
            WeightsError: If the weights must be sent first.
        """
        async with self._steering:
            self._paused_by_caller = False
            if self._paused is not None:
                self._trust()
                await self._resume()

    async def _pause(self, mode: PauseMode) -> None:
        if self._undoing is not None:
            await asyncio.wait([self._undoing])
        self._running.clear()
        self._paused = mode
        self._pauses += 1
        pausing: asyncio.Task[None] | None = None
        try:
            if mode == "wait" and not self.capabilities.drains:
                await _all_set([each.idle for each in self._ongoing if each.rid], None)
            pausing = asyncio.create_task(self._http.converse(self._speaking.pause(mode)))
            # A server goes on with a call whose caller has left: it could pause after it was told to go on.
            await asyncio.shield(pausing)
            if mode in ("abort", "wait"):
                await self._settle()
        except BaseException:
            self._paused = None
            self._running.set()
            self._undo(self._speaking.resume(), after=pausing)
            raise

    async def _settle(self) -> None:
        """Wait until every answer that the pause brought about is here.

        A request that comes to a paused server is answered after the pause, by other weights than those that it was
        sent to: it is dropped, and sent again.
        """
        under_way = [each for each in self._ongoing if each.rid]
        await _all_set([each.idle for each in under_way], _SETTLE_S)
        for each in under_way:
            each.drop()
        await _all_set([each.idle for each in under_way], None)

    async def _resume(self) -> None:
        try:
            await self._http.converse(self._speaking.resume())
        except BaseException as error:
            # Whoever is held would wait for ever.
            self.distrust(WeightUpdateError(f"{self.url} did not go on after a pause: {_words(error)}"))
            raise
        self._paused = None
        self._running.set()

    # Weights

    async def sync(self, source: WeightSource, version: int) -> None:
        """Take new weights; replies that are under way go on with them as the pause mode says.

        Raises:
            WeightUpdateError: If it failed: nothing is sampled from this server until one has succeeded.
            ConfigError: If `way` is None, or the source has no adapter.
        """
        if self._need.way == "adapter":
            if not isinstance(source, AdapterSource):
                raise ConfigError("adapters are served alone, and this policy has none: set model.lora")
            await self.take_adapter(str(await source.adapter_folder()), version)
        elif self._need.way == "disk":
            await self.take_folder(str(await source.folder()), version)
        elif self._need.way == "broadcast" and self._carrier is not None:
            carrier = self._carrier
            if self._group is None:
                await carrier.leave()
                address = carrier.address(self.capabilities.world_size)
                await _together(self.join_group(address), carrier.join())
            async with self.updating(version):
                for bucket in carrier.buckets(source):
                    await _together(self.announce(bucket), carrier.send(bucket))
        else:
            raise ConfigError(f"{self.url} was not told how new weights reach it")

    async def take_folder(self, folder: str, version: int) -> None:
        """Take weights from a folder that the server can read."""
        async with self._taking(version) as mode:
            await self._http.converse(self._speaking.load_folder(folder, str(version), mode))

    async def join_group(self, address: GroupAddress) -> None:
        """Let the server's ranks join a group; the trainer must join at the same time."""
        await self._http.converse(self._speaking.join_group(address))
        self._group = address

    async def leave_group(self) -> None:
        """Let them leave it."""
        if self._group is not None:
            group, self._group = self._group, None
            await self._http.converse(self._speaking.leave_group(group))

    @asynccontextmanager
    async def updating(self, version: int) -> AsyncIterator[None]:
        """Hold an update by broadcast open: paused, and closed with `version` at the end of the block."""
        async with self._taking(version) as mode:
            await self._http.converse(self._speaking.begin_update())
            try:
                yield
                await self._http.converse(self._speaking.end_update(str(version), mode))
            except BaseException:
                # A group whose update broke off may still wait for tensors: the next one is a new one.
                self._group = None
                self._undo(self._speaking.abandon_update())
                raise

    async def announce(self, bucket: Bucket) -> None:
        """Tell the server which tensors the group carries now; returns when it has taken them."""
        if self._group is None:
            raise RuntimeError(f"{self.url} has joined no group")
        await self._http.converse(self._speaking.update(bucket, self._group))

    @asynccontextmanager
    async def _taking(self, version: int) -> AsyncIterator[PauseMode]:
        """Pause for an update; afterwards all is well and goes on, or nothing is trusted."""
        async with self._steering:
            if self._undoing is not None:
                await asyncio.wait([self._undoing])
            if self._paused is None:
                await self._pause(self._need.mode)
            mode = self._paused or self._need.mode
            # Before the server can draw with them: a reply may end before this block does.
            self._labels[str(version)] = version
            try:
                yield mode
            except BaseException as error:
                failure = WeightUpdateError(
                    f"{self.url}: the update to version {version} failed: {_words(error)}"
                )
                self.distrust(failure)
                if isinstance(error, InferenceError):
                    raise failure from error
                raise
            # One that was not trusted let everybody through, to be refused.
            self._running.clear()
            self._version, self._synced, self._distrust = version, True, None
            self._troubles_seen = self._http.troubles
            self._forget_labels()
            if not self._paused_by_caller:
                await self._resume()

    def _forget_labels(self) -> None:
        oldest = min((each.submitted_version for each in self._ongoing if each.rid), default=self._version)
        self._labels = {
            label: version for label, version in self._labels.items() if oldest <= version <= self._version
        }

    async def take_adapter(self, folder: str, version: int) -> None:
        """Load an adapter from a folder that the server can read, under a new name.

        Replies under way end with the adapter that they began with (pause mode "wait"), or are taken up again with the
        new one ("abort"). The old one is unloaded when nobody uses it any more.
        """
        async with self._steering:
            pauses = self._need.mode == "abort" and self._paused is None
            if pauses:
                await self._pause("abort")
            name = f"policy-{version}-{uuid4().hex[:8]}"
            try:
                await self._http.converse(self._speaking.load_adapter(name, folder))
                if self._adapter is not None:
                    self._retired.add(self._adapter)
                self._adapter, self._version = name, version
                self._distrust = None
            except InferenceError as error:
                # It may have been loaded all the same.
                self._retired.add(name)
                raise WeightUpdateError(
                    f"{self.url}: the adapter of version {version} failed: {error}"
                ) from error
            finally:
                if pauses:
                    await self._resume()
        self._unload_retired(None)

    def _unload_retired(self, leaving: _Ongoing | None) -> None:
        used = {each.adapter for each in self._ongoing if each is not leaving and each.rid}
        for name in self._retired - used:
            self._retired.discard(name)
            self._leave(self._speaking.unload_adapter(name))

    async def _has_adapter(self, name: str) -> bool:
        """Ask with one token: a request may be refused for other reasons."""
        call = GenerationCall(uuid4().hex, [0], SamplingParams(1), 0, adapter=name)
        answer = await self._http.call(self._speaking.generate(call))
        return answer.ok

    # Memory

    async def sleep(self, *, keep_weights: bool) -> None:
        """Give accelerator memory back; requests wait until `wake`. Without its weights it needs a `sync` before."""
        await self.pause("abort")
        async with self._steering:
            await self._http.converse(self._speaking.sleep(keep_weights=keep_weights))
            if not keep_weights:
                self._distrust = WeightsError(
                    f"{self.url} gave its weights back: send them before it goes on"
                )
                self._labels = {}

    async def wake(self, tags: Sequence[MemoryTag] = ("weights", "kv_cache")) -> None:
        """Take memory again; with its cache it goes on."""
        async with self._steering:
            await self._http.converse(self._speaking.wake(tags))
        if "kv_cache" in tags:
            await self.resume()

    async def close(self) -> None:
        """End all requests, and let the server go on if it is paused."""
        with suppress(TrainerError, TimeoutError):
            async with asyncio.timeout(_FAREWELL_S):
                if self._paused is not None and self._distrust is None:
                    await self._http.converse(self._speaking.resume())
                await self.leave_group()
                if self._carrier is not None:
                    await self._carrier.leave()
        self._http.interrupt(InferenceError(f"the client of {self.url} was closed"))
        self.distrust(WeightsError(f"the client of {self.url} was closed"))
        for task in list(self._left):
            task.cancel()
        await asyncio.gather(*self._left, return_exceptions=True)
        await self._http.close()


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__


async def _all_set(events: Sequence[asyncio.Event], timeout_s: float | None) -> None:
    """Wait until all events are set, or time is over."""
    if not events:
        return
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=timeout_s)
    finally:
        for wait in waits:
            wait.cancel()


async def _together(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run two ends of one exchange; if one fails, the other would wait for ever."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        pending = [task for task in tasks if not task.done()]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    for task in tasks:
        if not task.cancelled():
            task.result()
