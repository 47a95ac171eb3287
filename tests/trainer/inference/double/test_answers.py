"""The double of the inference servers keeps to their contract; what it says can be checked number by number."""

import asyncio
import json

import httpx
import pytest

from tests.support.inference_server.models import HashModel, Row, log_softmax
from tests.support.inference_server.running import InferenceServer
from tests.support.tiny_models import reference_logprobs, sharp_model

PROMPT = [72, 101, 108, 108, 111]


@pytest.fixture(scope="module")
def vllm():
    with InferenceServer("vllm", max_length=512) as server:
        yield server


@pytest.fixture(scope="module")
def sglang():
    with InferenceServer("sglang", max_length=512) as server:
        yield server


def vllm_reply(server, **params):
    body = {
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": 6, "logprobs": 0, "ignore_eos": True, **params},
    }
    return httpx.post(f"{server.url}/inference/v1/generate", json=body)


def sglang_reply(server, **params):
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 6, "ignore_eos": True, **params},
        "return_logprob": True,
    }
    return httpx.post(f"{server.url}/generate", json=body)


def of_vllm(reply):
    choice = reply.json()["choices"][0]
    return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]


def of_sglang(reply):
    triples = reply.json()["meta_info"]["output_token_logprobs"]
    return [token for _, token, _ in triples], [logprob for logprob, _, _ in triples]


def expected_logprobs(ids, temperature=1.0):
    """Straight from the hash model, by nobody's sampler."""
    model = HashModel()
    row = Row([])
    values = []
    for token in ids:
        if row.ids:
            values.append(float(log_softmax(model.logits([row])[0] / temperature)[token]))
        row.ids.append(token)
    return values


def test_log_probabilities_are_those_of_the_model(vllm, sglang):
    for ids, logprobs in (of_vllm(vllm_reply(vllm)), of_sglang(sglang_reply(sglang))):
        assert logprobs == pytest.approx(expected_logprobs(PROMPT + ids)[len(PROMPT) - 1 :])


def test_each_dialect_has_its_own_distribution_in_its_log_probabilities(vllm, sglang):
    ids, raw = of_vllm(vllm_reply(vllm, temperature=0.5, top_k=3))
    assert raw == pytest.approx(expected_logprobs(PROMPT + ids)[len(PROMPT) - 1 :])
    with InferenceServer("vllm", logprobs_mode="processed_logprobs") as server:
        assert of_vllm(vllm_reply(server, top_k=1))[1] == [0.0] * 6
    ids, tempered = of_sglang(sglang_reply(sglang, temperature=0.5, top_k=3))
    assert tempered == pytest.approx(expected_logprobs(PROMPT + ids, 0.5)[len(PROMPT) - 1 :])
    with InferenceServer("sglang", original_logprobs=True) as server:
        ids, raw = of_sglang(sglang_reply(server, temperature=0.5))
        assert raw == pytest.approx(expected_logprobs(PROMPT + ids)[len(PROMPT) - 1 :])


def test_a_folder_of_hugging_face_is_served_and_taken_from_disk(tmp_path):
    for name, seed in (("first", 0), ("second", 1)):
        sharp_model(seed).save_pretrained(tmp_path / name)
    with InferenceServer("vllm", model=tmp_path / "first") as server:
        prompt = [3, 4, 5]
        body = {"token_ids": prompt, "sampling_params": {"max_tokens": 8, "logprobs": 0, "ignore_eos": True}}
        ids, logprobs = of_vllm(httpx.post(f"{server.url}/inference/v1/generate", json=body))
        expected = reference_logprobs(sharp_model(0), prompt + ids)[len(prompt) - 1 :]
        assert logprobs == pytest.approx(expected, abs=1e-4)
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "second")}}
        assert httpx.post(f"{server.url}/collective_rpc", json=reload).json() == {"results": [None]}
        ids, logprobs = of_vllm(httpx.post(f"{server.url}/inference/v1/generate", json=body))
        expected = reference_logprobs(sharp_model(1), prompt + ids)[len(prompt) - 1 :]
        assert logprobs == pytest.approx(expected, abs=1e-4)


async def test_rows_of_a_folder_that_come_and_go_do_not_disturb_each_other(tmp_path):
    sharp_model().save_pretrained(tmp_path)
    with InferenceServer("vllm", model=tmp_path) as server:
        async with httpx.AsyncClient(timeout=30) as client:

            async def ask(number):
                prompt = [3 + number % 5] * (1 + number)
                params = {
                    "max_tokens": 2 + 3 * number % 11,
                    "logprobs": 0,
                    "ignore_eos": True,
                    "seed": number,
                }
                body = {"token_ids": prompt, "sampling_params": params}
                reply = await client.post(f"{server.url}/inference/v1/generate", json=body)
                return prompt, *of_vllm(reply)

            answers = await asyncio.gather(*[ask(number) for number in range(12)])
    model = sharp_model()
    for prompt, ids, logprobs in answers:
        expected = reference_logprobs(model, prompt + ids)[len(prompt) - 1 :]
        assert logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("clear", [True, False])
async def test_a_new_version_in_mid_request_splits_the_span_and_stale_keys_show(clear, tmp_path):
    other = HashModel(seed=1).write(tmp_path)
    with InferenceServer("vllm") as server:
        server.steps(3)
        async with httpx.AsyncClient(timeout=30, base_url=server.url) as client:
            body = {
                "token_ids": PROMPT,
                "sampling_params": {"max_tokens": 6, "logprobs": 0, "ignore_eos": True},
            }
            asked = asyncio.create_task(client.post("/inference/v1/generate", json=body))
            await server.until(drawn=3)
            await client.post("/pause", params={"mode": "keep", "clear_cache": clear})
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(other)}}
            await client.post("/collective_rpc", json=reload)
            await client.post("/update_weight_version", json={"new_version": "7"})
            server.steps(None)
            await client.post("/resume")
            reply = await asked
    ids, logprobs = of_vllm(reply)
    assert reply.json()["choices"][0]["weight_versions"] == [
        {"version": "default", "start": 0, "end": 3},
        {"version": "7", "start": 3, "end": 6},
    ]
    fresh = HashModel(seed=1).prompt_logprobs(PROMPT + ids)[len(PROMPT) - 1 :]
    computed = [float(row[token]) for row, token in zip(fresh, ids, strict=False)]
    assert logprobs[:3] == pytest.approx(expected_logprobs(PROMPT + ids)[len(PROMPT) - 1 :][:3])
    # Recomputed keys are those of the new weights; kept ones are stale.
    assert (logprobs[3:] == pytest.approx(computed[3:])) is clear


async def test_pauses_of_vllm(vllm):
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 6, "ignore_eos": True}}
    async with httpx.AsyncClient(timeout=30, base_url=vllm.url) as client:
        vllm.steps(2)
        asked = asyncio.create_task(client.post("/inference/v1/generate", json=body))
        await vllm.until(drawn=2)
        assert (await client.post("/pause", params={"mode": "abort"})).json() == {"status": "paused"}
        choice = (await asked).json()["choices"][0]
        assert (choice["finish_reason"], len(choice["token_ids"])) == ("abort", 2)
        refused = await client.post("/inference/v1/generate", json=body)
        assert refused.status_code == 503
        assert refused.json()["error"]["type"] == "ServiceUnavailableError"
        vllm.steps(None)
        await client.post("/resume")
        vllm.steps(2)
        asked = asyncio.create_task(client.post("/inference/v1/generate", json=body))
        await vllm.until(drawn=2)
        draining = asyncio.create_task(client.post("/pause", params={"mode": "wait"}))
        vllm.steps(None)
        assert (await asked).json()["choices"][0]["finish_reason"] == "length"
        assert (await draining).status_code == 200
        await client.post("/resume")
        await client.post("/pause", params={"mode": "keep"})
        queued = asyncio.create_task(client.post("/inference/v1/generate", json=body))
        await vllm.until(waiting=1)
        await client.post("/resume")
        assert len((await queued).json()["choices"][0]["token_ids"]) == 6
        assert (await client.post("/pause", params={"mode": "soon"})).status_code == 400


async def test_pauses_of_sglang(sglang):
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 6, "ignore_eos": True},
        "rid": "a" * 32,
    }
    async with httpx.AsyncClient(timeout=30, base_url=sglang.url) as client:
        for mode, waits in (("in_place", "running"), ("retract", "waiting")):
            sglang.steps(2)
            asked = asyncio.create_task(client.post("/generate", json=body))
            await sglang.until(tokens=sglang.state()["tokens"] + 2)
            await client.post("/pause_generation", json={"mode": mode})
            assert sglang.state()[waits] == 1
            flushed = await client.post("/flush_cache")
            assert flushed.status_code == (400 if mode == "in_place" else 200)
            sglang.steps(None)
            await client.post("/continue_generation", json={})
            assert (await asked).json()["meta_info"]["finish_reason"] == {"type": "length", "length": 6}
        await client.post("/pause_generation", json={"mode": "abort"})
        blocked = asyncio.create_task(client.post("/generate", json=body))
        await asyncio.sleep(0.05)
        assert not blocked.done()
        await client.post("/continue_generation", json={})
        assert (await blocked).status_code == 200


async def test_a_client_that_leaves_is_dropped(vllm, sglang):
    for server, path, body in (
        (
            vllm,
            "/inference/v1/generate",
            {"token_ids": PROMPT, "sampling_params": {"max_tokens": 99, "ignore_eos": True}},
        ),
        (vllm, "/v1/completions", {"prompt": PROMPT, "max_tokens": 99, "ignore_eos": True, "stream": True}),
        (
            sglang,
            "/generate",
            {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 99, "ignore_eos": True}},
        ),
    ):
        dropped = server.state()["dropped"]
        server.steps(2)
        async with httpx.AsyncClient(timeout=30, base_url=server.url) as client:
            asked = asyncio.create_task(client.post(path, json=body))
            await server.until(drawn=2)
            asked.cancel()
        assert (await server.until(dropped=dropped + 1))["running"] == 0
        server.steps(None)


def test_streams_are_deltas_in_vllm_and_cumulative_in_sglang(vllm, sglang):
    body = {
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": 3, "logprobs": 0, "ignore_eos": True},
        "stream": True,
    }
    chunks = events(httpx.post(f"{vllm.url}/inference/v1/generate", json=body))
    assert [len(chunk["choices"][0]["token_ids"]) for chunk in chunks] == [1, 1, 1]
    assert [chunk["choices"][0].get("weight_versions") is not None for chunk in chunks] == [
        False,
        False,
        True,
    ]
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}, "stream": True}
    chunks = events(httpx.post(f"{sglang.url}/generate", json=body))
    assert [len(chunk["output_ids"]) for chunk in chunks] == [1, 2, 3]


def events(reply):
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_switches(vllm):
    with InferenceServer("vllm", dev_mode=False, scale_out=False, lora=False, api_key="secret") as server:
        assert vllm_reply(server).status_code == 401
        key = {"Authorization": "Bearer secret"}
        body = {"token_ids": PROMPT, "sampling_params": {}}
        refused = httpx.post(f"{server.url}/inference/v1/generate", json=body, headers=key)
        assert (refused.status_code, refused.json()["error"]["type"]) == (403, "PermissionDeniedError")
        assert httpx.post(f"{server.url}/pause").status_code == 404
        assert httpx.post(f"{server.url}/v1/load_lora_adapter", headers=key, json={}).status_code == 404
        assert httpx.get(f"{server.url}/health").status_code == 200
    with InferenceServer("vllm", "0.24.0") as server:
        assert httpx.get(f"{server.url}/weight_info").status_code == 404
        assert "weight_versions" not in vllm_reply(server).json()["choices"][0]
    with InferenceServer("sglang", "0.5.20") as server:
        assert httpx.post(f"{server.url}/begin_weight_update", json={}).status_code == 404
    assert httpx.post(f"{vllm.url}/start_weight_update").status_code == 500
    assert httpx.post(f"{vllm.url}/update_weights", json={"update_info": {}}).status_code == 500


def test_health_of_sglang_draws_a_token_and_so_says_nothing_in_a_pause():
    for generates in (True, False):
        with InferenceServer("sglang", health_generates=generates) as server:
            assert httpx.get(f"{server.url}/health").status_code == 200
            httpx.post(f"{server.url}/pause_generation", json={"mode": "in_place"})
            assert httpx.get(f"{server.url}/model_info", timeout=5).status_code == 200
            if not generates:
                assert httpx.get(f"{server.url}/health", timeout=5).status_code == 200
                continue
            with pytest.raises(httpx.ReadTimeout):
                httpx.get(f"{server.url}/health", timeout=0.5)
            httpx.post(f"{server.url}/continue_generation", json={})
            assert httpx.get(f"{server.url}/health", timeout=5).status_code == 200


def test_libraries_of_agents_can_talk_to_it(vllm):
    vllm.script('<tool_call>{"name": "look", "arguments": {"where": "up"}}</tool_call>', "Ja, schön.")
    messages = [{"role": "user", "content": "look up"}]
    tools = [{"type": "function", "function": {"name": "look"}}]
    body = {"messages": messages, "tools": tools, "logprobs": True}
    choice = httpx.post(f"{vllm.url}/v1/chat/completions", json=body).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"where": "up"}'}
    with httpx.stream("POST", f"{vllm.url}/v1/chat/completions", json={**body, "stream": True}) as reply:
        text = b"".join(reply.iter_raw()).decode()
    said = [json.loads(line[6:])["choices"][0]["delta"]["content"] for line in text.split("\n\n")[:-2]]
    assert "".join(said) == "Ja, schön."
    assert httpx.get(f"{vllm.url}/v1/models").json()["data"][0]["max_model_len"] == 512
