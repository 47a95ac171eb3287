"""Optimizer steps by Megatron: gradients in buffers, and a state that the ranks with the same weights share."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from rollgym.trainer.backends.megatron.heads import MegatronHead
from rollgym.trainer.backends.megatron.weights import MegatronPieces
from rollgym.trainer.backends.optimizer import (
    Applied,
    by_paths,
    checked_groups,
    make_optimizer,
    path_of,
    place_of,
    plain_state,
    what_broke,
)
from rollgym.trainer.backends.rank_group import RankGroup
from rollgym.trainer.config.optimizer import OptimizerSettings

_AVERAGES = ("exp_avg", "exp_avg_sq")


class WholeState:
    """What an optimizer holds that is not divided: each weight itself, or its copy in float32."""

    divided = False

    def stretch(self, parameter: Tensor, key: str) -> tuple[int, Tensor] | None:
        """Return all of a weight as it is trained."""
        return 0, _master(parameter).view(-1)

    def read(self, parameter: Tensor, key: str) -> Tensor:
        """Return the weight as it is trained; there is nothing else."""
        return _master(parameter).float()

    def write(self, parameter: Tensor, key: str, content: Tensor) -> None:
        """Copy a loaded tensor into the weight as it is trained."""
        _master(parameter).copy_(content)


def _master(parameter: Tensor) -> Tensor:
    master: Tensor = getattr(parameter, "main_param", parameter)
    return master.detach()


class DistributedState:
    """What the distributed optimizer holds of each weight: in every rank one stretch of it, in float32.

    Args:
        optimizers: Megatron's optimizers: of dense weights, and of experts'.
    """

    divided = True

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._of = {
            parameter: optimizer
            for optimizer in optimizers
            for parameter in optimizer.model_param_group_index_map
        }

    def read(self, parameter: Tensor, key: str) -> Tensor:
        """Return a tensor of the parameter's shape, zero where other ranks hold it."""
        content = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
        held = self.stretch(parameter, key)
        if held is not None:
            start, tensor = held
            content.view(-1)[start : start + tensor.numel()].copy_(tensor.view(-1))
        return content

    def write(self, parameter: Tensor, key: str, content: Tensor) -> None:
        """Take of a tensor of the parameter's shape what this rank holds."""
        held = self.stretch(parameter, key)
        if held is not None:
            start, tensor = held
            tensor.view(-1).copy_(content.view(-1)[start : start + tensor.numel()])

    def stretch(self, parameter: Tensor, key: str) -> tuple[int, Tensor] | None:
        """Return where this rank's stretch of a weight begins, and what it holds of it."""
        optimizer = self._of.get(parameter)
        if optimizer is None:
            return None
        held = optimizer._get_main_param_and_optimizer_states(parameter)
        if key not in held:
            return None
        return optimizer._get_model_param_range_map(parameter)["param"].start, held[key].detach()


class MegatronSteps:
    """Megatron's distributed optimizer (Rajbhandari et al. 2020, arXiv 1910.02054, stage 1) over its gradient buffers.

    SGD, which has no state, steps whole weights.

    Args:
        wrapped: The model in Megatron's wrapper.
        group: The ranks.
        pieces: The weights.
        settings: The optimizer's settings and gradient clip.
        rate: Learning rate of the first step.
    """

    fused = False
    """Whether the setting of that name was followed: Megatron takes the kernels that it finds."""

    def __init__(
        self,
        wrapped: DistributedDataParallel,
        group: RankGroup,
        pieces: MegatronPieces,
        settings: OptimizerSettings,
        rate: float,
    ) -> None:
        self._wrapped = wrapped
        self._group = group
        self._pieces = pieces
        self._clip = settings.gradient_clip
        self._averages = settings.keeps_averages
        # No exceptions from weight decay: all backends step alike.
        self._optimizer = get_megatron_optimizer(
            optimizer_config(settings, rate, wrapped.config.params_dtype), [wrapped], config_overrides={}
        )
        self._parts: list[Any] = self._optimizer.chained_optimizers
        pieces.states = DistributedState(self._parts) if self._averages else WholeState()
        self._names = [name for name, _ in pieces.names()]
        # As torch writes the settings of one group of all weights.
        own = make_optimizer(settings, [torch.empty(0) for _ in self._names], rate)
        self._param_groups = own.state_dict()["param_groups"]
        self._count = 0
        self._saved_count = torch.zeros(())

    def backward(self, share: Tensor, *, last: bool) -> None:
        """Add the gradients of a share of the loss."""
        share.backward()

    def apply(self, finite: Tensor, rate: float) -> Applied:
        """Clip the gradients, take the step if all is finite in all ranks, and forget the gradients."""
        finalize_model_grads([self._wrapped])
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        taken = self._group.all_true(finite & torch.tensor(norm, device=finite.device).isfinite())
        broken = ""
        if taken:
            self._step(norm, rate)
        else:
            gradients = self._pieces.each_finite(_gradient)
            broken = what_broke(self._group, finite, gradients)
        self._wrapped.zero_grad_buffer()
        self._optimizer.zero_grad()
        return Applied(norm, taken, broken)

    def _step(self, norm: float, rate: float) -> None:
        for part in self._parts:
            if parameters := part.get_parameters():
                clip_grad_by_total_norm_fp32(parameters, self._clip, norm)
        for group in [*self._optimizer.param_groups, *self._param_groups]:
            group["lr"] = rate
        self._optimizer.step_with_ready_grads()
        self._count += 1

    def state(self) -> Iterator[tuple[str, Any]]:
        """Yield the state by paths, gathered one at a time, in torch's layout."""
        yield from by_paths(self._entries(), self._param_groups)

    def _entries(self) -> Iterator[tuple[int, str, Any]]:
        if not self._averages or not self._count:
            return
        for number, name in enumerate(self._names):
            yield number, "step", torch.tensor(float(self._count))
            for key in _AVERAGES:
                yield number, key, self._pieces.state(name, key)

    def pieces(self) -> dict[str, Tensor]:
        """Return this rank's pieces of the state by paths, made if there were none yet."""
        if not self._averages:
            return {}
        if not self._count:
            self._make_room()
            self.end_load()
        self._saved_count = torch.tensor(float(self._count))
        found: dict[str, Tensor] = {}
        for number, name in enumerate(self._names):
            found[path_of(number, "step")] = self._saved_count
            for key in _AVERAGES:
                found[path_of(number, key)] = self._pieces.piece(name, key)
        return found

    def plain(self) -> dict[str, Any]:
        """Return the parts of the state other than tensors, by paths."""
        return plain_state(self._param_groups, stateless=not self._averages)

    def pieces_read(self) -> None:
        """The pieces have other contents now: have the model compute with them."""
        self._count = int(self._saved_count)
        self.end_load()
        if self._averages:
            # As after a step: each rank has new numbers for its stretches, and the others get them from it.
            for part in self._parts:
                part._copy_main_params_to_model_params()
            self._wrapped.start_param_sync()
            return
        for parameter in self._wrapped.parameters():
            parameter.copy_(_master(parameter))

    def begin_load(self, plain: Mapping[str, Any]) -> None:
        """Load the parts of a state other than tensors, and allocate the tensors.

        Raises:
            ValueError: If it is of another optimizer.
        """
        checked_groups(plain, len(self._names))
        self._count = 0
        self._make_room()

    def _make_room(self) -> None:
        """Allocate averages of zeros, if the optimizer is one that has averages."""
        if not self._averages:
            return
        for part in self._parts:
            for group in part.param_groups:
                for parameter in group["params"]:
                    entries = part.optimizer.state[parameter]
                    for key in _AVERAGES:
                        entries[key] = torch.zeros_like(parameter.data, dtype=torch.float32)

    def take(self, path: str, whole: Tensor) -> None:
        """Take up a tensor of a state that all ranks have whole."""
        number, key = place_of(path)
        if key == "step":
            self._count = int(whole)
        elif key in _AVERAGES:
            self._pieces.put(self._names[number], key, whole)

    def end_load(self) -> None:
        """All of it was given."""
        if not self._averages:
            return
        for part in self._parts:
            for group in part.param_groups:
                if not isinstance(part.optimizer, torch.optim.AdamW):
                    group["step"] = self._count  # TransformerEngine's counts for all of a group
                    continue
                for parameter in group["params"]:
                    part.optimizer.state[parameter]["step"] = torch.tensor(float(self._count))

    def move(self, parts: Sequence[str], device: torch.device) -> None:
        """Bring the state and the gradients to a device's memory."""
        if self._group.device.type == "cpu":
            return
        away = device.type == "cpu"
        for buffer in [*self._wrapped.buffers, *self._wrapped.expert_parallel_buffers]:
            for name in {"parameters", "gradients"} & set(parts):
                chosen = {"move_params": name == "parameters", "move_grads": name == "gradients"}
                (buffer.offload_to_cpu if away else buffer.reload_from_cpu)(**chosen)
        if "optimizer" in parts:
            for part in self._parts:
                for master in _masters_of(part):
                    master.data = master.data.to(device)
                for entries in part.optimizer.state.values():
                    for key in _AVERAGES:
                        if key in entries:
                            entries[key] = entries[key].to(device)


def _masters_of(optimizer: Any) -> list[Tensor]:
    """An optimizer's own copies of weights in float32; weights that are in float32 are their own."""
    names = ("shard_fp32_from_float16_groups", "fp32_from_float16_groups")
    groups: list[Any] = next((getattr(optimizer, name) for name in names if hasattr(optimizer, name)), [])
    return [master for group in groups for master in group if master is not None]


def _gradient(parameter: Any) -> Tensor:
    gradient: Tensor = parameter.main_grad
    return gradient


def wrap(head: MegatronHead, settings: OptimizerSettings) -> DistributedDataParallel:
    """Return the model in Megatron's wrapper, whose buffers add up gradients in float32.

    Args:
        head: This rank's part of the model, and what is read off it.
        settings: The optimizer's settings.
    """
    buffers = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=settings.keeps_averages
    )
    return DistributedDataParallel(head.model.config, buffers, head)


def optimizer_config(settings: OptimizerSettings, rate: float, dtype: torch.dtype) -> OptimizerConfig:
    """Return Megatron's settings of an optimizer.

    Args:
        settings: The optimizer's settings.
        rate: Learning rate of the first step.
        dtype: Type of numbers that the model computes in.
    """
    return OptimizerConfig(
        optimizer="adam" if settings.kind == "adamw" else "sgd",
        lr=rate,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_eps=settings.epsilon,
        sgd_momentum=0.0,
        clip_grad=settings.gradient_clip,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        # Megatron divides Adam's state only.
        use_distributed_optimizer=settings.keeps_averages,
    )
