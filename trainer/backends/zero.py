"""Training on several ranks with DeepSpeed's ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054). The package is imported
at its point of use: it is an extra.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollgym.trainer.backends.base import loss_of_nothing
from rollgym.trainer.backends.heads import Head
from rollgym.trainer.backends.optimizer import (
    Applied,
    Schedule,
    by_paths,
    checked_groups,
    make_optimizer,
    path_of,
    place_of,
    plain_state,
    what_broke,
)
from rollgym.trainer.backends.packing import shell_and_costs
from rollgym.trainer.backends.rank_group import RankGroup
from rollgym.trainer.backends.sharded import ShardedBackend
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.models.lora import adapter_tensors, is_adapter, merged, plain_name
from rollgym.trainer.records.pieces import BoxedTensor


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


_AVERAGES = ("exp_avg", "exp_avg_sq")


class EngineHead(Head):
    """A head that is computed by the engine that wraps it.

    Args:
        head: The head that was wrapped.
        engine: The engine.
        stage: What it divides.
    """

    def __init__(self, head: Head, engine: nn.Module, stage: int) -> None:
        super().__init__()
        self.model = head.model
        # Not as modules of this one: they hold the model too.
        self._wrapped = (head, engine)
        self._stage = stage

    @property
    def body(self) -> PreTrainedModel:
        """The part of the model that makes hidden states."""
        return self._wrapped[0].body

    @property
    def why_not_shared(self) -> str | None:
        """Why it cannot compute segments behind a prefix; None if it can."""
        if self._stage == 3:
            return "ZeRO at stage 3 gathers weights in the order of calls that it has seen, and trees differ"
        return self._wrapped[0].why_not_shared

    @property
    def why_not_packed(self) -> str | None:
        """Why it cannot compute rows behind each other; None if it can."""
        return self._wrapped[0].why_not_packed

    def keep_experts(self, *, wanted: bool) -> None:
        """Have forwards keep the experts that tokens take, or no longer."""
        self._wrapped[0].keep_experts(wanted=wanted)

    def kept_experts(self, rows: int, tokens: int) -> Tensor:
        """Return those of the last forward, int16 `[rows, tokens, layers * taken]`."""
        return self._wrapped[0].kept_experts(rows, tokens)

    def _read(self, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        """Return what the wrapped head reads."""
        return self._wrapped[0]._read(*inputs)

    def forward(self, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        """Return what the wrapped head returns."""
        computed: tuple[Tensor, Tensor | None] = self._wrapped[1](*inputs)
        return computed


class ZeroOptimizer:
    """Steps through DeepSpeed's engine, which clips gradients and leaves steps out that are not finite.

    Args:
        engine: The engine.
        masters: What it holds in float32.
        group: The ranks.
        trained: What is trained, by name.
        settings: The optimizer's settings.
        param_groups: The groups of the optimizer that the engine was given, as torch writes them.
        nothing: Computes something of the model that has no gradient, for a step that changes nothing.
        on_host: Whether the engine holds its state in the processor's memory as it is.

    Attributes:
        masters: What the engine holds in float32.
        fused: Whether a step is one kernel.
    """

    def __init__(
        self,
        engine: Any,
        masters: ZeroMasters,
        group: RankGroup,
        trained: Mapping[str, Tensor],
        settings: OptimizerSettings,
        param_groups: list[dict[str, Any]],
        nothing: Callable[[], Tensor],
        *,
        on_host: bool,
    ) -> None:
        self._engine = engine
        self.masters = masters
        self._group = group
        self._names = list(trained)
        self._trained = list(trained.values())
        self.fused = settings.fused is True
        self._averages = _AVERAGES if settings.keeps_averages else ()
        self._param_groups = param_groups
        self._nothing = nothing
        self._on_host = on_host
        self._count: Tensor | None = None
        # The engine's own look at gradients says nothing of whose they are, and leaves none of them behind.
        self._finite = [torch.ones((), dtype=torch.bool, device=group.device) for _ in self._trained]
        for number, parameter in enumerate(self._trained):
            parameter.register_hook(partial(self._note, number))

    def _note(self, number: int, gradient: Tensor) -> None:
        self._finite[number] &= gradient.isfinite().all()

    def backward(self, share: Tensor, *, last: bool) -> None:
        """Add the gradients of a share of the loss."""
        self._engine.set_gradient_accumulation_boundary(last)
        # Where a share is not finite, its gradient must not be either: that is what the engine looks at. The ranks'
        # gradients are averaged, and are shares of a sum.
        spoilt = torch.where(share.detach().isfinite(), 1.0, torch.nan)
        self._engine.backward(share * spoilt * self._group.data.size(), scale_wrt_gas=False)

    def apply(self, finite: Tensor, rate: float) -> Applied:
        """Take the step if all is finite in all ranks."""
        for group in [*self._engine.optimizer.param_groups, *self._param_groups]:
            group["lr"] = rate
        self._engine.step()
        taken = not self._engine.optimizer.overflow
        gradients = dict(zip(self._names, self._finite, strict=True))
        broken = "" if taken else what_broke(self._group, finite, gradients)
        for each in self._finite:
            each.fill_(True)
        return Applied(float(self._engine.get_global_grad_norm()), taken, broken)

    def state(self) -> Iterator[tuple[str, Any]]:
        """Yield the state by paths, gathered one at a time, in torch's layout."""
        return by_paths(self._whole_state(), self._param_groups)

    def _whole_state(self) -> Iterator[tuple[int, str, Tensor]]:
        count = self._steps_taken()
        if count is None:
            return
        for number, parameter in enumerate(self._trained):
            yield number, "step", count.clone().cpu()
            for key in self._averages:
                yield number, key, self.masters.whole(parameter, key)

    def pieces(self) -> dict[str, Tensor]:
        """Return this rank's pieces of the state by paths, made if there were none yet.

        If weights are not finite before the first step there are none: the engine takes no step then.
        """
        if self._averages and self._steps_taken() is None:
            self._make_room()
            self.end_load()
        count = self._steps_taken()
        if count is None:
            return {}
        self._count = count.clone().cpu()
        found: dict[str, Tensor] = {}
        for number, parameter in enumerate(self._trained):
            found[path_of(number, "step")] = self._count
            for key in self._averages:
                found[path_of(number, key)] = self.masters.piece(parameter, key)
        return found

    def plain(self) -> dict[str, Any]:
        """Return the parts of the state other than tensors, by paths."""
        return plain_state(self._param_groups, stateless=not self._averages)

    def pieces_read(self) -> None:
        """The pieces have other contents now: have the model compute with them."""
        self.end_load()
        self.masters.compute_with()

    def begin_load(self, plain: Mapping[str, Any]) -> None:
        """Load the parts of a state other than tensors, and allocate the tensors.

        Raises:
            ValueError: If it is of another optimizer.
        """
        checked_groups(plain, len(self._trained))
        self._make_room()

    def _make_room(self) -> None:
        """Have the engine make averages, if it has none yet: what they hold is not to be used."""
        self._count = None
        if self._averages and self._steps_taken() is None:
            rate = self._param_groups[0]["lr"]
            # It makes them in its first step. At a rate of 0 that changes no weight.
            self.backward(self._nothing(), last=True)
            self.apply(torch.ones((), dtype=torch.bool), 0.0)
            self._param_groups[0]["lr"] = rate

    def take(self, path: str, whole: Tensor) -> None:
        """Take up a tensor of a state that all ranks have whole."""
        number, key = place_of(path)
        if key == "step":
            self._count = whole
        elif key in self._averages:
            self.masters.put(self._trained[number], whole, key)

    def end_load(self) -> None:
        """All of it was given."""
        for entries in self.masters.averages:
            if "step" in entries:
                entries["step"].fill_(0.0 if self._count is None else float(self._count))
            if self._count is None:
                for key in self._averages:
                    entries[key].zero_()

    def move(self, parts: Sequence[str], device: torch.device) -> None:
        """Bring what the engine holds of parts to a device's memory; it brings all of them back together."""
        if self._group.device.type == "cpu" or self._on_host:
            return
        if device.type == "cpu":
            self.masters.offload(parts)
        else:
            self.masters.reload(parts)

    def _steps_taken(self) -> Tensor | None:
        """The optimizer's own count of its steps; None before the first."""
        return next((entries["step"] for entries in self.masters.averages if "step" in entries), None)


def zero_backend(
    head: Head | None,
    group: RankGroup,
    optimizer: OptimizerSettings,
    schedule: Schedule,
    *,
    stage: int,
    dtype: torch.dtype = torch.float32,
    gradient_checkpointing: bool = False,
    cpu_offload: bool = False,
) -> ShardedBackend:
    """Return one rank's part of a model that is trained.

    Args:
        head: The model, whole, and what is read off it; the first rank's counts, and it is emptied.
        group: The ranks.
        optimizer: The optimizer's settings, gradient clip and micro-batch size.
        schedule: The learning rate.
        stage: What is divided over the ranks: 1, the optimizer's state; 2, gradients too; 3, weights too.
        dtype: Type of numbers that the model computes in.
        gradient_checkpointing: Whether activations are computed once more for the gradient in place of being kept.
        cpu_offload: Whether the optimizer's state (at stage 3 weights too) is held in the processor's memory.

    """
    deepspeed = _deepspeed(group)
    whole, costs, packs = shell_and_costs(
        head, group, optimizer.shared_prefixes, optimizer.packed_rows, dtype
    )
    head = whole.shell
    whole.fill(head)
    head.to(group.device)  # its tables of positions
    trained = {name: each for name, each in head.model.named_parameters() if each.requires_grad}
    # The engine has the optimizer step pieces of its own, wherever it holds them.
    fused = optimizer.fused is True
    inner = make_optimizer(optimizer.model_copy(update={"fused": fused}), trained.values(), schedule.rate(0))
    param_groups = inner.state_dict()["param_groups"]
    engine, *_ = deepspeed.initialize(
        model=head,
        optimizer=inner,
        config=engine_config(optimizer.gradient_clip, stage, dtype, cpu_offload=cpu_offload),
        dist_init_required=False,
    )
    wrapped = EngineHead(head, engine, stage)
    masters = ZeroMasters(engine, group)

    def nothing() -> Tensor:
        ids = torch.zeros((1, 2), dtype=torch.int64, device=group.device)
        indices = torch.zeros(0, dtype=torch.int64, device=group.device)
        return loss_of_nothing(*wrapped(ids, indices, indices, "none"))

    return ShardedBackend(
        wrapped,
        group,
        ZeroPieces(head.model, stage, masters),
        ZeroOptimizer(engine, masters, group, trained, optimizer, param_groups, nothing, on_host=cpu_offload),
        schedule,
        dtype=dtype,
        tokens_per_micro_batch=optimizer.micro_batch_tokens,
        gradient_checkpointing=gradient_checkpointing,
        costs=costs,
        packs=packs,
    )


def engine_config(clip: float, stage: int, dtype: torch.dtype, *, cpu_offload: bool) -> dict[str, Any]:
    """Return DeepSpeed's own settings. Micro-batches, denominators and the rate are ours; it counts each as one."""
    sharding: dict[str, Any] = {"stage": stage}
    if cpu_offload:
        sharding["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if stage == 3:
            sharding["offload_param"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clip,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": sharding,
        "steps_per_print": 2**31,
    }


def _deepspeed(group: RankGroup) -> Any:
    os.environ.setdefault("DS_BUILD_OPS", "0")
    import deepspeed

    if group.device.type == "cpu":
        # Its exchange through shared memory would be compiled now, which takes minutes; gloo serves.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
