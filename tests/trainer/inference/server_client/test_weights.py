"""Weights and adapters on their way to one server: broadcast, refused, wrong, left behind, and the pauses for them."""

import asyncio

import pytest
import torch
from safetensors.numpy import save_file

from rollgym.trainer.inference.errors import (
    RequestRefusedError,
    WeightsError,
    WeightsLostError,
    WeightUpdateError,
)
from rollgym.trainer.inference.server_client.client import ServerClient
from tests.support.inference_server.carrier import GlooCarrier
from tests.support.inference_server.models import HashModel
from tests.support.inference_server.running import InferenceServer
from tests.support.server_weights import BOTH, PROMPT, Weights, logprobs_of, request


@BOTH
@pytest.mark.parametrize("packed", [True, False])
async def test_weights_are_broadcast_in_buckets(dialect, packed):
    carrier = GlooCarrier(dialect, packed=packed)
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect, way="broadcast", carrier=carrier) as client:
            for version in (1, 2):
                await client.sync(Weights(version), version)
                result = await client.generate(request())
                assert result.policy_versions == [version] * 6
                assert result.logprobs == pytest.approx(logprobs_of(version, result.token_ids))
            assert carrier.joined == 1
            assert server.state()["session"] is False


@pytest.mark.parametrize("release", ["0.5.20", "0.5.23"])
async def test_sglang_has_sessions_where_its_release_has_them(release):
    with InferenceServer("sglang", release) as server:
        carrier = GlooCarrier("sglang")
        async with ServerClient(server.url, "sglang", way="broadcast", carrier=carrier) as client:
            assert client.capabilities.sessions is (release == "0.5.23")
            await client.sync(Weights(1), 1)
            result = await client.generate(request())
            assert result.logprobs == pytest.approx(logprobs_of(1, result.token_ids))


@BOTH
async def test_several_servers_share_one_broadcast(dialect):
    carrier = GlooCarrier(dialect, per_bucket=3)
    with InferenceServer(dialect) as one, InferenceServer(dialect) as two:
        async with (
            ServerClient(one.url, dialect, way="broadcast") as first,
            ServerClient(two.url, dialect, way="broadcast") as second,
        ):
            clients = [first, second]
            address = carrier.address(2)
            from dataclasses import replace

            joining = [
                client.join_group(replace(address, rank_offset=1 + place))
                for place, client in enumerate(clients)
            ]
            await asyncio.gather(carrier.join(), *joining)
            async with first.updating(4), second.updating(4):
                for bucket in carrier.buckets(Weights(4)):
                    await asyncio.gather(
                        carrier.send(bucket), *[client.announce(bucket) for client in clients]
                    )
            for client in clients:
                assert client.version == 4
                assert await client.score(PROMPT) == pytest.approx(logprobs_of(4, [], start=1))


@BOTH
@pytest.mark.parametrize("way", ["disk", "broadcast"])
async def test_after_a_failed_update_nothing_is_sampled_until_one_succeeds(dialect, way, tmp_path):
    carrier = GlooCarrier(dialect)
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect, way=way, carrier=carrier, pause_mode="keep") as client:
            before = server.state()["tokens"]
            server.steps(2)
            reply = asyncio.create_task(client.generate(request(tokens=40)))
            await server.until(tokens=before + 2)
            server.weights(fail=True)
            with pytest.raises(WeightUpdateError, match="version 1"):
                await client.sync(Weights(1, tmp_path), 1)
            with pytest.raises(WeightUpdateError):
                await reply
            with pytest.raises(WeightUpdateError):
                await client.generate(request())
            assert not (await client.health()).ready
            assert client.version == 0
            server.steps(None)
            await client.sync(Weights(2, tmp_path), 2)
            result = await client.generate(request())
            assert result.logprobs == pytest.approx(logprobs_of(2, result.token_ids))
            assert result.policy_versions == [2] * 6
            assert (await client.health()).ready


async def test_wrong_weights_with_a_good_status_show_in_the_score(tmp_path):
    with InferenceServer("vllm") as server:
        async with ServerClient(server.url, "vllm") as client:
            server.weights(wrong=True)
            await client.sync(Weights(1, tmp_path), 1)
            assert await client.score(PROMPT) != pytest.approx(logprobs_of(1, [], start=1))
            await client.sync(Weights(1, tmp_path), 1)
            assert await client.score(PROMPT) == pytest.approx(logprobs_of(1, [], start=1))


@BOTH
async def test_adapters_have_a_new_name_for_each_version(dialect, tmp_path):
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect, way="adapter", pause_mode="wait") as client:
            base = await client.generate(request())
            before = server.state()["tokens"]
            await client.sync(Weights(1, tmp_path), 1)
            server.steps(3)
            old = asyncio.create_task(client.generate(request()))
            await server.until(tokens=before + 3)
            await client.sync(Weights(2, tmp_path), 2)
            server.steps(None)
            result, new = await old, await client.generate(request())
            names = [reply["model"] for reply in server.log()["replies"]]
            await asyncio.gather(*client._link._left)
            assert server.models() == {"policy", names[-1]}
        assert server.models() == {"policy"}, "a run takes its adapters with it"
    folders = [str(tmp_path / f"adapter-{seed}") for seed in (1, 2)]
    for reply, folder, version in ((result, folders[0], 1), (new, folders[1], 2)):
        rows = HashModel().prompt_logprobs(PROMPT + reply.token_ids, folder)
        expected = [float(row[token]) for row, token in zip(rows[4:], reply.token_ids, strict=False)]
        assert reply.logprobs == pytest.approx(expected)
        assert reply.policy_versions == [version] * 6
    assert base.policy_versions == [0] * 6
    assert len({*names[-2:]}) == 2


@BOTH
async def test_an_adapter_whose_loading_was_left_is_unloaded_with_the_next(dialect, tmp_path, monkeypatch):
    """The server may have loaded it all the same, and holds a few at most."""
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect, way="adapter", pause_mode="wait") as client:
            converse, loaded = client._link.converse, asyncio.Event()

            async def unheard(conversation):
                await converse(conversation)
                loaded.set()
                await asyncio.Event().wait()

            monkeypatch.setattr(client._link, "converse", unheard)
            loading = asyncio.create_task(client.sync(Weights(1, tmp_path), 1))
            await loaded.wait()
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            monkeypatch.undo()
            assert len(server.models()) == 2
            await client.sync(Weights(2, tmp_path), 2)
            await asyncio.gather(*client._link._left)
            assert len(server.models()) == 2, "the base and the new one"


@BOTH
async def test_an_adapter_that_is_gone_is_missed(dialect, tmp_path):
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect, way="adapter", pause_mode="abort") as client:
            await client.sync(Weights(1, tmp_path), 1)
            await client._link.converse(client._link.dialect.unload_adapter(client._adapters.current))
            with pytest.raises(WeightsLostError, match="adapter of version 1"):
                await client.generate(request())
            assert not (await client.health()).ready
            await client.sync(Weights(2, tmp_path), 2)
            assert (await client.generate(request())).policy_versions == [2] * 6
            path = "/v1/load_lora" if dialect == "vllm" else "/load_lora"
            server.fail({"kind": "answer", "path": path, "status": 400})
            with pytest.raises(WeightUpdateError, match="version 3"):
                await client.sync(Weights(3, tmp_path), 3)
            # The old one is as good as it was.
            assert (await client.generate(request())).policy_versions == [2] * 6


@BOTH
async def test_a_server_that_does_not_go_on_holds_nobody(dialect, tmp_path):
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect) as client:
            path = "/resume" if dialect == "vllm" else "/continue_generation"
            server.fail({"kind": "answer", "path": path, "status": 400})
            syncing = asyncio.create_task(client.sync(Weights(1, tmp_path), 1))
            await asyncio.sleep(0)
            held = asyncio.create_task(client.generate(request()))
            with pytest.raises(RequestRefusedError):
                await syncing
            with pytest.raises(WeightUpdateError, match="did not go on"):
                await held
            await client.sync(Weights(2, tmp_path), 2)
            assert (await client.generate(request())).policy_versions == [2] * 6


@BOTH
async def test_what_broke_off_is_taken_back_before_the_next_pause(dialect, tmp_path):
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect) as client:
            path = "/pause" if dialect == "vllm" else "/pause_generation"
            server.fail({"kind": "late", "path": path, "seconds": 0.2})
            syncing = asyncio.create_task(client.sync(Weights(1, tmp_path), 1))
            await asyncio.sleep(0.1)
            syncing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await syncing
            await client.pause("abort")
            assert server.state()["paused"] == "abort"
            await client.resume()
            assert (await client.generate(request())).policy_versions == [0] * 6


@BOTH
async def test_memory_is_given_back_and_taken_again(dialect, tmp_path):
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect) as client:
            await client.sleep(keep_weights=True)
            assert server.state()["asleep"]
            reply = asyncio.create_task(client.generate(request()))
            await client.wake()
            assert len((await reply).token_ids) == 6
            await client.sleep(keep_weights=False)
            await client.wake(["weights"])
            with pytest.raises(WeightsError, match="send them"):
                await client.wake(["kv_cache"])
            await client.sync(Weights(1, tmp_path), 1)
            await client.wake(["kv_cache"])
            result = await client.generate(request())
            assert result.logprobs == pytest.approx(logprobs_of(1, result.token_ids))


@BOTH
async def test_a_server_that_was_paused_when_it_was_lost_goes_on_when_it_is_met_again(dialect, tmp_path):
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect) as client:
            await client.pause("abort")
            await client.connect()
            await client.sync(Weights(1, tmp_path), 1)
            async with asyncio.timeout(20):
                assert (await client.generate(request())).policy_versions == [1] * 6


@BOTH
async def test_a_server_that_is_met_while_it_is_told_to_pause_goes_on_all_the_same(dialect, tmp_path):
    """Whoever had asked for the pause ends it, and would find nothing to end."""
    with InferenceServer(dialect) as server:
        async with asyncio.timeout(30), ServerClient(server.url, dialect) as client:
            path = "/pause" if dialect == "vllm" else "/pause_generation"
            server.fail({"kind": "late", "path": path, "seconds": 0.5})
            pausing = asyncio.create_task(client.pause("abort"))
            await asyncio.sleep(0.1)
            await client.connect()
            await pausing
            await client.resume()
            assert not server.state()["paused"]
            await client.sync(Weights(1, tmp_path), 1)
            assert (await client.generate(request())).policy_versions == [1] * 6


@BOTH
async def test_what_a_dead_trainer_left_behind_is_cleared(dialect, tmp_path):
    with InferenceServer(dialect) as server:
        first = ServerClient(server.url, dialect, way="broadcast", carrier=GlooCarrier(dialect))
        await first.connect()
        await first.sync(Weights(1), 1)
        await first._link.converse(first._link.dialect.pause("keep"))
        await first._link.converse(first._link.dialect.begin_update())
        assert server.state()["session"]
        await first._link.close()
        carrier = GlooCarrier(dialect)
        async with ServerClient(server.url, dialect, way="broadcast", carrier=carrier) as client:
            await client.sync(Weights(2), 2)
            result = await client.generate(request())
            assert result.logprobs == pytest.approx(logprobs_of(2, result.token_ids))


@BOTH
async def test_a_server_of_another_model_is_named_by_the_first_update_that_it_refuses(dialect, tmp_path):
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect) as client:
            folder = tmp_path / "other"
            folder.mkdir()
            save_file({"nothing": torch.zeros(1).numpy()}, folder / "model.safetensors")
            with pytest.raises(WeightUpdateError, match=r"started from the run's model\? It serves 'policy'"):
                await client.take_folder(str(folder), 1)
            await client.sync(Weights(1, tmp_path), 1)
            with pytest.raises(WeightUpdateError) as caught:
                await client.take_folder(str(folder), 2)
            assert "started from" not in str(caught.value)
