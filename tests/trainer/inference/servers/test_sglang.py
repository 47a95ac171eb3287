"""What SGLang does otherwise than one would think, by its sources (0.5.23): the client meets each."""

import asyncio
from dataclasses import replace

import httpx
import pytest

from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.inference.base import GenerationRequest, SamplingParams
from rollgym.trainer.inference.errors import InferenceError
from rollgym.trainer.inference.server_client.client import ServerClient
from rollgym.trainer.inference.servers.sglang_server import TOKENS_KEPT_FREE
from rollgym.trainer.run.inference import RunServerClient
from tests.support.inference_server.running import InferenceServer
from tests.support.server_weights import Weights, request


@pytest.mark.parametrize("temperature", [0.2, 0.7, 1.0, 1.5, 100.0])
async def test_every_temperature_brings_its_own_log_probabilities(temperature):
    """Greedy requests alone in a batch have the model's whatever is asked for: a probe by such a request is misled."""
    with InferenceServer("sglang") as server:
        async with ServerClient(server.url, "sglang", way=None) as client:
            assert client.capabilities.logprobs_of == "temperature"
            result = await client.generate(request(temperature=temperature))
            drawn = server.log()["replies"][-1]
    assert result.logprobs == pytest.approx(drawn["processed_logprobs"])
    if temperature != 1.0:
        assert result.logprobs != pytest.approx(drawn["raw_logprobs"])


async def test_a_server_that_reports_the_models_log_probabilities_is_found():
    with InferenceServer("sglang", original_logprobs=True) as server:
        async with ServerClient(server.url, "sglang", way=None) as client:
            assert client.capabilities.logprobs_of == "model"
            await client.generate(request())
            with pytest.raises(
                ConfigError, match="start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB, or give"
            ):
                await client.generate(request(temperature=0.7))


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize(
    "sampling", [{"top_k": 3}, {"top_k": 4, "top_p": 0.6, "temperature": 0.5}, {"top_k": 1}]
)
@pytest.mark.parametrize("incremental", [False, True])
async def test_after_top_k_log_probabilities_are_those_of_what_was_left(original, sampling, incremental):
    with InferenceServer("sglang", original_logprobs=original, incremental=incremental) as server:
        async with ServerClient(server.url, "sglang", way=None) as client:
            told = []
            asked = replace(request(**sampling), on_tokens=told.extend)
            result = await client.generate(asked)
            drawn = server.log()["replies"][-1]
    assert result.token_ids == drawn["token_ids"]
    assert result.logprobs == pytest.approx(drawn["processed_logprobs"])
    assert told == (result.token_ids if incremental else [])


async def test_top_p_alone_is_refused_with_the_way_out():
    with InferenceServer("sglang") as server:
        async with ServerClient(server.url, "sglang", way=None) as client:
            with pytest.raises(ConfigError, match="give top_k a value of 1 to 4095 beside top_p"):
                await client.generate(request(top_p=0.9))


@pytest.mark.parametrize("prompt", [1, 40, 63])
async def test_a_row_may_fill_all_that_the_run_has(prompt):
    """The server refuses prompts near its context's end, and cuts replies before it."""
    longest = 64
    with InferenceServer("sglang", max_length=longest + TOKENS_KEPT_FREE) as server:
        async with ServerClient(server.url, "sglang", way=None) as client:
            assert client.capabilities.max_length == longest
            ids = [5] * prompt
            server.script([6] * (longest - prompt))
            result = await client.generate(GenerationRequest("r", ids, SamplingParams(longest - prompt), 1))
            assert len(result.token_ids) == longest - prompt
            assert len(await client.score([5] * longest)) == longest - 1
            with pytest.raises(ValueError, match="pass the longest row"):
                await client.generate(GenerationRequest("r", [5] * 64, SamplingParams(1), 1))


async def test_the_servers_own_limits_are_where_its_sources_have_them():
    with InferenceServer("sglang", max_length=64) as server, httpx.Client(base_url=server.url) as http:

        def asked(prompt, limit):
            body = {"input_ids": [5] * prompt, "sampling_params": {"max_new_tokens": limit, "temperature": 0}}
            return http.post("/generate", json=body)

        assert asked(58, 1).status_code == 400
        assert asked(57, 8).status_code == 400
        assert len(asked(57, 7).json()["output_ids"]) == 5
        assert len(asked(57, 5).json()["output_ids"]) == 5


async def test_a_run_of_longer_rows_is_told_the_switch():
    settings = RunSettings.model_validate(
        {
            "tasks": [{"env_id": "FrozenLake-v0"}],
            "model": {"max_length": 64},
            "rollout": {"max_new_tokens": 8},
            "inference": {"kind": "sglang", "urls": ["http://127.0.0.1:1"]},
        }
    )
    said = r"rows of up to 57 tokens.*start the server with --context-length 71"
    with InferenceServer("sglang", max_length=64) as server, pytest.raises(ConfigError, match=said):
        await RunServerClient(server.url, settings, None).connect()


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("sampling", [{}, {"top_k": 3}])
async def test_a_reply_that_was_put_back_and_aborted_is_read(incremental, sampling):
    """Its stream ends with an event of another kind: the last id again, and the log-probabilities of all."""
    with InferenceServer("sglang", incremental=incremental) as server:
        async with asyncio.timeout(30), ServerClient(server.url, "sglang", way=None) as client:
            server.steps(3)
            told = []
            asked = replace(request("put back", tokens=9, **sampling), on_tokens=told.extend)
            running = asyncio.create_task(client.generate(asked))
            await server.until(drawn=3)
            async with httpx.AsyncClient() as http:
                await http.post(f"{server.url}/pause_generation", json={"mode": "retract"})
            assert await client.abort(["put back"]) == 1
            result = await running
            drawn = server.log()["replies"][-1]
    assert result.finish_reason == "abort"
    # What top-k left is said by events of a stream alone then: other tokens are none of the reply.
    kept = 0 if sampling and not incremental else 3
    assert result.token_ids == drawn["token_ids"][:kept]
    assert result.logprobs == pytest.approx(drawn["processed_logprobs"][:kept])
    assert told == (drawn["token_ids"] if incremental else [])


async def test_an_update_that_aborts_what_was_put_back_loses_nothing(tmp_path):
    with InferenceServer("sglang", incremental=True) as server:
        async with asyncio.timeout(30), ServerClient(server.url, "sglang", way="disk") as client:
            server.steps(3)
            told = []
            running = asyncio.create_task(client.generate(replace(request(tokens=8), on_tokens=told.extend)))
            await server.until(drawn=3)
            async with httpx.AsyncClient() as http:
                await http.post(f"{server.url}/pause_generation", json={"mode": "retract"})
            server.steps(None)
            await client.sync(Weights(1, tmp_path), 1)
            result = await running
    assert told == result.token_ids
    assert result.policy_versions == [0] * 3 + [1] * 5


async def test_seeds_are_read_where_inference_is_deterministic():
    for deterministic in (True, False):
        with InferenceServer("sglang", deterministic=deterministic) as server:
            async with ServerClient(server.url, "sglang", way=None) as client:
                assert client.capabilities.reads_seeds is deterministic
                first, second = [await client.generate(request(tokens=20)) for _ in range(2)]
        assert (first.token_ids == second.token_ids) is deterministic


async def test_the_models_name_stays_when_its_weights_came_from_a_folder(tmp_path):
    with InferenceServer("sglang") as server:
        async with ServerClient(server.url, "sglang", way="disk") as client:
            await client.sync(Weights(1, tmp_path), 1)
            async with httpx.AsyncClient(base_url=server.url) as http:
                renamed = (await http.get("/model_info")).json()["served_model_name"]
            assert renamed == str(tmp_path / "weights")
            assert (await client.look()).model == "policy"


async def test_a_probe_that_is_refused_says_what_the_server_said():
    with InferenceServer("sglang") as server:
        server.fail({"kind": "answer", "path": "/generate", "status": 400, "count": -1})
        with pytest.raises(InferenceError, match="did not generate a token: 400, overloaded"):
            async with ServerClient(server.url, "sglang", way=None):
                pass
