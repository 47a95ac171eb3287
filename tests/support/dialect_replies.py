"""Calls and good replies of both dialects."""

from rollgym.trainer.inference.base import SamplingParams
from rollgym.trainer.inference.servers.chunks import GenerationCall
from rollgym.trainer.inference.servers.dialect import ServerCapabilities
from rollgym.trainer.inference.servers.sglang import SglangDialect
from rollgym.trainer.inference.servers.vllm import VllmDialect


def capabilities(**changes):
    plain = {
        "server": "a server",
        "release": (0, 33, 0),
        "model": "policy",
        "max_length": 99,
        "logprobs_of": "model",
        "weight_label": "default",
        "spans": True,
    }
    return ServerCapabilities(**(plain | changes))


VLLM = VllmDialect(capabilities())
COMPLETIONS = VllmDialect(capabilities(tokens_route=False))
SGLANG = SglangDialect(capabilities(release=(0, 5, 23), drains=False))
CALL = GenerationCall("0" * 32, [5, 6, 7], SamplingParams(4), 3, "a/b ü\n", "version-1")
SPANS = [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 3}]
IDS, LOGPROBS = [8, 9, 8], [-0.5, -1.25, 0.0]
GOOD = {
    VLLM: {
        "request_id": "x",
        "choices": [
            {
                "index": 0,
                "finish_reason": "length",
                "stop_reason": None,
                "token_ids": IDS,
                "logprobs": {
                    "content": [
                        {"token_id": token, "logprob": value, "rank": 1, "top_logprobs": []}
                        for token, value in zip(IDS, LOGPROBS, strict=True)
                    ]
                },
                "weight_versions": SPANS,
            }
        ],
    },
    COMPLETIONS: {
        "choices": [
            {
                "index": 0,
                "text": "...",
                "finish_reason": "length",
                "token_ids": IDS,
                "logprobs": {"tokens": ["a", "b", "a"], "token_logprobs": LOGPROBS},
                "weight_versions": SPANS,
            }
        ]
    },
    SGLANG: {
        "text": "...",
        "output_ids": IDS,
        "meta_info": {
            "id": "x",
            "finish_reason": {"type": "length", "length": 3},
            "output_token_logprobs": [
                [value, token, None] for token, value in zip(IDS, LOGPROBS, strict=True)
            ],
            "weight_versions": SPANS,
        },
    },
}
