"""What real servers said once: the double says the same, and the client can read it."""

import json
from pathlib import Path

import pytest

from rollgym.trainer.inference.base import SamplingParams
from rollgym.trainer.inference.calls import HttpAnswer, message_of
from rollgym.trainer.inference.servers.chunks import GenerationCall
from rollgym.trainer.inference.servers.dialect import ServerCapabilities
from rollgym.trainer.inference.servers.vllm import VllmDialect
from tests.support.inference_server.models import HashModel
from tests.support.inference_server.running import InferenceServer
from tests.support.inference_server.transcripts import differences, record, vllm_calls

FOLDER = Path(__file__).parent / "transcripts"
RELEASES = sorted(file.stem.removeprefix("vllm-") for file in FOLDER.glob("vllm-*.json"))


def entries_of(release):
    return json.loads((FOLDER / f"vllm-{release}.json").read_text())


def content(entry):
    try:
        return json.loads(entry["reply"])
    except ValueError:
        return entry["reply"]


@pytest.mark.parametrize("release", RELEASES)
def test_the_double_answers_as_the_real_server_did(release, tmp_path):
    real = entries_of(release)
    with InferenceServer("vllm", release, max_length=512) as server:
        double = record(server.url, vllm_calls(str(HashModel().write(tmp_path))))
    for one, other in zip(real, double, strict=True):
        assert (one["path"], one["status"]) == (other["path"], other["status"]), (one, other)
        if one["status"] == 200:
            assert differences(content(one), content(other), one["path"]) == []
        else:
            # Words differ; that there are some does not.
            assert bool(message_of(one["reply"].encode())) is bool(message_of(other["reply"].encode()))


@pytest.mark.parametrize("release", RELEASES)
def test_the_client_reads_what_the_real_server_said(release):
    call = GenerationCall("0" * 32, [3, 4, 5], SamplingParams(3), 1)
    read = 0
    for entry in entries_of(release):
        if entry["status"] != 200 or entry["path"] != "/inference/v1/generate":
            continue
        numbers = tuple(int(part) for part in release.split("."))
        capabilities = ServerCapabilities(
            "vLLM", numbers, "policy", 512, "model", "default", numbers >= (0, 33)
        )
        dialect = VllmDialect(capabilities)
        answer = HttpAnswer(200, entry["reply"].encode())
        stretch = dialect.read_generation(answer, call)
        assert len(stretch.token_ids) == 3
        assert stretch.finish_reason == "length"
        if "prompt_logprobs" in json.dumps(entry["body"]):
            conversation = dialect.score([3, 4, 5], "salt", None)
            next(conversation)
            with pytest.raises(StopIteration) as ended:
                conversation.send(answer)
            assert len(ended.value.value) == 2
        read += 1
    assert read == 2
