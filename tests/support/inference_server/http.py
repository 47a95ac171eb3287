"""What both dialects need of HTTP: bodies, streams, clients that leave, keys."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tests.support.inference_server.engine import Engine, Job

Result = TypeVar("Result")


@dataclass(frozen=True)
class Options:
    """How a double is started.

    Attributes:
        release: The version string of the server that it stands for.
        model_name: Name of the base model.
        api_key: Key for the routes that the dialect guards.
        admin_api_key: SGLang's second key.
        dev_mode: vLLM's `VLLM_SERVER_DEV_MODE`.
        scale_out: vLLM's `--enable-scale-out`.
        logprobs_mode: vLLM's `--logprobs-mode`.
        original_logprobs: SGLang's `SGLANG_RETURN_ORIGINAL_LOGPROB`.
        lora: Whether adapters may be loaded while it runs.
        memory_saver: vLLM's `--enable-sleep-mode`, SGLang's `--enable-memory-saver`.
        incremental: SGLang's `--incremental-streaming-output`.
        health_generates: SGLang's `SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION`.
        deterministic: SGLang's `--enable-deterministic-inference`, without which it reads no seed.
        inference_world: Ranks that take weights.
        routed_experts: `--enable-return-routed-experts`, of both.
    """

    release: str
    model_name: str = "policy"
    api_key: str | None = None
    admin_api_key: str | None = None
    dev_mode: bool = True
    scale_out: bool = True
    logprobs_mode: str = "raw_logprobs"
    original_logprobs: bool = False
    lora: bool = True
    memory_saver: bool = True
    incremental: bool = False
    health_generates: bool = True
    deterministic: bool = True
    inference_world: int = 1
    routed_experts: bool = False

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(int(part) for part in self.release.split("+")[0].split("."))


class BadRequest(Exception):  # noqa: N818
    """What a client asked for cannot be."""


def as_json(content: Any, status: int = 200) -> Response:
    """JSON as Python writes it: NaN and all, as a test may want."""
    return Response(json.dumps(content), status, media_type="application/json")


async def body_of(request: Request) -> dict[str, Any]:
    raw = await request.body()
    try:
        body = json.loads(raw) if raw else {}
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be an object")
    return body


async def unless_gone(request: Request, engine: Engine, job: Job) -> bool:
    """Wait for a reply; False, and it is dropped, if the client leaves before."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(job.ended()), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if job.finish is None:
        await engine.drop(job)
        return False
    return True


async def unless_client_leaves(request: Request, waiting: Awaitable[Result]) -> Result | None:
    """Wait for something before a reply; None if the client leaves."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, leaving = asyncio.ensure_future(waiting), asyncio.ensure_future(gone())
    try:
        await asyncio.wait([task, leaving], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, leaving):
            each.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


def streamed(
    engine: Engine, job: Job, chunks: Callable[[Job, int], list[Any]], last: Callable[[Job], list[Any]]
) -> Response:
    """Server-sent events: `chunks(job, seen)` for what came since, `last(job)` at the end, then [DONE]."""

    async def events() -> AsyncIterator[bytes]:
        seen = 0
        try:
            while True:
                if job.finish is None and len(job.drawn) == seen:
                    job.changed.clear()
                    await job.changed.wait()
                if len(job.drawn) > seen or job.finish is not None:
                    for chunk in chunks(job, seen):
                        # In two pieces, and not where characters end: a reader must put them together.
                        data = f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode()
                        yield data[: len(data) // 2]
                        yield data[len(data) // 2 :]
                    seen = len(job.drawn)
                if job.finish is not None:
                    break
            for chunk in last(job):
                yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode()
            yield b"data: [DONE]\n\n"
        finally:
            with suppress(asyncio.CancelledError):
                await asyncio.shield(engine.drop(job))

    return StreamingResponse(events(), media_type="text/event-stream")


def bearer(request: Request) -> str | None:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" else None
