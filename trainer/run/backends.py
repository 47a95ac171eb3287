"""Heads and training backends of a run's models: in this process, or by a recipe that is sent to ranks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from rollgym.trainer.backends.base import Scorer
from rollgym.trainer.backends.batching import Plans
from rollgym.trainer.backends.heads import Head, PolicyHead, ValueHead
from rollgym.trainer.backends.layers import bodies_of
from rollgym.trainer.backends.optimizer import Schedule
from rollgym.trainer.backends.packing import attention_of, may_pack
from rollgym.trainer.backends.rank_group import RankGroup
from rollgym.trainer.backends.reference import (
    FrozenModel,
    PolicyWithoutAdapters,
    ShardedPolicyWithoutAdapters,
)
from rollgym.trainer.backends.torch_backend import TorchBackend
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.device import DTYPES
from rollgym.trainer.core.seeding import derive_seed
from rollgym.trainer.models.load import set_attention
from rollgym.trainer.models.lora import add_lora
from rollgym.trainer.models.value_head import RewardModel, ValueModel
from rollgym.trainer.models.weights import twin_of
from rollgym.trainer.run.layout import maker_of
from rollgym.trainer.run.learners import distillation_head, reading_pass
from rollgym.trainer.run.policy import build_policy


def policy_head(model: PreTrainedModel, temperature: float) -> PolicyHead:
    """Return what training reads off the policy."""
    return PolicyHead(model, temperature)


def training_head(settings: RunSettings, model: PreTrainedModel) -> Head:
    """Return what updates read off what a run trains: the policy, a student beside its teachers, or a reward model.

    Raises:
        ConfigError: If a teacher cannot be loaded.
    """
    if settings.reward is not None:
        reward_model = RewardModel(model)
        if settings.model.lora is not None:
            add_lora(reward_model.body, settings.model.lora, derive_seed(settings.seed, "adapters"))
        return ValueHead(reward_model)
    if settings.distill is not None and settings.distill.estimate != "sampled":
        return distillation_head(settings, settings.distill, model)
    return policy_head(model, settings.rollout.temperature)


def critic_head(settings: RunSettings, model: PreTrainedModel) -> ValueHead:
    """Return a critic whose body starts with the policy's weights.

    Where the policy trains adapters, the critic trains adapters of its own.
    """
    critic = ValueModel(model)
    if settings.model.lora is not None:
        add_lora(critic.body, settings.model.lora, derive_seed(settings.seed, "critic adapters"))
    return ValueHead(critic)


def policy_backend(settings: RunSettings, model: PreTrainedModel, plans: Plans | None = None) -> TorchBackend:
    """Return the backend of what a run trains, in this process; models of one run may share the plans of rows."""
    schedule = run_schedule(settings, settings.optimizer.learning_rate)
    return _backend(settings, training_head(settings, model), schedule, plans)


def critic_backend(settings: RunSettings, model: PreTrainedModel, plans: Plans | None = None) -> TorchBackend:
    """Return the backend of a critic, in this process."""
    schedule = run_schedule(settings, settings.optimizer.critic_learning_rate)
    return _backend(settings, critic_head(settings, model), schedule, plans)


def reference_model(settings: RunSettings, model: PreTrainedModel, plans: Plans | None = None) -> Scorer:
    """Return the policy as the run begins: a second model, or the same one with its adapters off."""
    adapted = settings.model.lora is not None
    frozen = model if adapted else twin_of(model, DTYPES[settings.model.dtype])
    head = policy_head(frozen, settings.rollout.temperature)
    forward_pass = reading_pass(settings, head, plans)
    if adapted:
        return PolicyWithoutAdapters(forward_pass, warm=settings.warm_start is not None)
    return FrozenModel(forward_pass)


def warm_start_backend(settings: RunSettings, model: PreTrainedModel, learning_rate: float) -> TorchBackend:
    """Return the backend of the supervised start; its optimizer's state ends with it."""
    return _backend(settings, policy_head(model, 1.0), Schedule(learning_rate, 0, 1, "constant"))


def _backend(
    settings: RunSettings, head: Head, schedule: Schedule, plans: Plans | None = None
) -> TorchBackend:
    return TorchBackend(
        head,
        settings.optimizer,
        schedule,
        dtype=DTYPES[settings.model.dtype],
        gradient_checkpointing=settings.model.gradient_checkpointing,
        compiled=settings.model.compile,
        plans=plans,
    )


def run_schedule(settings: RunSettings, peak: float) -> Schedule:
    """Return the learning rate of a run's steps, given the highest."""
    return Schedule(
        peak,
        settings.optimizer.warmup_steps,
        settings.steps * settings.algorithm.updates,
        settings.optimizer.schedule,
    )


ModelRole = Literal["policy", "critic", "reference", "warm_start"]


@dataclass(frozen=True, slots=True)
class RankRecipe:
    """How a rank makes its part of a model; it is sent to the rank, and the model is built there.

    Attributes:
        settings: The run.
        role: The model's role.
        start: Folder of the weights to begin with; those that the settings name if None.
        learning_rate: Constant rate of a warm start.
    """

    settings: RunSettings
    role: ModelRole
    start: Path | None = None
    learning_rate: float = 0.0

    def __call__(self, group: RankGroup, backends: dict[str, Any]) -> Any:
        """Build the model and divide it.

        Args:
            group: The rank's group.
            backends: Backends that this rank has built already, by role.
        """
        settings = self.settings
        torch.set_num_threads(settings.threads)
        if self.role == "reference" and settings.model.lora is not None:
            return ShardedPolicyWithoutAdapters(backends["policy"], warm=settings.warm_start is not None)
        # The others get their pieces of the first rank's.
        head = self._whole(group.device) if group.rank == 0 else None
        if self.role == "reference":
            return maker_of(settings.backend).read_only(settings, head, group)
        return maker_of(settings.backend).trained(settings, head, group, self._schedule())

    def _whole(self, device: torch.device) -> Head:
        settings = self.settings
        # On the processor: only a rank's part of it comes to its device. What a head finds out of its model is found
        # out there too, by an attention that the processor has.
        model = settings.model.model_copy(update={"device": "cpu", "attention": None})
        host = settings.model_copy(update={"model": model})
        policy = build_policy(host, self.start, trained=self.role != "reference")
        if self.role == "critic":
            head: Head = critic_head(settings, policy.model)
        else:
            head = _role_head(settings, self.role, policy.model)
        attention = settings.model.attention or attention_of(head)
        if may_pack(settings.optimizer.packed_rows, attention, device, DTYPES[settings.model.dtype]):
            _ = head.why_not_packed
        set_attention(bodies_of(head.model), settings.model.attention)
        return head

    def _schedule(self) -> Schedule:
        if self.role == "warm_start":
            return Schedule(self.learning_rate, 0, 1, "constant")
        optimizer = self.settings.optimizer
        peak = optimizer.critic_learning_rate if self.role == "critic" else optimizer.learning_rate
        return run_schedule(self.settings, peak)


def _role_head(settings: RunSettings, role: ModelRole, model: PreTrainedModel) -> Head:
    if role == "policy":
        return training_head(settings, model)
    return policy_head(model, 1.0 if role == "warm_start" else settings.rollout.temperature)
