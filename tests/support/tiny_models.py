"""A policy small enough for tests, with weights large enough that its choices are not all alike."""

import torch

from trainer.models.tiny import TinyPolicySettings, build_tiny_model

VOCABULARY = 40


def sharp_model(seed: int = 0):
    """A one-layer policy over 40 tokens whose distributions are far from uniform."""
    model = build_tiny_model(
        TinyPolicySettings(VOCABULARY, hidden_size=16, layers=2, heads=2, max_length=64), seed
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(12.0)
    return model.eval()


def reference_logprobs(model, ids: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probability of each token but the first, by the plain forward pass of the library."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


class WeightsOf:
    """A model's parameters as an inference client takes them, from memory only."""

    def __init__(self, model):
        self._model = model

    def tensors(self):
        yield from self._model.named_parameters()

    parameters = tensors

    async def folder(self):
        raise AssertionError("nobody asked for files")
