"""vLLM's routes on the double's engine."""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Awaitable, Callable
from io import BytesIO
from typing import Any, cast

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tests.support.inference_server.engine import Engine, Job, Sampling
from tests.support.inference_server.http import (
    BadRequest,
    Options,
    as_json,
    bearer,
    body_of,
    streamed,
    unless_client_leaves,
    unless_gone,
)
from tests.support.inference_server.models import WeightsError
from tests.support.inference_server.openai_routes import OpenAIRoutes, usage
from tests.support.inference_server.texts import Tokens
from tests.support.inference_server.weights import (
    Bucket,
    SessionError,
    WeightUpdates,
    receive,
    receive_packed,
    vllm_prefixes,
)

_GUARDED = ("/v1", "/v2", "/inference", "/cohere")
_GROUP = "transfer"


def error(status: int, message: str, kind: str = "BadRequestError") -> Response:
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)


class Unavailable(Exception):  # noqa: N818
    """Paused: come again."""


class VllmRoutes:
    """vLLM, of the release that the options name.

    Args:
        engine: What samples.
        updates: What takes weights.
        tokens: Text to ids and back.
        options: How the double was started.
    """

    def __init__(self, engine: Engine, updates: WeightUpdates, tokens: Tokens, options: Options) -> None:
        self._engine = engine
        self._updates = updates
        self._options = options
        self._since = options.numbers
        self._mode = "processed" if options.logprobs_mode == "processed_logprobs" else "raw"
        self._spans = self._since >= (0, 33)
        self.adapters: dict[str, str] = {}
        self._openai = OpenAIRoutes(
            engine,
            tokens,
            options,
            logprobs_mode=self._mode,
            spans=self._spans,
            adapters=self.adapters,
        )

    def routes(self) -> list[Route]:
        def post(path: str, function: Callable[[Request], Awaitable[Response]]) -> Route:
            return Route(path, self._guarded(function), methods=["POST"])

        def get(path: str, function: Callable[[Request], Awaitable[Response]]) -> Route:
            return Route(path, self._guarded(function))

        routes = [
            post("/inference/v1/generate", self.generate),
            post("/v1/completions", self._unless_paused(self._openai.completions)),
            post("/v1/chat/completions", self._unless_paused(self._openai.chat)),
            get("/v1/models", self._openai.models),
            get("/health", self.health),
            get("/ping", self.health),
            get("/version", self.version),
        ]
        if self._options.lora:
            routes += [
                post("/v1/load_lora_adapter", self.load_adapter),
                post("/v1/unload_lora_adapter", self.unload_adapter),
            ]
        if not self._options.dev_mode:
            return routes
        routes += [
            post("/pause", self.pause),
            post("/resume", self.resume),
            get("/is_paused", self.is_paused),
            post("/init_weight_transfer_engine", self.init_transfer),
            post("/update_weights", self.update_weights),
            get("/get_world_size", self.world_size),
            post("/collective_rpc", self.collective_rpc),
            post("/reset_prefix_cache", self.reset_prefix_cache),
            post("/sleep", self.sleep),
            post("/wake_up", self.wake_up),
            get("/is_sleeping", self.is_sleeping),
            get("/server_info", self.server_info),
        ]
        if self._since >= (0, 24):
            routes += [
                post("/start_weight_update", self.start_update),
                post("/finish_weight_update", self.finish_update),
            ]
        if self._since >= (0, 28):
            routes += [
                post("/abort_requests", self.abort_requests),
                post("/update_weight_version", self.update_version),
                get("/weight_info", self.weight_info),
            ]
        if self._since >= (0, 33):
            routes += [
                post("/weight_checker", self.weight_checker),
                post("/shutdown_weight_transfer_engine", self.shutdown_transfer),
            ]
        return routes

    def _guarded(self, function: Callable[[Request], Awaitable[Response]]) -> Any:
        async def guarded(request: Request) -> Response:
            key = self._options.api_key
            if key is not None and request.url.path.startswith(_GUARDED) and bearer(request) != key:
                return JSONResponse({"error": "Unauthorized"}, 401)
            try:
                return await function(request)
            except BadRequest as bad:
                return error(400, str(bad))
            except LookupError as missing:
                return error(404, str(missing), "NotFoundError")
            except Unavailable as busy:
                return error(503, str(busy), "ServiceUnavailableError")
            except (SessionError, WeightsError) as broken:
                return error(500, str(broken), "InternalServerError")

        return guarded

    # -- generation

    async def _admitted(self, request: Request) -> bool:
        """Refuse while paused; before 0.33, and in "keep", requests wait."""
        if self._engine.paused in ("abort", "wait"):
            if self._since >= (0, 33):
                self._engine.counts["rejected"] += 1
                raise Unavailable("The engine is paused")
            waited = self._engine.until(lambda: self._engine.paused not in ("abort", "wait"))
            return await unless_client_leaves(request, _true(waited)) is not None
        return True

    def _unless_paused(self, function: Callable[[Request], Awaitable[Response]]) -> Any:
        async def call(request: Request) -> Response:
            await request.body()
            if not await self._admitted(request):
                return Response(status_code=499)
            return await function(request)

        return call

    async def generate(self, request: Request) -> Response:
        if self._since >= (0, 31) and not self._options.scale_out:
            return error(
                403, "Scale-out is not enabled: start with --enable-scale-out", "PermissionDeniedError"
            )
        body = await body_of(request)
        if not await self._admitted(request):
            return Response(status_code=499)
        ids = body.get("token_ids")
        if not isinstance(ids, list) or not ids or not all(type(each) is int and each >= 0 for each in ids):
            raise BadRequest("token_ids must be a non-empty list of non-negative integers")
        params = body.get("sampling_params")
        if not isinstance(params, dict):
            raise BadRequest("sampling_params must be an object")
        name = body.get("model")
        if name is not None and name != self._options.model_name and name not in self.adapters:
            raise LookupError(f"The model `{name}` does not exist.")
        if params.get("prompt_logprobs") is not None:
            body["scores"] = await self._openai.scores(ids, name)
        job = self._openai.job("generate-tokens", ids, self._sampling(params, len(ids)), body, request)
        await self._engine.submit(job)
        wants = params.get("logprobs")
        if body.get("stream"):
            return streamed(
                self._engine,
                job,
                lambda job, seen: [self._reply(job, body, wants, seen, job.finish is not None)],
                lambda job: [],
            )
        if not await unless_gone(request, self._engine, job):
            return Response(status_code=499)
        reply = self._reply(job, body, wants, 0, True) | {"usage": usage([job])}
        if self._options.routed_experts and job.ids:
            model = cast(Any, self._engine.model)  # of a folder: the hash model has no experts
            taken = await self._engine.alone(lambda: model.routed_experts([*ids, *job.ids]))
            reply["choices"][0]["routed_experts"] = _array_file(taken)
        return as_json(reply)

    def _sampling(self, params: dict[str, Any], prompt: int) -> Sampling:
        temperature = params.get("temperature", 1.0)
        if type(temperature) not in (int, float) or temperature < 0:
            raise BadRequest(f"temperature must be a non-negative number, got {temperature!r}")
        top_p = params.get("top_p", 1.0)
        if not 0 < top_p <= 1:
            raise BadRequest(f"top_p must be in (0, 1], got {top_p}.")
        return self._openai.sampling(params, default_tokens=self._engine.model.max_length - prompt)

    def _reply(
        self, job: Job, body: dict[str, Any], wants: int | None, start: int, whole: bool
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": job.finish,
            "token_ids": job.ids[start:],
            "logprobs": None if wants is None else {"content": self._logprobs(job, wants, start)},
        }
        if self._since >= (0, 33):
            choice["stop_reason"] = job.matched if job.matched not in self._engine.model.end_ids else None
        if self._spans and whole:
            choice["weight_versions"] = job.versions
        return {
            "request_id": job.rid,
            "model": body.get("model") or self._options.model_name,
            "created": int(time.time()),
            "output_mode": "tokens",
            "prompt_logprobs": body.get("scores"),
            "choices": [choice],
        }

    def _named(self, token: int) -> dict[str, Any]:
        """Of which token a log-probability is: as a number from 0.32 on, in words before."""
        return {"token_id": token} if self._since >= (0, 32) else {"token": f"token_id:{token}"}

    def _logprobs(self, job: Job, wants: int, start: int) -> list[dict[str, Any]]:
        return [
            {
                **self._named(each.token),
                "logprob": each.logprob(self._mode),
                "rank": 1,
                "top_logprobs": [
                    {**self._named(token), "logprob": value, "rank": place + 1}
                    for place, (token, value) in enumerate(each.top(self._mode, wants))
                ],
            }
            for each in job.drawn[start:]
        ]

    # -- pauses

    async def pause(self, request: Request) -> Response:
        mode = request.query_params.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            raise BadRequest(f"mode must be one of abort, wait, keep; got {mode!r}")
        clear = request.query_params.get("clear_cache", "true").lower() != "false"
        if await unless_client_leaves(request, _true(self._engine.pause(mode))) is None:  # type: ignore[arg-type]
            return Response(status_code=499)
        if clear:
            await self._engine.alone(self._forget_everything)
        return JSONResponse({"status": "paused"})

    def _forget_everything(self) -> None:
        self._engine.model.reset_prefix_cache()
        for job in [*self._engine.running, *self._engine.waiting]:
            job.row.cached = None

    async def resume(self, request: Request) -> Response:
        await self._engine.resume()
        return JSONResponse({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        return JSONResponse({"is_paused": self._engine.paused is not None})

    async def abort_requests(self, request: Request) -> Response:
        ids = (await body_of(request)).get("request_ids")
        count = await self._engine.abort(lambda job: ids is None or job.rid in ids)
        # The real one counts the names that it was given.
        return JSONResponse({"status": "aborted", "aborted": count if ids is None else len(ids)})

    # -- weights

    async def init_transfer(self, request: Request) -> Response:
        info = (await body_of(request)).get("init_info")
        if not isinstance(info, dict):
            raise BadRequest("init_info must be an object")
        world = info["world_size"]
        if info["rank_offset"] + self._options.inference_world > world:
            raise SessionError(f"world_size {world} for {self._options.inference_world} ranks and a trainer")
        if self._updates.groups:
            self._updates.groups.clear()
        await self._updates.join(
            _GROUP, info["master_address"], info["master_port"], info["rank_offset"], world, vllm_prefixes()
        )
        self._updates.options = info
        return JSONResponse({"message": "Weight transfer initialized"})

    async def shutdown_transfer(self, request: Request) -> Response:
        self._updates.groups.clear()
        return JSONResponse({"message": "Weight transfer engine shut down"})

    async def start_update(self, request: Request) -> Response:
        if self._updates.session:
            raise SessionError("a weight update is open already")
        if not self._updates.groups:
            raise SessionError("the weight transfer engine is not initialized")
        self._updates.session = True
        return JSONResponse({"message": "Weight update started"})

    async def update_weights(self, request: Request) -> Response:
        info = (await body_of(request)).get("update_info")
        if not isinstance(info, dict):
            raise BadRequest("update_info must be an object")
        if self._since >= (0, 24) and not self._updates.session:
            raise SessionError("update_weights must run between start_weight_update and finish_weight_update")
        bucket = self._bucket(info)
        group = self._updates.groups[_GROUP]
        packed = self._updates.options.get("packed", info.get("packed", False))
        size = self._updates.options.get("packed_buffer_size_bytes", 2**30)
        tensors = receive_packed(group, bucket, size) if packed else receive(group, bucket)
        await self._updates.take(tensors)
        return JSONResponse({"message": "Weights updated"})

    def _bucket(self, info: dict[str, Any]) -> Bucket:
        bucket = Bucket(info.get("names", []), info.get("dtype_names", []), info.get("shapes", []))
        bucket.check()
        if not bucket.names:
            if self._updates.last is None:
                raise SessionError("no names, and no update before this one")
            return self._updates.last
        self._updates.last = bucket
        return bucket

    async def finish_update(self, request: Request) -> Response:
        body = await body_of(request)
        if not self._updates.session:
            raise SessionError("no weight update is open")
        self._updates.session = False
        if self._since >= (0, 28) and body.get("weight_version") is not None:
            self._engine.version = str(body["weight_version"])
        return JSONResponse({"message": "Weight update finished"})

    async def update_version(self, request: Request) -> Response:
        version = (await body_of(request)).get("new_version")
        if not isinstance(version, str):
            raise BadRequest("new_version must be a string")
        self._engine.version = version
        return JSONResponse({"success": True, "new_version": version})

    async def weight_info(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self._engine.version})

    async def weight_checker(self, request: Request) -> Response:
        if (await body_of(request)).get("action") != "checksum":
            raise BadRequest("only checksum is played here")
        return JSONResponse({"checksums": {"rank0": self._engine.model.checksum()}})

    async def world_size(self, request: Request) -> Response:
        return JSONResponse({"world_size": self._options.inference_world})

    async def collective_rpc(self, request: Request) -> Response:
        body = await body_of(request)
        if body.get("method") != "reload_weights":
            raise SessionError(f"the workers have no method {body.get('method')!r}")
        await self._updates.load_folder(body.get("kwargs", {}).get("weights_path", ""))
        return JSONResponse({"results": [None] * self._options.inference_world})

    # -- memory and caches

    async def reset_prefix_cache(self, request: Request) -> Response:
        preempts = request.query_params.get("reset_running_requests", "false").lower() == "true"
        if self._engine.running and not preempts:
            return JSONResponse({"success": False})
        await self._engine.alone(self._forget_everything)
        return JSONResponse({"success": True})

    async def sleep(self, request: Request) -> Response:
        if not self._options.memory_saver:
            raise SessionError("sleep mode is not enabled")
        level = int(request.query_params.get("level", "1"))
        await self._engine.abort(lambda job: True)
        self._engine.asleep = True
        await self._engine.alone(self._forget_everything)
        if level == 2:
            await self._engine.alone(self._engine.model.spoil)
        return JSONResponse({"status": "sleeping", "level": level})

    async def wake_up(self, request: Request) -> Response:
        tags = request.query_params.getlist("tags")
        self._engine.asleep = bool(tags) and "kv_cache" not in tags
        await self._engine.notify()
        return JSONResponse({"status": "sleeping" if self._engine.asleep else "awake", "tags": tags})

    async def is_sleeping(self, request: Request) -> Response:
        return JSONResponse({"is_sleeping": self._engine.asleep})

    # -- adapters

    async def load_adapter(self, request: Request) -> Response:
        body = await body_of(request)
        name, path = body.get("lora_name"), body.get("lora_path")
        if not name or not path:
            raise BadRequest("Both 'lora_name' and 'lora_path' must be provided.")
        if name in self.adapters and not body.get("load_inplace"):
            raise BadRequest(f"The lora adapter '{name}' has already been loaded.")
        check_adapter(path)
        self.adapters[name] = path
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_adapter(self, request: Request) -> Response:
        name = (await body_of(request)).get("lora_name")
        if name not in self.adapters:
            raise LookupError(f"The lora adapter '{name}' cannot be found.")
        del self.adapters[name]
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    # -- information

    async def health(self, request: Request) -> Response:
        return Response()

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": self._options.release})

    async def server_info(self, request: Request) -> Response:
        model = {
            "model": self._engine.model.source,
            "logprobs_mode": self._options.logprobs_mode,
        }
        told: Any = {"model_config": model}
        if request.query_params.get("config_format", "text") == "text":
            told = f"model={self._engine.model.source!r}, logprobs_mode={self._options.logprobs_mode!r}"
        return JSONResponse({"vllm_config": told, "vllm_env": {}, "system_env": {}})


def _array_file(content: np.ndarray) -> str:
    buffer = BytesIO()
    np.save(buffer, content)
    return b64encode(buffer.getvalue()).decode()


async def _true(waiting: Awaitable[Any]) -> bool:
    await waiting
    return True


def check_adapter(path: str) -> None:
    from pathlib import Path

    if not (Path(path) / "adapter_config.json").is_file():
        raise BadRequest(f"no adapter_config.json in {path}")
