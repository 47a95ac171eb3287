"""Weights that DeepSpeed's ZeRO divides. The package is imported at its point of use: it is an extra."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rollgym.trainer.backends.rank_group import RankGroup
from rollgym.trainer.models.lora import adapter_tensors, is_adapter, merged, plain_name
from rollgym.trainer.records.boxes import BoxedTensor


class ZeroMasters:
    """What DeepSpeed's engine holds in float32 of each weight: in every rank a stretch of its numbers.

    Its own functions for it lose the averages once they were brought to the processor's memory and back.

    Args:
        engine: The engine.
        group: The ranks.
    """

    def __init__(self, engine: Any, group: RankGroup) -> None:
        self._engine = engine
        self._group = group

    @property
    def _optimizer(self) -> Any:
        return self._engine.optimizer

    @property
    def averages(self) -> list[dict[str, Any]]:
        """The state of the optimizer that the engine was given: one for each tensor that it steps."""
        return list(self._optimizer.optimizer.state.values())

    def stretch(self, parameter: Any, key: str | None = None) -> tuple[int, Tensor]:
        """Return where this rank's stretch of a weight begins, and the engine's own memory of it.

        Args:
            parameter: The weight.
            key: Which of the optimizer's averages; the weight itself if None.
        """
        if self._engine.zero_optimization_stage() == 3:
            held, _ = self._optimizer._get_fp32_opt_state_partition(parameter, True, key)
            start = min(self._group.rank * held.numel(), parameter.ds_numel)
            # The last ones are filled up where a weight cannot be divided evenly.
            return start, held[: parameter.ds_numel - start].detach()
        if (fragment := parameter._hp_mapping) is None:
            return 0, torch.empty(0)
        (stepped,) = self._optimizer.optimizer.param_groups[fragment.param_group_index]["params"]
        held = stepped if key is None else self._optimizer.optimizer.state[stepped][key]
        place = fragment.hp_fragment_address
        return fragment.lp_fragment_address.start, held.detach()[place.start : place.start + place.numel]

    def piece(self, parameter: Tensor, key: str | None = None) -> BoxedTensor:
        """Return this rank's piece of a weight, or of one of its averages: the engine's own memory."""
        return BoxedTensor.of_stretch(whole_shape(parameter), *self.stretch(parameter, key))

    def whole(self, parameter: Tensor, key: str | None = None) -> Tensor:
        """Return a weight, or one of its averages, gathered from all ranks."""
        found = torch.zeros(whole_shape(parameter), dtype=torch.float32, device=self._group.device)
        start, held = self.stretch(parameter, key)
        found.view(-1)[start : start + held.numel()].copy_(held)
        # Each number comes from one rank; as bytes it arrives as it is, whatever its sign.
        dist.all_reduce(found.view(-1).view(torch.uint8))
        return found

    def put(self, parameter: Tensor, whole: Tensor, key: str | None = None) -> None:
        """Take of a weight, or of one of its averages, that all ranks have whole, what this one holds."""
        start, held = self.stretch(parameter, key)
        held.copy_(whole.flatten()[start : start + held.numel()])

    def compute_with(self) -> None:
        """Have the model compute with what is held."""
        if self._engine.zero_optimization_stage() < 3:
            self._optimizer.update_lp_params()
            return
        # As the engine does after a step.
        self._optimizer.checkpoint_event_prologue()
        for number in range(len(self._optimizer.fp16_groups)):
            self._optimizer._reassign_or_swap_out_partitioned_parameters(number)
        self._optimizer.checkpoint_event_epilogue()

    def offload(self, parts: Sequence[str]) -> None:
        """Bring what the engine holds of parts to the processor's memory."""
        masters = self._moved_here(parts)
        if kinds := states_of(parts, but_masters=not self._engine_moves_all):
            self._engine.offload_states(include=kinds)
        for each in masters:
            each.data = each.data.cpu()

    def reload(self, parts: Sequence[str]) -> None:
        """Bring it back; the engine brings all that it moved itself."""
        self._engine.reload_states()
        for each in self._moved_here(parts):
            each.data = each.data.to(self._group.device)

    @property
    def _engine_moves_all(self) -> bool:
        return bool(self._engine.zero_optimization_stage() < 3)

    def _moved_here(self, parts: Sequence[str]) -> list[Tensor]:
        """What of parts the engine does not move: at stage 3 it does for an optimizer of DeepSpeed's own only."""
        if self._engine_moves_all:
            return []
        found = [*self._optimizer.fp32_partitioned_groups_flat] if "parameters" in parts else []
        if "optimizer" in parts:
            held = [content for entries in self.averages for content in entries.values()]
            found += [content for content in held if isinstance(content, Tensor) and content.dim()]
        return found


def states_of(parts: Sequence[str], *, but_masters: bool) -> list[Any]:
    """Return what the engine calls the parts of a model.

    Args:
        parts: Some of "parameters", "gradients" and "optimizer".
        but_masters: Whether what is in float32, and the averages, are left out.
    """
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as Kinds

    known = {
        "parameters": (Kinds.lp_params, Kinds.hp_params),
        "gradients": (Kinds.lp_grads, Kinds.contiguous_grad_buffer),
        "optimizer": (Kinds.optim_states,),
    }
    masters = (Kinds.hp_params, Kinds.optim_states) if but_masters else ()
    return [kind for part in parts for kind in known[part] if kind not in masters]


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of a whole weight, of which a rank may hold a piece."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


class ZeroPieces:
    """Weights that DeepSpeed divides.

    Args:
        model: The model, wrapped already.
        stage: At stage 3 each rank holds a piece of every weight, below it all of them.
        masters: What is held in float32.
    """

    def __init__(self, model: nn.Module, stage: int, masters: ZeroMasters) -> None:
        self._model = model
        self._stage = stage
        self._masters = masters
        self._trained = {name: each for name, each in model.named_parameters() if each.requires_grad}

    def names(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and whole shapes of the weights that a checkpoint holds."""
        for name, parameter in self._trained.items():
            yield name, whole_shape(parameter)

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's pieces of what a checkpoint holds, by name."""
        for name, parameter in self._trained.items():
            yield name, self._masters.piece(parameter)

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
        for name, parameter in self._trained.items():
            yield name, self._masters.whole(parameter)

    def take(self, name: str, whole: Tensor) -> None:
        """Take a weight that all ranks have whole."""
        parameter = self._trained[name]
        self._masters.put(parameter, whole)
        with torch.no_grad(), self._gathering([parameter], modifier_rank=0):
            parameter.copy_(whole)

    def move(self, device: torch.device) -> None:
        """Nothing: the engine moves all that it holds together (`ZeroMasters.offload`)."""

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
