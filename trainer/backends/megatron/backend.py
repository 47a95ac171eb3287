"""One rank's part of a model that Megatron-Core divides: layers, stages, rows and experts."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollgym.trainer.backends.base import EntropyMode, MicroBatch, TrainRow
from rollgym.trainer.backends.batching import RowBucket
from rollgym.trainer.backends.heads import Head, PolicyHead
from rollgym.trainer.backends.megatron.conversion import Shape
from rollgym.trainer.backends.megatron.heads import MegatronHead, MegatronPolicyHead, MegatronValueHead
from rollgym.trainer.backends.megatron.model import join_groups, megatron_body, megatron_config
from rollgym.trainer.backends.megatron.optimizer import MegatronSteps, wrap
from rollgym.trainer.backends.megatron.weights import MegatronPieces
from rollgym.trainer.backends.optimizer import Schedule
from rollgym.trainer.backends.rank_group import RankGroup
from rollgym.trainer.backends.sharded import ShardedBackend, ShardedModel
from rollgym.trainer.backends.weight_pieces import WholeModel
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.models.division import check_layout
from rollgym.trainer.models.lora import has_adapters


class MegatronModel(ShardedModel):
    """One rank's part of a model that is read and not trained."""

    source: PreTrainedModel | None = None
    """The model as the library has it, without weights; None of a critic."""

    @property
    def hub_model(self) -> PreTrainedModel | None:
        """The model as the library has it, of which names and configuration are read; None of a critic."""
        return self.source

    def _each(
        self,
        rows: Sequence[TrainRow],
        buckets: Sequence[RowBucket | None],
        entropy: EntropyMode,
        then: Callable[[RowBucket | None, MicroBatch], Tensor | None],
    ) -> None:
        """Compute micro-batches; with pipeline stages several are in flight at a time (Megatron's 1F1B)."""
        if self._group.shape.pipeline == 1:
            super()._each(rows, buckets, entropy, then)
            return
        head = self._head
        assert isinstance(head, MegatronHead)

        def forward_step(given: Iterator[RowBucket | None], _: nn.Module) -> tuple[Tensor | None, Any]:
            bucket = next(given)
            micro = self._run(rows, bucket, entropy)
            if not head.is_last:
                return head.handed_on, None
            share = then(bucket, micro)
            # A third result has it neither divided by micro-batches nor multiplied by ranks of a row.
            nothing = torch.zeros((), dtype=torch.int, device=self._group.device)
            return micro.outputs, lambda _: (micro.outputs if share is None else share, nothing, {})

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(buckets),
            model=[head],
            num_microbatches=len(buckets),
            seq_length=1,  # stages tell each other
            micro_batch_size=1,
            forward_only=not torch.is_grad_enabled(),
        )


class MegatronBackend(MegatronModel, ShardedBackend):
    """One rank's part of a model that is trained."""

    meant_to_share = False
    """Whether rows that begin alike were meant to share what they begin with."""

    @property
    def why_not_shared(self) -> str | None:
        """Why rows that begin alike do not share what they begin with; None if they are not meant to."""
        return self._head.why_not_shared if self.meant_to_share else None

    def _move(self, parts: Sequence[str], device: torch.device) -> None:
        self._optimizer.move(parts, device)


def megatron_model(
    head: Head | None,
    group: RankGroup,
    *,
    dtype: torch.dtype,
    tokens_per_micro_batch: int,
    sequence_parallel: bool = True,
) -> MegatronModel:
    """Return one rank's part of a model that stays as it is.

    Args:
        head: The model, whole, on any device, and what is read off it; the first rank's counts, and it is emptied.
        group: The ranks.
        dtype: Type of numbers that the model computes in, and is in.
        tokens_per_micro_batch: Tokens of a micro-batch, padding included.
        sequence_parallel: Whether activations between layers are divided over the ranks of a layer.

    Raises:
        ConfigError: If the model cannot be divided as the group wants it.
    """
    whole = WholeModel(head, group, lambda each: None)
    own = _divided(whole.shell, group, dtype, sequence_parallel, gradient_checkpointing=False)
    for parameter in own.parameters():
        parameter.requires_grad = False
    pieces = _pieces(whole.shell, own, group, dtype)
    _load(whole, pieces)
    model = MegatronModel(own, group, pieces, dtype=dtype, tokens_per_micro_batch=tokens_per_micro_batch)
    model.source = _language_model(whole.shell)
    return model


def megatron_backend(
    head: Head | None,
    group: RankGroup,
    optimizer: OptimizerSettings,
    schedule: Schedule,
    *,
    dtype: torch.dtype = torch.float32,
    gradient_checkpointing: bool = False,
    sequence_parallel: bool = True,
) -> MegatronBackend:
    """Return one rank's part of a model that is trained.

    Weights are held in the type that the model computes in, and once more in float32, a stretch of them in each of the
    ranks that hold the same; gradients are added up in float32.

    Args:
        head: The model, whole, on any device, and what is read off it; the first rank's counts, and it is emptied.
        group: The ranks.
        optimizer: The optimizer's settings, gradient clip and micro-batch size.
        schedule: The learning rate.
        dtype: Type of numbers that the model computes in.
        gradient_checkpointing: Whether activations are computed once more for the gradient in place of being kept.
        sequence_parallel: Whether activations between layers are divided over the ranks of a layer.

    Raises:
        ConfigError: If the model cannot be divided as the group wants it.
    """
    whole = WholeModel(head, group, lambda each: None)
    own = _divided(
        whole.shell, group, dtype, sequence_parallel, gradient_checkpointing=gradient_checkpointing
    )
    wrapped = wrap(own, optimizer)
    pieces = _pieces(whole.shell, own, group, dtype)
    steps = MegatronSteps(wrapped, group, pieces, optimizer, schedule.rate(0))
    _load(whole, pieces)
    backend = MegatronBackend(
        own,
        group,
        pieces,
        steps,
        schedule,
        dtype=dtype,
        tokens_per_micro_batch=optimizer.micro_batch_tokens,
        gradient_checkpointing=gradient_checkpointing,
    )
    backend.source = _language_model(whole.shell)
    backend.meant_to_share = optimizer.shared_prefixes != "off"
    return backend


def _divided(
    head: Head, group: RankGroup, dtype: torch.dtype, sequence_parallel: bool, *, gradient_checkpointing: bool
) -> MegatronHead:
    """Return this rank's part of a model, its weights not yet loaded, and what is read off it."""
    if has_adapters(head.model):
        raise ConfigError(
            "backend.kind megatron: adapters (model.lora) are not trained by Megatron-Core here: take "
            "backend.kind=fsdp2 or deepspeed, or train all weights"
        )
    config, mesh = head.body.config, group.shape
    check_layout(config, mesh, sequence_parallel=sequence_parallel)
    join_groups(mesh)
    critic = not isinstance(head, PolicyHead)
    rotary: Any = head.body.rotary_emb
    megatron = megatron_config(
        config,
        mesh,
        dtype=dtype,
        sequence_parallel=sequence_parallel,
        gradient_checkpointing=gradient_checkpointing,
    )
    body = megatron_body(config, group, megatron, rotary.inv_freq, critic=critic)
    if isinstance(head, PolicyHead):
        return MegatronPolicyHead(body, group, config.vocab_size, head.temperature)
    return MegatronValueHead(body, group, config.hidden_size)


def _pieces(head: Head, own: MegatronHead, group: RankGroup, dtype: torch.dtype) -> MegatronPieces:
    sizes = {name: tuple(parameter.shape) for name, parameter in head.model.named_parameters()}
    shape = Shape.of(head.body.config, critic=not isinstance(head, PolicyHead))
    return MegatronPieces(own.model, group, shape, sizes, dtype)


def _load(whole: WholeModel, pieces: MegatronPieces) -> None:
    for name, tensor in whole.weights():
        pieces.take(name.removeprefix("model."), tensor)


def _language_model(shell: Head) -> PreTrainedModel | None:
    return shell.model if isinstance(shell.model, PreTrainedModel) else None
