"""Layers divided over ranks, as the model's own plan in the library says."""

import re
from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from rollgym.trainer.backends.layers import bodies_of
from rollgym.trainer.backends.rank_group import RankGroup
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.models.lora import has_adapters

_PER_HEAD = "replicated_with_grad_allreduce"


def divide_layers(model: nn.Module, group: RankGroup) -> list[str]:
    """Divide a model's layers over the tensor-parallel ranks.

    Embeddings and the output head stay whole in each of them.

    Args:
        model: A language model, or a critic with one as its body; it is changed in place.
        group: The ranks.

    Returns:
        Names of the weights that each rank holds whole, but uses for its own heads only: their gradients are parts of a
        sum over these ranks.

    Raises:
        ConfigError: If the model has no plan that is known here, or its heads do not divide.
    """
    parts = group.tensor.size()
    if parts == 1:
        return []
    partial: list[str] = []
    for body in bodies_of(model):
        core = body.base_model
        prefix = next(name for name, module in model.named_modules() if module is core)
        plan = layer_plan(body, parts)
        for name, module in core.named_modules():
            style = plan.get(_pattern(name))
            if style == _PER_HEAD:
                partial += [_joined(prefix, name, own) for own, _ in module.named_parameters()]
            elif style is not None:
                parallelize_module(module, group.tensor, _style(style))
    return partial


def layer_plan(body: PreTrainedModel, parts: int) -> Mapping[str, str]:
    """Return how each kind of layer is divided, by names with `*` in place of numbers.

    Args:
        body: A language model.
        parts: Tensor-parallel ranks.

    Raises:
        ConfigError: If it cannot be divided into so many parts by what is known here.
    """
    name = type(body).__name__
    if has_adapters(body):
        raise ConfigError(
            f"backend.mesh.tensor {parts}: adapters (model.lora) are not divided by tensor parallelism here: set "
            "backend.mesh.tensor=1, or train all weights"
        )
    plan = getattr(body.config, "base_model_tp_plan", None) or {}
    if not plan:
        raise ConfigError(
            f"backend.mesh.tensor {parts}: the library has no plan to divide {name}: set backend.mesh.tensor=1"
        )
    if unknown := sorted(set(plan.values()) - {"colwise", "rowwise", _PER_HEAD}):
        raise ConfigError(
            f"backend.mesh.tensor {parts}: the plan of {name} divides layers in a way that is not known here "
            f"({', '.join(unknown)}): set backend.mesh.tensor=1"
        )
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        count = getattr(body.config, key, parts)
        if count % parts:
            raise ConfigError(
                f"backend.mesh.tensor {parts} does not divide {key} {count} of {name}: take a number that does"
            )
    return plan


def _style(name: str) -> ParallelStyle:
    return ColwiseParallel() if name == "colwise" else RowwiseParallel()


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)
