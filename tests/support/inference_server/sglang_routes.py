"""SGLang's routes on the double's engine."""

from __future__ import annotations

import asyncio
import json
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tests.support.inference_server.engine import LOWEST_LOGPROB, Engine, Job, Sampling, unique_id
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
from tests.support.inference_server.models import Row, WeightsError
from tests.support.inference_server.openai_routes import OpenAIRoutes
from tests.support.inference_server.structures import of_sglang
from tests.support.inference_server.texts import Tokens
from tests.support.inference_server.vllm_routes import check_adapter
from tests.support.inference_server.weights import (
    Bucket,
    SessionError,
    WeightUpdates,
    receive,
    receive_flattened,
    sglang_prefixes,
)
from tests.support.inference_server.weights_checker import CheckError, WeightsChecker, per_engine

_OPEN = ("/health", "/ready", "/metrics")
_HEALTH_S = 20.0
_MASK_TOKENS = 4096
_SAMPLING_KEYS = frozenset(
    """
    max_new_tokens temperature top_p top_k min_p stop stop_token_ids stop_regex ignore_eos skip_special_tokens
    spaces_between_special_tokens no_stop_trim min_new_tokens n sampling_seed frequency_penalty presence_penalty
    repetition_penalty json_schema regex ebnf structural_tag logit_bias custom_params
    """.split()  # noqa: SIM905
)


def error(status: int, message: str) -> Response:
    body = {"object": "error", "message": message, "type": "BadRequest", "param": None, "code": status}
    return JSONResponse(body, status)


def _refused_in_stream(message: str) -> Response:
    """A grammar is compiled when the stream has begun: its fault is the reply's end."""
    reason = {"type": "abort", "message": message, "status_code": 400, "err_type": "BadRequestError"}
    event = {"text": "", "output_ids": [], "meta_info": {"finish_reason": reason, "completion_tokens": 0}}
    return PlainTextResponse(f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n", media_type="text/event-stream")


def outcome(message: str = "Succeeded.", *, success: bool = True, **more: Any) -> Response:
    return JSONResponse({"success": success, "message": message, **more}, 200 if success else 400)


class SglangRoutes:
    """SGLang, of the release that the options name.

    Args:
        engine: What samples.
        updates: What takes weights.
        tokens: Text to ids and back.
        options: How the double was started.
    """

    def __init__(self, engine: Engine, updates: WeightUpdates, tokens: Tokens, options: Options) -> None:
        self._engine = engine
        self._updates = updates
        self._checker = WeightsChecker(engine.model)
        self._options = options
        self._since = options.numbers
        self._tokens = tokens
        self._mode = "raw" if options.original_logprobs else "tempered"
        self._frozen = False
        self._served_name = options.model_name
        self._source = engine.model.source
        self.adapters: dict[str, str] = {}
        self._openai = OpenAIRoutes(
            engine, tokens, options, logprobs_mode=self._mode, spans=False, adapters=self.adapters
        )

    def routes(self) -> list[Route]:
        def post(path: str, function: Callable[[Request], Awaitable[Response]]) -> Route:
            return Route(path, self._guarded(function), methods=["POST"])

        def both(path: str, function: Callable[[Request], Awaitable[Response]]) -> Route:
            return Route(path, self._guarded(function), methods=["GET", "POST"])

        routes = [
            post("/generate", self.generate),
            post("/v1/completions", self._when_running(self._openai.completions)),
            post("/v1/chat/completions", self._when_running(self._openai.chat)),
            both("/v1/models", self._openai.models),
            both("/health", self.health),
            both("/health_generate", self.health_generate),
            both("/ready", self.ready),
            both("/model_info", self.model_info),
            both("/get_model_info", self.model_info),
            both("/server_info", self.server_info),
            both("/get_server_info", self.server_info),
            post("/pause_generation", self.pause),
            post("/continue_generation", self.resume),
            post("/abort_request", self.abort),
            both("/flush_cache", self.flush),
            post("/init_weights_update_group", self.init_group),
            post("/destroy_weights_update_group", self.destroy_group),
            post("/update_weights_from_distributed", self.update_distributed),
            post("/update_weights_from_disk", self.update_disk),
            post("/update_weight_version", self.update_version),
            both("/release_memory_occupation", self.release_memory),
            both("/resume_memory_occupation", self.resume_memory),
            post("/load_lora_adapter", self.load_adapter),
            post("/unload_lora_adapter", self.unload_adapter),
            both("/weights_checker", self.check_weights),
        ]
        if self._since >= (0, 5, 21):
            routes += [
                post("/begin_weight_update", self.begin_update),
                post("/end_weight_update", self.end_update),
            ]
        return routes

    def _guarded(self, function: Callable[[Request], Awaitable[Response]]) -> Any:
        async def guarded(request: Request) -> Response:
            if not self._allowed(request):
                return JSONResponse({"error": "Unauthorized"}, 401)
            try:
                return await function(request)
            except BadRequest as bad:
                return error(400, str(bad))
            except LookupError as missing:
                return error(400, str(missing))
            except (SessionError, WeightsError) as broken:
                return outcome(str(broken), success=False)

        return guarded

    def _allowed(self, request: Request) -> bool:
        path, key = request.url.path, bearer(request)
        if path.startswith(_OPEN):
            return True
        admin = not path.startswith(("/generate", "/v1", "/model_info", "/get_model_info", "/server_info"))
        if admin and self._options.admin_api_key is not None:
            return key == self._options.admin_api_key
        return self._options.api_key is None or key == self._options.api_key

    # -- generation

    def _when_running(self, function: Callable[[Request], Awaitable[Response]]) -> Any:
        async def call(request: Request) -> Response:
            await request.body()
            if await self._admitted(request):
                return await function(request)
            return Response(status_code=499)

        return call

    async def _admitted(self, request: Request) -> bool:
        """New requests block while generation is paused, and during an update without a pause."""
        waited = self._engine.until(lambda: self._engine.paused is None and not self._frozen)
        return await unless_client_leaves(request, _true(waited)) is not None

    async def generate(self, request: Request) -> Response:
        body = await body_of(request)
        if not await self._admitted(request):
            return Response(status_code=499)
        ids = body.get("input_ids")
        if isinstance(body.get("text"), str):
            ids = self._tokens.encode(body["text"])
        if not isinstance(ids, list) or not ids or not all(type(each) is int for each in ids):
            return JSONResponse({"error": "input_ids must be a non-empty list of integers"}, 400)
        name = body.get("lora_path")
        if name is not None and name not in self.adapters:
            return JSONResponse({"error": f"Got LoRA adapter that has never been loaded: {name}"}, 400)
        if body.get("return_logprob") and body.get("logprob_start_len", -1) == 0:
            body["scores"] = await self._scores(ids, self.adapters.get(name or "", ""))
        try:
            job = self._job(body, ids, request)
        except BadRequest as refused:
            if not body.get("stream") or "Failed to compile" not in str(refused):
                raise
            return _refused_in_stream(str(refused))
        await self._engine.submit(job)
        wants = body.get("return_logprob", False)
        if body.get("stream"):
            return streamed(
                self._engine, job, lambda job, seen: [self._reply(job, body, wants, seen)], lambda job: []
            )
        if not await unless_gone(request, self._engine, job):
            return Response(status_code=499)
        reply = self._reply(job, body, wants, 0)
        if self._options.routed_experts and body.get("return_routed_experts") and job.ids:
            model = cast(Any, self._engine.model)  # of a folder: the hash model has no experts
            taken = await self._engine.alone(lambda: model.routed_experts([*ids, *job.ids]))
            reply["meta_info"]["routed_experts"] = b64encode(taken.astype("<i4").tobytes()).decode()
        return as_json(reply)

    def _job(self, body: dict[str, Any], ids: list[int], request: Request) -> Job:
        params = body.get("sampling_params") or {}
        if self._since >= (0, 5, 22) and (unknown := sorted(params.keys() - _SAMPLING_KEYS)):
            raise BadRequest(f"unknown sampling parameters: {unknown}")
        if any(not 0 <= token < self._engine.model.vocabulary for token in ids):
            raise BadRequest("a token id is out of the vocabulary")
        sampling = self._sampling(params, len(ids))
        if body.get("return_sampling_mask") and not 0 < sampling.top_k <= _MASK_TOKENS:
            raise BadRequest("return_sampling_mask requires top_k=1 or finite 1 < top_k <= 4096")
        return Job(
            body.get("rid") or unique_id(),
            Row(
                list(ids),
                salt=f"{body.get('lora_path')}/{body.get('cache_salt')}/{body.get('extra_key')}",
                adapter=self.adapters.get(body.get("lora_path") or "", ""),
            ),
            sampling,
            decode=self._tokens.decode,
            labels={
                "session": body.get("routing_key"),
                "model": body.get("lora_path"),
                "cache_salt": body.get("cache_salt"),
            },
        )

    def _sampling(self, params: dict[str, Any], prompt: int) -> Sampling:
        limit, context = params.get("max_new_tokens", 128), self._engine.model.max_length
        if prompt + limit > context:
            raise BadRequest(
                f"Requested token count exceeds the model's maximum context length of {context} tokens."
            )
        # The scheduler keeps more free than the front end says.
        if prompt >= context - 6:
            raise BadRequest(
                f"Input length ({prompt} tokens) exceeds the maximum allowed length ({context - 6} tokens)."
            )
        limit = min(limit, context - 2 - prompt)
        temperature = params.get("temperature", 1.0)
        if type(temperature) not in (int, float) or temperature < 0:
            raise BadRequest(f"temperature must be non-negative, got {temperature}.")
        stop = params.get("stop") or ()
        # Unlike in vLLM, `ignore_eos` ignores the stop tokens too.
        ends = frozenset([*(params.get("stop_token_ids") or ()), *self._engine.model.end_ids])
        return Sampling(
            max_tokens=limit,
            min_tokens=params.get("min_new_tokens", 0),
            temperature=float(temperature),
            top_p=params.get("top_p", 1.0),
            top_k=max(params.get("top_k", -1), 0),
            min_p=params.get("min_p", 0.0),
            seed=params.get("sampling_seed", 42) if self._options.deterministic else None,
            stop_token_ids=frozenset() if params.get("ignore_eos") else ends,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            logit_bias=tuple((int(token), bias) for token, bias in (params.get("logit_bias") or {}).items()),
            structure=of_sglang(params),
            form_ends=ends,
        )

    async def _scores(self, ids: list[int], adapter: str) -> list[list[Any]]:
        rows = await self._engine.alone(lambda: self._engine.model.prompt_logprobs(ids, adapter))
        found: list[list[Any]] = [[None, ids[0], None]]
        for row, token in zip(rows, ids[1:], strict=False):
            found.append([max(float(row[token]), LOWEST_LOGPROB), token, None])
        return found

    def _finish_reason(self, job: Job) -> dict[str, Any] | None:
        if job.finish == "stop":
            return {"type": "stop", "matched": job.matched}
        if job.finish == "length":
            return {"type": "length", "length": job.sampling.max_tokens}
        if job.finish == "abort":
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        return None

    def _reply(self, job: Job, body: dict[str, Any], wants: bool, seen: int) -> dict[str, Any]:
        start = seen if self._options.incremental and body.get("stream") else 0
        if job.finish == "abort" and job.put_back:
            return self._aborted_in_queue(job, body, wants)
        meta: dict[str, Any] = {
            "id": job.rid,
            "finish_reason": self._finish_reason(job),
            "prompt_tokens": len(job.prompt),
            "completion_tokens": len(job.drawn),
            "cached_tokens": job.row.cached_tokens,
            "weight_version": self._engine.version,
            "num_retractions": 0,
            "e2e_latency": 0.0,
        }
        if self._since >= (0, 5, 20):
            meta["weight_versions"] = job.versions
        if "scores" in body:
            meta["input_token_logprobs"] = body["scores"]
        if wants:
            meta["output_token_logprobs"] = [
                [each.logprob(self._mode), each.token, None] for each in job.drawn[start:]
            ]
            count = body.get("top_logprobs_num") or 0
            if count:
                meta["output_top_logprobs"] = [
                    [[value, token, None] for token, value in each.top(self._mode, count)]
                    for each in job.drawn[start:]
                ]
            if named := body.get("token_ids_logprob"):
                meta["output_token_ids_logprobs"] = [
                    [[each.logprob(self._mode, token), token, None] for token in named]
                    for each in job.drawn[start:]
                ]
        if body.get("return_sampling_mask"):
            sampled = [each.logprob("processed") for each in job.drawn[start:]]
            meta["output_token_sampling_logprobs"] = sampled
        text = self._tokens.decode(job.ids[start:])
        return {"text": text, "output_ids": job.ids[start:], "meta_info": meta}

    def _aborted_in_queue(self, job: Job, body: dict[str, Any], wants: bool) -> dict[str, Any]:
        """What the front end writes by itself: the last id alone in a stream, and all triples."""
        meta: dict[str, Any] = {
            "id": job.rid,
            "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
            "completion_tokens": len(job.drawn),
            "weight_version": self._engine.version,
            "e2e_latency": 0.0,
        }
        if self._since >= (0, 5, 20):
            meta["weight_versions"] = job.versions
        if wants:
            meta["output_token_logprobs"] = [
                [each.logprob(self._mode), each.token, None] for each in job.drawn
            ]
        alone = body.get("stream") and self._options.incremental
        return {
            "text": self._tokens.decode(job.ids),
            "output_ids": job.ids[-1:] if alone else job.ids,
            "meta_info": meta,
        }

    # -- pauses

    async def pause(self, request: Request) -> Response:
        mode = (await body_of(request)).get("mode", "abort")
        modes = {"abort": "abort", "retract": "retract", "in_place": "keep"}
        if mode not in modes:
            raise BadRequest(f"mode must be one of abort, retract, in_place; got {mode!r}")
        await self._engine.pause(modes[mode])  # type: ignore[arg-type]
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: Request) -> Response:
        await self._engine.resume()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def abort(self, request: Request) -> Response:
        body = await body_of(request)
        rid, everything = body.get("rid") or "", body.get("abort_all", False)
        if rid or everything:
            await self._engine.abort(lambda job: everything or job.rid.startswith(rid))
        return Response()

    def _busy(self) -> bool:
        if self._engine.paused is not None and self._since >= (0, 5, 22):
            return bool(self._engine.running)
        return bool(self._engine.running or self._engine.waiting)

    async def flush(self, request: Request) -> Response:
        if self._busy():
            return PlainTextResponse("Flush cache failed.\n", 400)
        await self._engine.alone(self._engine.model.reset_prefix_cache)
        return PlainTextResponse("Cache flushed.\n")

    # -- weights

    async def init_group(self, request: Request) -> Response:
        body = await body_of(request)
        name = body.get("group_name", "weight_update_group")
        if body["rank_offset"] + self._options.inference_world > body["world_size"]:
            raise SessionError(f"world_size {body['world_size']} has no room for rank {body['rank_offset']}")
        await self._updates.join(
            name,
            body["master_address"],
            body["master_port"],
            body["rank_offset"],
            body["world_size"],
            sglang_prefixes(name),
        )
        return outcome("Succeeded to initialize custom process group.")

    async def destroy_group(self, request: Request) -> Response:
        name = (await body_of(request)).get("group_name", "weight_update_group")
        if self._updates.groups.pop(name, None) is None:
            raise SessionError(f"The group {name} does not exist.")
        return outcome("Succeeded to destroy custom process group.")

    async def begin_update(self, request: Request) -> Response:
        if self._updates.session:
            raise SessionError("a weight update has begun already")
        self._updates.session = True
        return outcome()

    async def end_update(self, request: Request) -> Response:
        if not self._updates.session:
            raise SessionError("no weight update has begun")
        self._updates.session = False
        return outcome()

    async def _changed(
        self, body: dict[str, Any], change: Callable[[], Awaitable[None]], flush: bool
    ) -> Response:
        if body.get("abort_all_requests"):
            await self._engine.abort(lambda job: True)
        if self._engine.paused is None:
            # The writer waits for readers, and no new ones come in.
            self._frozen = True
            try:
                await self._engine.until(lambda: not (self._engine.running or self._engine.waiting))
                await change()
            finally:
                self._frozen = False
                await self._engine.notify()
        else:
            await change()
        if body.get("weight_version") is not None:
            self._engine.version = str(body["weight_version"])
        if body.get("flush_cache", flush):
            if self._busy():
                return outcome("Failed to flush the cache.", success=False)
            await self._engine.alone(self._engine.model.reset_prefix_cache)
        return outcome()

    async def update_distributed(self, request: Request) -> Response:
        body = await body_of(request)
        if self._since >= (0, 5, 21) and not self._updates.session:
            raise SessionError("must run between begin_weight_update() and end_weight_update()")
        bucket = Bucket(body["names"], body["dtypes"], body["shapes"])
        bucket.check()
        group = self._updates.groups.get(body.get("group_name", "weight_update_group"))
        if group is None:
            raise SessionError(f"Group {body.get('group_name')} not in the list of groups.")
        flattened = body.get("load_format") == "flattened_bucket"
        tensors = receive_flattened(group, bucket) if flattened else receive(group, bucket)
        return await self._changed(body, lambda: self._updates.take(tensors), flush=True)

    async def update_disk(self, request: Request) -> Response:
        body = await body_of(request)
        answer = await self._changed(body, lambda: self._updates.load_folder(body["model_path"]), flush=True)
        if answer.status_code == 200:
            self._served_name = self._source = body["model_path"]
        if not body.get("keep_pause"):
            await self._engine.resume()
        return answer

    async def update_version(self, request: Request) -> Response:
        body = await body_of(request)
        if body.get("abort_all_requests", True):
            await self._engine.abort(lambda job: True)
        self._engine.version = str(body["new_version"])
        return outcome(new_version=self._engine.version)

    async def check_weights(self, request: Request) -> Response:
        body = await body_of(request)
        action, skip = body.get("action", "checksum"), body.get("skip_tensor_list") or []
        try:
            ranks = await self._engine.alone(lambda: self._checker.handle(action, skip))
        except CheckError as error:
            return outcome(str(error), success=False)
        if ranks is None:
            return outcome("Success.")
        return outcome("Success.", ranks=ranks, per_engine_checksum=per_engine(ranks))

    # -- memory and adapters

    async def release_memory(self, request: Request) -> Response:
        tags = (await body_of(request)).get("tags")
        if not self._options.memory_saver:
            raise SessionError("--enable-memory-saver is not set")
        if self._busy() and self._engine.paused is None:
            raise SessionError("release_memory_occupation needs an idle or paused server")
        self._engine.asleep = True
        if tags is None or "weights" in tags:
            await self._engine.alone(self._engine.model.spoil)
        return JSONResponse(None)

    async def resume_memory(self, request: Request) -> Response:
        tags = (await body_of(request)).get("tags")
        self._engine.asleep = tags is not None and "kv_cache" not in tags
        await self._engine.notify()
        return JSONResponse(None)

    def _adapters(self, success: bool = True, message: str = "") -> Response:
        body = {"success": success, "error_message": message, "loaded_adapters": self.adapters}
        return JSONResponse(body, 200 if success else 400)

    async def load_adapter(self, request: Request) -> Response:
        body = await body_of(request)
        if not self._options.lora:
            return self._adapters(False, "LoRA is not enabled. Please set `--enable-lora` to enable LoRA.")
        name, path = body["lora_name"], body["lora_path"]
        if name in self.adapters:
            return self._adapters(False, f"LoRA adapter {name} is already loaded.")
        check_adapter(path)
        self.adapters[name] = path
        return self._adapters()

    async def unload_adapter(self, request: Request) -> Response:
        name = (await body_of(request))["lora_name"]
        if self.adapters.pop(name, None) is None:
            return self._adapters(False, f"LoRA adapter {name} is not loaded.")
        return self._adapters()

    # -- information

    async def health(self, request: Request) -> Response:
        return await self.health_generate(request) if self._options.health_generates else Response()

    async def health_generate(self, request: Request) -> Response:
        """Well as soon as a token is drawn, which none is in a pause; unwell after 20 seconds without one."""
        try:
            async with asyncio.timeout(_HEALTH_S):
                await self._admitted(request)
        except TimeoutError:
            return Response(status_code=503)
        return Response()

    async def ready(self, request: Request) -> Response:
        """No, in a pause."""
        return Response(status_code=200 if self._engine.paused is None else 503)

    async def model_info(self, request: Request) -> Response:
        return JSONResponse(
            {
                "model_path": self._source,
                "served_model_name": self._served_name,
                "tokenizer_path": self._options.model_name,
                "is_generation": True,
                "weight_version": self._engine.version,
                "load_format": "auto",
                "model_type": self._engine.model.config["model_type"],
            }
        )

    async def server_info(self, request: Request) -> Response:
        return JSONResponse(
            {
                "version": self._options.release,
                "served_model_name": self._options.model_name,
                "context_length": self._engine.model.max_length,
                "max_req_input_len": self._engine.model.max_length - 6,
                "sampling_mask_max_tokens": _MASK_TOKENS,
                "enable_deterministic_inference": self._options.deterministic,
                "tp_size": self._options.inference_world,
                "dp_size": 1,
                "pp_size": 1,
                "enable_lora": self._options.lora,
                "incremental_streaming_output": self._options.incremental,
                "enable_memory_saver": self._options.memory_saver,
                "time": time.time(),
            }
        )


async def _true(waiting: Awaitable[Any]) -> bool:
    await waiting
    return True
