"""Builders and parsers of both dialects on plain data: no reply, however broken, raises anything but its own errors."""

import copy
import json
import time
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.inference.base import GenerationRequest, SamplingParams
from rollgym.trainer.inference.calls import HttpAnswer, excerpt, header_value, message_of, read_object
from rollgym.trainer.inference.errors import (
    InferenceError,
    MalformedReplyError,
    RequestRefusedError,
    ServerSetupError,
)
from rollgym.trainer.inference.server_client.in_flight import PartialReply
from rollgym.trainer.inference.server_client.replies import ReplyEvents
from rollgym.trainer.inference.servers import sglang_server, vllm_server
from rollgym.trainer.inference.servers.chunks import GenerationCall, labels_of_spans
from rollgym.trainer.inference.servers.dialect import Bucket, GroupAddress, ServerRequirements, read_release
from rollgym.trainer.inference.servers.sglang import SglangDialect
from rollgym.trainer.inference.servers.vllm import VllmDialect
from tests.support.dialect_replies import (
    CALL,
    COMPLETIONS,
    GOOD,
    IDS,
    LOGPROBS,
    SGLANG,
    VLLM,
    capabilities,
)

DIALECTS = list(GOOD)
ALL = pytest.mark.parametrize("dialect", DIALECTS, ids=["vllm", "completions", "sglang"])


def answer(reply, status=200):
    return HttpAnswer(status, json.dumps(reply).encode())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def places(value, path=()):
    """All paths into a reply."""
    yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from places(part, (*path, key))


@pytest.mark.parametrize("named", ["token_id:9", "token_id:99", "9", 9, None])
def test_a_log_probability_may_name_its_token_in_words(named):
    """As vLLM did before 0.32."""
    reply = copy.deepcopy(GOOD[VLLM])
    for entry in (entries := reply["choices"][0]["logprobs"]["content"]):
        entry["token"] = f"token_id:{entry.pop('token_id')}"
    entries[1]["token"] = named
    if named in ("token_id:9", 9):
        assert VLLM.read_generation(answer(reply), CALL).logprobs == LOGPROBS
        return
    with pytest.raises(MalformedReplyError, match="log-probability 1 is of another token"):
        VLLM.read_generation(answer(reply), CALL)


@ALL
def test_a_reply_is_read(dialect):
    stretch = dialect.read_generation(answer(GOOD[dialect]), CALL)
    assert (stretch.token_ids, stretch.logprobs) == (IDS, LOGPROBS)
    assert stretch.labels == ["1", "2", "2"]
    assert stretch.finish_reason == "length"


def with_junk(reply, data):
    """A reply in which something somewhere is missing, or is anything else."""
    reply = copy.deepcopy(reply)
    path = data.draw(st.sampled_from(list(places(reply))))
    junk = data.draw(json_values)
    if not path:
        return junk
    holder = reply
    for key in path[:-1]:
        holder = holder[key]
    if data.draw(st.booleans()):
        holder[path[-1]] = junk
    else:
        del holder[path[-1]]
    return reply


@ALL
@settings(max_examples=60)
@given(data=st.data())
def test_a_reply_with_anything_anywhere_is_read_or_refused(dialect, data):
    reply = with_junk(GOOD[dialect], data)
    try:
        stretch = dialect.read_generation(answer(reply), CALL)
    except InferenceError:
        return
    assert len(stretch.token_ids) == len(stretch.logprobs) <= 4
    assert all(type(value) is float and -9999 < value <= 1e-3 for value in stretch.logprobs)
    assert all(type(token) is int and token >= 0 for token in stretch.token_ids)
    assert stretch.labels is None or len(stretch.labels) == len(stretch.token_ids)


@ALL
@settings(max_examples=60)
@given(data=st.data())
def test_a_stream_with_anything_anywhere_is_read_or_refused(dialect, data):
    told = []
    reading = ReplyEvents(dialect, told.extend)
    take = reading.reading()
    for event in (GOOD[dialect], with_junk(GOOD[dialect], data)):
        take(b"data: " + json.dumps(event).encode() + b"\n\n")
    assert all(type(token) is int for token in told)
    with suppress(InferenceError):
        dialect.read_generation(reading.answer(HttpAnswer(200, b"data: ...")), CALL)


@ALL
@settings(max_examples=30)
@given(body=st.binary(max_size=60), status=st.sampled_from([200, 400, 403, 404, 422, 500]))
def test_bytes_of_any_kind_are_refused(dialect, body, status):
    with pytest.raises((InferenceError, ServerSetupError)):
        dialect.read_generation(HttpAnswer(status, body), CALL)


@ALL
@pytest.mark.parametrize("unit", ["[", '{"a":', '{"choices":[', "x", '"' * 3, "\x00", "9", "é"])
def test_rubbish_is_refused_in_linear_time(dialect, unit):
    def seconds(size):
        body = (unit * (size // len(unit))).encode()
        started = time.process_time()
        with pytest.raises(MalformedReplyError) as raised:
            dialect.read_generation(HttpAnswer(200, body), CALL)
        with pytest.raises(RequestRefusedError):
            dialect.read_generation(HttpAnswer(400, body), CALL)
        assert len(str(raised.value)) < 1000
        return time.process_time() - started

    seconds(10_000)
    # Quadratic work on two megabytes would be minutes.
    assert seconds(2_000_000) < 2.0


@ALL
def test_an_abort_without_tokens_is_a_stretch(dialect):
    reply = copy.deepcopy(GOOD[dialect])
    if dialect is SGLANG:
        reply["output_ids"] = []
        meta = reply["meta_info"]
        meta |= {"output_token_logprobs": [], "weight_versions": [], "finish_reason": {"type": "abort"}}
    else:
        reply["choices"][0] |= {
            "token_ids": [],
            "logprobs": None,
            "weight_versions": [],
            "finish_reason": "abort",
        }
    stretch = dialect.read_generation(answer(reply), CALL)
    assert (stretch.token_ids, stretch.logprobs, stretch.finish_reason) == ([], [], "abort")


def test_a_stop_token_that_sglang_trims_comes_back():
    reply = copy.deepcopy(GOOD[SGLANG])
    reply["output_ids"] = IDS[:-1]
    reply["meta_info"]["finish_reason"] = {"type": "stop", "matched": IDS[-1]}
    assert SGLANG.read_generation(answer(reply), CALL).token_ids == IDS
    reply["meta_info"]["finish_reason"] = {"type": "length", "length": 3}
    with pytest.raises(MalformedReplyError):
        SGLANG.read_generation(answer(reply), CALL)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"error": {"message": "too long", "type": "BadRequestError"}}, "too long"),
        ({"error": "text of a contract"}, "text of a contract"),
        ({"object": "error", "message": "bad", "code": 400}, "bad"),
        ({"success": False, "message": "no such group"}, "no such group"),
        ({"success": False, "error_message": "no adapter"}, "no adapter"),
        ({"detail": "Not Found"}, "Not Found"),
        ({"error": "Unauthorized"}, "Unauthorized"),
        ([1, 2], "[1, 2]"),
    ],
)
def test_errors_of_every_shape_are_quoted(body, said):
    assert message_of(json.dumps(body).encode()) == said


@given(st.binary(max_size=2000))
def test_quotes_are_short_and_printable(body):
    assert len(excerpt(body)) <= 304
    assert excerpt(body).isprintable()


@given(st.lists(st.sampled_from(["default", "1", "2"]), max_size=12))
def test_spans_say_the_label_of_each_token(labels):
    spans = []
    for place, label in enumerate(labels):
        if spans and spans[-1]["version"] == label:
            spans[-1]["end"] = place + 1
        else:
            spans.append({"version": label, "start": place, "end": place + 1})
    assert labels_of_spans(spans, len(labels), "a reply") == labels
    if spans:
        for broken in (spans[1:], [*spans, spans[-1]], [*spans[:-1], spans[-1] | {"end": len(labels) + 1}]):
            with pytest.raises(MalformedReplyError):
                labels_of_spans(broken, len(labels), "a reply")


samplings = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(1, 30),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_p=st.sampled_from([0.9, 1.0]),
    top_k=st.sampled_from([0, 5]),
    stop_token_ids=st.lists(st.integers(0, 9), max_size=3).map(tuple),
)


@ALL
@given(
    ids=st.lists(st.integers(0, 10**6), min_size=1),
    sampling=samplings,
    seed=st.integers(0, 2**70),
    key=st.text(),
)
def test_what_is_asked_for_is_what_is_sent(dialect, ids, sampling, seed, key):
    call = dialect.generate(GenerationCall("0" * 32, ids, sampling, seed, key, "salt"))
    body = json.loads(json.dumps(call.body))
    params = body if dialect is COMPLETIONS else body["sampling_params"]
    assert (body.get("token_ids") or body.get("input_ids") or body.get("prompt")) == ids
    assert params.get("max_tokens", params.get("max_new_tokens")) == sampling.max_new_tokens
    assert params["stop_token_ids"] == list(sampling.stop_token_ids)
    assert params["temperature"] == sampling.temperature
    assert params.get("top_p", 1.0) == sampling.top_p
    assert params.get("top_k", 0) == sampling.top_k
    assert 0 <= params.get("seed", params.get("sampling_seed")) < 2**63
    assert body["cache_salt"] == "salt"
    for value in call.headers.values():
        assert value.isascii()
        assert value.isprintable()


def test_the_end_of_the_model_is_the_run_s_in_vllm_and_the_server_s_in_sglang():
    assert VLLM.generate(CALL).body["sampling_params"]["ignore_eos"] is True
    # There it would ignore the stop tokens, too.
    assert "ignore_eos" not in SGLANG.generate(CALL).body["sampling_params"]


def test_header_values_hold_one_line():
    assert header_value("a\r\nB: c") == "a%0D%0AB:%20c"


@pytest.mark.parametrize(
    ("text", "numbers"), [("0.33.0", (0, 33, 0)), ("0.32.0+cpu", (0, 32, 0)), ("v0.5.23.post1", (0, 5, 23))]
)
def test_releases_are_read(text, numbers):
    assert read_release(text) == numbers


@given(st.text(alphabet="ab.x+-", max_size=20))
def test_what_is_no_release_is_refused(text):
    with pytest.raises(MalformedReplyError):
        read_release(text)


@given(
    cuts=st.lists(st.integers(0, 5), max_size=6),
    tokens=st.lists(st.integers(10, 20), min_size=1, max_size=12),
    seed=st.integers(0, 2**53),
)
def test_a_reply_in_stretches_is_the_reply(cuts, tokens, seed):
    request = GenerationRequest("r", [1, 2], SamplingParams(len(tokens), stop_token_ids=(3,)), seed)
    reply, seeds = PartialReply(request), []
    left = list(tokens)
    for cut in [*cuts, len(tokens)]:
        part, left = left[:cut], left[cut:]
        if part:
            seeds.append(reply.seed)
            assert reply.sampling.max_new_tokens == len(part) + len(left)
            assert reply.prompt_ids + part + left == [1, 2, *tokens]
        reply.add(part, [-1.0] * len(part), [0] * len(part))
    assert reply.token_ids == tokens
    assert reply.finished() == "length"
    assert seeds[0] == seed
    assert len(set(seeds)) == len(seeds)


def played(conversation, answers):
    """A conversation whose server answers as told; gives the calls and what came of it."""
    calls = [next(conversation)]
    try:
        for each in answers:
            calls.append(conversation.send(each))
    except StopIteration as ended:
        return calls, ended.value
    raise AssertionError(f"it asked on: {calls[-1]}")


OK = answer({"success": True, "status": "ok"})
NO = answer({"success": False, "message": "no"}, 400)
ADDRESS = GroupAddress("10.0.0.1", 29500, 3, 1, "weights")


def paths(calls):
    return [call.path for call in calls]


def test_updates_are_conversations_in_the_order_of_the_contract():
    calls, _ = played(VLLM.load_folder("/w", "3", "recompute"), [OK] * 3)
    assert paths(calls) == ["/collective_rpc", "/reset_prefix_cache", "/update_weight_version"]
    assert calls[0].body == {"method": "reload_weights", "kwargs": {"weights_path": "/w"}}
    assert calls[1].query == {"reset_running_requests": "true"}
    assert paths(played(VLLM.load_folder("/w", "3", "keep"), [OK] * 2)[0])[1] == "/update_weight_version"
    calls, _ = played(SGLANG.load_folder("/w", "3", "abort"), [OK] * 2)
    assert paths(calls) == ["/update_weights_from_disk", "/flush_cache"]
    assert calls[0].body["keep_pause"] is True
    calls, _ = played(VLLM.end_update("3", "abort"), [OK] * 2)
    assert calls[0].body == {"weight_version": "3"}
    calls, _ = played(SGLANG.end_update("3", "keep"), [OK] * 2)
    assert paths(calls) == ["/end_weight_update", "/update_weight_version"]
    assert calls[1].body == {"new_version": "3", "abort_all_requests": False}
    old = VllmDialect(capabilities(release=(0, 24, 0), spans=False))
    assert paths(played(old.end_update("3", "abort"), [OK] * 2)[0])[0] == "/finish_weight_update"
    assert old.end_update("3", "abort").send(None).body == {}


def test_a_session_that_somebody_left_open_is_closed_first():
    calls, _ = played(VLLM.begin_update(), [answer({}, 500), OK, OK])
    assert paths(calls) == ["/start_weight_update", "/finish_weight_update", "/start_weight_update"]
    with pytest.raises(RequestRefusedError):
        played(VLLM.begin_update(), [answer({}, 500)] * 3)
    calls, _ = played(SGLANG.begin_update(), [NO, OK, OK])
    assert paths(calls)[1] == "/end_weight_update"
    calls, _ = played(SGLANG.join_group(ADDRESS), [NO, OK, OK])
    assert paths(calls)[1] == "/destroy_weights_update_group"
    without = SglangDialect(capabilities(sessions=False))
    assert list(without.begin_update()) == []


@pytest.mark.parametrize("dialect", [VLLM, SGLANG], ids=["vllm", "sglang"])
def test_a_no_is_an_error_everywhere(dialect):
    bucket = Bucket(["a"], ["float32"], [[1]])
    conversations = [
        dialect.pause("abort"),
        dialect.resume(),
        dialect.load_folder("/w", "1", "abort"),
        dialect.join_group(ADDRESS),
        dialect.update(bucket, ADDRESS),
        dialect.end_update("1", "abort"),
        dialect.weight_label(),
        dialect.load_adapter("a", "/a"),
        dialect.unload_adapter("a"),
        dialect.sleep(keep_weights=True),
        dialect.wake(["weights"]),
        dialect.score([1, 2], "s", None),
        dialect.abort(["x"]),
    ]
    for conversation in conversations:
        with pytest.raises(RequestRefusedError, match="no"):
            played(conversation, [NO] * 4)


def test_updates_by_what_cannot_be_undone_are_not_repeated():
    for dialect in (VLLM, SGLANG):
        for conversation in (
            dialect.begin_update(),
            dialect.join_group(ADDRESS),
            dialect.end_update("1", "keep"),
        ):
            assert next(conversation).repeatable is False
        assert next(dialect.load_folder("/w", "1", "keep")).repeatable is True
        assert dialect.generate(CALL).repeatable is True


def test_a_bucket_names_each_tensor_once():
    with pytest.raises(ValueError, match="2 names"):
        Bucket(["a", "b"], ["float32"], [[1]])


@pytest.mark.parametrize("probe", [vllm_server.probe, sglang_server.probe], ids=["vllm", "sglang"])
@given(replies=st.lists(json_values, min_size=1, max_size=6))
@settings(max_examples=40)
def test_a_probe_of_anything_ends_with_an_error(probe, replies):
    with pytest.raises((InferenceError, ConfigError)):
        played(probe(ServerRequirements("disk")), [answer(each) for each in [*replies, *[{}] * 20]])


def test_a_probe_of_a_server_that_draws_nothing_ends_with_an_error():
    nothing = copy.deepcopy(GOOD[VLLM])
    nothing["choices"][0]["token_ids"] = []
    said = [
        {"version": "0.27.0"},
        {"data": [{"id": "policy"}]},
        {"is_paused": False},
        {},
        *[nothing] * 3,
    ]
    with pytest.raises(MalformedReplyError, match="a request of one token has none"):
        played(vllm_server.probe(ServerRequirements()), [answer(each) for each in said])


@given(st.recursive(st.just([]), lambda inner: st.lists(inner, max_size=2)))
def test_only_objects_are_read(value):
    with pytest.raises(MalformedReplyError):
        read_object(json.dumps(value).encode())


@ALL
@pytest.mark.parametrize("token", [2**31, 2**63, -1, True])
def test_an_id_that_no_vocabulary_has_is_refused(dialect, token):
    reply = json.loads(json.dumps(GOOD[dialect]).replace("[8, 9, 8]", f"[8, {json.dumps(token)}, 8]"))
    with pytest.raises(MalformedReplyError, match="token id 1 is "):
        dialect.read_generation(answer(reply), CALL)


@ALL
@pytest.mark.parametrize("event", ["[1]", "5", "null", '"x"', "{"])
def test_an_event_that_is_no_object_is_a_fault_of_its_stream(dialect, event):
    reading = ReplyEvents(dialect, lambda ids: None)
    take = reading.reading()
    take(f"data: {json.dumps(GOOD[dialect])}\n\ndata: {event}\n\n".encode())
    with pytest.raises(InferenceError, match="is no JSON object"):
        dialect.read_generation(reading.answer(HttpAnswer(200, b"data: ...")), CALL)
