"""Activations that are computed once more for the gradient in place of being kept."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel

from trainer.backends.prefix_cache import take_replays


class GradientCheckpointing:
    """Lets the library compute activations again, which it does in training mode only.

    Args:
        model: What is trained: a language model, or a critic with one as its body.
        enabled: Whether it does; if not, nothing is changed.
    """

    def __init__(self, model: nn.Module, *, enabled: bool) -> None:
        self._bodies = bodies_of(model) if enabled else []
        for body in self._bodies:
            body.gradient_checkpointing_enable({"use_reentrant": False})
            take_replays(body)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let it while inside."""
        for body in self._bodies:
            body.train()
        try:
            yield
        finally:
            for body in self._bodies:
                body.eval()


def bodies_of(model: nn.Module) -> list[PreTrainedModel]:
    """Return the language models in what is trained: the policy itself, or a critic's body."""
    if isinstance(model, PreTrainedModel):
        return [model]
    return [module for module in model.children() if isinstance(module, PreTrainedModel)]


def layers_of(body: nn.Module) -> list[nn.Module]:
    """Return a language model's layers: what the library says must not be cut in two."""
    names = set(getattr(body, "_no_split_modules", None) or [])
    return [module for module in body.modules() if type(module).__name__ in names]
