"""Weights in float32 for the optimizer, where the model computes in fewer bits (Micikevicius et al. 2018, section 3.1).

A step of AdamW is often smaller than half the distance of two neighbouring bfloat16 numbers: added to such weights, it
is lost. The optimizer therefore keeps weights and gradients in float32, and the model computes with rounded copies.
Autocast over float32 weights would take as much memory and round every weight anew at each use; and the embedded engine
could not share the weights that training computes with, bit by bit.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer.models.lora import is_adapter


class MasterWeights:
    """The weights that are trained, in float32.

    Weights that the model computes with in float32 are their own masters. Gradients of the others move over to their
    masters as soon as they are there, so that those of micro-batches add up in float32 and none is held twice.

    Args:
        model: The model. Those of its bodies' trained weights that are no adapters are rounded to `dtype`; what is
            frozen stays as it is.
        dtype: Type of numbers that the model computes in.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._model = model
        self._rounded: dict[nn.Parameter, nn.Parameter] = {}
        self._hooks = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and not is_adapter(name) and _is_of_a_body(model, name):
                master = nn.Parameter(parameter.data.float())
                parameter.data = master.data.to(dtype)
                if dtype == torch.float32:
                    continue  # one and the same
                self._rounded[parameter] = master
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._take_gradient))
        self.trained = [
            self._rounded.get(parameter, parameter)
            for parameter in model.parameters()
            if parameter.requires_grad
        ]

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what is trained by name, in float32; tied weights once."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                yield name, self._rounded.get(parameter, parameter).detach()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model, after a step or where they were loaded."""
        for parameter, master in self._rounded.items():
            parameter.copy_(master)

    def release(self) -> None:
        """Give the model its weights in float32: who trains it next loses nothing."""
        for hook in self._hooks:
            hook.remove()
        for parameter, master in self._rounded.items():
            parameter.data = master.data
        self._rounded, self._hooks = {}, []

    def _take_gradient(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        master = self._rounded[parameter]
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None


def _is_of_a_body(model: nn.Module, name: str) -> bool:
    """Whether a parameter belongs to a language model, and not to what was put on top of one."""
    if isinstance(model, PreTrainedModel):
        return True
    return isinstance(getattr(model, name.partition(".")[0]), PreTrainedModel)
