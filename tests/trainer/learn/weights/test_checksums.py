"""Tensors of a server are compared bit by bit, where it tells checksums of them."""

import asyncio
import functools
import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.trainer.inference.errors import MalformedReplyError, RequestRefusedError, WrongWeightsError
from rollgym.trainer.inference.server_client.client import ServerClient
from rollgym.trainer.learn.weights.checksums import ChecksumCheck, as_served, sha256_hash, tile_hash
from tests.support.inference_server.running import InferenceServer
from tests.support.tiny_models import VOCABULARY, sharp_model
from tests.support.weight_senders import backend_of

_WORD = 2**32 - 1


def one_word_after_the_other(data: bytes) -> int:
    """The hash by tiles, as slowly as it can be read."""

    def mixed(x):
        x = (x ^ x >> 16) * 0x85EBCA6B & _WORD
        x = (x ^ x >> 13) * 0xC2B2AE35 & _WORD
        return x ^ x >> 16

    def rotated(x, by):
        return (x << by | x >> 32 - by) & _WORD

    data += bytes(-len(data) % 4)
    words = [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]
    if not words:
        return 0
    total, seed, size = 0, 0x243F6A88, len(data) & _WORD
    other = (seed * 0x9E3779B1 ^ 0xDEADBEEF) & _WORD
    for start_of_tile in range(0, len(words), 8192):
        high = low = 0
        for i, word in enumerate(words[start_of_tile : start_of_tile + 8192], start_of_tile):
            high += mixed(word ^ (i * 0x27D4EB2D + seed & _WORD) ^ rotated(i, 15))
            low += mixed(word ^ (i * 0x165667B1 + other & _WORD) ^ rotated(i, 13))
        total += mixed((high & _WORD) ^ size) << 32 | mixed((low & _WORD) ^ size)
    total &= 2**64 - 1
    total = (total ^ total >> 30) * 0xBF58476D1CE4E5B9 & 2**64 - 1
    total = (total ^ total >> 27) * 0x94D049BB133111EB & 2**64 - 1
    return total ^ total >> 31


@given(st.binary(max_size=100))
@settings(deadline=None)
def test_hashes_are_those_of_the_bytes(data):
    tensor = torch.tensor(list(data), dtype=torch.uint8)
    assert tile_hash(tensor) == f"{one_word_after_the_other(data):016x}"
    assert sha256_hash(tensor) == hashlib.sha256(data).hexdigest()[:16]


@pytest.mark.parametrize("count", [8192, 8193, 20_000])
def test_tiles_are_added_up_and_parts_of_large_tensors_too(count, monkeypatch):
    monkeypatch.setattr("rollgym.trainer.learn.weights.checksums._WORDS_AT_ONCE", 8192)
    tensor = torch.arange(count, dtype=torch.float32).mul(0.37).reshape(-1, 1)
    assert tile_hash(tensor) == f"{one_word_after_the_other(tensor.numpy().tobytes()):016x}"
    assert tile_hash(tensor[1:]) == tile_hash(tensor[1:].clone())
    assert tile_hash(tensor.bfloat16()[1:]) == tile_hash(tensor.bfloat16()[1:].clone())


def test_projections_that_a_server_computes_together_are_one_tensor():
    parts = {name: torch.full((2, 3), float(n)) for n, name in enumerate("qkv")}
    tensors = [(f"model.layers.0.self_attn.{name}_proj.weight", tensor) for name, tensor in parts.items()]
    *own, (name, whole) = as_served(tensors)
    assert own == tensors
    assert name == "model.layers.0.self_attn.qkv_proj.weight"
    assert torch.equal(whole, torch.cat([parts[each] for each in "qkv"]))


def test_a_projection_without_the_others_is_not_held():
    tensors = [(f"layers.{layer}.self_attn.q_proj.weight", torch.ones(1)) for layer in (0, 1)]
    tensors += [(f"layers.1.self_attn.{name}_proj.weight", torch.ones(1)) for name in "kv"]
    names = [name for name, _ in as_served(tensors)]
    assert [name for name in names if "qkv" in name] == ["layers.1.self_attn.qkv_proj.weight"]


class Told:
    """A client whose server tells what it is given."""

    def __init__(self, sums):
        self.sums = sums

    async def checksums(self):
        return self.sums


def sums_of(model, dtype=torch.float32):
    return {name: sha256_hash(tensor.to(dtype)) for name, tensor in model.named_parameters()}


@functools.cache
def backend_at(seed):
    return backend_of(sharp_model(seed))


async def checked(check, version, seed, *clients):
    check.begin(version, backend_at(seed))
    try:
        for name, client in clients:
            await check(name, client)
    finally:
        await check.end()


async def test_a_tensor_counts_once_it_was_equal():
    check = ChecksumCheck(torch.float32)
    count = len(sums_of(sharp_model()))
    other = sums_of(sharp_model(1)) | {"model.norm.weight": "f" * 16, "of_the_servers_own": "0" * 16}
    await checked(check, 1, 1, ("server", Told(other)))
    assert check.compared == count - 1
    other = sums_of(sharp_model(2)) | {"model.norm.weight": "e" * 16}
    await checked(check, 2, 2, ("server", Told(other)))
    assert check.compared == count - 1
    stale = {"model.embed_tokens.weight": other["model.embed_tokens.weight"]}
    with pytest.raises(
        WrongWeightsError, match=rf"checksums of 1 of {count} tensors .*embed_tokens.*weights\.checksums"
    ):
        await checked(check, 3, 3, ("server", Told(sums_of(sharp_model(3)) | stale)))
    # Another server's tensors have never been equal: nobody knows how it holds them.
    await checked(check, 4, 4, ("other", Told(dict.fromkeys(other, "0" * 16))))
    assert check.compared == 0


async def test_tensors_are_compared_in_the_servers_format():
    check = ChecksumCheck(torch.bfloat16)
    await checked(check, 1, 1, ("server", Told(sums_of(sharp_model(1), torch.bfloat16))))
    assert check.compared == len(sums_of(sharp_model()))


async def test_padding_of_a_vocabulary_is_no_difference():
    model = sharp_model(1)
    sums = sums_of(model)
    embedding = model.get_input_embeddings().weight.detach()
    assert len(embedding) % 64
    padded = torch.nn.functional.pad(embedding, (0, 0, 0, -len(embedding) % 64))
    check = ChecksumCheck(torch.float32)
    name = "model.embed_tokens.weight"
    await checked(check, 1, 1, ("server", Told({name: tile_hash(padded)})))
    assert check.compared == 1
    await checked(check, 2, 1, ("server", Told({name: tile_hash(padded)})))
    with pytest.raises(WrongWeightsError):
        await checked(check, 3, 1, ("server", Told({name: sums[name]})))


async def test_large_models_are_compared_in_turn():
    model = sharp_model(1)
    backend, told = backend_of(model), sums_of(model)
    check = ChecksumCheck(torch.float32, bytes_at_once=1)

    async def look(version, sums):
        check.begin(version, backend)
        await check("a", Told(told))
        await check("b", Told(sums))

    for version in range(len(told)):
        await look(version, told)
        assert check.compared == 1
    found = []
    for version in range(len(told)):
        try:
            await look(version, dict.fromkeys(told, "0" * 16))
        except WrongWeightsError as error:
            found.append(str(error))
    assert [[name for name in told if f"({name})" in each] for each in found] == [[name] for name in told]


async def test_a_server_that_tells_none_and_one_that_is_back_too_late_are_not_compared():
    check = ChecksumCheck(torch.float32)
    await checked(check, 1, 1, ("none", Told(None)), ("engine", object()))
    assert check.compared is None
    await check("back", Told(sums_of(sharp_model(1))))
    assert check.compared == 0


@pytest.fixture
async def client(start):
    with InferenceServer("sglang", model=start) as server:
        async with asyncio.timeout(60), ServerClient(server.url, "sglang", way="disk") as client:
            yield server, client


async def test_a_server_tells_checksums_of_what_it_holds(client):
    _, talking = client
    told = await talking.checksums()
    check = ChecksumCheck(torch.float32)
    await checked(check, 1, 9, ("server", talking))
    assert check.compared == len(told)
    assert any(".qkv_proj." in name for name in told)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ({"status": 400, "body": '{"success": false, "message": "no memory"}'}, RequestRefusedError),
        ({"status": 200, "body": '{"success": false}'}, RequestRefusedError),
        ({"status": 200, "body": '{"success": true}'}, MalformedReplyError),
        ({"status": 200, "body": '{"success": true, "ranks": []}'}, MalformedReplyError),
        ({"status": 200, "body": '{"success": true, "ranks": [7]}'}, MalformedReplyError),
        ({"status": 200, "body": '{"success": true, "ranks": [{"checksums": []}]}'}, MalformedReplyError),
    ],
)
async def test_an_answer_that_is_none_is_an_error(client, fault, error):
    server, talking = client
    server.fail({"kind": "answer", "path": "/weights_checker", **fault})
    with pytest.raises(error, match=r"weights_checker|checksums"):
        await talking.checksums()


async def test_shares_of_ranks_are_no_whole_tensors(client):
    server, talking = client
    body = '{"success": true, "ranks": [{"checksums": {"a": "1", "b": "2"}}, {"checksums": {"a": "1", "b": "3"}}]}'
    server.fail({"kind": "answer", "path": "/weights_checker", "status": 200, "body": body})
    assert await talking.checksums() == {"a": "1"}


@pytest.mark.parametrize(("dialect", "release"), [("sglang", "0.5.22"), ("vllm", None)])
async def test_others_tell_none(dialect, release, start):
    with InferenceServer(dialect, release, model=start) as server:
        async with asyncio.timeout(60), ServerClient(server.url, dialect, way="disk") as talking:
            assert await talking.checksums() is None


def test_the_vocabulary_of_these_tests_is_one_that_is_padded():
    assert VOCABULARY % 64
