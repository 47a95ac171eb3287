"""Drawing tokens: distributions and streams."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollgym.trainer.inference.base import SamplingParams
from rollgym.trainer.inference.engine.decoding import (
    RequestStream,
    draw_tokens,
    inverse_transform,
    sampled_distribution,
)

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]])


def test_top_p_keeps_the_smallest_set_with_its_mass():
    probabilities = LOGITS.softmax(-1)[0]
    kept = sampled_distribution(LOGITS, SamplingParams(1, top_p=0.8)).exp()[0]
    expected = probabilities[:2] / probabilities[:2].sum()
    assert kept.tolist() == pytest.approx([*expected.tolist(), 0.0, 0.0])


def test_top_p_never_empties():
    assert sampled_distribution(LOGITS, SamplingParams(1, top_p=1e-9)).exp()[0].tolist() == [
        1.0,
        0.0,
        0.0,
        0.0,
    ]


@given(uniform=st.floats(0.0, 1.0, exclude_max=True))
def test_inverse_transform_follows_the_cumulative_sum(uniform):
    distribution = torch.tensor([[0.1, 0.0, 0.6, 0.3]]).log()
    chosen = inverse_transform(distribution, torch.tensor([uniform], dtype=torch.float64)).item()
    assert chosen != 1, "a token of probability 0 is never drawn"
    assert (
        chosen == (0 if uniform < 0.1 else 2 if uniform < 0.7 else 3)
        or uniform == pytest.approx(0.1)
        or (uniform == pytest.approx(0.7))
    )


def test_streams_belong_to_requests():
    together = draw_tokens(LOGITS.repeat(2, 1), [SamplingParams(1)] * 2, [RequestStream(1), RequestStream(2)])
    alone = draw_tokens(LOGITS, [SamplingParams(1)], [RequestStream(2)])
    assert together[0][1] == alone[0][0]


def test_rows_may_be_drawn_differently():
    samplings = [SamplingParams(1, temperature=0.0), SamplingParams(1, top_k=1), SamplingParams(1)]
    tokens, logprobs = draw_tokens(LOGITS.repeat(3, 1), samplings, [RequestStream(seed) for seed in range(3)])
    assert tokens[:2] == [0, 0]
    assert logprobs[0] == pytest.approx(LOGITS.log_softmax(-1)[0, 0].item())
    assert logprobs[1] == 0.0
