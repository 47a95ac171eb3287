"""Training on several ranks with DeepSpeed's ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054). The package is imported
at its point of use: it is an extra.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollgym.trainer.backends.base import loss_of_nothing
from rollgym.trainer.backends.heads import Head
from rollgym.trainer.backends.optimizer import Schedule, make_optimizer
from rollgym.trainer.backends.packing import packs_rows
from rollgym.trainer.backends.prefix_costs import sharing_costs
from rollgym.trainer.backends.prefix_tree import CallCosts
from rollgym.trainer.backends.rank_group import RankGroup
from rollgym.trainer.backends.sharded import ShardedBackend
from rollgym.trainer.backends.sharded_optimizer import (
    Applied,
    by_paths,
    checked_groups,
    path_of,
    place_of,
    plain_state,
    what_broke,
)
from rollgym.trainer.backends.whole_model import WholeModel
from rollgym.trainer.backends.zero_pieces import ZeroMasters, ZeroPieces
from rollgym.trainer.config.optimizer import OptimizerSettings

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
        self._averages = _AVERAGES if settings.kind == "adamw" else ()
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

    def look(each: Head) -> tuple[CallCosts | None, bool]:
        return (
            sharing_costs(each, optimizer.shared_prefixes, group.device),
            packs_rows(each, optimizer.packed_rows, group.device, dtype),
        )

    whole = WholeModel(head, group, look)
    head = whole.shell
    costs, packs = look(head)
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
