"""A look at the log-probabilities of a few tokens before a run: engine, training and model must agree on them."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from trainer.backends.heads import PolicyHead
from trainer.core.errors import ConfigError
from trainer.inference.base import GenerationRequest, GenerationResult, InferenceClient, SamplingParams

TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Largest difference of two log-probabilities that rounding can make, by the type of numbers.

Eight bits of a logit of some tens are steps of an eighth: bfloat16 shows wrong heads and masks, and nothing finer.
"""
_TOKENS = 8


async def probe_log_probabilities(
    model: PreTrainedModel,
    client: InferenceClient,
    prompt: Sequence[int],
    temperature: float,
    max_length: int,
) -> float:
    """Draw a few tokens and compare their log-probabilities: as drawn, as trained, and by the model's own forward.

    Two prompts of unequal length are read together, as they are in a run.

    Args:
        model: The policy.
        client: Where replies are sampled, with the same weights.
        prompt: Token ids of a conversation.
        temperature: The rollouts' sampling temperature.
        max_length: Longest row in tokens.

    Returns:
        The largest difference.

    Raises:
        ConfigError: If they do not agree; the message says who says what.
    """
    count = min(_TOKENS, max_length - 1)
    whole = list(prompt)[-(max_length - count) :]
    prompts = [whole, whole[-max(1, len(whole) // 2) :]]
    sampling = SamplingParams(count, temperature)
    replies = await client.generate_together(
        [
            GenerationRequest(f"probe-{number}", ids, sampling, seed=number, order=(number,))
            for number, ids in enumerate(prompts)
        ]
    )
    head = PolicyHead(model, temperature)
    pairs = zip(prompts, replies, strict=True)
    return max(_compare(model, head, ids, reply, temperature) for ids, reply in pairs)


@torch.no_grad()
def _compare(
    model: PreTrainedModel, head: PolicyHead, prompt: list[int], reply: GenerationResult, temperature: float
) -> float:
    ids = torch.tensor([[*prompt, *reply.token_ids]], device=model.device)
    column = torch.arange(len(prompt), ids.shape[1], device=model.device)
    trained, _ = head(ids, torch.zeros_like(column), column, "none")
    logits = model(input_ids=ids, use_cache=False).logits[0, column - 1].float() / temperature
    own = logits.log_softmax(-1).gather(-1, ids[0, column][:, None])[:, 0]
    drawn = torch.tensor(reply.logprobs, device=model.device)
    apart = torch.maximum((trained - own).abs(), (drawn - own).abs())
    worst = int(apart.nan_to_num(nan=torch.inf).argmax())
    if not bool((apart <= TOLERANCES[model.dtype]).all()):
        raise ConfigError(
            f"log-probabilities of {type(model).__name__} do not agree: for token {int(ids[0, column[worst]])} the "
            f"inference engine has {drawn[worst]:.4f}, training {trained[worst]:.4f} and the model's own forward "
            f"{own[worst]:.4f}; with this model ratios would mean nothing"
        )
    return float(apart.max())
