"""What replies must look like, by vLLM's and SGLang's own means, against the double of each."""

import asyncio
import json
import re
from dataclasses import replace

import httpx
import pytest

from rollgym.trainer.inference.base import SamplingParams, StructuredOutput
from rollgym.trainer.inference.calls import HttpAnswer
from rollgym.trainer.inference.errors import RequestRefusedError, StructuredOutputError
from rollgym.trainer.inference.server_client.client import ServerClient
from rollgym.trainer.inference.servers.chunks import GenerationCall
from rollgym.trainer.inference.servers.sglang import SglangDialect
from rollgym.trainer.inference.servers.vllm import VllmDialect
from rollgym.trainer.rollout.agents.calls import AgentCall
from rollgym.trainer.rollout.agents.policy_service import held_reply
from rollgym.trainer.rollout.agents.replies import read_reply
from tests.support.dialect_replies import capabilities
from tests.support.inference_server.models import END_ID
from tests.support.inference_server.running import InferenceServer
from tests.support.server_weights import Weights, request

MOVES = StructuredOutput("regex", "(Left|Right|Up){5}")
OTHER_END = 200
MOVES_PATTERN = re.compile(MOVES.text)
SCHEMA = {
    "type": "object",
    "properties": {"move": {"enum": ["Left", "Right"]}, "sure": {"enum": [True, False]}},
}
GO = {"type": "function", "function": {"name": "go", "parameters": SCHEMA}}
CALLS, _ = held_reply(
    AgentCall([], tools=[GO], reads_tools=True, must_call=("go",), parallel_tools=False), "hermes"
)
EACH = pytest.mark.parametrize(
    ("dialect", "release", "options"),
    [
        ("vllm", None, {}),
        ("vllm", "0.26.0", {"scale_out": False}),
        ("sglang", None, {}),
        ("sglang", None, {"incremental": True}),
    ],
    ids=["vllm", "vllm-completions", "sglang", "sglang-streams"],
)


def asked(structured, name="r", tokens=80, seed=1, **sampling):
    return request(name, tokens, seed, structured=structured, stop_token_ids=(END_ID,), **sampling)


def said(result):
    assert result.token_ids[-1] == END_ID
    return bytes(result.token_ids[:-1]).decode()


@EACH
async def test_replies_fit_and_bring_the_log_probabilities_that_they_were_drawn_with(
    dialect, release, options
):
    with InferenceServer(dialect, release, **options) as server:
        async with asyncio.timeout(60), ServerClient(server.url, dialect, way=None) as client:
            told = []
            first = await client.generate(
                replace(asked(StructuredOutput("json", json.dumps(SCHEMA))), on_tokens=told.extend)
            )
            assert json.loads(said(first)).keys() == {"move", "sure"}
            assert told in ([], first.token_ids)
            assert bool(told) == client.capabilities.streams
            moves = await client.generate(asked(MOVES, seed=2))
            assert said(moves).replace("Left", "").replace("Right", "").replace("Up", "") == ""
            anything = await client.generate(asked(StructuredOutput("json", '{"type": "object"}'), seed=4))
            assert isinstance(json.loads(said(anything)), dict)
            called = await client.generate(asked(CALLS.output, tokens=160, seed=5))
            assert [call.name for call in read_reply(said(called), "hermes").calls] == ["go"]
        replies = (first, moves, anything, called)
        for result, entry in zip(replies, server.log()["replies"][-4:], strict=True):
            assert result.token_ids == entry["token_ids"]
            assert result.logprobs == pytest.approx(entry["processed_logprobs"])


@EACH
async def test_what_a_server_cannot_compile_is_refused_at_once(dialect, release, options):
    with InferenceServer(dialect, release, **options) as server:
        async with asyncio.timeout(60), ServerClient(server.url, dialect, way=None) as client:
            for listener in (None, lambda ids: None):
                broken = replace(asked(StructuredOutput("regex", "(")), on_tokens=listener)
                with pytest.raises(StructuredOutputError, match="Failed to compile"):
                    await client.generate(broken)
            assert await client.generate(asked(MOVES)) is not None
            with pytest.raises(RequestRefusedError, match=r"vocabulary|context"):
                await client.generate(replace(request("other"), prompt_ids=[299_999]))


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_a_reply_that_new_weights_interrupt_begins_again(dialect, tmp_path):
    options = {"incremental": True} if dialect == "sglang" else {}
    with InferenceServer(dialect, **options) as server:
        async with asyncio.timeout(60), ServerClient(server.url, dialect, way="disk") as client:
            told = []
            server.steps(4)
            reply = asyncio.create_task(client.generate(replace(asked(MOVES), on_tokens=told.extend)))
            await server.until(tokens=4)
            server.steps(0)
            syncing = asyncio.create_task(client.sync(Weights(1, tmp_path), 1))
            await asyncio.sleep(0.05)
            server.steps(None)
            await syncing
            result = await reply
            assert said(result).replace("Left", "").replace("Right", "").replace("Up", "") == ""
            assert set(result.policy_versions) == {1}
            assert told == [], "nobody has heard of what was begun again"


VLLM, SGLANG = (
    kind(capabilities(release=release, logprobs_of="temperature"))
    for kind, release in ((VllmDialect, (0, 32, 0)), (SglangDialect, (0, 5, 23)))
)


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("json", "json_schema"),
        ("regex", "regex"),
        ("grammar", "ebnf"),
        ("structural_tag", "structural_tag"),
    ],
)
def test_each_kind_is_asked_for_in_the_servers_own_words(kind, field):
    call = GenerationCall("0" * 32, [5], SamplingParams(4, structured=StructuredOutput(kind, "x")), 3)
    assert VLLM.generate(call).body["sampling_params"]["structured_outputs"] == {kind: "x"}
    assert SGLANG.generate(call).body["sampling_params"][field] == "x"
    plain = GenerationCall("0" * 32, [5], SamplingParams(4), 3)
    assert "structured_outputs" not in VLLM.generate(plain).body["sampling_params"]
    assert (
        not {"json_schema", "regex", "ebnf", "structural_tag"}
        & SGLANG.generate(plain).body["sampling_params"].keys()
    )


@pytest.mark.parametrize("release", [(0, 26, 0), (0, 32, 0)])
def test_vllm_s_own_end_ends_a_reply_that_has_a_form(release):
    vllm = VllmDialect(capabilities(release=release, tokens_route=release > (0, 30)))

    def ignored(structured):
        body = vllm.generate(GenerationCall("0" * 32, [5], SamplingParams(4, structured=structured), 3)).body
        return body.get("sampling_params", body)["ignore_eos"]

    assert ignored(None) is True
    assert not any(
        ignored(StructuredOutput(kind, "x")) for kind in ("json", "regex", "grammar", "structural_tag")
    )


@EACH
async def test_a_reply_ends_where_its_form_does_though_the_run_names_another_end(dialect, release, options):
    with InferenceServer(dialect, release, **options) as server:
        async with asyncio.timeout(60), ServerClient(server.url, dialect, way=None) as client:
            sampling = SamplingParams(80, structured=MOVES, stop_token_ids=(OTHER_END,))
            results = [
                await client.generate(replace(asked(MOVES, seed=seed), sampling=sampling))
                for seed in range(8)
            ]
    assert {result.finish_reason for result in results} == {"stop"}
    assert {result.token_ids[-1] for result in results} == {END_ID, OTHER_END}
    for result in results:
        assert MOVES_PATTERN.fullmatch(bytes(result.token_ids[:-1]).decode())


def test_the_double_of_vllm_goes_on_behind_a_form_whose_end_it_is_told_to_ignore():
    with InferenceServer("vllm") as server:
        params = {
            **{"max_tokens": 40, "seed": 1, "ignore_eos": True, "stop_token_ids": [OTHER_END], "logprobs": 0},
            "structured_outputs": {"regex": MOVES.text},
        }
        body = {"token_ids": [3, 4, 5], "sampling_params": params}
        (choice,) = httpx.post(f"{server.url}/inference/v1/generate", json=body).json()["choices"]
    ids = choice["token_ids"]
    end = ids.index(END_ID)
    assert MOVES_PATTERN.fullmatch(bytes(ids[:end]).decode())
    assert ids[end + 1 :], "nothing ended the reply"


def test_an_abort_while_sglang_compiles_is_an_abort_and_no_bad_request():
    structured = GenerationCall("0" * 32, [5], SamplingParams(4, structured=MOVES), 3)
    refused = HttpAnswer(400, b'{"error": {"message": "Aborted by AbortReq."}}')
    assert SGLANG.read_generation(refused, structured).finish_reason == "abort"
    with pytest.raises(RequestRefusedError, match="AbortReq"):
        SGLANG.read_generation(refused, GenerationCall("0" * 32, [5], SamplingParams(4), 3))
    reason = {"type": "abort", "message": "Aborted by AbortReq.", "status_code": 400}
    ended = {"output_ids": [], "meta_info": {"finish_reason": reason}}
    assert (
        SGLANG.read_generation(HttpAnswer(200, json.dumps(ended).encode()), structured).finish_reason
        == "abort"
    )
    reason["message"] = "Failed to compile regex grammar"
    with pytest.raises(RequestRefusedError, match="400, Failed to compile"):
        SGLANG.read_generation(HttpAnswer(200, json.dumps(ended).encode()), structured)
