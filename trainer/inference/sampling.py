"""Draw tokens from logits, each request from a random stream of its own.

One uniform number per token, read through the inverse of the cumulative distribution: who else shares a batch never
changes what a request draws, only rounding in the logits could.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trainer.core.device import widest_float
from trainer.inference.base import SamplingParams


class RequestStream:
    """Uniform numbers of one request."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.Philox(seed))

    def draw(self) -> float:
        """Return the next number in [0, 1)."""
        return float(self._generator.random())


def sampled_distribution(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Return the log-probabilities that tokens are drawn from, float32 `[rows, vocabulary]`.

    Temperature, top-k and top-p are applied and what is left is renormalised. With temperature 0 the distribution is
    that of temperature 1: greedy decoding reads it, and its log-probabilities say how likely the choice was.

    Args:
        logits: `[rows, vocabulary]`.
        sampling: How tokens are drawn.
    """
    logits = logits.float()
    if sampling.temperature > 0 and sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if sampling.top_p < 1.0:
        ordered, places = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(dim=-1)
        # A token stays while the mass before it is below top_p, so the most likely one always stays.
        outside = probabilities.cumsum(dim=-1) - probabilities >= sampling.top_p
        logits = logits.masked_fill(outside.scatter(-1, places, outside), -torch.inf)
    return logits.log_softmax(dim=-1)


def draw_tokens(
    logits: Tensor, samplings: Sequence[SamplingParams], streams: Sequence[RequestStream]
) -> tuple[list[int], list[float]]:
    """Draw one token per row and return the ids and their log-probabilities.

    Args:
        logits: `[rows, vocabulary]`.
        samplings: How each row's token is drawn.
        streams: Each row's random stream; a greedy row draws nothing from it.
    """
    ids = [0] * len(samplings)
    logprobs = [0.0] * len(samplings)
    places: dict[SamplingParams, list[int]] = {}
    for place, sampling in enumerate(samplings):
        places.setdefault(sampling, []).append(place)
    for sampling, rows in places.items():
        distribution = sampled_distribution(logits[rows] if len(places) > 1 else logits, sampling)
        if sampling.temperature == 0:
            chosen = distribution.argmax(dim=-1)
        else:
            uniforms = torch.tensor([streams[row].draw() for row in rows], dtype=torch.float64)
            chosen = inverse_transform(distribution, uniforms)
        picked = distribution.gather(-1, chosen[:, None])[:, 0]
        # One transfer from the device: ids are small enough to be exact in the type of the log-probabilities.
        tokens, values = torch.stack([chosen.to(picked.dtype), picked]).tolist()
        for row, token, logprob in zip(rows, tokens, values, strict=True):
            ids[row], logprobs[row] = int(token), logprob
    return ids, logprobs


def inverse_transform(log_probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Return, for each row, the first token whose cumulative probability exceeds the row's uniform number.

    Args:
        log_probabilities: `[rows, vocabulary]`; tokens of probability 0 are never chosen.
        uniforms: `[rows]`, in [0, 1).
    """
    wide = widest_float(log_probabilities.device)
    cumulative = log_probabilities.to(wide).exp().cumsum(dim=-1)
    # Rounding may leave the last sum a little below 1; scaling keeps every number inside the table.
    target = uniforms.to(device=cumulative.device, dtype=wide) * cumulative[:, -1]
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0].clamp(
        max=log_probabilities.shape[-1] - 1
    )
