"""Weights on their way to a real vLLM, which is started as a run starts it.

    ROLLGYM_VLLM=/opt/vllm/bin/vllm python -m pytest tests/trainer/learn/weights/test_real_vllm.py

Without the variable nothing is run; `keep` and `recompute` need 0.33. vLLM's build for CPUs has no NCCL: there
broadcasts come by gloo, through a transfer engine of the tests behind vLLM's own routes. Its sleep is refused by vLLM
itself where it has no accelerator.
"""

import asyncio
import os
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import torch

from rollgym.trainer.backends.heads import PolicyHead
from rollgym.trainer.backends.torch_backend import Schedule, TorchBackend
from rollgym.trainer.config.inference import InferenceSettings, LaunchSettings
from rollgym.trainer.config.model import LoraSettings
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.inference.base import GenerationRequest, SamplingParams
from rollgym.trainer.inference.server_client.client import ServerClient
from rollgym.trainer.inference.server_pool.pool import ServerPool
from rollgym.trainer.inference.servers.dialect import SERVED_NAME, ServedModel
from rollgym.trainer.inference.servers.launch import LaunchError, choose_ports, launched, server_processes
from rollgym.trainer.learn.weights.broadcast import TensorBroadcast
from rollgym.trainer.learn.weights.folders import ModelLayout, WeightFolders
from rollgym.trainer.learn.weights.publisher import WeightPublisher
from rollgym.trainer.learn.weights.verification import Tolerance, WeightCheck, probe_prompts
from rollgym.trainer.models.language_head import cache_argument
from rollgym.trainer.models.lora import add_lora, is_adapter
from rollgym.trainer.models.tiny import TinyPolicySettings, build_tiny_model, build_tiny_tokenizer
from tests.support.vllm_gloo_engine import BACKEND, written

PROGRAM = os.environ.get("ROLLGYM_VLLM", "")
ROOT = Path(__file__).parents[4]
VOCABULARY, MAX_LENGTH = 64, 128
# A busy machine takes minutes to start a server.
pytestmark = [
    pytest.mark.skipif(not PROGRAM, reason="ROLLGYM_VLLM names no program"),
    pytest.mark.timeout(1800),
]


def policy(seed):
    """A policy that vLLM serves on CPUs, where heads have 32 numbers or more, and whose choices are not all alike."""
    model = build_tiny_model(TinyPolicySettings(VOCABULARY, layers=2, heads=2, max_length=MAX_LENGTH), seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.0)
    return model.eval()


def adapted(seed):
    """The policy that the server was started with, and adapters beside it that do something."""
    model = policy(0)
    add_lora(model, LoraSettings(rank=4), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def backend_of(model):
    return TorchBackend(PolicyHead(model, 1.0), OptimizerSettings(), Schedule(1e-3, 0, 1, "constant"))


@asynccontextmanager
async def served(folder, *, model=None, tokenizer=None, max_length=MAX_LENGTH, **more):
    """A vLLM that a run has started, and its folder; ends with the block."""
    model = policy(0) if model is None else model
    layout = ModelLayout(model, tokenizer or build_tiny_tokenizer(), separate_head=True)
    plugins = written(folder / "plugins")
    launch = LaunchSettings(
        command=[PROGRAM],
        arguments=["--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096"],
        environment={
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{plugins}",
        },
        startup_timeout_s=1200.0,
    )
    inference = InferenceSettings(
        kind="vllm", dtype="float32", launch=launch, sleep_level=more.pop("sleep_level", 0)
    )
    with WeightFolders(folder / "start", layout) as folders:
        served_model = ServedModel(
            folders.write_start(backend_of(model).export()),
            max_length,
            lora_rank=8,
            adapters=3,
            broadcast=BACKEND,
        )
        processes = server_processes(inference, launch, served_model, choose_ports(launch), folder / "logs")
        async with launched(
            processes, startup_timeout_s=1200.0, restarts=0, say=print, status=lambda _: None
        ) as urls:
            yield urls[0]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """One server for all tests, in a loop of its own."""
    loop = asyncio.new_event_loop()
    server = served(tmp_path_factory.mktemp("vllm"))
    try:
        yield loop.run_until_complete(server.__aenter__())
        loop.run_until_complete(server.__aexit__(None, None, None))
    finally:
        loop.close()


@asynccontextmanager
async def opened(url, way, folder, **settings):
    """A pool of the server and what publishes to it."""
    layout = ModelLayout(policy(0), build_tiny_tokenizer(), separate_head=way != "adapter")
    carrier = TensorBroadcast(
        "vllm",
        collective="gloo",
        host="127.0.0.1",
        bucket_bytes=30_000,
        device=torch.device("cpu"),
        arrange=layout.arrange,
        timeout_s=60.0,
    )
    client = ServerClient(url, "vllm", way=way, carrier=carrier, patience_s=60.0, **settings)
    tolerance = Tolerance(1e-3)
    prompts = probe_prompts([3, 4, 5], VOCABULARY, MAX_LENGTH, tolerance)
    check = WeightCheck(prompts, 1.0, tolerance, seed=0)
    with WeightFolders(folder / "weights", layout) as folders:
        async with ServerPool({url: client}, max_concurrent=8, patience_s=60.0, check=check) as pool:
            yield pool, WeightPublisher([pool], folders, check)


def request(name="r", tokens=8):
    return GenerationRequest(name, [3, 4, 5], SamplingParams(tokens), 1)


def names(url):
    return {each["id"] for each in httpx.get(f"{url}/v1/models", timeout=30).json()["data"]}


@pytest.mark.parametrize("mode", ["abort", "wait"])
async def test_adapters_are_loaded_while_it_runs_and_verified(url, tmp_path, mode):
    async with opened(url, "adapter", tmp_path, pause_mode=mode) as (pool, publisher):
        for version in (1, 2):
            metrics = await publisher.publish(backend_of(adapted(version)), version)
            assert metrics["sync/probe_difference"] < 1e-3
        under_way = asyncio.create_task(pool.generate(request("long", 100)))
        await asyncio.sleep(0.3)
        metrics = await publisher.publish(backend_of(adapted(3)), 3)
        assert metrics["sync/probe_difference"] < 1e-3
        reply = await under_way
        assert len(reply.token_ids) == 100
        assert reply.policy_versions == sorted(reply.policy_versions)
        assert set(reply.policy_versions) <= ({2} if mode == "wait" else {2, 3})
        async with asyncio.timeout(30):
            while len(names(url) - {SERVED_NAME}) > 1:  # the old ones go once nobody needs them
                await asyncio.sleep(0.1)
    assert names(url) == {SERVED_NAME}, "a run takes its adapters with it"


@pytest.mark.parametrize("way", ["disk", "broadcast"])
async def test_whole_weights_arrive_and_are_verified(url, tmp_path, way):
    async with opened(url, way, tmp_path) as (pool, publisher):
        for version in (1, 2):
            metrics = await publisher.publish(backend_of(policy(version)), version)
            assert metrics["sync/probe_difference"] < 1e-3
            assert set((await pool.generate(request())).policy_versions) == {version}
        await publisher.publish(backend_of(policy(0)), 3)  # what adapters are beside


@pytest.mark.parametrize("mode", ["keep", "recompute"])
async def test_a_reply_goes_on_with_other_weights(url, tmp_path, mode):
    async with opened(url, "disk", tmp_path) as (pool, _):
        client = next(iter(pool._servers)).client
        if not client.capabilities.spans:
            pytest.skip(f"{client.capabilities.server} does not say which version drew which token")
    async with opened(url, "disk", tmp_path, pause_mode=mode) as (pool, publisher):
        await publisher.publish(backend_of(policy(0)), 1)
        under_way = asyncio.create_task(pool.generate(request("long", 100)))
        await asyncio.sleep(0.2)
        metrics = await publisher.publish(backend_of(policy(1)), 2)
        reply = await under_way
        await publisher.publish(backend_of(policy(0)), 3)
    assert metrics["sync/probe_difference"] < 1e-3
    drawn_before = reply.policy_versions.count(1)
    assert reply.policy_versions == [1] * drawn_before + [2] * (100 - drawn_before)
    assert 0 < drawn_before < 100, "the update fell into the reply"
    ids = [3, 4, 5, *reply.token_ids]
    # The last token that the old weights drew is the first that the new ones read.
    read_before = 3 + drawn_before - 1
    with torch.no_grad():
        old = policy(0)(torch.tensor([ids[:read_before]]), use_cache=True)
        cache = {cache_argument(policy(1)): old.past_key_values}
        kept = policy(1)(torch.tensor([ids[read_before:-1]]), **cache)
        first = torch.cat([old.logits[0, 2:], kept.logits[0]])
        whole = policy(1)(torch.tensor([ids[:-1]])).logits[0, 2:]
    stale, fresh = (log_probabilities(logits, reply.token_ids) for logits in (first, whole))
    given = torch.tensor(reply.logprobs)
    assert given[:drawn_before] == pytest.approx(stale[:drawn_before], abs=1e-3)
    after = {"keep": stale, "recompute": fresh}[mode][drawn_before:]
    assert given[drawn_before:] == pytest.approx(after, abs=1e-3)
    assert (stale - fresh)[drawn_before:].abs().max() > 1e-2, "the two ways part"


def log_probabilities(logits, tokens):
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


async def test_two_runs_do_not_take_each_other_s_weights_for_their_own(url, tmp_path):
    async with (
        opened(url, "disk", tmp_path / "one") as (one, first),
        opened(url, "disk", tmp_path / "two") as (
            other,
            second,
        ),
    ):
        await first.publish(backend_of(policy(1)), 1)
        await second.publish(backend_of(policy(2)), 1)
        assert set((await other.generate(request())).policy_versions) == {1}
        client = next(iter(one._servers)).client
        with pytest.raises(Exception, match="somebody else updates it"):
            await client.generate(request())
        await second.publish(backend_of(policy(0)), 2)


async def test_sleep_is_refused_where_vllm_has_no_accelerator(tmp_path):
    if torch.accelerator.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(LaunchError, match=r"[Ss]leep mode"):
        async with served(tmp_path, sleep_level=1):
            raise AssertionError("it started")
