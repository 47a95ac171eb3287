"""Compares log-probabilities of a few tokens before a run: engine, training and model must agree on them.

In fp32 they agree to a thousandth, token by token. In bf16 each operation rounds to eight bits. The resulting error of
a log-probability depends on the model, and no bound on the largest difference over some tokens holds for all models. So
the measure is the model's distance from itself: its own forward computes the tokens as a whole row, and one after the
other as in decoding. Both results are right, and differ by rounding.

A sign test asks whether the examined result is further from one of them than the other one is. If the engine is right,
its result is one more computation of the same kind: of it and the model's own decoding, neither is the further one from
the model's whole row with a probability of more than a half, and likewise with the whole row and the decoding
exchanged. So of n tokens it is the further one k times or more with a probability of at most
P(Binomial(n, 1/2) >= k). A run is refused from the k on for which that is below one in ten million (94 of 128 tokens;
there are three such tests). One large difference counts as one, so a router that breaks a tie the other way refuses no
run. Tokens of a row are not quite independent, but a healthy engine mostly agrees to the bit with what computes as it
does, which is far less than a half. Similar computations do not serve as a measure: decoding alone and beside others
agrees with itself to the bit, and an engine with another shape of cache is right and further away. A fault that affects
few tokens only is not detected.

What whole rows and decoding do differently in the model's own code (attention to later tokens, positions that padding
shifts) is not rounding. For that there is a coarse bound for each row: a median of 16 times half the last bit of the
largest logit. `benchmarks/training/healthy_starts.py` counts how many healthy starts are refused, and which faults of
one layer are found.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rollgym.trainer.backends.heads import PolicyHead
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.sign_test import least_by_no_chance
from rollgym.trainer.inference.base import (
    GenerationRequest,
    GenerationResult,
    InferenceClient,
    SamplingParams,
)
from rollgym.trainer.models.language_head import cache_argument
from rollgym.trainer.models.picture_processor import PictureProcessor
from rollgym.trainer.models.pictures import image_tensors, own_inputs
from rollgym.trainer.models.trials import UNLIKE
from rollgym.trainer.records.images import Picture, PlacedImage
from rollgym.trainer.rollout.rendering import ChatRenderer

TOLERANCE = 1e-3
"""Largest difference of two log-probabilities that rounding makes in float32."""
_TOKENS = {torch.float32: 8, torch.bfloat16: 64}
_COARSE = 16.0
_HALF_A_BIT = 2.0**-9


@dataclass(frozen=True, slots=True)
class _Look:
    """Log-probabilities of the tokens of a reply, `[n]` each.

    Attributes:
        tokens: Their ids.
        drawn: As the engine drew them.
        trained: As training computes them.
        own: By the model's own forward, of the whole row.
        largest: The largest absolute logit at the position of each drawn token.
    """

    tokens: Tensor
    drawn: Tensor
    trained: Tensor
    own: Tensor
    largest: Tensor

    @property
    def apart(self) -> Tensor:
        """How far engine or training is from the model's own forward; infinite if either has a non-finite value."""
        either = torch.maximum((self.trained - self.own).abs(), (self.drawn - self.own).abs())
        return either.nan_to_num(nan=torch.inf)


async def probe_log_probabilities(
    model: PreTrainedModel,
    client: InferenceClient,
    prompt: Sequence[int],
    temperature: float,
    max_length: int,
    images: Sequence[PlacedImage] = (),
) -> float:
    """Draw a few tokens and compare their log-probabilities: as drawn, as trained, and by the model's own forward.

    Two prompts of unequal length are read together, as they are in a run.

    Args:
        model: The policy.
        client: The inference client, with the same weights.
        prompt: Token ids of a conversation.
        temperature: The rollouts' sampling temperature.
        max_length: Longest row in tokens.
        images: Pictures in the conversation, which must leave room for a reply then.

    Returns:
        The largest difference.

    Raises:
        ConfigError: If they do not agree; the message lists the values of each.
    """
    count = min(_TOKENS[torch.float32 if images else model.dtype], max_length - 1)
    whole = list(prompt)[-(max_length - count) :]
    half = whole[: images[0].start] if images else whole[-max(1, len(whole) // 2) :]
    prompts = [(whole, tuple(images)), (half or whole[:1], ())]
    sampling = SamplingParams(count, temperature)
    replies = await client.generate_together(
        [
            GenerationRequest(f"probe-{number}", ids, sampling, seed=number, order=(number,), images=shown)
            for number, (ids, shown) in enumerate(prompts)
        ]
    )
    head = PolicyHead(model, temperature)
    pairs = zip(prompts, replies, strict=True)
    looks = [_look(model, head, ids, shown, reply, temperature) for (ids, shown), reply in pairs]
    if model.dtype == torch.float32:
        faulty = [look for look in looks if bool((look.apart > TOLERANCE).any())]
    elif images:
        faulty = [look for look in looks if _is_coarse(look, look.apart)]
    else:
        faulty = _faulty_in_bf16(model, [ids for ids, _ in prompts], looks, temperature)
    if faulty:
        raise _disagreement(model, faulty[0])
    return max(float(look.apart.max()) for look in looks if len(look.tokens))


def _disagreement(model: PreTrainedModel, look: _Look) -> ConfigError:
    worst = int(look.apart.argmax())
    return ConfigError(
        f"log-probabilities of {type(model).__name__} do not agree: for token {int(look.tokens[worst])} the "
        f"inference engine has {look.drawn[worst]:.4f}, training {look.trained[worst]:.4f} and the model's own "
        f"forward {look.own[worst]:.4f}; with this model ratios would mean nothing"
    )


def _faulty_in_bf16(
    model: PreTrainedModel, prompts: Sequence[list[int]], looks: Sequence[_Look], temperature: float
) -> list[_Look]:
    """Return the looks if engine or training is further from the model's own computations than these are apart."""
    if coarse := [look for look in looks if _is_coarse(look, look.apart)]:
        return coarse
    drawn, trained, own = (
        torch.cat([getattr(look, name) for look in looks]) for name in ("drawn", "trained", "own")
    )
    least = least_by_no_chance(len(own))
    if int((drawn != own).sum()) < least and int((trained != own).sum()) < least:
        return []  # too few differ at all
    decoded = torch.cat(
        [
            _decoded(model, prompt, look.tokens, temperature)
            for prompt, look in zip(prompts, looks, strict=True)
        ]
    )
    if (
        _is_further(drawn, decoded, own)
        or _is_further(drawn, own, decoded)
        or _is_further(trained, decoded, own)
    ):
        return [max(looks, key=lambda look: float(look.apart.max()))]
    return []


def _is_coarse(look: _Look, apart: Tensor) -> bool:
    """Whether differences cannot be rounding, for any model."""
    if not len(apart):
        return False
    # Not a number is more than anything.
    return not bool((apart / look.largest.clamp(min=1.0)).median() <= _COARSE * _HALF_A_BIT)


def _is_further(seen: Tensor, healthy: Tensor, other: Tensor) -> bool:
    """Whether `seen` is further from `other` than `healthy` is, more often than by chance."""
    further = (seen - other).abs().nan_to_num(nan=torch.inf) > (healthy - other).abs()
    return int(further.sum()) >= least_by_no_chance(len(further))


@torch.no_grad()
def _look(
    model: PreTrainedModel,
    head: PolicyHead,
    prompt: list[int],
    images: Sequence[PlacedImage],
    reply: GenerationResult,
    temperature: float,
) -> _Look:
    # A placeholder that was drawn is not a picture: most models' own code fails on the tokens after it.
    placeholder = model.config.image_token_id if images else None
    answer = list(takewhile(lambda token: token != placeholder, reply.token_ids))
    ids = torch.tensor([[*prompt, *answer]], device=model.device)
    column = torch.arange(len(prompt), ids.shape[1], device=model.device)
    tokens, drawn = ids[0, column], torch.tensor(reply.logprobs[: len(answer)], device=model.device)
    if not answer:
        return _Look(tokens, drawn, drawn, drawn, drawn)
    tensors = image_tensors(model, ids, [images])
    shown = {} if tensors is None else {"images": tensors}
    trained, _ = head(ids, torch.zeros_like(column), column, "none", **shown)
    given = own_inputs(model, ids[0], images)
    logits = model(**given, use_cache=False).logits[0, column - 1].float() / temperature
    return _Look(tokens, drawn, trained, _chosen(logits, tokens), logits.abs().amax(-1))


def _chosen(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


@torch.no_grad()
def _decoded(model: PreTrainedModel, prompt: list[int], reply: Tensor, temperature: float) -> Tensor:
    """Return log-probabilities of a reply `[n]` by the model's own forward, one token after the other."""
    read, new = 0, torch.tensor([prompt], device=model.device)
    cache = {cache_argument(model): DynamicCache()}
    found = []
    for token in reply:
        positions = torch.arange(read, read + new.shape[1], device=model.device)[None]
        output = model(input_ids=new, position_ids=positions, use_cache=True, **cache)
        found.append(_chosen(output.logits[0, -1].float() / temperature, token))
        read, new = read + new.shape[1], token[None, None]
    return torch.stack(found)


async def try_pictures(
    settings: RunSettings, model: PreTrainedModel, client: InferenceClient, renderer: ChatRenderer
) -> PictureProcessor | str:
    """Return what reads pictures for a model, if engine, training and the model's own forward agree on one; or why not.

    Families differ in what they do with pictures. One that does more than put their features in the places of tokens
    may still be trained on text.

    Args:
        settings: The run.
        model: The policy.
        client: The inference client, with the same weights.
        renderer: The policy's, with what reads pictures.

    Raises:
        ConfigError: If the policy was made to see, and they do not agree.
    """
    pictures = renderer.pictures
    pixels = np.arange(32 * 32 * 3, dtype=np.int64).reshape(32, 32, 3) * 7 % 251
    shown = [
        {"type": "image", "image": Picture(pixels.astype(np.uint8))},
        {"type": "text", "text": "Which way?"},
    ]
    try:
        prompt = renderer.read([{"role": "user", "content": shown}])
        longest = settings.model.max_length
        if len(prompt.ids) + _TOKENS[torch.float32] <= longest:
            temperature = settings.rollout.temperature
            await probe_log_probabilities(model, client, prompt.ids, temperature, longest, prompt.images)
    except (*UNLIKE, ConfigError) as error:
        if settings.model.vision is not None:
            raise
        return f"{type(model).__name__} reads them in a way that is not known here: {error}"
    return pictures
