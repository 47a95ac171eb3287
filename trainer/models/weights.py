"""A model's weights by name: read one after the other, load, and build a second model without copying the first.

A model that is used here has no randomness in its forward: the sampled and the trained distribution must be the same.
"""

import copy
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rollgym.trainer.models.lora import is_adapter, merged, plain_name

Model = TypeVar("Model", bound=PreTrainedModel)

_NOISE = frozenset({"layerdrop", "jitter_noise", "input_jitter_noise"})
"""Attributes of modules that are read in training mode alone, beside all that have "dropout" in their name.

`router_jitter_noise` is not among them: Phi-3.5-MoE's router reads it in evaluation as well, as how near to the best an
expert must be.
"""


def without_chance(model: Model) -> Model:
    """Remove dropout, randomly skipped layers and the noise of routers from a model; return it.

    Most families keep what they drop by in modules or in attributes of modules. Falcon's layers read the configuration.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in [name for name, value in vars(module).items() if isinstance(value, float)]:
            if "dropout" in name or name in _NOISE:
                setattr(module, name, 0.0)
    if isinstance(getattr(model.config, "hidden_dropout", None), float):
        model.config.hidden_dropout = 0.0
    # With it the library would compute a loss of its own for the balance of experts: the algorithm's is the only one.
    if getattr(model.config, "output_router_logits", False):
        model.config.output_router_logits = False
    return model.eval()


def parameters_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights by the names of the model's own modules, always in one order; tied ones once.

    Weights beside which adapters lie come with these added to them, one at a time: nothing is held but the one that is
    read. All others are the model's own tensors.
    """
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            yield plain_name(name), merged(model, name, parameter.detach())


def hub_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights by the names that they have on the Hugging Face hub, which inference servers read.

    Mostly these are the names of the modules. Where the library holds the experts of a layer in one tensor, the hub has
    one for each; a layer's experts are copied for as long as they are read.
    """
    for name, tensor in parameters_of(model):
        yield from hub_names(model, name, tensor)


def hub_names(model: PreTrainedModel, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield one of the weights as the hub has it: mostly itself, but a layer's experts one by one."""
    yield from revert_weight_conversion(model, {name: tensor}).items()


def base_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights beside which adapters lie, without them, by the names that they have on the hub."""
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            yield from hub_names(model, plain_name(name), parameter.detach())


def load_weights(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy weights into `model` by the names of its modules; devices and types may differ.

    Raises:
        ValueError: If a name is unknown, a shape is another, or a weight is missing: a partial update is refused.
    """
    own = dict(model.named_parameters())
    missing = set(own)
    with torch.no_grad():
        for name, tensor in tensors:
            if name not in own:
                raise ValueError(f"weights do not fit the model: unknown {name}")
            if tensor.shape != own[name].shape:
                raise ValueError(f"weights do not fit the model: {name} is of another shape")
            own[name].copy_(tensor)
            missing.discard(name)
    if missing:
        raise ValueError(f"weights do not fit the model: missing {', '.join(sorted(missing)[:8])}")


def place(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Bring a model to a device, its weights (and not its tables of positions) to a type of numbers."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.to(device)


def twin_of(model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Return a second model of the same weights, on the same device, without adapters (they are added to the weights).

    It is built from the configuration without room for weights, which are then read one after the other.

    Args:
        model: A model, or the body of one.
        dtype: Type of the second one's numbers; the same if None.
    """
    with torch.device("meta"):
        twin: PreTrainedModel = type(model)(copy.deepcopy(model.config))
    for parameter in twin.parameters():
        parameter.data = parameter.data.to(dtype or model.dtype)
    twin.to_empty(device=model.device)
    twin.tie_weights()
    buffers = dict(model.named_buffers())
    for name, buffer in twin.named_buffers():
        buffer.copy_(buffers[name])
    load_weights(twin, parameters_of(model))
    if getattr(model, "generation_config", None) is not None:
        twin.generation_config = model.generation_config
    return without_chance(twin)
