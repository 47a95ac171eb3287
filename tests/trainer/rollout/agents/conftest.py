"""What several files talk to: a real engine, or a policy that says what it is told to."""

import pytest

from rollgym.trainer.inference.engine.torch_engine import TorchEngine
from rollgym.trainer.models.tiny import TinyPolicySettings, build_tiny_model
from rollgym.trainer.rollout.environments import EnvironmentPool
from tests.support.agent_policy import ScriptedPolicy, endpoint_of, service_of
from tests.support.agent_talk import Talk
from tests.support.processes import env_server
from tests.support.structured_talk import TOKENIZER


@pytest.fixture(scope="module")
def url():
    """The address of a server of environments."""
    with env_server() as address:
        yield address


@pytest.fixture
async def pool(url):
    async with EnvironmentPool(url, None, "msgpack") as environments:
        yield environments


@pytest.fixture
async def engine():
    pytest.importorskip("llguidance")
    shape = TinyPolicySettings(len(TOKENIZER), hidden_size=16, layers=1, heads=2, max_length=1024)
    async with TorchEngine(
        build_tiny_model(shape, 0), max_rows=8, max_length=1024, tokenizer=TOKENIZER
    ) as running:
        yield running


@pytest.fixture
async def talk():
    """Makes talks; all that was recorded in them is compared with the engine's log at the end."""
    opened = []

    async def make(script, *, tokenizer=TOKENIZER, gate=None, session=None, **service):
        policy = ScriptedPolicy(tokenizer, script, gate=gate)
        context = endpoint_of(service_of(policy, tokenizer, **service))
        one = Talk(await context.__aenter__(), policy, **session or {})
        opened.append((context, one))
        return one

    yield make
    for context, one in opened:
        await one.openai.close()
        await context.__aexit__(None, None, None)
