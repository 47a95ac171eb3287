"""Servers of a pool that can be unplugged, and what is asked of them."""

import asyncio
from dataclasses import replace

from rollgym.trainer.inference.base import GenerationRequest, InferenceHealth, SamplingParams
from rollgym.trainer.inference.engine.torch_engine import TorchEngine
from rollgym.trainer.inference.server_pool.pool import ServerPool


class Server:
    """An engine that can be unplugged: whoever talks to it then is told that the connection is lost."""

    def __init__(self, model):
        self._engine = TorchEngine(model, max_rows=4, max_length=64)
        self.plugged = asyncio.Event()
        self.plugged.set()
        self.unplugged = asyncio.Event()
        self.seen = []
        self.syncs = []
        self.most_running = 0
        self.looks = 0
        self.answers = []
        self.breaks_after = None
        self._running = 0

    def unplug(self):
        self.plugged.clear()
        self.unplugged.set()

    def plug(self):
        self.unplugged.clear()
        self.plugged.set()

    async def _connected(self, call):
        if not self.plugged.is_set():
            call.close()
            raise ConnectionError("connection refused")
        answer, lost = asyncio.ensure_future(call), asyncio.ensure_future(self.unplugged.wait())
        try:
            await asyncio.wait({answer, lost}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            raise ConnectionError("connection reset")
        finally:
            answer.cancel()
            lost.cancel()

    @property
    def version(self):
        return self._engine.version

    @property
    def counters(self):
        return self._engine.counters

    async def connect(self):
        if not self.plugged.is_set():
            raise ConnectionError("connection refused")

    async def generate(self, request):
        self.seen.append(request)
        self._running += 1
        self.most_running = max(self.most_running, self._running)
        try:
            return await self._connected(self._engine.generate(request))
        finally:
            self._running -= 1

    async def extend(self, reply):
        if self.answers:
            raise self.answers.pop(0)
        sampling = reply.sampling
        if self.breaks_after is not None:
            sampling = replace(sampling, max_new_tokens=self.breaks_after)
        result = await self.generate(replace(reply.request, prompt_ids=reply.prompt_ids, sampling=sampling))
        reply.add(result.token_ids, result.logprobs, result.policy_versions)
        if self.breaks_after is not None:
            self.breaks_after = None
            raise ConnectionError("connection reset")
        return result.finish_reason

    async def generate_together(self, requests):
        raise AssertionError("the pool batches nothing")

    async def abort(self, request_ids=None):
        return await self._connected(self._engine.abort(request_ids))

    async def pause(self, mode):
        await self._connected(self._engine.pause(mode))

    async def resume(self):
        await self._connected(self._engine.resume())

    async def sync(self, source, version):
        self.syncs.append(version)
        await self._connected(self._engine.sync(source, version))

    async def health(self):
        self.looks += 1
        return InferenceHealth(
            self.plugged.is_set(), "fine" if self.plugged.is_set() else "connection refused"
        )

    async def close(self):
        await self._engine.close()


class Sleeper(Server):
    """A server that sleeps between updates, and notes what it is asked; a request to it meanwhile would end it."""

    def __init__(self, model):
        super().__init__(model)
        self.steps = []

    async def connect(self):
        self.steps.append("connect")

    async def sleep(self, *, keep_weights):
        self.steps.append("sleep")

    async def wake(self, tags):
        self.steps += tags

    async def sync(self, source, version):
        self.steps.append(f"sync {version}")
        await super().sync(source, version)


def pool_of(servers, **options):
    options = {"max_concurrent": 8, "patience_s": 20.0, "look_every_s": 0.01} | options
    return ServerPool(servers, **options)


def request(number, tokens=6, session=""):
    prompt = [3 + number % 30, 4]
    return GenerationRequest(f"r{number}", prompt, SamplingParams(tokens), number, (number,), session)


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)
