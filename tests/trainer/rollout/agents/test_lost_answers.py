"""The openai library asks again by itself where an answer is lost on its way: the agent sees what the record holds."""

import asyncio
from contextlib import asynccontextmanager

import httpx
import openai
import pytest

from rollgym.trainer.inference.engine.torch_engine import TorchEngine
from rollgym.trainer.models.tiny import TinyPolicySettings, build_tiny_model
from rollgym.trainer.rollout.agents.black_box import give_posted
from rollgym.trainer.rollout.agents.errors import ApiError
from rollgym.trainer.rollout.agents.runners import AgentEnd
from tests.support.agent_policy import (
    LoggedClient,
    ScriptedPolicy,
    assert_recorded,
    endpoint_of,
    service_of,
    short_sampling,
    tool_tokenizer,
)
from tests.support.cutting_proxy import cutting_proxy

TOKENIZER = tool_tokenizer()
WORDS = ["one", "two", "three", "four", "five", "six"]
LOST = ["headless", "half", "500", "502", "503", "429"]


class CountingPolicy(ScriptedPolicy):
    """Counts requests when they come."""

    begun = 0

    async def generate(self, request):
        self.begun += 1
        return await super().generate(request)


class Agent:
    """An agent on the openai library with the library's own retries, behind a proxy that loses answers."""

    def __init__(self, address, proxy, policy, session, timeout, retries):
        self.address, self.proxy, self.policy, self.session = address, proxy, policy, session
        self.history, self.seen, self.calls = [], [], []
        self.client = openai.AsyncOpenAI(
            base_url=f"{address}/v1", api_key="any", max_retries=retries, timeout=timeout
        )

    async def say(self, text, *, stream=False):
        """Say something behind all that was said, and note the answer as the agent saw it."""
        self.history.append({"role": "user", "content": text})
        create = self.client.chat.completions.with_raw_response.create
        raw = await create(model="policy", messages=self.history, stream=stream)
        if stream:
            chunks = [chunk async for chunk in raw.parse()]
            answer = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
        else:
            answer = raw.parse().choices[0].message.content
        self.calls.append(int(raw.headers["x-rollgym-call"]))
        self.seen.append(answer)
        self.history.append({"role": "assistant", "content": answer})
        return answer

    def check(self):
        """The record holds what the agent saw, once, and nothing was drawn but that."""
        trajectory = self.session.trajectory
        assert [turn.reply for turn in trajectory.turns] == self.seen
        assert_recorded(trajectory, self.policy.log)
        assert len(trajectory.segments) == 1, "one conversation that only went on"
        assert self.session.counts.calls == len(self.seen)


@asynccontextmanager
async def agent_behind(*faults, gate=None, timeout=20.0, retries=2, words=WORDS, **session):
    policy = CountingPolicy(TOKENIZER, words, gate=gate)
    async with (
        asyncio.timeout(60),
        endpoint_of(service_of(policy, TOKENIZER)) as endpoint,
        cutting_proxy(endpoint.url, faults) as (url, proxy),
    ):
        key, session = endpoint.open(**session)
        yield Agent(f"{url}/s/{key}", proxy, policy, session, timeout, retries)


@pytest.mark.parametrize(
    ("fault", "stream"),
    # In the midst of a stream the library does not ask again.
    [(fault, stream) for fault in LOST for stream in (False, True) if (fault, stream) != ("half", True)],
)
async def test_an_answer_that_was_lost_is_given_again(fault, stream):
    async with agent_behind("none", fault, "none", fault, fault, max_calls=3) as agent:
        assert await agent.say("a") == "one"
        assert await agent.say("b", stream=stream) == "two"
        assert await agent.say("c", stream=stream) == "three"
        assert len(agent.proxy.requests) == 1 + 2 + 3, "the library asked again"
        agent.check()
        assert agent.calls == [0, 1, 2]


async def test_what_never_arrived_is_drawn_once():
    async with agent_behind("unsent", "none", "unsent") as agent:
        assert [await agent.say("a"), await agent.say("b")] == ["one", "two"]
        agent.check()


async def test_rewards_of_an_answer_that_was_given_again_are_its_own():
    async with agent_behind("half", "none", "502") as agent:
        await agent.say("a")
        await agent.say("b")
        async with httpx.AsyncClient() as client:
            for call, reward in zip(agent.calls, (0.25, 0.5), strict=True):
                body = {"call": call, "reward": reward}
                (await client.post(f"{agent.address}/reward", json=body)).raise_for_status()
            (await client.post(f"{agent.address}/reward", json={"reward": 2.0})).raise_for_status()
        give_posted(agent.session.trajectory, agent.session, AgentEnd())
        assert [turn.reward for turn in agent.session.trajectory.turns] == [0.25, 2.5]
        agent.check()


async def test_who_waited_too_long_has_the_next_answer_and_loses_no_turn():
    gate = asyncio.Event()
    async with agent_behind("leaves", gate=gate, timeout=0.5, max_calls=2) as agent:
        talk = asyncio.create_task(agent.say("a"))
        await agent.proxy.wait_for(2)
        agent.client = agent.client.with_options(timeout=20.0)
        gate.set()
        assert await talk == "one"
        assert await agent.say("b") == "two", "the first attempt was no turn"
        assert agent.policy.cancelled == agent.session.counts.abandoned == 1
        agent.check()


async def test_an_answer_that_is_still_sampled_is_waited_for_by_who_asks_again():
    """Where what stands between does not tell the endpoint that the client has gone."""
    gate = asyncio.Event()
    async with agent_behind("silent", gate=gate, timeout=0.5) as agent:
        talk = asyncio.create_task(agent.say("a"))
        await agent.proxy.wait_for(2)
        gate.set()
        assert await talk == "one"
        assert agent.policy.cancelled == 0
        agent.check()


async def test_answers_of_the_responses_api_are_given_again():
    async with agent_behind("half", "none", "503") as agent:
        first = await agent.client.responses.create(model="policy", input="a")
        second = await agent.client.responses.create(model="policy", input="b", previous_response_id=first.id)
        agent.seen += [first.output_text, second.output_text]
        assert agent.seen == ["one", "two"]
        agent.check()


async def test_equal_requests_of_their_own_are_drawn_each():
    async with agent_behind() as agent:
        create = agent.client.chat.completions.create
        question = [{"role": "user", "content": "a"}]
        answers = [await create(model="policy", messages=question) for _ in range(2)]
        answers += await asyncio.gather(*(create(model="policy", messages=question) for _ in range(2)))
        said = [each.choices[0].message.content for each in answers]
        assert sorted(said) == sorted(WORDS[:4]), "who asks for the first time is no retry"


async def test_of_equal_requests_at_one_time_none_gets_the_answer_of_another():
    gate = asyncio.Event()
    async with agent_behind("half", "none", gate=gate) as agent:
        create = agent.client.chat.completions.create
        question = [{"role": "user", "content": "a"}]
        asked = asyncio.gather(*(create(model="policy", messages=question) for _ in range(2)))
        await agent.proxy.wait_for(2)
        while agent.policy.begun < 2:
            await asyncio.sleep(0.01)
        gate.set()
        said = [each.choices[0].message.content for each in await asked]
        assert len(set(said)) == 2, "nobody knows whose answer was lost, so it is drawn anew"


async def test_requests_with_a_name_are_answered_once_whoever_sends_them():
    async with agent_behind() as agent, httpx.AsyncClient() as client:
        body = {"model": "policy", "messages": [{"role": "user", "content": "a"}]}
        said = []
        for name in ("x", "x", "y"):
            url, headers = f"{agent.address}/v1/chat/completions", {"idempotency-key": name}
            answer = (await client.post(url, json=body, headers=headers)).raise_for_status().json()
            said.append(answer["choices"][0]["message"]["content"])
        assert said == ["one", "one", "two"]
        assert len(agent.policy.log.calls) == 2


@pytest.mark.parametrize("fault", ["500", "unsent", "headless", "half"])
async def test_the_retries_that_the_library_comes_with_leave_one_record_of_a_real_engine(fault):
    shape = TinyPolicySettings(len(TOKENIZER), hidden_size=16, layers=1, heads=2, max_length=4096)
    async with TorchEngine(build_tiny_model(shape, 0), max_rows=4, max_length=4096) as engine:
        policy = LoggedClient(engine)
        service = service_of(policy, TOKENIZER, max_length=4096, sampling=short_sampling(TOKENIZER))
        async with (
            asyncio.timeout(60),
            endpoint_of(service) as endpoint,
            cutting_proxy(endpoint.url, [fault, "none", "none", fault]) as (url, proxy),
        ):
            key, session = endpoint.open()
            history, seen = [], []
            async with openai.AsyncOpenAI(base_url=f"{url}/s/{key}/v1", api_key="any") as client:
                for text in ("a", "b", "c"):
                    history.append({"role": "user", "content": text})
                    answer = await client.chat.completions.create(model="policy", messages=history)
                    seen.append(answer.choices[0].message.content)
                    history.append({"role": "assistant", "content": seen[-1]})
    assert len(proxy.requests) == 2 + 1 + 2, "the library asked again"
    assert len(policy.log.calls) == session.counts.calls == 3, "nothing was drawn twice"
    assert [turn.reply for turn in session.trajectory.turns] == seen
    assert_recorded(session.trajectory, policy.log)


async def test_an_endpoint_that_fails_records_nothing_of_it():
    class Failing(ScriptedPolicy):
        failures = 2

        async def generate(self, request):
            if self.failures:
                self.failures -= 1
                raise ApiError(502, "the reply was lost while it was sampled: ask again", "reply_lost")
            return await super().generate(request)

    async with endpoint_of(service_of(Failing(TOKENIZER, WORDS), TOKENIZER)) as endpoint:
        key, session = endpoint.open(max_calls=1)
        client = openai.AsyncOpenAI(base_url=f"{endpoint.url}/s/{key}/v1", api_key="any", max_retries=2)
        answer = await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "a"}]
        )
        assert answer.choices[0].message.content == "one"
        assert [turn.reply for turn in session.trajectory.turns] == ["one"]
        assert_recorded(session.trajectory, session.service.client.log)


class Faltering(CountingPolicy):
    """Fails at one request: the second of all, unless told otherwise."""

    fails_at = 2

    async def generate(self, request):
        if self.begun + 1 == self.fails_at:
            self.begun += 1
            raise ApiError(502, "the reply was lost while it was sampled: ask again", "reply_lost")
        return await super().generate(request)


@pytest.mark.parametrize("stream", [False, True])
async def test_who_asks_the_same_anew_and_fails_is_not_given_the_answer_of_before(stream):
    policy = Faltering(TOKENIZER, WORDS)
    async with asyncio.timeout(60), endpoint_of(service_of(policy, TOKENIZER)) as endpoint:
        key, session = endpoint.open()
        async with httpx.AsyncClient() as client:

            async def ask(count):
                question = [{"role": "user", "content": "a"}]
                return await client.post(
                    f"{endpoint.url}/s/{key}/v1/chat/completions",
                    json={"model": "policy", "messages": question, "stream": stream},
                    headers={"x-stainless-retry-count": str(count)},
                )

            first, failed, second, again = [await ask(count) for count in (0, 0, 1, 2)]
    assert (first.status_code, failed.status_code) == (200, 502)
    assert '"one"' in first.text
    assert '"two"' in second.text, "the attempt before it came to nothing"
    assert '"two"' in again.text, "this one had an answer, which may have been lost"
    assert [turn.reply for turn in session.trajectory.turns] == ["one", "two"]


async def test_who_leaves_and_asks_the_same_again_is_not_given_the_answer_of_before():
    gate = asyncio.Event()
    gate.set()
    async with agent_behind("none", "leaves", gate=gate) as agent:
        question = {"model": "policy", "messages": [{"role": "user", "content": "a"}]}
        answer = await agent.client.chat.completions.create(**question)
        gate.clear()
        hasty = agent.client.with_options(timeout=0.5, max_retries=9)
        talk = asyncio.create_task(hasty.chat.completions.create(**question))
        await agent.proxy.wait_for(3)
        gate.set()
        said = [each.choices[0].message.content for each in (answer, await talk)]
        assert said == ["one", "two"]
        assert [turn.reply for turn in agent.session.trajectory.turns] == said


@pytest.mark.parametrize("api", ["chat/completions", "messages"])
async def test_who_waits_for_a_stream_that_is_asked_for_again_is_told_so(api):
    gate = asyncio.Event()
    policy = ScriptedPolicy(TOKENIZER, ["one"], gate=gate)
    body = {"model": "m", "max_tokens": 8, "stream": True, "messages": [{"role": "user", "content": "Hi"}]}
    async with endpoint_of(service_of(policy, TOKENIZER)) as endpoint, httpx.AsyncClient() as client:
        key, session = endpoint.open()
        url = f"{endpoint.url}/s/{key}/v1/{api}"
        first = asyncio.create_task(client.post(url, json=body))
        await policy.asked.wait()
        again = asyncio.create_task(client.post(url, json=body, headers={"x-stainless-retry-count": "1"}))
        told = await first
        assert (told.status_code, told.json()["error"]["code"]) == (400, "asked_again")
        gate.set()
        assert "one" in (await again).text
        assert_recorded(session.trajectory, policy.log)
