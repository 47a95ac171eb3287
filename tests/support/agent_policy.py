"""An endpoint for agents with a policy behind it: one that says what it is told to, or a real one of random weights."""

import asyncio
import itertools
import time
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from rollgym.trainer.inference.base import (
    GenerationRequest,
    GenerationResult,
    InferenceCounters,
    InferenceHealth,
    SamplingParams,
)
from rollgym.trainer.records.trajectory import Trajectory
from rollgym.trainer.rollout.agents.black_box import SessionTable
from rollgym.trainer.rollout.agents.endpoint import agents_app
from rollgym.trainer.rollout.agents.http import serve_app
from rollgym.trainer.rollout.agents.policy_service import PolicyService
from rollgym.trainer.rollout.agents.replies import format_of_template
from rollgym.trainer.rollout.agents.session import AgentSession
from rollgym.trainer.rollout.agents.splicing import SplicingRenderer
from rollgym.trainer.rollout.prompts import ChatRenderer
from rollgym.trainer.tasks.task import Task
from tests.support.chat_templates import tokenizer_of

# The shape of Qwen2.5's template, tools included.
QWEN_TOOLS = (
    "{%- if tools -%}<|im_start|>system{{ '\n' }}"
    "{{ messages[0].content if messages[0].role == 'system' else 'You are a helpful assistant.' }}"
    "{{ '\n\n# Tools\n\n<tools>' }}{%- for tool in tools -%}{{ '\n' }}{{ tool | tojson }}{%- endfor -%}"
    "{{ '\n</tools>' }}<|im_end|>{{ '\n' }}"
    "{%- elif messages[0].role == 'system' -%}<|im_start|>system{{ '\n' }}{{ messages[0].content }}<|im_end|>"
    "{{ '\n' }}{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' and message.tool_calls -%}"
    "<|im_start|>assistant{%- if message.content -%}{{ '\n' + message.content }}{%- endif -%}"
    '{%- for call in message.tool_calls -%}{{ \'\n<tool_call>\n{"name": "\' + call.function.name + \'", '
    "\"arguments\": ' }}{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{%- endfor -%}"
    "<|im_end|>{{ '\n' }}"
    "{%- elif message.role == 'tool' -%}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}<|im_start|>user{%- endif -%}"
    "{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}<|im_end|>{{ '\n' }}{%- endif -%}"
    "{%- elif not (loop.first and message.role == 'system') -%}"
    "<|im_start|>{{ message.role }}{{ '\n' }}{{ message.content }}<|im_end|>{{ '\n' }}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\n' }}{%- endif -%}"
)


def tool_tokenizer():
    """A tokenizer whose template knows tools."""
    tokenizer = tokenizer_of("qwen2.5")
    tokenizer.chat_template = QWEN_TOOLS
    return tokenizer


@dataclass(slots=True)
class EngineLog:
    """Everything that an engine was asked, and what it answered."""

    calls: list[tuple[GenerationRequest, GenerationResult]] = field(default_factory=list)


class LoggedClient:
    """Any inference client, with a log of its own of what it says."""

    def __init__(self, client):
        self._client = client
        self.log = EngineLog()

    def __getattr__(self, name):
        return getattr(self._client, name)

    async def generate(self, request):
        result = await self._client.generate(request)
        self.log.calls.append((request, result))
        return result


class ScriptedPolicy:
    """An inference client that says what it is told to, in tokens of a tokenizer, and keeps a log.

    Args:
        tokenizer: Whose tokens it speaks.
        script: What it says: texts in turn, or a function of the prompt as text.
        delay: Before each answer, an event to wait for or nothing.
    """

    version = 7

    def __init__(self, tokenizer, script, *, gate=None):
        self._tokenizer = tokenizer
        self._next = script if isinstance(script, Callable) else _in_turn(script)
        self._gate = gate
        self.log = EngineLog()
        self.asked = asyncio.Event()
        self.cancelled = 0

    async def says(self, request):
        """What it says to a request."""
        return self._next(self._tokenizer.decode(request.prompt_ids))

    async def generate(self, request):
        self.asked.set()
        try:
            if self._gate is not None:
                await self._gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        said = await self.says(request)
        ids = self._tokenizer.encode(said, add_special_tokens=False)
        ids.append(self._tokenizer.convert_tokens_to_ids("<|im_end|>"))
        longest = request.sampling.max_new_tokens
        reason = "length" if len(ids) > longest else "stop"
        ids = ids[:longest]
        logprobs = [-(((each * 7919 + len(request.prompt_ids)) % 997) + 1) / 1000 for each in ids]
        result = GenerationResult(ids, logprobs, [self.version] * len(ids), reason)
        self.log.calls.append((request, result))
        return result

    async def abort(self, request_ids=None):
        return 0

    async def health(self):
        return InferenceHealth(True)

    counters = InferenceCounters()

    async def close(self):
        pass


def _in_turn(texts):
    remaining = iter(texts)
    return lambda prompt: next(remaining)


def service_of(client, tokenizer, **changes) -> PolicyService:
    renderer = ChatRenderer(tokenizer)
    service = PolicyService(
        client=client,
        renderer=SplicingRenderer(renderer),
        sampling=SamplingParams(max_new_tokens=512, stop_token_ids=renderer.stop_token_ids),
        max_length=100_000,
        model="policy",
        tool_format=format_of_template(tokenizer.chat_template),
        wishes="run",
        seed=3,
        purpose="train",
    )
    return replace(service, **changes)


def short_sampling(tokenizer) -> SamplingParams:
    """Ends the replies of a model of random weights soon, and not at their greatest length: clients refuse those."""
    return SamplingParams(max_new_tokens=64, stop_token_ids=tuple(range(0, len(tokenizer), 3)))


class TestEndpoint:
    """A running endpoint and its sessions."""

    __test__ = False

    def __init__(self, url: str, table: SessionTable, service: PolicyService):
        self.url, self.table, self.service = url, table, service
        self._numbers = itertools.count()

    def open(self, max_calls=None, environment=None, trajectory=None) -> tuple[str, AgentSession]:
        trajectory = trajectory or Trajectory(Task(next(self._numbers), "Any-v0", seed=0), 0)
        session = AgentSession(self.service, trajectory, max_calls, time.time)
        return self.table.add(session, environment), session


@asynccontextmanager
async def endpoint_of(service: PolicyService, max_body_bytes=1 << 22):
    table = SessionTable(service.model)
    async with serve_app(agents_app(table, max_body_bytes), "127.0.0.1", 0) as url:
        yield TestEndpoint(url, table, service)


def recorded_replies(trajectory: Trajectory) -> list[tuple[list[int], list[int], list[float], list[int]]]:
    """What an episode's record says of each turn: prompt, ids, log-probabilities, versions."""
    found = []
    for turn in trajectory.turns:
        segment = trajectory.segments[turn.segment]
        span = slice(turn.start, turn.end)
        assert all(segment.action_mask[span])
        found.append(
            (
                segment.ids[: turn.start],
                segment.ids[span],
                segment.behaviour_logprobs[span],
                segment.versions[span],
            )
        )
    return found


def logged_replies(log: EngineLog) -> list[tuple[list[int], list[int], list[float], list[int]]]:
    """The same as the engine itself tells it."""
    return [
        (
            list(request.prompt_ids),
            list(result.token_ids),
            list(result.logprobs),
            list(result.policy_versions),
        )
        for request, result in log.calls
    ]


def assert_recorded(trajectory: Trajectory, log: EngineLog) -> None:
    """Every call's prompt, ids, log-probabilities and versions in the record are those of the engine."""
    assert sorted(recorded_replies(trajectory)) == sorted(logged_replies(log))
    masked = sum(sum(segment.action_mask) for segment in trajectory.segments)
    assert masked == sum(len(result.token_ids) for _, result in log.calls), "nothing else is trained"
