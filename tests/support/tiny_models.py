"""A policy small enough for tests, with weights large enough that its choices are not all alike."""

import torch

from rollgym.trainer.config.model import LoraSettings
from rollgym.trainer.models.lora import add_lora, is_adapter
from rollgym.trainer.models.tiny import TinyPolicySettings, build_tiny_model

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


def adapted_model(seed: int):
    """The policy of seed 9, and adapters beside it that do something."""
    model = sharp_model(9)
    add_lora(model, LoraSettings(rank=2), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


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

    def require_held(self):
        pass

    async def folder(self):
        raise AssertionError("nobody asked for files")
