"""The client of one inference server against the double of each, which says what it drew and with which weights."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.inference import server_http
from rollgym.trainer.inference.base import GenerationRequest, SamplingParams
from rollgym.trainer.inference.errors import (
    ForeignWeightsError,
    MalformedReplyError,
    RepeatedAbortError,
    RequestRefusedError,
    ServerGoneError,
    ServerSetupError,
    ServerTooOldError,
    WeightsError,
    WeightsLostError,
    WeightUpdateError,
)
from rollgym.trainer.inference.partial_reply import PartialReply
from rollgym.trainer.inference.server_client import ServerClient
from rollgym.trainer.inference.under_way import OngoingReply, UnderWay
from rollgym.trainer.records.images import Picture, PlacedImage
from tests.support.inference_server.carrier import GlooCarrier
from tests.support.inference_server.models import END_ID, HashModel
from tests.support.inference_server.running import InferenceServer, InferenceServerProcess

PROMPT = [72, 101, 108, 108, 111]
PAGE = "\n<!doctype html><html><body>default backend</body></html>"
BOTH = pytest.mark.parametrize("dialect", ["vllm", "sglang"])


def request(name="r", tokens=6, seed=1, **sampling):
    return GenerationRequest(name, PROMPT, SamplingParams(tokens, **sampling), seed, session_key="episode 7")


def logprobs_of(seed, ids, start=5):
    """What the model of a seed says of ids, with nothing kept from before."""
    rows = HashModel(seed).prompt_logprobs(PROMPT + ids)
    return [float(row[token]) for row, token in zip(rows[start - 1 :], (PROMPT + ids)[start:], strict=False)]


class Weights:
    """The hash model of a seed, in each of the forms that a server may take it in."""

    def __init__(self, seed, folder=None):
        self._model = HashModel(seed)
        self._folder = folder

    def tensors(self):
        for name, array in self._model.weights.items():
            yield name, torch.from_numpy(array.copy())

    async def folder(self):
        return self._model.write(self._folder / "weights")

    async def adapter_folder(self):
        folder = self._folder / f"adapter-{self._model.seed}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text("{}")
        save_file(self._model.weights, folder / "adapter_model.safetensors")
        return folder


async def interrupted_by_an_update(server, client, weights, version=1, tokens=6, before=3):
    """A reply that takes new weights after its first tokens."""
    server.steps(before)
    reply = asyncio.create_task(client.generate(request(tokens=tokens)))
    await server.until(tokens=before)
    server.steps(0)
    syncing = asyncio.create_task(client.sync(weights, version))
    if client._link.need.mode == "wait":
        await server.until(drawn=before)
    server.steps(None)
    await syncing
    return await reply


# What comes back


@BOTH
async def test_a_reply_is_what_the_engine_drew(dialect):
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect) as client:
            result = await client.generate(request())
            drawn = server.log()["replies"][-1]
            assert result.token_ids == drawn["token_ids"]
            assert result.logprobs == pytest.approx(drawn["raw_logprobs"])
            assert result.logprobs == pytest.approx(logprobs_of(0, result.token_ids))
            assert result.policy_versions == [0] * 6
            assert result.finish_reason == "length"
            assert "episode" in drawn["session"]
            assert drawn["prompt_ids"] == PROMPT
            stop = result.token_ids[2]
            stopped = await client.generate(request(stop_token_ids=(stop,)))
            assert stopped.token_ids == result.token_ids[: result.token_ids.index(stop) + 1]
            assert stopped.finish_reason == "stop"
            counters = client.counters
            assert (counters.requests, counters.prompt_tokens, counters.running) == (2, 10, 0)
            assert counters.tokens_generated == 6 + len(stopped.token_ids)


@BOTH
async def test_replies_of_a_batch_come_in_order(dialect):
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect) as client:
            together = await client.generate_together([request(f"r{n}", seed=n) for n in range(5)])
            alone = [await client.generate(request(seed=n)) for n in range(5)]
            assert [each.token_ids for each in together] == [each.token_ids for each in alone]
            with pytest.raises(ValueError, match="empty"):
                await client.generate_together([request(), GenerationRequest("e", [], SamplingParams(3), 0)])


async def test_without_scale_out_the_completions_route_brings_the_same():
    results = []
    for scale_out in (True, False):
        with InferenceServer("vllm", scale_out=scale_out) as server:
            async with ServerClient(server.url, "vllm") as client:
                assert client.capabilities.tokens_route is scale_out
                results.append(await client.generate(request()))
                assert await client.score(PROMPT) == pytest.approx(logprobs_of(0, [], start=1))
    assert results[0] == results[1]


@BOTH
async def test_a_prompt_is_scored(dialect):
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect) as client:
            assert await client.score(PROMPT) == pytest.approx(logprobs_of(0, [], start=1))


@BOTH
async def test_what_a_server_could_only_answer_otherwise_is_refused(dialect):
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect) as client:
            with pytest.raises(ConfigError, match="log-probabilities"):
                await client.generate(request(top_p=0.5))
            if dialect == "vllm":
                with pytest.raises(ConfigError, match="top_k"):
                    await client.generate(request(top_k=3))
            shown = (PlacedImage(1, 2, Picture(np.zeros((8, 8, 3), np.uint8))),)
            with pytest.raises(ConfigError, match="shows pictures"):
                await client.generate(replace(request(), images=shown))
            if dialect == "vllm":
                with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
                    await client.generate(request(temperature=0.5))
            else:
                assert (await client.generate(request(temperature=0.5))).finish_reason == "length"
            assert (await client.generate(request(temperature=0.0))).finish_reason == "length"
    switch = {"logprobs_mode": "processed_logprobs"} if dialect == "vllm" else {"original_logprobs": True}
    with InferenceServer(dialect, **switch) as server:
        async with ServerClient(server.url, dialect) as client:
            if dialect == "vllm":
                result = await client.generate(request(temperature=0.5, top_p=0.5, top_k=9))
                assert result.logprobs == pytest.approx(server.log()["replies"][-1]["processed_logprobs"])
            else:
                with pytest.raises(ConfigError, match="SGLANG_RETURN_ORIGINAL_LOGPROB"):
                    await client.generate(request(temperature=0.5))


async def test_a_row_that_does_not_fit_is_refused_here():
    with InferenceServer("vllm", max_length=16) as server:
        async with ServerClient(server.url, "vllm") as client:
            with pytest.raises(ValueError, match="longest row"):
                await client.generate(request(tokens=12))
            assert server.state()["finished"] == 3  # Those of the probe.


# Interruptions


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


@BOTH
async def test_an_abort_that_nobody_asked_for_is_no_end(dialect):
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect) as client:
            path = "/inference" if dialect == "vllm" else "/generate"
            server.fail({"kind": "edit", "edit": "abort", "path": path, "count": 3})
            result = await client.generate(request())
            assert (len(result.token_ids), result.finish_reason) == (6, "length")
            server.fail({"kind": "edit", "edit": "abort", "path": path, "count": -1})
            with pytest.raises(RepeatedAbortError, match="something else pause"):
                await client.generate(request())


@BOTH
async def test_a_reply_is_aborted_with_what_it_has(dialect):
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect) as client:
            server.steps(0)
            replies = [asyncio.create_task(client.generate(request(name))) for name in ("a", "b")]
            await server.until(waiting=2)
            server.steps(2)
            await server.until(drawn=4)
            assert await client.abort(["a", "unknown"]) == 1
            first = await replies[0]
            assert (first.finish_reason, len(first.token_ids)) == ("abort", 2)
            assert server.state()["running"] == 1
            assert await client.abort() == 1
            assert (await replies[1]).finish_reason == "abort"
            assert await client.abort() == 0


async def test_before_aborts_by_name_a_reply_is_dropped():
    with InferenceServer("vllm", "0.24.0") as server:
        async with ServerClient(server.url, "vllm") as client:
            before = server.state()["tokens"]
            server.steps(2)
            reply = asyncio.create_task(client.generate(request()))
            await server.until(tokens=before + 2)
            assert await client.abort() == 1
            assert (await reply).token_ids == []
            assert (await server.until(dropped=1))["running"] == 0


@BOTH
async def test_what_is_cancelled_is_dropped_at_the_server(dialect):
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect) as client:
            before = server.state()["tokens"]
            server.steps(2)
            reply = asyncio.create_task(client.generate(request(tokens=500)))
            await server.until(tokens=before + 2)
            reply.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reply
            assert client.counters.running == 0
            server.steps(0)
            state = server.state()
            for _ in range(100):
                if not (state["running"] or state["waiting"]):
                    break
                await asyncio.sleep(0.01)
                state = server.state()
            assert (state["running"], state["waiting"]) == (0, 0)


@BOTH
async def test_a_pause_holds_what_comes(dialect):
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect) as client:
            await client.pause("abort")
            await client.pause("keep")
            reply = asyncio.create_task(client.generate(request()))
            other = asyncio.create_task(client.generate(request("other")))
            await asyncio.sleep(0.05)
            assert not reply.done()
            assert not (await client.health()).ready
            assert await client.abort(["other"]) == 1
            assert (await other).token_ids == []
            await client.resume()
            await client.resume()
            assert len((await reply).token_ids) == 6
            assert (await client.health()).ready


# Weights


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


# What goes wrong


@BOTH
@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "answer", "status": 503, "count": 3},
        {"kind": "answer", "status": 500, "count": 2},
        {"kind": "answer", "status": 502, "count": 2, "body": PAGE},
        {"kind": "answer", "status": 404, "count": 2, "body": PAGE},
        {"kind": "answer", "status": 200, "count": 2, "body": PAGE},
        {"kind": "answer", "status": 503, "count": 2, "body": "no healthy upstream"},
        {"kind": "cut", "count": 2},
        {"kind": "cut_body", "count": 2},
        {"kind": "late", "seconds": 0.1},
    ],
    ids=lambda fault: f"{fault['kind']}-{fault.get('status', '')}",
)
async def test_what_passes_is_waited_for(dialect, fault):
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect) as client:
            expected = await client.generate(request())
            server.fail({"path": "/inference" if dialect == "vllm" else "/generate", **fault})
            assert await client.generate(request()) == expected
            assert len(server.state()["faults"]) == fault.get("count", 1)


@BOTH
@pytest.mark.parametrize(
    "edit", ["short_logprobs", "null_logprobs", "true_logprobs", "nan_logprobs", "no_logprobs", "floor"]
)
async def test_a_reply_that_breaks_the_contract_is_refused(dialect, edit):
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect) as client:
            server.fail({"kind": "edit", "edit": edit})
            with pytest.raises(MalformedReplyError):
                await client.generate(request())
            assert len((await client.generate(request())).token_ids) == 6


@BOTH
async def test_refusals_and_rubbish_have_their_types(dialect):
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect) as client:
            refused = GenerationRequest("r", [5000], SamplingParams(2), 0)
            with pytest.raises(RequestRefusedError, match="vocabulary"):
                await client.generate(refused)
            for body in ("[" * 100_000, '{"a":' * 10_000, "html" * 300_000, "", "null", '"x"', "{}"):
                server.fail({"kind": "answer", "status": 200, "body": body})
                with pytest.raises(MalformedReplyError) as raised:
                    await client.generate(request())
                assert len(str(raised.value)) < 1000
            path = "/inference" if dialect == "vllm" else "/generate"
            server.fail({"kind": "answer", "status": 500, "count": -1, "path": path})
            with pytest.raises(RequestRefusedError, match="overloaded"):
                await client.generate(request())


async def test_a_page_is_no_server():
    """What stands before a server answers while that is gone; at the start it may be the wrong address."""
    with InferenceServer("vllm") as server:
        async with ServerClient(server.url, "vllm", patience_s=1.5) as client:
            server.fail({"kind": "answer", "status": 200, "body": PAGE, "count": -1})
            assert not (await client.health()).ready
            with pytest.raises(ServerGoneError, match="default backend"):
                await client.generate(request())
            for status, kind in ((200, MalformedReplyError), (404, ServerSetupError)):
                server.fail({"kind": "answer", "status": status, "body": PAGE, "count": -1})
                async with asyncio.timeout(20):
                    with pytest.raises(kind):
                        await ServerClient(server.url, "vllm", patience_s=60.0).connect()


async def test_what_a_proxy_may_have_passed_on_is_not_sent_twice():
    """Tensors would be announced that nobody sends."""
    carrier = GlooCarrier("vllm")
    with InferenceServer("vllm") as server:
        async with ServerClient(server.url, "vllm", way="broadcast", carrier=carrier) as client:
            server.fail({"kind": "answer", "path": "/update_weights", "status": 504, "body": PAGE})
            with pytest.raises(WeightUpdateError, match="lost on its way"):
                await client.sync(Weights(1), 1)
            await client.sync(Weights(2), 2)
            result = await client.generate(request())
            assert result.logprobs == pytest.approx(logprobs_of(2, result.token_ids))


async def test_a_reply_keeps_what_was_drawn_when_its_server_is_lost():
    with InferenceServer("vllm") as first, InferenceServer("vllm") as second:
        async with (
            ServerClient(first.url, "vllm", patience_s=1.5) as client,
            ServerClient(second.url, "vllm") as other,
        ):
            before, before_of_second = first.state()["tokens"], second.state()["tokens"]
            reply = PartialReply(request(tokens=9))
            first.steps(4)
            drawing = asyncio.create_task(client.extend(reply))
            await first.until(tokens=before + 4)
            await client.pause("abort")
            path = "/inference"
            first.fail(
                {"kind": "cut", "path": path, "count": -1}, {"kind": "answer", "path": "/health", "count": -1}
            )
            await client.resume()
            with pytest.raises(ServerGoneError):
                await drawing
            drawn = list(reply.token_ids)
            assert len(drawn) == 4
            assert await other.extend(reply) == "length"
            assert reply.token_ids[:4] == drawn
            assert second.state()["tokens"] - before_of_second == 5
            assert reply.logprobs == pytest.approx(logprobs_of(0, reply.token_ids))


async def test_an_engine_that_is_dead_behind_its_front_is_given_up():
    with InferenceServer("vllm") as server:
        async with ServerClient(server.url, "vllm", patience_s=1.5) as client:
            server.fail({"kind": "answer", "status": 500, "count": -1})
            with pytest.raises(ServerGoneError):
                await client.generate(request())


async def test_a_health_that_flaps_costs_no_reply():
    with InferenceServer("vllm", step_s=0.02) as server:
        async with ServerClient(server.url, "vllm", patience_s=5.0, watch_every_s=0.02) as client:
            server.fail(*[{"kind": "answer", "path": "/health", "skip": skip} for skip in (0, 1, 1)])
            assert len((await client.generate(request(tokens=12))).token_ids) == 12
            assert server.state()["faults"]
            assert client.counters.resubmitted == 0


async def test_a_server_that_never_comes_is_given_up():
    client = ServerClient("http://127.0.0.1:9", "vllm", patience_s=0.2)
    with pytest.raises(ServerGoneError, match=r"0\.2 s"):
        await client.connect()
    await client.close()
    with pytest.raises(ConfigError, match="http://"):
        ServerClient("localhost:8000", "vllm")


@BOTH
async def test_a_server_that_is_started_again_has_lost_its_weights(dialect, tmp_path):
    with InferenceServerProcess(dialect) as server:
        async with ServerClient(server.url, dialect, patience_s=30) as client:
            first = await client.generate(request())
            server.kill()
            waiting = asyncio.create_task(client.generate(request()))
            await asyncio.sleep(0.1)
            await asyncio.to_thread(server.start)
            # Before anything was sent, the weights of the start are the run's.
            assert await waiting == first
            await client.sync(Weights(1, tmp_path), 1)
            server.kill()
            waiting = asyncio.create_task(client.generate(request()))
            await asyncio.to_thread(server.start)
            with pytest.raises(WeightsLostError, match="default"):
                await waiting
            with pytest.raises(WeightsLostError):
                await client.generate(request())
            assert not (await client.health()).ready
            await client.sync(Weights(1, tmp_path), 1)
            result = await client.generate(request())
            assert result.logprobs == pytest.approx(logprobs_of(1, result.token_ids))


@BOTH
async def test_an_update_that_takes_longer_than_a_server_may_be_silent_goes_through(
    dialect, tmp_path, monkeypatch
):
    monkeypatch.setattr(server_http, "_HEALTH_S", 0.3)
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect, patience_s=0.5, watch_every_s=0.1) as client:
            paths = {"vllm": "/collective_rpc", "sglang": "/update_weights_from_disk"}
            server.fail({"kind": "late", "path": paths[dialect], "seconds": 2.5})
            await client.sync(Weights(1, tmp_path), 1)
            result = await client.generate(request())
            assert result.logprobs == pytest.approx(logprobs_of(1, result.token_ids))


async def test_a_server_that_stands_still_with_its_connections_open_is_given_up():
    with InferenceServerProcess("vllm") as server:
        async with ServerClient(server.url, "vllm", patience_s=1.5, watch_every_s=0.1) as client:
            await client.generate(request())
            server.stand_still()
            with pytest.raises(ServerGoneError, match=r"1\.5 s"):
                await client.generate(request())
            server.go_on()
            assert len((await client.generate(request())).token_ids) == 6


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


async def test_answers_to_a_pause_that_come_one_after_the_other_are_all_waited_for(monkeypatch):
    monkeypatch.setattr("rollgym.trainer.inference.under_way._SETTLE_S", 0.2)
    under_way = UnderWay()
    ongoing = [OngoingReply(PartialReply(request()), rid=f"r{number}") for number in range(5)]
    for each in ongoing:
        under_way.begin(each)
    async with asyncio.timeout(20), asyncio.timeout(None) as limit:
        ongoing[-1].limit = limit
        settling = asyncio.create_task(under_way.settle(at_once))
        for each in ongoing:
            await asyncio.sleep(0.1)
            each.idle.set()
        await settling
    assert not limit.expired()


async def at_once():
    """Is answered at once."""


async def test_answers_of_a_server_that_has_little_processor_time_are_waited_for(monkeypatch):
    monkeypatch.setattr("rollgym.trainer.inference.under_way._SETTLE_S", 0.01)
    under_way, late = UnderWay(), OngoingReply(PartialReply(request()), rid="r")
    under_way.begin(late)

    async def after_what_it_owes():
        await asyncio.sleep(0.05)
        late.idle.set()

    async with asyncio.timeout(20), asyncio.timeout(None) as late.limit:
        await under_way.settle(after_what_it_owes)
    assert not late.limit.expired()


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


# Switches


@pytest.mark.parametrize(
    ("dialect", "release", "options", "client", "error", "message"),
    [
        ("vllm", "0.17.1", {}, {}, ServerTooOldError, r"0\.24"),
        ("sglang", "0.5.18", {}, {}, ServerTooOldError, r"0\.5\.20"),
        ("sglang", "0.5.20", {}, {"pause_mode": "recompute"}, ServerTooOldError, r"0\.5\.22"),
        ("vllm", None, {"dev_mode": False}, {}, ServerSetupError, "VLLM_SERVER_DEV_MODE=1"),
        ("vllm", None, {"lora": False}, {"way": "adapter"}, ServerSetupError, "ALLOW_RUNTIME_LORA"),
        ("sglang", None, {"lora": False}, {"way": "adapter"}, ServerSetupError, "--enable-lora"),
        ("vllm", None, {"api_key": "k"}, {}, ServerSetupError, "API key"),
        ("sglang", None, {"api_key": "k"}, {"api_key": "wrong"}, ServerSetupError, "API key"),
        ("sglang", None, {"admin_api_key": "a"}, {"api_key": "k"}, ServerSetupError, "API key"),
    ],
)
async def test_what_a_server_lacks_is_named(dialect, release, options, client, error, message):
    with (
        InferenceServer(dialect, release, **options) as server,
        pytest.raises(error, match=message) as caught,
    ):
        async with ServerClient(server.url, dialect, **client):
            pass
    assert str(caught.value).startswith(f"{server.url}: "), "of several servers it says which"


@BOTH
async def test_the_other_dialect_is_recognised(dialect):
    other = "sglang" if dialect == "vllm" else "vllm"
    with InferenceServer(dialect) as server, pytest.raises(ServerSetupError, match="is it"):
        await ServerClient(server.url, other).connect()


@BOTH
async def test_who_only_looks_changes_nothing(dialect, tmp_path):
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect, way="broadcast", carrier=GlooCarrier(dialect)) as client:
            await client.sync(Weights(1), 1)
            await client.pause("keep")
            await client._link.converse(client._link.dialect.begin_update())
            before = server.state()
            passer_by = ServerClient(server.url, dialect, way="broadcast")
            seen = await passer_by.look()
            await passer_by.close()
            assert server.state() == before
            assert before["session"]
            assert before["paused"] is not None
            assert (seen.server, seen.model) == (client.capabilities.server, client.capabilities.model)
            assert (seen.release, seen.max_length) == (
                client.capabilities.release,
                client.capabilities.max_length,
            )


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


@BOTH
async def test_keys_open_what_they_guard(dialect, tmp_path):
    keys = {"api_key": "k"} if dialect == "vllm" else {"api_key": "k", "admin_api_key": "a"}
    with InferenceServer(dialect, **keys) as server:
        async with ServerClient(server.url, dialect, **keys) as client:
            await client.sync(Weights(1, tmp_path), 1)
            assert (await client.generate(request())).policy_versions == [1] * 6


async def test_without_dev_mode_fixed_weights_are_sampled():
    with InferenceServer("vllm", dev_mode=False) as server:
        async with ServerClient(server.url, "vllm", way=None) as client:
            assert len((await client.generate(request())).token_ids) == 6
            with pytest.raises(ConfigError, match="not told"):
                await client.sync(Weights(1), 1)
    with pytest.raises(ConfigError, match="adapter"):
        ServerClient("http://localhost", "vllm", way="adapter", pause_mode="keep")


@BOTH
async def test_a_token_that_the_policys_model_does_not_know_is_refused(dialect):
    with InferenceServer(dialect) as server:
        async with (
            asyncio.timeout(30),
            ServerClient(server.url, dialect, way=None, vocabulary=END_ID) as client,
        ):
            assert len((await client.generate(request())).token_ids) == 6
            server.script([7])  # and the end
            with pytest.raises(
                MalformedReplyError, match="drew the token id 256, and the policy's model knows ids"
            ):
                await client.generate(request())
