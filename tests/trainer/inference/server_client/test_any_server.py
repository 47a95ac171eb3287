"""What must hold of every inference server, asked through the client alone.

It runs against the doubles, and against a real server whose URL a person gives:

    ROLLGYM_INFERENCE_URL=http://127.0.0.1:8000 ROLLGYM_INFERENCE_DIALECT=vllm \
        python -m pytest tests/trainer/inference/server_client/test_any_server.py -k given

ROLLGYM_INFERENCE_FOLDER names the folder of the model that it serves, as it stands on the server's disk: with it, the
updates from disk are tried. ROLLGYM_INFERENCE_API_KEY and ROLLGYM_INFERENCE_ADMIN_API_KEY are its keys.
"""

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollgym.trainer.inference.base import GenerationRequest, SamplingParams
from rollgym.trainer.inference.server_client.client import ServerClient
from tests.support.inference_server.models import HashModel
from tests.support.inference_server.running import InferenceServer

# Of a real server in float32 and bfloat16: its kernels for prompts and for single tokens differ.
TOLERANCE = float(os.environ.get("ROLLGYM_INFERENCE_TOLERANCE", "1e-3"))


@dataclass(frozen=True)
class Server:
    url: str
    dialect: str
    folder: Path | None
    keys: dict


@pytest.fixture(scope="module", params=["vllm", "sglang", "given"])
def server(request, tmp_path_factory):
    if request.param == "given":
        if "ROLLGYM_INFERENCE_URL" not in os.environ:
            pytest.skip("ROLLGYM_INFERENCE_URL names no server")
        folder = os.environ.get("ROLLGYM_INFERENCE_FOLDER")
        keys = {
            name: os.environ[f"ROLLGYM_INFERENCE_{name.upper()}"]
            for name in ("api_key", "admin_api_key")
            if f"ROLLGYM_INFERENCE_{name.upper()}" in os.environ
        }
        dialect = os.environ.get("ROLLGYM_INFERENCE_DIALECT", "vllm")
        yield Server(os.environ["ROLLGYM_INFERENCE_URL"], dialect, folder and Path(folder), keys)
        return
    folder = HashModel().write(tmp_path_factory.mktemp("model"))
    with InferenceServer(request.param, step_s=0.002) as double:
        yield Server(double.url, request.param, folder, {})


def client_of(server, version=0, **settings):
    way = "disk" if server.folder is not None else None
    return ServerClient(server.url, server.dialect, way=way, version=version, **server.keys, **settings)


@pytest.fixture
async def client(server):
    async with client_of(server) as connected:
        if connected._weights.distrusted is not None:
            # An earlier test has named the weights, which are still those of the folder.
            await connected.take_folder(str(server.folder), 0)
        yield connected


def wanted(name="r", tokens=12, seed=1, prompt=(3, 4, 5, 6), **sampling):
    return GenerationRequest(
        name, list(prompt), SamplingParams(tokens, **sampling), seed, session_key="episode"
    )


async def require_scored(client, request, result):
    """What was said of each token as it was drawn is what is said of it in a prompt."""
    scores = await client.score(request.prompt_ids + result.token_ids)
    assert result.logprobs == pytest.approx(scores[len(request.prompt_ids) - 1 :], abs=TOLERANCE)


async def test_sampled_tokens_have_the_log_probabilities_of_their_prompt(client):
    request = wanted()
    result = await client.generate(request)
    assert len(result.token_ids) == len(result.policy_versions) <= 12
    await require_scored(client, request, result)


async def test_the_most_likely_tokens_repeat(client):
    request = wanted(temperature=0.0)
    first, second = await client.generate(request), await client.generate(request)
    assert first.token_ids == second.token_ids
    await require_scored(client, request, first)


async def test_equal_seeds_draw_equal_tokens(client, server):
    if server.dialect == "sglang":
        pytest.skip("SGLang reads seeds with --enable-deterministic-inference alone")
    first, second = [await client.generate(wanted(seed=7)) for _ in range(2)]
    assert first.token_ids == second.token_ids
    others = [await client.generate(wanted(seed=seed)) for seed in range(20, 24)]
    assert any(other.token_ids != first.token_ids for other in others)


async def test_a_stop_token_ends_a_reply_and_is_part_of_it(client):
    drawn = (await client.generate(wanted(temperature=0.0))).token_ids
    stop = drawn[len(drawn) // 2]
    result = await client.generate(wanted(temperature=0.0, stop_token_ids=(stop,)))
    assert result.token_ids == drawn[: drawn.index(stop) + 1]
    assert result.finish_reason == "stop"


async def test_many_at_once_do_not_disturb_each_other(client):
    requests = [wanted(f"r{n}", seed=n, prompt=range(3, 5 + n)) for n in range(12)]
    results = await client.generate_together(requests)
    for request, result in zip(requests, results, strict=True):
        await require_scored(client, request, result)


def long_reply(client):
    # Long enough to be caught, and within the server's rows.
    return wanted(tokens=min(400, (client.capabilities.max_length or 2048) - 8))


async def test_a_pause_that_aborts_loses_nothing(client, server):
    if server.folder is None:
        pytest.skip("without a folder the server is not steered")
    request = long_reply(client)
    reply = asyncio.create_task(client.generate(request))
    await asyncio.sleep(0.3)
    await client.pause("abort")
    held = asyncio.create_task(client.generate(wanted("held")))
    await asyncio.sleep(0.1)
    assert not held.done()
    await client.resume()
    result = await reply
    assert (await held).token_ids
    await require_scored(client, request, result)


async def test_a_reply_is_aborted_with_what_it_has(client):
    request = long_reply(client)
    reply = asyncio.create_task(client.generate(request))
    await asyncio.sleep(0.3)
    ended = await client.abort([request.request_id])
    result = await reply
    assert (result.finish_reason == "abort") is (ended == 1)
    if client.capabilities.keeps_aborted and result.token_ids:
        await require_scored(client, request, result)


async def test_what_is_cancelled_leaves_the_server_free(client):
    replies = [asyncio.create_task(client.generate(long_reply(client))) for _ in range(4)]
    await asyncio.sleep(0.2)
    for reply in replies:
        reply.cancel()
    await asyncio.gather(*replies, return_exceptions=True)
    assert client.counters.running == 0
    assert (await client.generate(wanted())).token_ids
    assert (await client.health()).ready


@pytest.mark.parametrize("mode", ["wait", "abort", "keep", "recompute"])
async def test_an_update_from_disk_in_the_middle_of_a_reply(server, mode):
    if server.folder is None:
        pytest.skip("ROLLGYM_INFERENCE_FOLDER names no folder")
    async with client_of(server) as plain:
        if mode in ("keep", "recompute") and not plain.capabilities.spans:
            pytest.skip(f"{plain.capabilities.server} does not say which version drew which token")
    async with client_of(server, pause_mode=mode) as client:
        await client.take_folder(str(server.folder), 0)
        before = await client.score([3, 4, 5, 6])
        request = long_reply(client)
        reply = asyncio.create_task(client.generate(request))
        await asyncio.sleep(0.3)
        await client.take_folder(str(server.folder), 1)
        result = await reply
        assert client.version == 1
        assert set(result.policy_versions) <= {0, 1}
        assert result.policy_versions == sorted(result.policy_versions)
        # The weights are those of before.
        assert await client.score([3, 4, 5, 6]) == pytest.approx(before, abs=TOLERANCE)
        await require_scored(client, request, result)
        assert (await client.generate(wanted())).policy_versions[0] == 1
        await client.take_folder(str(server.folder), 0)
