"""Training on several ranks with DeepSpeed's ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054). The package is imported
where it is used: it is an extra.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer.backends.base import EntropyMode
from trainer.backends.heads import Head
from trainer.backends.optimizer import Schedule, make_optimizer
from trainer.backends.prefix_costs import sharing_costs
from trainer.backends.prefix_layout import SharedTokens
from trainer.backends.rank_group import RankGroup
from trainer.backends.sharded import Applied, ShardedBackend
from trainer.config.optimizer import OptimizerSettings
from trainer.core.errors import ConfigError
from trainer.models.lora import adapter_tensors, is_adapter, merged, plain_name

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
        self._why_not_shared = head.why_not_shared
        if stage == 3:
            self._why_not_shared = (
                "ZeRO at stage 3 gathers weights in the order of calls that it has seen, and trees differ"
            )

    @property
    def body(self) -> PreTrainedModel:
        """The part of the model that makes hidden states."""
        return self._wrapped[0].body

    @property
    def why_not_shared(self) -> str | None:
        """Why it cannot compute segments behind a prefix; None if it can."""
        return self._why_not_shared

    def forward(
        self,
        ids: Tensor,
        row: Tensor,
        column: Tensor,
        entropy: EntropyMode,
        shared: SharedTokens | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return what the wrapped head returns."""
        computed: tuple[Tensor, Tensor | None] = self._wrapped[1](ids, row, column, entropy, shared)
        return computed


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

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what is trained whole and in float32, gathered one at a time."""
        from deepspeed.utils import safe_get_full_fp32_param

        for name, parameter in self._trained.items():
            yield name, safe_get_full_fp32_param(parameter).view(dict(self.names())[name])

    def take(self, name: str, whole: Tensor) -> None:
        """Take a weight that all ranks have whole; one that is not ours is left out."""
        from deepspeed.utils import safe_set_full_fp32_param

        if name not in self._trained:
            return
        parameter = self._trained[name]
        safe_set_full_fp32_param(parameter, whole)
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


class ZeroOptimizer:
    """Steps through DeepSpeed's engine, which clips gradients and leaves steps out that are not finite.

    Args:
        engine: The engine.
        group: The ranks.
        trained: What is trained, in order.
        settings: The optimizer's settings.
        param_groups: The groups of the optimizer that the engine was given, as torch writes them.
        nothing: Computes something of the model that has no gradient, for a step that changes nothing.
    """

    def __init__(
        self,
        engine: Any,
        group: RankGroup,
        trained: Sequence[Tensor],
        settings: OptimizerSettings,
        param_groups: list[dict[str, Any]],
        nothing: Callable[[], Tensor],
    ) -> None:
        self._engine = engine
        self._group = group
        self._trained = list(trained)
        self._averages = _AVERAGES if settings.kind == "adamw" else ()
        self._param_groups = param_groups
        self._nothing = nothing
        self._count: Tensor | None = None

    def backward(self, share: Tensor, *, last: bool) -> None:
        """Add the gradients of a share of the loss."""
        self._engine.set_gradient_accumulation_boundary(last)
        # Where a share is not finite, its gradient must not be either: that is what the engine looks at. The ranks'
        # gradients are averaged, and are shares of a sum.
        spoilt = torch.where(share.detach().isfinite(), 1.0, torch.nan)
        self._engine.backward(share * spoilt * self._group.data.size(), scale_wrt_gas=False)

    def apply(self, finite: Tensor, rate: float) -> Applied:
        """Take the step if all is finite in all ranks."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        for group in self._param_groups:
            group["lr"] = rate
        self._engine.step()
        return Applied(float(self._engine.get_global_grad_norm()), not self._engine.optimizer.overflow)

    def state(self) -> Iterator[tuple[str, Any]]:
        """Yield the state by paths, gathered one at a time, in torch's layout."""
        from deepspeed.utils import safe_get_full_optimizer_state

        count = self._steps_taken()
        if count is None:
            yield "optimizer\tstate", {}
        else:
            for index, parameter in enumerate(self._trained):
                shape = getattr(parameter, "ds_shape", parameter.shape)
                yield f"optimizer\tstate\t#{index}\tstep", count.clone().cpu()
                for key in self._averages:
                    whole = safe_get_full_optimizer_state(parameter, key)
                    yield f"optimizer\tstate\t#{index}\t{key}", whole.view(shape)
        yield "optimizer\tparam_groups", self._param_groups

    def begin_load(self, plain: Mapping[str, Any]) -> None:
        """Take up what of a state is no tensor, and make room for what is.

        Raises:
            ValueError: If it is of another optimizer.
        """
        groups = plain["optimizer\tparam_groups"]
        if [len(group["params"]) for group in groups] != [len(self._trained)]:
            raise ValueError("its optimizer is of another model")
        self._count = None
        if self._averages and self._steps_taken() is None:
            # The engine makes the averages in its first step. At a rate of 0 that changes no weight.
            self.backward(self._nothing(), last=True)
            self.apply(torch.ones((), dtype=torch.bool), 0.0)

    def take(self, path: str, whole: Tensor) -> None:
        """Take up a tensor of a state that all ranks have whole."""
        from deepspeed.utils import safe_set_full_optimizer_state

        _, _, index, key = path.split("\t")
        if key == "step":
            self._count = whole
        elif key in self._averages:
            safe_set_full_optimizer_state(self._trained[int(index.removeprefix("#"))], whole, key)

    def end_load(self) -> None:
        """All of it was given."""
        for entries in self._engine.optimizer.optimizer.state.values():
            if "step" in entries:
                entries["step"].fill_(0.0 if self._count is None else float(self._count))
            if self._count is None:
                for key in self._averages:
                    entries[key].zero_()

    def move(self, parts: Sequence[str], device: torch.device) -> None:
        """Bring what the engine holds to a device's memory; it moves all of it together."""
        if self._group.device.type == "cpu" or "optimizer" not in parts:
            return
        if device.type == "cpu":
            self._engine.offload_states()
        else:
            self._engine.reload_states()

    def _steps_taken(self) -> Tensor | None:
        """The optimizer's own count of its steps; None before the first."""
        counts = [
            entries["step"]
            for entries in self._engine.optimizer.optimizer.state.values()
            if "step" in entries
        ]
        return counts[0] if counts else None


def zero_backend(
    head: Head,
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
        head: The model, whole, and what is read off it; it is changed in place.
        group: The ranks.
        optimizer: The optimizer's settings, gradient clip and micro-batch size.
        schedule: The learning rate.
        stage: What is divided over the ranks: 1, the optimizer's state; 2, gradients too; 3, weights too.
        dtype: Type of numbers that the model computes in.
        gradient_checkpointing: Whether activations are computed once more for the gradient in place of being kept.
        cpu_offload: Whether the optimizer's state (at stage 3 weights too) is held in the processor's memory.

    Raises:
        ConfigError: If the package cannot do it on this device.
    """
    if cpu_offload and group.device.type == "cpu":
        raise ConfigError("backend.cpu_offload: there is no device to take anything off: leave it out")
    deepspeed = _deepspeed(group)
    head.to(group.device)
    # Both look at weights, which are in pieces once the model is wrapped.
    head.why_not_shared  # noqa: B018
    costs = sharing_costs(head, optimizer.shared_prefixes, group.device)
    trained = [each for each in head.model.parameters() if each.requires_grad]
    inner = make_optimizer(optimizer, trained, schedule.rate(0))
    param_groups = inner.state_dict()["param_groups"]
    engine, *_ = deepspeed.initialize(
        model=head,
        optimizer=inner,
        config=engine_config(optimizer.gradient_clip, stage, dtype, cpu_offload=cpu_offload),
        dist_init_required=False,
    )
    wrapped = EngineHead(head, engine, stage)

    def nothing() -> Tensor:
        ids = torch.zeros((1, 2), dtype=torch.int64, device=group.device)
        places = torch.zeros(0, dtype=torch.int64, device=group.device)
        return wrapped(ids, places, places, "none")[0].sum() * 0.0

    return ShardedBackend(
        wrapped,
        group,
        ZeroPieces(head.model, group, stage),
        ZeroOptimizer(engine, group, trained, optimizer, param_groups, nothing),
        schedule,
        dtype=dtype,
        tokens_per_micro_batch=optimizer.tokens_per_micro_batch,
        gradient_checkpointing=gradient_checkpointing,
        costs=costs,
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
