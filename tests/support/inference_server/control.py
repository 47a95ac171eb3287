"""Routes of the double alone, under `/_test`: what happened, what shall go wrong, and how fast time goes."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.support.inference_server.engine import Engine
from tests.support.inference_server.faults import Fault, Faults
from tests.support.inference_server.texts import Tokens
from tests.support.inference_server.weights import WeightUpdates


class Control:
    """Lets a test see and steer the double.

    Args:
        engine: What samples.
        updates: What takes weights.
        faults: What fails.
        tokens: Text to ids.
    """

    def __init__(self, engine: Engine, updates: WeightUpdates, faults: Faults, tokens: Tokens) -> None:
        self._engine = engine
        self._updates = updates
        self._faults = faults
        self._tokens = tokens
        self.requests: list[dict[str, Any]] = []

    def routes(self) -> list[Route]:
        return [
            Route("/_test/state", self.state),
            Route("/_test/log", self.log),
            Route("/_test/received", self.received),
            Route("/_test/wait", self.wait),
            Route("/_test/steps", self.steps, methods=["POST"]),
            Route("/_test/faults", self.plan, methods=["POST"]),
            Route("/_test/weights", self.weights, methods=["POST"]),
            Route("/_test/script", self.script, methods=["POST"]),
            Route("/_test/logprobs", self.logprobs, methods=["POST"]),
        ]

    def _state(self) -> dict[str, Any]:
        engine = self._engine
        return {
            "running": len(engine.running),
            "waiting": len(engine.waiting),
            "drawn": sum(len(job.drawn) for job in engine.running),
            "paused": engine.paused,
            "asleep": engine.asleep,
            "version": engine.version,
            "checksum": engine.model.checksum(),
            "session": self._updates.session,
            "broken": self._updates.broken,
            "finished": len(engine.log),
            "faults": self._faults.happened,
            **engine.counts,
        }

    async def state(self, request: Request) -> Response:
        """Numbers of now."""
        return JSONResponse(self._state())

    async def log(self, request: Request) -> Response:
        """Every reply that ended, as the engine drew it, and every request as it came."""
        return JSONResponse({"replies": self._engine.log, "requests": self.requests})

    async def received(self, request: Request) -> Response:
        """Tensors that came since this was last asked, in their order, each with a digest."""
        received, self._updates.received = self._updates.received, []
        return JSONResponse(received)

    async def wait(self, request: Request) -> Response:
        """Answer when each named number of the state is at least the given one."""
        wanted = {name: int(value) for name, value in request.query_params.items()}
        async with asyncio.timeout(30):
            await self._engine.until(
                lambda: all(int(self._state()[name]) >= value for name, value in wanted.items())
            )
        return JSONResponse(self._state())

    async def steps(self, request: Request) -> Response:
        """Allow {"steps": n} more decoding steps, any number for null."""
        self._engine.permit((await request.json())["steps"])
        await self._engine.notify()
        return JSONResponse({})

    async def plan(self, request: Request) -> Response:
        """Plan faults: a list of `Fault` as objects, instead of those that were planned."""
        self._faults.planned = [Fault(**each) for each in await request.json()]
        return JSONResponse({})

    async def weights(self, request: Request) -> Response:
        """Spoil the next update without a word ("wrong"), let it fail half-way ("fail"), or forget the version."""
        body = await request.json()
        self._updates.wrong_next = body.get("wrong", False)
        self._updates.fail_next = body.get("fail", False)
        if body.get("forget_version"):
            self._engine.version = "default"
        return JSONResponse({})

    async def script(self, request: Request) -> Response:
        """Let the next replies say these texts (or ids), each ended by the model's end token."""
        for each in (await request.json())["replies"]:
            ids = self._tokens.encode(each) if isinstance(each, str) else each
            self._engine.script.append([*ids, *self._engine.model.end_ids[:1]])
        return JSONResponse({})

    async def logprobs(self, request: Request) -> Response:
        """Log-probabilities of {"ids": [...]} after the first, with the weights of now and nothing cached."""
        ids = (await request.json())["ids"]
        rows = await self._engine.alone(lambda: self._engine.model.prompt_logprobs(ids))
        values = [float(row[token]) for row, token in zip(rows, ids[1:], strict=False)]
        return JSONResponse({"logprobs": values})
