"""Training in one process on plain torch."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollgym.trainer.algorithms.aggregation import Metrics, merge
from rollgym.trainer.backends.base import (
    Digest,
    EntropyMode,
    LossFunction,
    RoutedOutputs,
    StepKernels,
    StepReport,
    TrainRow,
)
from rollgym.trainer.backends.batching import Plans, RowBucket
from rollgym.trainer.backends.forward_pass import ForwardPass, KeptOutputs
from rollgym.trainer.backends.heads import Head
from rollgym.trainer.backends.layers import CompiledLayers, GradientCheckpointing, compiler_of
from rollgym.trainer.backends.optimizer import LOSS_NOT_FINITE, Schedule, gradient_named, make_optimizer
from rollgym.trainer.backends.packing import sharing_and_packing
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.models.device import give_back, peak_bytes
from rollgym.trainer.models.load import save_weights
from rollgym.trainer.models.lora import has_adapters, is_adapter, save_adapter
from rollgym.trainer.models.weights import hub_tensors, parameters_of
from rollgym.trainer.records.pieces import whole_state

_log = logging.getLogger(__name__)
_GIB = 2**30
_NUMBERS_TOGETHER = 2**25
"""Of gradients that are held until they are moved together (64 MiB in bfloat16)."""
_FEWEST_TOKENS = 256
"""Below which a micro-batch is not halved: what does not fit then is something else."""


class TorchBackend:
    """A model, its optimizer and nothing of an algorithm.

    What is trained are the weights that the model has not frozen: all of them, or its adapters.

    Args:
        head: The model, on its device, and what is read off it.
        optimizer: AdamW's settings, gradient clip and micro-batch size.
        schedule: The learning rate.
        dtype: Type of numbers that the model computes in. Below float32, the optimizer has weights of its own in
            float32, and those are saved.
        gradient_checkpointing: Whether activations are computed once more for the gradient in place of being kept.
        compiled: What compiles the layers, if anything (`model.compile`).
        plans: Plans of rows that other models compute too.
    """

    def __init__(
        self,
        head: Head,
        optimizer: OptimizerSettings,
        schedule: Schedule,
        *,
        dtype: torch.dtype = torch.float32,
        gradient_checkpointing: bool = False,
        compiled: str | None = None,
        plans: Plans | None = None,
    ) -> None:
        self._head = head
        self._settings = optimizer
        self._schedule = schedule
        self._steps = 0
        self._has_stepped = False
        self._masters = MasterWeights(head.model, dtype)
        costs, packs = sharing_and_packing(
            head, optimizer.shared_prefixes, optimizer.packed_rows, head.body.device, dtype
        )
        self._pass = ForwardPass(head, optimizer.micro_batch_tokens, costs, plans, packs=packs)
        self._optimizer = make_optimizer(optimizer, self._masters.trained, schedule.rate(0))
        self._checkpointing = GradientCheckpointing(head.model, enabled=gradient_checkpointing)
        self._layers = CompiledLayers(head, compiler_of(compiled, head.body.device))

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return self._schedule.rate(self._steps)

    def forward(self, rows: Sequence[TrainRow]) -> list[Tensor]:
        """Return the outputs of each row, float32 `[tokens]`, zero outside its mask, without gradient."""
        return self._pass.outputs(rows)

    def forward_routed(self, rows: Sequence[TrainRow]) -> RoutedOutputs:
        """Return what `forward` does, and the experts that tokens took.

        Raises:
            ConfigError: If the model has none whose choice is known.
        """
        return self._pass.routed(rows)

    def entropies(self, rows: Sequence[TrainRow], mode: EntropyMode = "metric") -> list[Tensor]:
        """Return the entropy that each token was drawn with, float32 `[tokens]`, without gradient."""
        return self._pass.outputs(rows, mode)

    def step(
        self,
        rows: Sequence[TrainRow],
        loss: LossFunction,
        *,
        entropy: EntropyMode = "none",
        keep_outputs: bool = False,
    ) -> StepReport:
        """Take one optimizer step; leave the weights as they are if the loss or the gradient is not finite.

        The losses of micro-batches are shares of one sum, so their gradients add up whatever the cut. The schedule of
        the learning rate advances in either case: it counts the run's steps.
        """
        while (computed := self._with_gradients(rows, loss, entropy, keep_outputs=keep_outputs)) is None:
            # Only here nothing holds the tensors any more that were computed.
            self._pass.halve()
            give_back(self._pass.device)
            _log.warning(
                "memory does not suffice for the micro-batches that were planned: they have %s tokens from now on",
                self._pass.tokens_per_micro_batch,
            )
        finite, kept = computed.finite, computed.kept
        trained = self._masters.trained
        norm = torch.nn.utils.get_total_norm([each.grad for each in trained if each.grad is not None])
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate
        self._steps += 1
        outputs = None if kept is None else kept.by_row()
        tokens = self._pass.tokens(rows, computed.buckets)
        if not bool(finite & norm.isfinite()):
            broken = LOSS_NOT_FINITE if not bool(finite) else gradient_named(self._broken_gradient())
            self._optimizer.zero_grad(set_to_none=True)
            return StepReport({}, float(norm), False, outputs, tokens, broken)
        torch.nn.utils.clip_grads_with_norm_(trained, self._settings.gradient_clip, norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._masters.publish()
        if not self._has_stepped:
            self._has_stepped = True
            self._compare_with_plan()
        return StepReport(merge(computed.metrics), float(norm), applied=True, outputs=outputs, tokens=tokens)

    def _with_gradients(
        self, rows: Sequence[TrainRow], loss: LossFunction, entropy: EntropyMode, *, keep_outputs: bool
    ) -> "_Computed | None":
        """Compute a batch and its gradients; None where smaller micro-batches may find the room that these lack."""
        self._optimizer.zero_grad(set_to_none=True)
        self._masters.forget()
        kept = KeptOutputs(rows) if keep_outputs else None
        finite = torch.ones((), dtype=torch.bool, device=self._pass.device)
        parts: list[Metrics] = []
        try:
            with self._checkpointing.active(), self._layers.active():
                buckets = self._pass.buckets(rows)
                for bucket in buckets:
                    micro = self._pass.run(rows, bucket, entropy)
                    if kept is not None:
                        kept.add(micro)
                    share, metrics = loss(micro)
                    finite &= share.detach().isfinite()
                    share.backward()
                    self._masters.add_gradients()
                    parts.append(metrics)
        except torch.OutOfMemoryError:
            if self._may_halve():
                return None
            raise
        return _Computed(buckets, parts, finite, kept)

    def _may_halve(self) -> bool:
        """Whether micro-batches may shrink: until a first step fits into memory, if their size is automatic."""
        is_open = self._settings.tokens_per_micro_batch == "auto"
        return is_open and not self._has_stepped and self._pass.tokens_per_micro_batch >= 2 * _FEWEST_TOKENS

    def _compare_with_plan(self) -> None:
        """Say so where the first step took more memory than was planned."""
        planned, peak = self._settings.planned_micro_batch, peak_bytes(self._pass.device)
        if planned is not None and peak is not None and peak > planned.peak_bytes:
            _log.warning(
                "the first step took up to %.1f GiB, and the memory plan said %.1f: where memory is short, set "
                "optimizer.tokens_per_micro_batch below %s",
                peak / _GIB,
                planned.peak_bytes / _GIB,
                self._pass.tokens_per_micro_batch,
            )

    def _broken_gradient(self) -> str | None:
        """Return the first weight whose gradient is not finite."""
        named = zip(self._masters.named(), self._masters.trained, strict=True)
        return next(
            (name for (name, _), each in named if each.grad is not None and not each.grad.isfinite().all()),
            None,
        )

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights by their Hugging Face names, in the type that the model computes in; tied weights once.

        Adapters come added to the weights that they lie beside.
        """
        model = self._head.model
        return hub_tensors(model) if isinstance(model, PreTrainedModel) else parameters_of(model)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the same by the names of the model's modules, which the library may hold in another division."""
        return parameters_of(self._head.model)

    def digest(self, into: Digest) -> None:
        """Add all that is trained to a digest, bit by bit and in float32."""
        for _, tensor in self._masters.named():
            into.update(tensor.contiguous().cpu().view(-1).view(torch.uint8).numpy())

    def not_finite(self) -> list[str]:
        """Return the names of the weights that hold anything but finite numbers."""
        names, weights = zip(*self._head.model.named_parameters(), strict=True)
        # One transfer from the device, and not one for each weight.
        finite = torch.stack([each.isfinite().all() for each in weights]).tolist()
        return [name for name, whole in zip(names, finite, strict=True) if not whole]

    def save(self, directory: Path) -> None:
        """Write the model in Hugging Face layout, adapters added to the weights."""
        model = self._head.model
        if not isinstance(model, PreTrainedModel):
            raise ValueError("a critic is saved in checkpoints only: no other tool has a use for it")
        save_weights(model, directory)

    @property
    def why_not_shared(self) -> str | None:
        """Why rows that begin alike do not share what they begin with; None if they do, or are not meant to."""
        return self._pass.why_not_shared

    @property
    def kernels(self) -> StepKernels:
        """What its steps are computed with."""
        return StepKernels(self._layers.compiler, bool(self._optimizer.defaults["fused"]), self._pass.packs)

    @property
    def has_adapter(self) -> bool:
        """Whether adapters are trained, and the model's own weights stay as they are."""
        return has_adapters(self._head.model)

    def save_adapter(self, directory: Path) -> None:
        """Write the adapters in peft's layout.

        Raises:
            ValueError: If there are none.
        """
        save_adapter(self._head.model, directory)

    def release(self) -> None:
        """Hand the model over to its next trainer, with its weights in float32."""
        self._masters.release()

    def state_dict(self) -> dict[str, Any]:
        """Return what is trained, the optimizer's state and the number of steps; tensors are the backend's own."""
        return {
            "model": dict(self._masters.named()),
            "optimizer": self._optimizer.state_dict(),
            "steps": self._steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state that `state_dict` returned.

        Raises:
            ValueError: If it is of another model.
        """
        state = whole_state(state)
        own, saved = dict(self._masters.named()), state["model"]
        if not all(name in saved and saved[name].shape == tensor.shape for name, tensor in own.items()):
            raise ValueError("it is of another model")
        for name, tensor in own.items():
            tensor.copy_(saved[name])
        self._masters.publish()
        self._optimizer.load_state_dict(state["optimizer"])
        self._steps = state["steps"]


@dataclass(frozen=True, slots=True)
class _Computed:
    """A batch whose gradients are there.

    Attributes:
        buckets: Its micro-batches.
        metrics: Of each.
        finite: Whether all shares of the loss are.
        kept: The outputs of its rows, if the caller requested them.
    """

    buckets: Sequence[RowBucket]
    metrics: Sequence[Metrics]
    finite: Tensor
    kept: KeptOutputs | None


class MasterWeights:
    """The weights that are trained, in float32 (Micikevicius et al. 2018, section 3.1).

    A step of AdamW is often smaller than half the distance of two neighbouring bfloat16 numbers: added to such weights,
    it is lost. The optimizer therefore keeps weights and gradients in float32, and the model computes with rounded
    copies. Autocast over float32 weights would take as much memory and round every weight at each use; and the
    embedded engine could not share the weights that training computes with, bit by bit.

    Weights that the model computes with in float32 are their own masters. Gradients of the others move over to their
    masters in groups of some millions of numbers, as a backward pass makes them: those of micro-batches add up in
    float32, few are held twice, and an accelerator is not launched for each weight.

    Args:
        model: The model. Of its bodies' trained weights all but the adapters are rounded to `dtype`; frozen weights
            stay as they are.
        dtype: Type of numbers that the model computes in.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._model = model
        self._rounded: dict[nn.Parameter, nn.Parameter] = {}
        self._hooks = []
        self._ready: dict[nn.Parameter, None] = {}
        self._numbers_ready = 0
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
        """Round the masters into the model, after a step or after they were loaded."""
        if self._rounded:
            torch._foreach_copy_(list(self._rounded), list(self._rounded.values()))

    def release(self) -> None:
        """Give the model its weights in float32: its next trainer loses no precision."""
        for hook in self._hooks:
            hook.remove()
        for parameter, master in self._rounded.items():
            parameter.data = master.data
        self._rounded, self._hooks = {}, []

    def _take_gradient(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        self._ready[parameter] = None
        self._numbers_ready += parameter.numel()
        if self._numbers_ready >= _NUMBERS_TOGETHER:
            self.add_gradients()

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Move what gradients there are over to the masters."""
        ready = [(each, self._rounded[each]) for each in self._ready if each.grad is not None]
        first = [(parameter, master) for parameter, master in ready if master.grad is None]
        more = [(parameter, master) for parameter, master in ready if master.grad is not None]
        for _, master in first:
            master.grad = torch.empty_like(master)
        for pairs, into in ((first, _copied), (more, _added)):
            if pairs:
                into([_gradient(master) for _, master in pairs], [_gradient(each) for each, _ in pairs])
        self.forget()

    def forget(self) -> None:
        """Forget gradients that have not moved over."""
        for parameter in self._ready:
            parameter.grad = None
        self._ready, self._numbers_ready = {}, 0


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _copied(sums: list[Tensor], gradients: list[Tensor]) -> None:
    torch._foreach_copy_(sums, gradients)


def _added(sums: list[Tensor], gradients: list[Tensor]) -> None:
    # Sums of unlike types have no common kernel, and copies have.
    widened = [torch.empty_like(each) for each in sums]
    torch._foreach_copy_(widened, gradients)
    torch._foreach_add_(sums, widened)


def _is_of_a_body(model: nn.Module, name: str) -> bool:
    """Whether a parameter belongs to a language model, and not to what was put on top of one."""
    if isinstance(model, PreTrainedModel):
        return True
    return isinstance(getattr(model, name.partition(".")[0]), PreTrainedModel)
