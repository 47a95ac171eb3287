"""Completions, chat completions and models: what libraries of agents ask of either server."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tests.support.inference_server.engine import LOWEST_LOGPROB, Engine, Job, Sampling, unique_id
from tests.support.inference_server.http import BadRequest, Options, as_json, body_of, streamed, unless_gone
from tests.support.inference_server.models import Row
from tests.support.inference_server.structures import of_vllm
from tests.support.inference_server.texts import Tokens

_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class OpenAIRoutes:
    """The OpenAI-compatible face.

    Args:
        engine: What samples.
        tokens: Text to ids and back.
        options: How the double was started.
        logprobs_mode: Which distribution log-probabilities are of.
        spans: Whether replies say which versions drew them.
        adapters: Names that may stand for the model.
    """

    def __init__(
        self,
        engine: Engine,
        tokens: Tokens,
        options: Options,
        *,
        logprobs_mode: str,
        spans: bool,
        adapters: dict[str, str],
    ) -> None:
        self._engine = engine
        self._tokens = tokens
        self._options = options
        self._mode = logprobs_mode
        self._spans = spans
        self._adapters = adapters

    async def models(self, request: Request) -> Response:
        base = {
            "id": self._options.model_name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "double",
            "root": self._engine.model.source,
            "parent": None,
            "max_model_len": self._engine.model.max_length,
        }
        adapters = [
            base | {"id": name, "root": path, "parent": self._options.model_name}
            for name, path in self._adapters.items()
        ]
        return as_json({"object": "list", "data": [base, *adapters]})

    async def completions(self, request: Request) -> Response:
        body = await body_of(request)
        self._check_model(body)
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            prompt = self._tokens.encode(prompt)
        if not isinstance(prompt, list) or not prompt or not all(isinstance(each, int) for each in prompt):
            raise BadRequest("prompt must be text or a list of ids")
        wants = body.get("logprobs")
        if body.get("prompt_logprobs") is not None:
            body["scores"] = await self.scores(prompt, body.get("model"))
        job = self.job("cmpl", prompt, self.sampling(body, default_tokens=16), body, request)
        return await self._answered(request, body, [job], "text_completion", wants, self._completion_choice)

    async def chat(self, request: Request) -> Response:
        body = await body_of(request)
        self._check_model(body)
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise BadRequest("messages must be a list")
        kwargs = body.get("chat_template_kwargs") or {}
        prompt = self._tokens.chat(messages, body.get("tools"), **kwargs)
        body = dict(body)
        body["max_tokens"] = body.get("max_completion_tokens") or body.get("max_tokens")
        room = self._engine.model.max_length - len(prompt)
        sampling = self.sampling(body, default_tokens=max(room, 0))
        jobs = [
            self.job(
                "chatcmpl",
                prompt,
                sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + place),
                body,
                request,
                place,
            )
            for place in range(body.get("n") or 1)
        ]
        wants = (body.get("top_logprobs") or 0) if body.get("logprobs") else None
        return await self._answered(request, body, jobs, "chat.completion", wants, self._chat_choice)

    # -- requests

    def _check_model(self, body: dict[str, Any]) -> None:
        name = body.get("model")
        if name is not None and name != self._options.model_name and name not in self._adapters:
            raise LookupError(f"The model `{name}` does not exist.")

    def sampling(self, body: dict[str, Any], default_tokens: int) -> Sampling:
        stop = body.get("stop") or ()
        named = frozenset(body.get("stop_token_ids") or ())
        own = frozenset(self._engine.model.end_ids)
        limit = body.get("max_tokens")
        temperature = body.get("temperature")
        top_p = body.get("top_p")
        seed = body.get("seed")
        return Sampling(
            max_tokens=default_tokens if limit is None else limit,
            min_tokens=body.get("min_tokens") or 0,
            temperature=1.0 if temperature is None else float(temperature),
            top_p=1.0 if top_p is None else float(top_p),
            top_k=max(body.get("top_k") or 0, 0),
            min_p=body.get("min_p") or 0.0,
            seed=seed,
            stop_token_ids=named if body.get("ignore_eos") else named | own,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            logit_bias=tuple((int(token), bias) for token, bias in (body.get("logit_bias") or {}).items()),
            structure=of_vllm(body),
            # Its own end ends a form, whether it ends the reply or not.
            form_ends=named | own,
        )

    def job(
        self,
        kind: str,
        prompt: list[int],
        sampling: Sampling,
        body: dict[str, Any],
        request: Request,
        place: int = 0,
    ) -> Job:
        if len(prompt) + sampling.max_tokens > self._engine.model.max_length:
            raise BadRequest(
                f"This model's maximum context length is {self._engine.model.max_length} tokens. However, you "
                f"requested {sampling.max_tokens} output tokens and your prompt contains {len(prompt)}."
            )
        if any(not 0 <= token < self._engine.model.vocabulary for token in prompt):
            raise BadRequest("Token id is out of vocabulary")
        base = request.headers.get("x-request-id") or body.get("request_id") or unique_id()
        return Job(
            f"{kind}-{base}" + (f"-{place}" if kind == "cmpl" else ""),
            Row(
                list(prompt),
                salt=f"{body.get('model')}/{body.get('cache_salt') or ''}",
                adapter=self._adapters.get(body.get("model") or "", ""),
            ),
            sampling,
            decode=self._tokens.decode,
            labels={
                "session": request.headers.get("x-session-id") or body.get("session_id"),
                "model": body.get("model"),
                "cache_salt": body.get("cache_salt"),
            },
        )

    # -- replies

    async def _answered(
        self,
        request: Request,
        body: dict[str, Any],
        jobs: list[Job],
        kind: str,
        wants: int | None,
        choice: Any,
    ) -> Response:
        for job in jobs:
            await self._engine.submit(job)
        head = {
            "id": jobs[0].rid,
            "object": kind,
            "created": int(time.time()),
            "model": body.get("model") or self._options.model_name,
        }
        if body.get("stream"):
            return self._stream(jobs[0], head, body, wants)
        for place, job in enumerate(jobs):
            if not await unless_gone(request, self._engine, job):
                for other in jobs[place:]:
                    await self._engine.drop(other)
                return Response(status_code=499)
        choices = [choice(job, place, body, wants) for place, job in enumerate(jobs)]
        return as_json({**head, "choices": choices, "usage": usage(jobs)})

    def _common(self, job: Job, place: int, body: dict[str, Any]) -> dict[str, Any]:
        ids = body.get("return_token_ids")
        common: dict[str, Any] = {
            "index": place,
            "finish_reason": job.finish,
            "stop_reason": job.matched if job.matched not in self._engine.model.end_ids else None,
            "token_ids": job.ids if ids else None,
        }
        if self._spans and body.get("return_weight_versions"):
            common["weight_versions"] = job.versions
        return common

    def _text(self, job: Job) -> str:
        text = self._tokens.decode(job.ids)
        if isinstance(job.matched, str):
            return text[: text.index(job.matched)]
        return text

    def _completion_choice(
        self, job: Job, place: int, body: dict[str, Any], wants: int | None
    ) -> dict[str, Any]:
        return {
            **self._common(job, place, body),
            "text": self._text(job),
            "logprobs": None if wants is None else self._completion_logprobs(job, wants),
            "prompt_token_ids": job.prompt if body.get("return_token_ids") else None,
            "prompt_logprobs": body.get("scores"),
        }

    async def scores(self, prompt: list[int], model: str | None) -> list[dict[str, Any] | None]:
        """Log-probabilities of a prompt as vLLM writes them: under the id, as text."""
        adapter = self._adapters.get(model or "", "")
        rows = await self._engine.alone(lambda: self._engine.model.prompt_logprobs(prompt, adapter))
        found: list[dict[str, Any] | None] = [None]
        for row, token in zip(rows, prompt[1:], strict=False):
            value = max(float(row[token]), LOWEST_LOGPROB)
            found.append({str(token): {"logprob": value, "rank": 1, "decoded_token": None}})
        return found

    def _completion_logprobs(self, job: Job, wants: int, start: int = 0) -> dict[str, Any]:
        part = job.drawn[start:]
        return {
            "tokens": [f"token_id:{each.token}" for each in part],
            "token_logprobs": [each.logprob(self._mode) for each in part],
            "top_logprobs": [
                {f"token_id:{token}": value for token, value in each.top(self._mode, wants)} for each in part
            ],
            "text_offset": [0 for _ in part],
        }

    def _chat_choice(self, job: Job, place: int, body: dict[str, Any], wants: int | None) -> dict[str, Any]:
        text = self._text(job)
        calls = _TOOL_CALL.findall(text) if body.get("tools") else []
        message: dict[str, Any] = {"role": "assistant", "content": text}
        choice = self._common(job, place, body)
        if calls:
            message |= {"content": _TOOL_CALL.sub("", text).strip() or None, "tool_calls": _tool_calls(calls)}
            choice["finish_reason"] = "tool_calls"
        logprobs = None if wants is None else {"content": self._chat_logprobs(job, wants)}
        return {**choice, "message": message, "logprobs": logprobs}

    def _chat_logprobs(self, job: Job, wants: int, start: int = 0) -> list[dict[str, Any]]:
        def entry(token: int, value: float) -> dict[str, Any]:
            text = self._tokens.decode([token])
            return {"token": text, "logprob": value, "bytes": list(text.encode())}

        return [
            entry(each.token, each.logprob(self._mode))
            | {"top_logprobs": [entry(token, value) for token, value in each.top(self._mode, wants)]}
            for each in job.drawn[start:]
        ]

    def _stream(self, job: Job, head: dict[str, Any], body: dict[str, Any], wants: int | None) -> Response:
        is_chat = head["object"] == "chat.completion"
        head = head | {"object": "chat.completion.chunk" if is_chat else "text_completion"}

        def delta(job: Job, seen: int) -> list[Any]:
            # Half a character waits for its other half.
            before, text = self._tokens.decode(job.ids[:seen]).rstrip("\ufffd"), self._tokens.decode(job.ids)
            new = (text if job.finish is not None else text.rstrip("\ufffd"))[len(before) :]
            choice: dict[str, Any] = {"index": 0, "finish_reason": job.finish, "stop_reason": None}
            if body.get("return_token_ids"):
                choice["token_ids"] = job.ids[seen:]
            if is_chat:
                choice["delta"] = {"content": new} if seen else {"role": "assistant", "content": new}
                choice["logprobs"] = (
                    None if wants is None else {"content": self._chat_logprobs(job, wants, seen)}
                )
            else:
                choice["text"] = new
                choice["logprobs"] = None if wants is None else self._completion_logprobs(job, wants, seen)
            if job.finish is not None and self._spans and body.get("return_weight_versions"):
                choice["weight_versions"] = job.versions
            return [{**head, "choices": [choice]}]

        def last(job: Job) -> list[Any]:
            wanted = (body.get("stream_options") or {}).get("include_usage")
            return [{**head, "choices": [], "usage": usage([job])}] if wanted else []

        return streamed(self._engine, job, delta, last)


def usage(jobs: list[Job]) -> dict[str, Any]:
    prompt, completion = len(jobs[0].prompt), sum(len(job.drawn) for job in jobs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        # Both need a switch to say more.
        "prompt_tokens_details": None,
    }


def _tool_calls(found: list[str]) -> list[dict[str, Any]]:
    calls = []
    for text in found:
        call = json.loads(text)
        arguments = json.dumps(call.get("arguments", {}))
        function = {"name": call.get("name"), "arguments": arguments}
        calls.append({"id": f"call-{unique_id()}", "type": "function", "function": function})
    return calls
