"""Agents on libraries from PyPI, unchanged: every call's ids and log-probabilities are those of the engine's own log.

`.ci/agents` installs them, each in an environment of its own; what is not installed is skipped by name.
"""

import pytest

from rollgym.trainer.inference.engine.torch_engine import TorchEngine
from rollgym.trainer.models.tiny import TinyPolicySettings, build_tiny_model
from rollgym.trainer.records.trajectory import PrefixBreak
from tests.support.agent_libraries import LIBRARIES, adder
from tests.support.agent_policy import (
    LoggedClient,
    ScriptedPolicy,
    assert_recorded,
    endpoint_of,
    service_of,
    short_sampling,
    tool_tokenizer,
)
from tests.support.agent_programs import interpreter_of, play


@pytest.mark.parametrize("name", LIBRARIES)
async def test_an_agent_that_uses_tools_streams_and_sub_agents(name):
    interpreter_of(name)
    tokenizer = tool_tokenizer()
    policy = ScriptedPolicy(tokenizer, adder)
    async with endpoint_of(service_of(policy, tokenizer)) as endpoint:
        key, session = endpoint.open()
        await play(name, f"{endpoint.url}/s/{key}/v1")
    assert_recorded(session.trajectory, policy.log)
    segments = session.trajectory.segments
    assert PrefixBreak.CONVERSATION in {segment.prefix_break for segment in segments}, (
        "a sub-agent, or a shortened history"
    )
    turns_of = [
        sum(turn.segment == place for turn in session.trajectory.turns) for place in range(len(segments))
    ]
    assert max(turns_of) >= (3 if name != "smolagents" else 1), (
        "calls of tools and their results went on in one segment"
    )


@pytest.mark.parametrize("name", LIBRARIES)
async def test_an_agent_on_a_real_engine(name):
    interpreter_of(name)
    tokenizer = tool_tokenizer()
    shape = TinyPolicySettings(len(tokenizer), hidden_size=16, layers=1, heads=2, max_length=16_384)
    async with TorchEngine(build_tiny_model(shape, 0), max_rows=4, max_length=16_384) as engine:
        client = LoggedClient(engine)
        service = service_of(client, tokenizer, max_length=16_384, sampling=short_sampling(tokenizer))
        async with endpoint_of(service) as endpoint:
            key, session = endpoint.open()
            await play(name, f"{endpoint.url}/s/{key}/v1")
    assert client.log.calls
    assert_recorded(session.trajectory, client.log)
