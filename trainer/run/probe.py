"""Compares log-probabilities of a few tokens before a run: engine, training and model must agree on them.

In fp32 they agree to a thousandth, token by token. In bf16 each operation rounds to eight bits. The resulting error of
a log-probability depends on the model, and no bound on the largest difference over some tokens holds for all models. So
the measure is the model's distance from itself: its own forward computes the tokens as a whole row, and one after the
other as in decoding. Both results are right, and differ by rounding.

A sign test asks whether the examined result is further from one of them than the other one is. If the engine is right,
its result is one more computation of the same kind: of it and the model's own decoding, neither is the further one from
the model's whole row with a probability of more than a half, and likewise with the whole row and the decoding
exchanged. So of n tokens it is the further one k times or more with a probability of at most
P(Binomial(n, 1/2) >= k). A run is refused from the k on for which that is below one in forty million (there are three
such tests). If it is below one in a hundred, as many tokens are drawn again, up to four times: a fault that is hardly
larger than rounding is found in 512 tokens and not in 128, and four looks refuse what is right with a chance of one in
ten million. One large difference counts as one, so a router that breaks a tie the other way refuses no
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
from rollgym.trainer.core.numbers import CHANCE, least_by_no_chance
from rollgym.trainer.inference.base import (
    GenerationRequest,
    GenerationResult,
    InferenceClient,
    SamplingParams,
)
from rollgym.trainer.models.language_head import UNLIKE, cache_argument
from rollgym.trainer.models.picture_processor import PictureProcessor
from rollgym.trainer.models.pictures import image_tensors, own_inputs
from rollgym.trainer.records.images import Picture, PlacedImage
from rollgym.trainer.rollout.prompts import ChatRenderer

TOLERANCE = 1e-3
"""Largest difference of two log-probabilities that rounding makes in float32."""
_TOKENS = {torch.float32: 8, torch.bfloat16: 64}
_LOOKS = 4
_DOUBT = 1e-2
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
    head = PolicyHead(model, temperature)

    async def look(first: int) -> list[_Look]:
        replies = await client.generate_together(
            [
                GenerationRequest(f"probe-{number}", ids, sampling, number, (number,), images=shown)
                for number, (ids, shown) in enumerate(prompts, first)
            ]
        )
        pairs = zip(prompts, replies, strict=True)
        return [_look(model, head, ids, shown, reply, temperature) for (ids, shown), reply in pairs]

    looks = taken = await look(0)
    if model.dtype == torch.float32:
        faulty = [each for each in looks if bool((each.apart > TOLERANCE).any())]
    elif images:
        faulty = [each for each in looks if _is_coarse(each, each.apart)]
    else:
        comparison = _Comparison(model, [ids for ids, _ in prompts], temperature)
        faulty = comparison.take(taken)
        while not faulty and comparison.is_in_doubt:
            taken = await look(comparison.looks * len(prompts))
            looks = [*looks, *taken]
            faulty = comparison.take(taken)
    if faulty:
        raise _disagreement(model, faulty[0])
    return max(float(each.apart.max()) for each in looks if len(each.tokens))


def _disagreement(model: PreTrainedModel, look: _Look) -> ConfigError:
    worst = int(look.apart.argmax())
    return ConfigError(
        f"log-probabilities of {type(model).__name__} do not agree: for token {int(look.tokens[worst])} the "
        f"inference engine has {look.drawn[worst]:.4f}, training {look.trained[worst]:.4f} and the model's own "
        f"forward {look.own[worst]:.4f}; with this model ratios would mean nothing"
    )


class _Comparison:
    """Whether engine or training is further from the model's own computations than these are apart, by several looks.

    Args:
        model: The policy, in bf16.
        prompts: Of each look's replies.
        temperature: At which they are drawn.

    Attributes:
        looks: How many were taken.
        is_in_doubt: Whether another one would tell more.
    """

    def __init__(self, model: PreTrainedModel, prompts: Sequence[list[int]], temperature: float) -> None:
        self._model = model
        self._prompts = prompts
        self._temperature = temperature
        self._tokens = 0
        self._further = torch.zeros(3, dtype=torch.long)
        self._replies: list[list[Tensor]] = [[] for _ in prompts]
        self.looks = 0
        self.is_in_doubt = False

    def take(self, looks: Sequence[_Look]) -> list[_Look]:
        """Return the looks at fault, given replies to all prompts."""
        if coarse := [look for look in looks if _is_coarse(look, look.apart)]:
            return coarse
        before = self._tokens
        news = []
        for look, earlier in zip(looks, self._replies, strict=True):
            news.append(slice(_first_new(look.tokens, earlier), None))
            earlier.append(look.tokens)
        self._tokens += sum(len(look.tokens[new]) for look, new in zip(looks, news, strict=True))
        self.looks += 1
        doubtful = least_by_no_chance(self._tokens, _DOUBT)
        # What is equal to one of two is not further from the other.
        if int(self._further.max()) + _unlike(looks, news) < doubtful:
            self.is_in_doubt = False
            return []
        for prompt, look, new in zip(self._prompts, looks, news, strict=True):
            drawn, trained, own = look.drawn[new], look.trained[new], look.own[new]
            decoded = _decoded(self._model, prompt, look.tokens, self._temperature)[new]
            tests = ((drawn, decoded, own), (drawn, own, decoded), (trained, decoded, own))
            self._further += torch.stack([_further(*test).sum().cpu() for test in tests])
        most = int(self._further.max())
        # A policy that says the same again says nothing new.
        self.is_in_doubt = most >= doubtful and self.looks < _LOOKS and self._tokens > before
        if most >= least_by_no_chance(self._tokens, CHANCE / _LOOKS):
            return [max(looks, key=lambda look: float(look.apart.max()))]
        return []


def _unlike(looks: Sequence[_Look], news: Sequence[slice]) -> int:
    """How many tokens engine or training, whichever has more, computes otherwise than the model's own forward."""
    pairs = list(zip(looks, news, strict=True))
    drawn = sum(int((look.drawn[new] != look.own[new]).sum()) for look, new in pairs)
    return max(drawn, sum(int((look.trained[new] != look.own[new]).sum()) for look, new in pairs))


def _first_new(reply: Tensor, earlier: Sequence[Tensor]) -> int:
    """Return from which token on a reply says something that no earlier reply to its prompt has said.

    The token at which it begins to differ is drawn from the same logits, which are no new computation.
    """
    first = 0
    for other in earlier:
        length = min(len(reply), len(other))
        same = int((reply[:length] == other[:length]).long().cumprod(0).sum())
        first = max(first, min(same + 1, len(reply)))
    return first


def _is_coarse(look: _Look, apart: Tensor) -> bool:
    """Whether differences cannot be rounding, for any model."""
    if not len(apart):
        return False
    # Not a number is more than anything.
    return not bool((apart / look.largest.clamp(min=1.0)).median() <= _COARSE * _HALF_A_BIT)


def _further(seen: Tensor, healthy: Tensor, other: Tensor) -> Tensor:
    """Whether `seen` is further from `other` than `healthy` is, for each token."""
    return (seen - other).abs().nan_to_num(nan=torch.inf) > (healthy - other).abs()


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
