"""A run of another model than a server's touches nothing there, and a pause of somebody else's stays."""

import asyncio
import json

import httpx
import pytest
from transformers import CONFIG_MAPPING, LlamaConfig

from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.inference.errors import ServerGoneError, ServerSetupError, WeightUpdateError
from rollgym.trainer.inference.server_client.client import ServerClient
from rollgym.trainer.inference.servers.dialect import check_same_model, config_in, shape_of
from rollgym.trainer.models.tiny import TinyPolicySettings, build_tiny_model
from rollgym.trainer.run.inference import RunServerClient
from tests.support.inference_server.models import VOCABULARY
from tests.support.inference_server.running import InferenceServer
from tests.support.server_weights import BOTH, Weights, request


def settings_of(dialect):
    return RunSettings.model_validate(
        {
            "tasks": [{"env_id": "FrozenLake-v0"}],
            "model": {"max_length": 64},
            "rollout": {"max_new_tokens": 8},
            "inference": {"kind": dialect, "urls": ["http://127.0.0.1:1"]},
        }
    )


def model_of():
    return build_tiny_model(TinyPolicySettings(259, hidden_size=32, layers=1, heads=2, max_length=64), 1)


def written(model, folder):
    model.save_pretrained(folder)
    return folder


@BOTH
async def test_another_model_is_refused_before_anything_is_sent(dialect, tmp_path):
    served = written(model_of(), tmp_path / "served")
    policy = model_of().config
    policy.hidden_size, policy.num_hidden_layers = 48, 3
    with InferenceServer(dialect, model=served) as server:
        before = server.state()
        with pytest.raises(
            ConfigError, match=r"serves another model, .*hidden_size 32, where the policy has 48"
        ):
            await RunServerClient(server.url, settings_of(dialect), None, policy).connect()
        after = server.state()
        assert after == before
        assert after["paused"] is None


async def test_of_a_server_elsewhere_is_compared_what_it_says(tmp_path):
    """Its folder is not on this machine: SGLang says of which kind its model is, and vLLM does not."""
    served = written(model_of(), tmp_path / "served")
    own = model_of().config
    policy = LlamaConfig(vocab_size=own.vocab_size, hidden_size=own.hidden_size)
    for dialect in ("vllm", "sglang"):
        with InferenceServer(dialect, model=served) as server:
            (served / "config.json").rename(served / "hidden.json")
            client = RunServerClient(server.url, settings_of(dialect), None, policy)
            if dialect == "vllm":
                assert (await client.connect()).tried
            else:
                with pytest.raises(ConfigError, match="model_type 'qwen3', where the policy has 'llama'"):
                    await client.connect()
            await client.close()
            (served / "hidden.json").rename(served / "config.json")


@BOTH
async def test_the_runs_own_model_is_taken(dialect, tmp_path):
    model = model_of()
    with InferenceServer(dialect, model=written(model, tmp_path / "served")) as server:
        client = RunServerClient(server.url, settings_of(dialect), None, model.config)
        assert (await client.connect()).tried
        await client.close()


@BOTH
async def test_a_smaller_vocabulary_is_found_by_the_policys_last_token(dialect):
    with InferenceServer(dialect) as server:
        with pytest.raises(
            ServerSetupError, match=f"the policy's last token, {VOCABULARY}: does it serve another"
        ):
            async with ServerClient(server.url, dialect, vocabulary=VOCABULARY + 1):
                pass
        async with ServerClient(server.url, dialect, vocabulary=VOCABULARY):
            pass
        assert server.state()["version"] == "default"


@BOTH
async def test_a_pause_of_somebody_else_stays_until_weights_come(dialect, tmp_path):
    """Another run's update may be in its middle, or have left an engine that dies of its next token."""
    pause, resume = {
        "vllm": ("/pause?mode=keep", "/resume"),
        "sglang": ("/pause_generation", "/continue_generation"),
    }[dialect]
    with InferenceServer(dialect) as server:
        async with httpx.AsyncClient(base_url=server.url) as other:
            await other.post(pause, json={"mode": "in_place"})
            async with asyncio.timeout(30), ServerClient(server.url, dialect, way="disk") as client:
                assert not client.capabilities.tried
                assert server.state()["paused"] is not None
                assert server.state()["steps"] == 0
                await client.sync(Weights(1, tmp_path), 1)
                assert client.capabilities.tried
                assert (await client.generate(request())).policy_versions == [1] * 6
                assert server.state()["paused"] is None
            # And one that goes on without its update is asked then.
            await other.post(pause, json={"mode": "in_place"})
            client = ServerClient(server.url, dialect, way="disk")
            await client.connect()
            await client.close()
            assert server.state()["paused"] is not None
            await other.post(resume, json={})


async def test_a_wrong_setup_of_a_paused_server_is_found_with_its_first_weights(tmp_path):
    with InferenceServer("sglang", original_logprobs=True) as server:
        async with httpx.AsyncClient(base_url=server.url) as other:
            await other.post("/pause_generation", json={"mode": "in_place"})
        async with asyncio.timeout(30), ServerClient(server.url, "sglang", way="disk") as client:
            client.check_sampling(request(temperature=0.7).sampling)  # nobody knows yet
            await client.sync(Weights(1, tmp_path), 1)
            with pytest.raises(ConfigError, match="SGLANG_RETURN_ORIGINAL_LOGPROB"):
                await client.generate(request(temperature=0.7))


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ('{\n  "hidden_size": 3\n}\n', {"hidden_size": 3}),
        ("{hidden_size: 3}", {}),
        ("[" * 100_000, {}),
        ('{"a":' * 100_000, {}),
        ('["a"]', {}),
        ("", {}),
    ],
)
def test_a_configuration_is_read_from_whatever_a_file_holds(text, read):
    assert config_in(text) == read


def test_models_of_several_parts_are_compared_by_their_text_model():
    text = {"model_type": "text of vl", "hidden_size": 64, "vocab_size": 10}
    policy = {"model_type": "vl", "text_config": text}
    assert shape_of(policy) == {"model_type": "vl", "hidden_size": 64, "vocab_size": 10}
    check_same_model(policy, json.loads(json.dumps(policy)), "http://a", "m")
    check_same_model(policy, {}, "http://a", "m")
    check_same_model(policy, {"hidden_size": True, "vocab_size": None}, "http://a", "m")
    with pytest.raises(ConfigError, match=r"hidden_size 65, where the policy has 64.*nothing was sent to it"):
        check_same_model(policy, {"text_config": {"hidden_size": 65}}, "http://a", "m")


_PAUSES = {"vllm": "/pause?mode=keep", "sglang": "/pause_generation"}


@BOTH
@pytest.mark.parametrize("mode", ["abort", "wait"])
async def test_an_adapter_ends_the_pause_that_a_server_was_met_in(dialect, mode, tmp_path):
    with InferenceServer(dialect) as server:
        async with httpx.AsyncClient(base_url=server.url) as other:
            await other.post(_PAUSES[dialect], json={"mode": "in_place"})
        async with (
            asyncio.timeout(30),
            ServerClient(server.url, dialect, way="adapter", pause_mode=mode) as client,
        ):
            assert not client.capabilities.tried
            for version, pauses in ((1, False), (2, True)):
                if pauses:
                    await client.pause("abort")
                    await client.connect()
                await client.sync(Weights(version, tmp_path), version)
                assert client.capabilities.tried
                assert (await client.generate(request())).policy_versions == [version] * 6
            assert server.state()["paused"] is None


_ADAPTERS = {"vllm": "/v1/load_lora_adapter", "sglang": "/load_lora_adapter"}


@BOTH
@pytest.mark.parametrize("mode", ["abort", "wait"])
async def test_an_adapter_that_is_not_taken_leaves_a_server_in_the_pause_that_it_was_met_in(
    dialect, mode, tmp_path
):
    with InferenceServer(dialect) as server:
        async with httpx.AsyncClient(base_url=server.url) as other:
            await other.post(_PAUSES[dialect], json={"mode": "in_place"})
        found = server.state()["paused"]
        assert found is not None
        async with asyncio.timeout(30):
            async with ServerClient(server.url, dialect, way="adapter", pause_mode=mode) as client:
                server.fail({"kind": "answer", "path": _ADAPTERS[dialect], "status": 400})
                with pytest.raises(WeightUpdateError, match="adapter of version 1"):
                    await client.sync(Weights(1, tmp_path), 1)
                assert server.state()["paused"] == found
            assert server.state()["paused"] == found
            async with ServerClient(server.url, dialect, way="adapter", pause_mode=mode) as client:
                await client.sync(Weights(1, tmp_path), 1)
                assert server.state()["paused"] is None


@BOTH
async def test_weights_that_are_not_taken_leave_a_server_in_the_pause_that_it_was_met_in(dialect, tmp_path):
    with InferenceServer(dialect) as server:
        async with httpx.AsyncClient(base_url=server.url) as other:
            await other.post(_PAUSES[dialect], json={"mode": "in_place"})
        server.weights(fail=True)
        async with asyncio.timeout(30):
            async with ServerClient(server.url, dialect, way="disk") as client:
                with pytest.raises(WeightUpdateError):
                    await client.sync(Weights(1, tmp_path), 1)
            assert server.state()["paused"] is not None


async def test_a_request_that_came_in_that_pause_is_looked_at_when_the_server_can_be(tmp_path):
    with InferenceServer("sglang", original_logprobs=True) as server:
        async with httpx.AsyncClient(base_url=server.url) as other:
            await other.post("/pause_generation", json={"mode": "in_place"})
            for goes_on in ("somebody", "weights"):
                async with asyncio.timeout(30), ServerClient(server.url, "sglang", way="disk") as client:
                    early = asyncio.create_task(client.generate(request(temperature=0.7)))
                    plain = asyncio.create_task(client.generate(request()))
                    while client.counters.running < 2:
                        await asyncio.sleep(0)
                    if goes_on == "weights":
                        await client.sync(Weights(1, tmp_path), 1)
                    else:
                        await other.post("/continue_generation", json={})
                    with pytest.raises(ConfigError, match="SGLANG_RETURN_ORIGINAL_LOGPROB"):
                        await early
                    assert len((await plain).token_ids) == 6
                await other.post("/pause_generation", json={"mode": "in_place"})


@BOTH
async def test_whoever_asks_that_a_server_goes_on_ends_the_pause_that_it_was_met_in(dialect):
    with InferenceServer(dialect) as server:
        async with httpx.AsyncClient(base_url=server.url) as other:
            await other.post(_PAUSES[dialect], json={"mode": "in_place"})
        async with asyncio.timeout(30), ServerClient(server.url, dialect, way="disk") as client:
            await client.resume()
            assert client.capabilities.tried
            assert (await client.generate(request())).policy_versions == [0] * 6


@BOTH
async def test_a_paused_server_that_is_sent_no_weights_is_an_error(dialect):
    with InferenceServer(dialect) as server:
        async with httpx.AsyncClient(base_url=server.url) as other:
            await other.post(_PAUSES[dialect], json={"mode": "in_place"})
        async with asyncio.timeout(30):
            with pytest.raises((ServerGoneError, ServerSetupError)):
                async with ServerClient(server.url, dialect, way=None, patience_s=1):
                    pass


@pytest.mark.parametrize("family", ["llama4", "qwen3_5", "qwen3_5_moe", "mllama", "emu3"])
def test_the_text_model_of_a_family_with_pictures_is_the_servers(family):
    """transformers loads it alone, as a causal language model with a type of its own."""
    whole = CONFIG_MAPPING[family]()
    text = whole.get_text_config()
    assert text.model_type != whole.model_type
    for served in (whole.to_dict(), {"model_type": whole.model_type}):
        check_same_model(text.to_dict(), served, "http://server", "it")
    other = text.to_dict() | {"hidden_size": text.hidden_size + 1}
    with pytest.raises(ConfigError, match="hidden_size"):
        check_same_model(other, whole.to_dict(), "http://server", "it")
