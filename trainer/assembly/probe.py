"""A look at the log-probabilities of a few tokens before a run: engine, training and model must agree on them."""

from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import torch
from transformers import PreTrainedModel

from rollgym.trainer.backends.heads import PolicyHead
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.inference.base import (
    GenerationRequest,
    GenerationResult,
    InferenceClient,
    SamplingParams,
)
from rollgym.trainer.models.picture_processor import PictureProcessor
from rollgym.trainer.models.pictures import image_tensors, own_inputs
from rollgym.trainer.records.images import Picture, PlacedImage
from rollgym.trainer.rollout.rendering import ChatRenderer

TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Largest difference of two log-probabilities that rounding can make, by the type of numbers.

Eight bits of a logit of some tens are steps of an eighth: bfloat16 shows wrong heads and masks, and nothing finer.
"""
_TOKENS = 8
_UNLIKE = (
    AttributeError,
    ConfigError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a model's code raises that reads pictures in another way."""


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
        client: Where replies are sampled, with the same weights.
        prompt: Token ids of a conversation.
        temperature: The rollouts' sampling temperature.
        max_length: Longest row in tokens.
        images: Pictures in the conversation, which must leave room for a reply then.

    Returns:
        The largest difference.

    Raises:
        ConfigError: If they do not agree; the message says who says what.
    """
    count = min(_TOKENS, max_length - 1)
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
    return max(_compare(model, head, ids, shown, reply, temperature) for (ids, shown), reply in pairs)


@torch.no_grad()
def _compare(
    model: PreTrainedModel,
    head: PolicyHead,
    prompt: list[int],
    images: Sequence[PlacedImage],
    reply: GenerationResult,
    temperature: float,
) -> float:
    # A placeholder that was drawn is no picture: most models' own code cannot read on behind it.
    placeholder = model.config.image_token_id if images else None
    answer = list(takewhile(lambda token: token != placeholder, reply.token_ids))
    if not answer:
        return 0.0
    ids = torch.tensor([[*prompt, *answer]], device=model.device)
    column = torch.arange(len(prompt), ids.shape[1], device=model.device)
    tensors = image_tensors(model, ids, [images])
    shown = {} if tensors is None else {"images": tensors}
    trained, _ = head(ids, torch.zeros_like(column), column, "none", **shown)
    given = own_inputs(model, ids[0], images)
    logits = model(**given, use_cache=False).logits[0, column - 1].float() / temperature
    own = logits.log_softmax(-1).gather(-1, ids[0, column][:, None])[:, 0]
    drawn = torch.tensor(reply.logprobs[: len(answer)], device=model.device)
    apart = torch.maximum((trained - own).abs(), (drawn - own).abs())
    worst = int(apart.nan_to_num(nan=torch.inf).argmax())
    if not bool((apart <= TOLERANCES[model.dtype]).all()):
        raise ConfigError(
            f"log-probabilities of {type(model).__name__} do not agree: for token {int(ids[0, column[worst]])} the "
            f"inference engine has {drawn[worst]:.4f}, training {trained[worst]:.4f} and the model's own forward "
            f"{own[worst]:.4f}; with this model ratios would mean nothing"
        )
    return float(apart.max())


async def try_pictures(
    settings: RunSettings, model: PreTrainedModel, client: InferenceClient, renderer: ChatRenderer
) -> PictureProcessor | str:
    """Return what reads pictures for a model, if engine, training and the model's own forward agree on one; or why not.

    Families differ in what they do with pictures. One that does more than put their features in the places of tokens
    may still be trained on text.

    Args:
        settings: The run.
        model: The policy.
        client: Where replies are sampled, with the same weights.
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
        if len(prompt.ids) + _TOKENS <= longest:
            temperature = settings.rollout.temperature
            await probe_log_probabilities(model, client, prompt.ids, temperature, longest, prompt.images)
    except _UNLIKE as error:
        if settings.model.vision is not None:
            raise
        return f"{type(model).__name__} reads them in a way that is not known here: {error}"
    return pictures
