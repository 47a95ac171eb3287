"""Weights that DeepSpeed's ZeRO divides. The package is imported where it is used: it is an extra."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainer.backends.rank_group import RankGroup
from trainer.models.lora import adapter_tensors, is_adapter, merged, plain_name


class ZeroPieces:
    """Weights that DeepSpeed divides.

    Args:
        model: The model, wrapped already.
        group: The ranks.
        stage: At stage 3 each rank holds a piece of every weight, below it all of them.
    """

    def __init__(self, model: nn.Module, group: RankGroup, stage: int) -> None:
        self._model = model
        self._group = group
        self._stage = stage
        self._trained = {name: each for name, each in model.named_parameters() if each.requires_grad}

    def names(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and whole shapes of the weights that a checkpoint holds."""
        for name, parameter in self._trained.items():
            yield name, tuple(getattr(parameter, "ds_shape", parameter.shape))

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what this rank holds of each weight that the model computes with, by name."""
        for name, parameter in self._model.named_parameters():
            yield name, getattr(parameter, "ds_tensor", parameter).detach()

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole weights with adapters added, gathered one at a time."""
        own = dict(self._model.named_parameters())
        for name, parameter in own.items():
            if is_adapter(name):
                continue
            layer = name.rpartition(".base_layer.")[0]
            beside = [each for key, each in own.items() if layer and key.startswith(f"{layer}.lora_")]
            with self._gathering([parameter, *beside]):
                whole = merged(self._model, name, parameter.detach()).clone()
            yield plain_name(name), whole

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole adapters by the names that peft saves them with."""
        own = [each for name, each in self._model.named_parameters() if is_adapter(name)]
        with self._gathering(own):
            whole = {name: tensor.clone() for name, tensor in adapter_tensors(self._model)}
        yield from whole.items()

    def put_adapters(self, tensors: Mapping[str, Tensor]) -> None:
        """Have the model compute with other adapters, which all ranks have whole; what is stepped stays as it is."""
        own = [each for name, each in self._model.named_parameters() if is_adapter(name)]
        with torch.no_grad(), self._gathering(own, modifier_rank=0):
            for name, tensor in adapter_tensors(self._model):
                tensor.copy_(tensors[name])

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what is trained whole and in float32, gathered one at a time."""
        from deepspeed.utils import safe_get_full_fp32_param

        for name, parameter in self._trained.items():
            yield name, safe_get_full_fp32_param(parameter).view(dict(self.names())[name])

    def take(self, name: str, whole: Tensor) -> None:
        """Take a weight that all ranks have whole."""
        parameter = self._trained[name]
        put_exact(parameter, whole, self._group.rank)
        with torch.no_grad(), self._gathering([parameter], modifier_rank=0):
            parameter.copy_(whole)

    def computing(self) -> AbstractContextManager[object]:
        """Entered while outputs are computed without gradient: nothing is to be done."""
        return nullcontext()

    def _gathering(
        self, parameters: Sequence[Tensor], modifier_rank: int | None = None
    ) -> AbstractContextManager[object]:
        if self._stage < 3:
            return nullcontext()
        from deepspeed.runtime.zero import GatheredParameters

        gathering: AbstractContextManager[object] = GatheredParameters(
            list(parameters), modifier_rank=modifier_rank
        )
        return gathering


def put_exact(parameter: Tensor, whole: Tensor, rank: int, key: str | None = None) -> None:
    """Set what the engine holds of a weight in float32.

    Args:
        parameter: The weight.
        whole: The new numbers, which all ranks have whole.
        rank: This rank.
        key: Which of the optimizer's averages; the weight itself if None.
    """
    from deepspeed import utils

    if not hasattr(parameter, "ds_id"):
        if key is None:
            utils.safe_set_full_fp32_param(parameter, whole)
        else:
            utils.safe_set_full_optimizer_state(parameter, whole, key)
        return
    # At stage 3 each rank sets its own piece. The last ones are filled up where a weight cannot be divided evenly: the
    # engine's functions for whole tensors do not know of it.
    size = cast(Any, parameter).ds_tensor.numel()
    start = rank * size
    piece = torch.zeros(size, dtype=whole.dtype, device=whole.device)
    own = whole.flatten()[start : start + size]
    piece[: own.numel()] = own
    if key is None:
        utils.safe_set_local_fp32_param(parameter, piece)
    else:
        utils.safe_set_local_optimizer_state(parameter, piece, key)
