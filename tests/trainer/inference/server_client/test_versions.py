"""Which weights drew which token, whatever updates come in between, and whose weights a server has."""

import asyncio

import pytest

from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.inference.errors import (
    ForeignWeightsError,
    ServerTooOldError,
    WeightsLostError,
)
from rollgym.trainer.inference.server_client.client import ServerClient
from tests.support.inference_server.models import END_ID
from tests.support.inference_server.running import InferenceServer, InferenceServerProcess
from tests.support.server_weights import BOTH, PROMPT, Weights, logprobs_of, request


@BOTH
async def test_a_reply_that_an_update_aborts_goes_on_from_its_tokens(dialect, tmp_path):
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect, pause_mode="abort") as client:
            # The probe has drawn tokens, too.
            before = server.state()["tokens"]
            server.steps(3)
            reply = asyncio.create_task(client.generate(request()))
            await server.until(tokens=before + 3)
            await client.sync(Weights(1, tmp_path), 1)
            server.steps(None)
            result = await reply
            first, second = server.log()["replies"][-2:]
    assert result.policy_versions == [0, 0, 0, 1, 1, 1]
    assert result.token_ids == first["token_ids"] + second["token_ids"]
    assert result.logprobs[:3] == pytest.approx(logprobs_of(0, result.token_ids)[:3])
    assert result.logprobs[3:] == pytest.approx(logprobs_of(1, result.token_ids)[3:])
    assert second["prompt_ids"] == PROMPT + first["token_ids"]
    assert first["finish"] == "abort"
    assert first["seed"] != second["seed"]
    assert first["salt"] != second["salt"]
    assert client.version == 1
    assert client.counters.resubmitted == 1


@BOTH
@pytest.mark.parametrize("mode", ["keep", "recompute"])
async def test_a_reply_that_is_frozen_says_which_version_drew_which_token(dialect, mode, tmp_path):
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect, pause_mode=mode) as client:
            before = server.state()["tokens"]
            server.steps(3)
            reply = asyncio.create_task(client.generate(request()))
            await server.until(tokens=before + 3)
            await client.sync(Weights(1, tmp_path), 1)
            server.steps(None)
            result = await reply
            assert len(server.log()["replies"][-1]["token_ids"]) == 6
            later = await client.generate(request("later"))
    assert result.policy_versions == [0, 0, 0, 1, 1, 1]
    fresh = logprobs_of(1, result.token_ids)[3:]
    assert (result.logprobs[3:] == pytest.approx(fresh)) is (mode == "recompute")
    # Nobody else reads what was cached before.
    assert later.logprobs == pytest.approx(logprobs_of(1, later.token_ids))
    assert client.counters.resubmitted == 0


@BOTH
async def test_waiting_lets_replies_end_with_their_version(dialect, tmp_path):
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect, pause_mode="wait") as client:
            before = server.state()["tokens"]
            server.steps(3)
            reply = asyncio.create_task(client.generate(request()))
            await server.until(tokens=before + 3)
            syncing = asyncio.create_task(client.sync(Weights(1, tmp_path), 1))
            await asyncio.sleep(0)
            held = asyncio.create_task(client.generate(request("held")))
            server.steps(None)
            await syncing
            result, after = await reply, await held
    assert result.policy_versions == [0] * 6
    assert after.policy_versions == [1] * 6
    assert after.logprobs == pytest.approx(logprobs_of(1, after.token_ids))


@pytest.mark.parametrize("release", ["0.24.0", "0.28.0", "0.31.0", "0.32.0+cpu"])
async def test_releases_without_versions_per_token_are_stamped_by_the_client(release, tmp_path):
    with InferenceServer("vllm", release) as server:
        with pytest.raises(ServerTooOldError, match=r"0\.33"):
            await ServerClient(server.url, "vllm", pause_mode="recompute").connect()
        async with ServerClient(server.url, "vllm", pause_mode="abort") as client:
            before = server.state()["tokens"]
            server.steps(3)
            reply = asyncio.create_task(client.generate(request()))
            await server.until(tokens=before + 3)
            await client.sync(Weights(1, tmp_path), 1)
            server.steps(None)
            result = await reply
            with pytest.raises(ConfigError, match="pause with"):
                await client.pause("keep")
    assert result.policy_versions == [0, 0, 0, 1, 1, 1]
    assert result.logprobs[3:] == pytest.approx(logprobs_of(1, result.token_ids)[3:])


@BOTH
async def test_many_updates_lose_and_repeat_no_token(dialect, tmp_path):
    with InferenceServer(dialect, step_s=0.002) as server:
        async with ServerClient(server.url, dialect) as client:
            replies = [
                asyncio.create_task(client.generate(request(f"r{n}", tokens=40, seed=n))) for n in range(8)
            ]
            for version in range(1, 6):
                await asyncio.sleep(0.01)
                await client.sync(Weights(version, tmp_path), version)
            results = await asyncio.gather(*replies)
    for result in results:
        # SGLang cannot be told to ignore the model's own end.
        assert len(result.token_ids) == 40 or result.token_ids[-1] == END_ID
        assert result.policy_versions == sorted(result.policy_versions)
        for version in set(result.policy_versions):
            expected = logprobs_of(version, result.token_ids)
            for place, drawn_by in enumerate(result.policy_versions):
                if drawn_by == version:
                    assert result.logprobs[place] == pytest.approx(expected[place])


@pytest.mark.parametrize("release", ["0.32.0", "0.33.0"])
async def test_weights_that_somebody_else_sent_are_noticed(release, tmp_path):
    with InferenceServer("vllm", release) as server:
        async with ServerClient(server.url, "vllm") as client:
            await client.sync(Weights(1, tmp_path), 1)
            server.weights(forget_version=True)
            with pytest.raises(WeightsLostError, match="default"):
                await client.generate(request())
        async with ServerClient(server.url, "vllm", version=5) as client:
            assert (await client.generate(request())).policy_versions == [5] * 6
            await client.sync(Weights(6, tmp_path), 6)
        async with ServerClient(server.url, "vllm", version=5) as client:
            with pytest.raises(WeightsLostError, match="-6'"):
                await client.generate(request())
            await client.sync(Weights(5, tmp_path), 5)
            assert (await client.generate(request())).policy_versions == [5] * 6


@BOTH
async def test_what_a_server_started_with_is_not_what_it_was_sent_under_the_same_number(dialect, tmp_path):
    with InferenceServerProcess(dialect) as server:
        async with ServerClient(server.url, dialect, patience_s=30) as client:
            await client.sync(Weights(1, tmp_path), 0)
            server.kill()
            waiting = asyncio.create_task(client.generate(request()))
            await asyncio.to_thread(server.start)
            with pytest.raises(WeightsLostError, match="'default'"):
                await waiting


@pytest.mark.parametrize(
    ("dialect", "release"), [("vllm", "0.32.0"), ("vllm", "0.33.0"), ("sglang", "0.5.23")]
)
async def test_two_runs_do_not_take_each_other_s_weights_for_their_own(dialect, release, tmp_path):
    """Their versions have the same numbers."""
    with InferenceServer(dialect, release) as server:
        async with ServerClient(server.url, dialect) as one, ServerClient(server.url, dialect) as other:
            await one.sync(Weights(1, tmp_path / "one"), 3)
            assert (await one.generate(request())).policy_versions == [3] * 6
            await other.sync(Weights(2, tmp_path / "other"), 3)
            with pytest.raises(ForeignWeightsError, match="another run"):
                await one.generate(request())
            result = await other.generate(request())
            assert result.logprobs == pytest.approx(logprobs_of(2, result.token_ids))


async def test_a_release_that_names_no_weights_is_asked_again_after_it_was_away(tmp_path):
    with InferenceServerProcess("vllm", "--release", "0.24.0") as server:
        async with ServerClient(server.url, "vllm") as client:
            await client.sync(Weights(1, tmp_path), 1)
            server.kill()
            assert not (await client.health()).ready
            await asyncio.to_thread(server.start)
            with pytest.raises(WeightsLostError, match="was away"):
                await client.generate(request())


async def test_without_dev_mode_fixed_weights_are_sampled():
    with InferenceServer("vllm", dev_mode=False) as server:
        async with ServerClient(server.url, "vllm", way=None) as client:
            assert len((await client.generate(request())).token_ids) == 6
            with pytest.raises(ConfigError, match="not told"):
                await client.sync(Weights(1), 1)
    with pytest.raises(ConfigError, match="adapter"):
        ServerClient("http://localhost", "vllm", way="adapter", pause_mode="keep")
