"""The client of one inference server behind a URL.

Its parts: `link` talks to the server, `weights` knows what it has, `replies` asks for tokens, `updates` pauses it and
brings it weights.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Self

from rollgym.trainer.config.inference import ServerName
from rollgym.trainer.core.errors import ConfigError, TrainerError
from rollgym.trainer.inference.base import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    InferenceCounters,
    InferenceHealth,
    PauseMode,
    SamplingParams,
    WeightSource,
)
from rollgym.trainer.inference.calls import all_or_cancel
from rollgym.trainer.inference.errors import InferenceError, WeightsError
from rollgym.trainer.inference.server_client.http import ServerHttp
from rollgym.trainer.inference.server_client.in_flight import InFlightReplies, PartialReply
from rollgym.trainer.inference.server_client.link import FAREWELL_S, ServerLink
from rollgym.trainer.inference.server_client.replies import ServerReplies
from rollgym.trainer.inference.server_client.updates import ServerPauses, TensorCarrier, WeightUpdates
from rollgym.trainer.inference.server_client.weights import ServedAdapters, ServedWeights
from rollgym.trainer.inference.servers.dialect import (
    Bucket,
    GroupAddress,
    InspectedServer,
    MemoryTag,
    ServerCapabilities,
    ServerRequirements,
    UpdateWay,
    server_program,
)


class ServerClient:
    """Samples from one server; use it in `async with`.

    Args:
        url: The server's root.
        dialect: What it speaks.
        way: How new weights reach it; None for weights that stay as they are.
        pause_mode: What becomes of replies under way while weights are taken.
        carrier: Carries tensors, where `way` is "broadcast" and `sync` is used.
        api_key: The server's key.
        admin_api_key: SGLang's key for the control routes, if it has a separate one.
        patience_s: How long the server may be away, or busy, before a request fails.
        watch_every_s: How often it is asked whether it lives while requests are under way.
        stalled_after_s: How long an answer that has begun to come may take to its end; of a stream, to its next token.
        vocabulary: How many token ids the policy's model knows; None if unknown.
        version: Version of the weights that it started with.

    Raises:
        ConfigError: If `way` and `pause_mode` do not go together.
    """

    def __init__(
        self,
        url: str,
        dialect: ServerName,
        *,
        way: UpdateWay | None = "disk",
        pause_mode: PauseMode = "abort",
        carrier: TensorCarrier | None = None,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        patience_s: float = 60.0,
        watch_every_s: float = 5.0,
        stalled_after_s: float = 120.0,
        vocabulary: int | None = None,
        version: int = 0,
    ) -> None:
        if way == "adapter" and pause_mode in ("keep", "recompute"):
            raise ConfigError(
                f"adapters and pauses of the kind {pause_mode!r} do not go together: a reply keeps its adapter to its "
                "end. Pause with 'wait' or 'abort'"
            )
        http = ServerHttp(
            url,
            api_key=api_key,
            admin_api_key=admin_api_key,
            patience_s=patience_s,
            watch_every_s=watch_every_s,
            sign_of_life=server_program(dialect).sign_of_life,
            engine_sign=server_program(dialect).engine_sign,
            stalled_after_s=stalled_after_s,
        )
        self._link = ServerLink(http, dialect, ServerRequirements(way, pause_mode, vocabulary))
        under_way = InFlightReplies()
        self._weights = ServedWeights(self._link, under_way, version)
        self._adapters = ServedAdapters(self._link, under_way)
        self._pauses = ServerPauses(self._link, under_way, self._weights)
        self._updates = WeightUpdates(
            self._link, under_way, self._weights, self._adapters, self._pauses, carrier
        )
        self._replies = ServerReplies(self._link, under_way, self._weights, self._adapters, vocabulary)

    async def __aenter__(self) -> Self:
        try:
            await self.connect()
        except BaseException:
            await self._link.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def connect(self) -> ServerCapabilities:
        """Ask the server what it can do.

        Raises:
            ServerSetupError: If it lacks something that the run needs; the message names the switch or the release.
            ServerGoneError: If the server does not answer.
        """
        async with self._pauses.steering:  # a probe may resume the server, which must not race with a pause
            capabilities = await self._link.probe()
            self._pauses.met()
            self._weights.meet()
        return capabilities

    async def look(self) -> InspectedServer:
        """Ask the server for its name, release and model, by read-only calls.

        Raises:
            ServerSetupError: If it is seen to lack something that the run needs.
            ServerGoneError: If the server does not answer.
        """
        return await self._link.look()

    @property
    def url(self) -> str:
        """Root URL of the server, without a path."""
        return self._link.url

    @property
    def version(self) -> int:
        """The policy version that answers now."""
        return self._weights.version

    @property
    def capabilities(self) -> ServerCapabilities:
        """What the server can do."""
        return self._link.capabilities

    @property
    def counters(self) -> InferenceCounters:
        """Totals of requests and tokens so far."""
        return self._replies.counters

    async def health(self) -> InferenceHealth:
        """Say whether the server answers, with this run's weights."""
        distrusted, paused = self._weights.distrusted, self._pauses.mode
        if distrusted is not None:
            return InferenceHealth(False, str(distrusted))
        if not await self._link.http.alive():
            return InferenceHealth(False, f"{self.url} does not answer")
        state = f"at version {self.version}" if paused is None else f"paused ({paused})"
        return InferenceHealth(paused is None, f"{self.capabilities.server} at {self.url}, {state}")

    # Generation

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Refuse sampling whose log-probabilities the server would report wrongly.

        Raises:
            ConfigError: With the switch that mends it.
        """
        self._replies.check_sampling(sampling)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Return one reply, in as many stretches as interruptions cut it into.

        If it is cancelled, the server drops the request.

        Raises:
            ValueError: If the prompt is empty or leaves no room for the reply.
            ConfigError: If the server cannot report the log-probabilities of this sampling.
            InferenceError: If the server did not answer as it should; each kind has its class.
        """
        reply = PartialReply(request)
        return reply.result(await self.extend(reply))

    async def extend(self, reply: PartialReply) -> FinishReason:
        """Draw what is left of a reply, and return why it ended.

        If this fails, `reply` still holds the tokens drawn so far: another server can continue from them.

        Raises:
            ValueError: As `generate` does; all of its errors are possible.
        """
        return await self._replies.extend(reply)

    async def generate_together(self, requests: list[GenerationRequest]) -> list[GenerationResult]:
        """Return the replies of one batch in order; the server decides which of them it computes together."""
        return await all_or_cancel([self.generate(request) for request in requests])

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """End replies with what they have, and return how many.

        A server that cannot abort by name (vLLM before 0.28) loses what the last stretch had drawn.
        """
        return await self._replies.abort(request_ids)

    async def score(self, prompt_ids: Sequence[int]) -> list[float]:
        """Return the log-probabilities of a prompt's tokens after the first, at temperature 1, from nothing cached."""
        return await self._replies.score(prompt_ids)

    # Steering

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating; requests that come meanwhile wait here.

        Raises:
            ConfigError: If replies would continue with other weights, and the server does not report which weights drew
                which token.
        """
        await self._pauses.pause(mode)

    async def resume(self) -> None:
        """Resume generating.

        Raises:
            WeightsError: If the weights must be sent first.
        """
        await self._pauses.resume()

    async def sleep(self, *, keep_weights: bool) -> None:
        """Give accelerator memory back; requests wait until `wake`. Without its weights it needs a `sync` before."""
        await self._pauses.sleep(keep_weights=keep_weights)

    async def wake(self, tags: Sequence[MemoryTag] = ("weights", "kv_cache")) -> None:
        """Allocate memory again; sampling resumes once the cache is back."""
        await self._pauses.wake(tags)

    def distrust(self, error: WeightsError) -> None:
        """Refuse all requests with `error` until an update has succeeded; those under way fail, too."""
        self._weights.distrust(error)

    # Weights

    async def sync(self, source: WeightSource, version: int) -> None:
        """Take new weights; the pause mode decides what becomes of replies in flight.

        Raises:
            WeightUpdateError: If it failed: nothing is sampled from this server until one has succeeded.
            ConfigError: If `way` is None, or the source has no adapter.
        """
        await self._updates.sync(source, version)

    async def take_folder(self, folder: str, version: int) -> None:
        """Take weights from a folder that the server can read."""
        await self._updates.take_folder(folder, version)

    async def take_adapter(self, folder: str, version: int) -> None:
        """Load an adapter from a folder that the server can read; see `WeightUpdates.take_adapter`."""
        await self._updates.take_adapter(folder, version)

    async def join_group(self, address: GroupAddress) -> None:
        """Let the server's ranks join a group; the trainer must join at the same time."""
        await self._updates.join_group(address)

    def updating(self, version: int) -> AbstractAsyncContextManager[None]:
        """Hold an update by broadcast open: paused, and closed with `version` at the end of the block."""
        return self._updates.updating(version)

    async def announce(self, bucket: Bucket) -> None:
        """Tell the server which tensors the group carries now; returns when it has taken them."""
        await self._updates.announce(bucket)

    async def checksums(self) -> Mapping[str, str] | None:
        """Return the checksum of each tensor that the server holds, by the server's names; None if it reports none.

        Raises:
            InferenceError: If it does not answer as it should.
        """
        return await self._link.converse(self._link.dialect.checksums())

    async def leave_group(self) -> None:
        """Let both ends leave it."""
        await self._updates.leave_group()

    async def close(self) -> None:
        """End all requests, resume the server if it is paused, and unload this run's adapters."""
        with suppress(TrainerError, TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                if self._pauses.is_ours and self._weights.distrusted is None:
                    await self._link.converse(self._link.dialect.resume())
                await self._updates.leave_group()
        self._link.http.interrupt(InferenceError(f"the client of {self.url} was closed"))
        self.distrust(WeightsError(f"the client of {self.url} was closed"))
        with suppress(TrainerError, TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await self._adapters.unload_all()
        await self._link.close()
