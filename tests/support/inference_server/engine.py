"""The double's scheduler: rows that are decoded together, pauses, aborts, and the weights between two steps."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from tests.support.inference_server.models import Row, ServedModel, log_softmax

if TYPE_CHECKING:
    from tests.support.inference_server.structures import Structure

Result = TypeVar("Result")
LOWEST_LOGPROB = -9999.0


@dataclass(frozen=True)
class Sampling:
    """How one reply is drawn, in the words of no dialect."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    forced: tuple[int, ...] = ()
    structure: Structure | None = None
    form_ends: frozenset[int] = frozenset()
    """Tokens that end what `structure` says; nothing binds what is drawn behind one that ends no reply."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1


@dataclass(frozen=True)
class Drawn:
    """One token and what there is to say about it."""

    token: int
    version: str
    raw: np.ndarray
    tempered: np.ndarray
    processed: np.ndarray

    def distribution(self, mode: str) -> np.ndarray:
        chosen: np.ndarray = {"raw": self.raw, "tempered": self.tempered, "processed": self.processed}[mode]
        return chosen

    def logprob(self, mode: str, token: int | None = None) -> float:
        return max(float(self.distribution(mode)[self.token if token is None else token]), LOWEST_LOGPROB)

    def top(self, mode: str, count: int) -> list[tuple[int, float]]:
        distribution = self.distribution(mode)
        places = np.argsort(-distribution, kind="stable")[:count]
        return [(int(place), max(float(distribution[place]), LOWEST_LOGPROB)) for place in places]


FinishKind = Literal["stop", "length", "abort"]


@dataclass(eq=False)
class Job:
    """One reply that was asked for."""

    rid: str
    row: Row
    sampling: Sampling
    decode: Callable[[list[int]], str] | None = None
    labels: dict[str, Any] = field(default_factory=dict)
    drawn: list[Drawn] = field(default_factory=list)
    finish: FinishKind | None = None
    matched: int | str | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    began: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self.prompt = list(self.row.ids)
        # Without a seed no two replies are drawn alike.
        seed = self.sampling.seed
        self.generator = np.random.Generator(
            np.random.Philox(secrets.randbits(64) if seed is None else seed % 2**64)
        )
        self.put_back = False

    @property
    def ids(self) -> list[int]:
        return [each.token for each in self.drawn]

    @property
    def versions(self) -> list[dict[str, Any]]:
        """Spans of equal versions, `end` exclusive."""
        spans: list[dict[str, Any]] = []
        for place, each in enumerate(self.drawn):
            if spans and spans[-1]["version"] == each.version:
                spans[-1]["end"] = place + 1
            else:
                spans.append({"version": each.version, "start": place, "end": place + 1})
        return spans

    async def ended(self) -> Job:
        while self.finish is None:
            self.changed.clear()
            await self.changed.wait()
        return self

    def end(self, kind: FinishKind, matched: int | str | None = None) -> None:
        self.finish, self.matched = kind, matched
        self.changed.set()


Pause = Literal["wait", "abort", "keep", "retract"]


class Engine:
    """Serves one model.

    Args:
        model: What is served.
        max_rows: Rows that are decoded at once.
        step_s: Seconds that each decoding step takes at least.
        log_file: Every reply that ended is appended to it before it is answered, so that it outlives the process.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        max_rows: int = 256,
        step_s: float = 0.0,
        log_file: Path | None = None,
    ) -> None:
        self.model = model
        self.max_rows = max_rows
        self.step_s = step_s
        self.version = "default"
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.paused: Pause | None = None
        self.asleep = False
        self.log: list[dict[str, Any]] = []
        self._log_file = (
            None if log_file is None else os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        )
        self.counts = {"dropped": 0, "aborted": 0, "steps": 0, "tokens": 0, "cached_tokens": 0, "rejected": 0}
        self.script: deque[list[int]] = deque()
        self._permits: int | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="double-model")
        self._alone = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    # -- life

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._serve())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for job in [*self.running, *self.waiting]:
            job.end("abort")
        self._thread.shutdown()

    async def notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)

    # -- requests

    async def submit(self, job: Job) -> None:
        if self.script:
            job.sampling = _forcing(job.sampling, self.script.popleft())
        self.waiting.append(job)
        if job.sampling.max_tokens == 0:
            self.waiting.remove(job)
            job.end("length")
        await self.notify()

    async def drop(self, job: Job) -> None:
        """Forget a request whose client has gone."""
        if job.finish is None:
            self.counts["dropped"] += 1
            self._leave(job)
            self._write_down(job, "dropped")
            job.end("abort")
            await self.notify()

    async def abort(self, matches: Callable[[Job], bool]) -> int:
        """End requests with what they have."""
        ended = [job for job in [*self.running, *self.waiting] if matches(job)]
        for job in ended:
            self._leave(job)
            self._finish(job, "abort")
        self.counts["aborted"] += len(ended)
        await self.notify()
        return len(ended)

    def _leave(self, job: Job) -> None:
        self.running = [each for each in self.running if each is not job]
        if job in self.waiting:
            self.waiting.remove(job)

    # -- pauses

    async def pause(self, mode: Pause) -> None:
        self.paused = mode
        if mode == "abort":
            await self.abort(lambda job: True)
        if mode == "retract":
            self.requeue()
        await self.notify()
        if mode == "wait":
            await self.until(lambda: self.paused != "wait" or not (self.running or self.waiting))
        # The step under way ends first.
        async with self._alone:
            if mode == "retract":
                self.requeue()

    async def resume(self) -> None:
        self.paused = None
        await self.notify()

    def requeue(self) -> None:
        """Put what runs back into the queue, without its cache."""
        for job in self.running:
            job.row.cached = None
            job.put_back = True
        self.waiting.extendleft(reversed(self.running))
        self.running = []

    async def alone(self, change: Callable[[], Result]) -> Result:
        """Do something between two steps, in the model's thread."""
        async with self._alone:
            result = await asyncio.get_running_loop().run_in_executor(self._thread, change)
        await self.notify()
        return result

    async def alone_async(self, change: Callable[[], Awaitable[Result]]) -> Result:
        """Do something that waits for others between two steps."""
        async with self._alone:
            result = await change()
        await self.notify()
        return result

    # -- the loop

    def permit(self, steps: int | None) -> None:
        """Let that many steps happen, any number for None."""
        self._permits = steps

    def _may_step(self) -> bool:
        if not (self.running or self.waiting) or self.asleep or self._permits == 0:
            return False
        return self.paused is None or self.paused == "wait"

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self.until(self._may_step)
            if self.step_s:
                await asyncio.sleep(self.step_s)
            async with self._alone:
                if not self._may_step():
                    continue
                while self.waiting and len(self.running) < self.max_rows:
                    self.running.append(self.waiting.popleft())
                    self.running[-1].put_back = False
                jobs = list(self.running)
                logits = await loop.run_in_executor(
                    self._thread, self.model.logits, [job.row for job in jobs]
                )
                all_greedy = all(job.sampling.greedy for job in jobs)
                for job, line in zip(jobs, logits, strict=True):
                    # Whoever was aborted or dropped meanwhile has its answer already.
                    if job.finish is None and job in self.running:
                        self._advance(job, line, all_greedy)
                self.running = [job for job in self.running if job.finish is None]
                self.counts["steps"] += 1
                if self._permits is not None:
                    self._permits -= 1
            await self.notify()

    def _advance(self, job: Job, logits: np.ndarray, all_greedy: bool) -> None:
        drawn = draw(logits, job, self.version, all_greedy=all_greedy)
        job.drawn.append(drawn)
        job.row.ids.append(drawn.token)
        self.counts["tokens"] += 1
        job.changed.set()
        enough = len(job.drawn) >= max(job.sampling.min_tokens, 1)
        if drawn.token in job.sampling.stop_token_ids and enough:
            self._finish(job, "stop", drawn.token)
        elif (text := _stop_string(job)) is not None and enough:
            self._finish(job, "stop", text)
        elif len(job.drawn) >= job.sampling.max_tokens or len(job.row.ids) >= self.model.max_length:
            self._finish(job, "length")

    def _finish(self, job: Job, kind: FinishKind, matched: int | str | None = None) -> None:
        self.counts["cached_tokens"] += job.row.cached_tokens
        self.log.append(self._write_down(job, kind))
        job.end(kind, matched)

    def _write_down(self, job: Job, finish: str) -> dict[str, Any]:
        entry = {
            "rid": job.rid,
            "prompt_ids": job.prompt,
            "token_ids": job.ids,
            "raw_logprobs": [each.logprob("raw") for each in job.drawn],
            "processed_logprobs": [each.logprob("processed") for each in job.drawn],
            "versions": [each.version for each in job.drawn],
            "finish": finish,
            "seed": job.sampling.seed,
            "salt": job.row.salt,
            **job.labels,
        }
        if self._log_file is not None:
            line = {**entry, "began": job.began, "ended": time.time(), "process": os.getpid()}
            os.write(self._log_file, (json.dumps(line) + "\n").encode())
        return entry


def draw(logits: np.ndarray, job: Job, version: str, *, all_greedy: bool = False) -> Drawn:
    """Draw one token; keep the distributions that a server may be asked for.

    A batch of greedy requests alone is never divided by a temperature.
    """
    sampling = job.sampling
    logits = np.asarray(logits, dtype=np.float64).copy()
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    if sampling.structure is not None and job.decode is not None and sampling.form_ends.isdisjoint(job.ids):
        # As both servers do it: before any distribution that they report.
        logits = sampling.structure.mask(logits, job.decode(job.ids), sorted(sampling.form_ends))
    raw = log_softmax(logits)
    greedy = sampling.temperature == 0
    tempered = raw if greedy or all_greedy else log_softmax(logits / sampling.temperature)
    processed = tempered if greedy else cut(tempered, sampling)
    if len(job.drawn) < len(sampling.forced):
        token = sampling.forced[len(job.drawn)]
    elif greedy:
        token = int(np.argmax(tempered))
    else:
        cumulative = np.exp(processed).cumsum()
        place = np.searchsorted(cumulative, job.generator.random() * cumulative[-1], side="right")
        token = int(min(place, len(cumulative) - 1))
    return Drawn(token, version, raw, tempered, processed)


def cut(tempered: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Apply top-k, top-p and min-p to log-probabilities and normalise what is left."""
    kept = tempered.copy()
    order = np.argsort(-tempered, kind="stable")
    if 0 < sampling.top_k < len(order):
        kept[order[sampling.top_k :]] = -np.inf
    if sampling.top_p < 1.0:
        probabilities = np.exp(log_softmax(kept))[order]
        kept[order[probabilities.cumsum() - probabilities >= sampling.top_p]] = -np.inf
    if sampling.min_p > 0.0:
        kept[tempered < tempered.max() + np.log(sampling.min_p)] = -np.inf
    return log_softmax(kept)


def _stop_string(job: Job) -> str | None:
    if not job.sampling.stop or job.decode is None:
        return None
    text = job.decode(job.ids)
    return next((each for each in job.sampling.stop if each in text), None)


def _forcing(sampling: Sampling, tokens: Iterable[int]) -> Sampling:
    from dataclasses import replace

    return replace(sampling, forced=tuple(tokens))


_numbers = itertools.count()


def unique_id() -> str:
    """An id of a request that brought none."""
    return f"{next(_numbers):08x}{np.random.default_rng().integers(2**63):016x}"
