"""The recipe by which a rank builds its part of a model; it is sent to the rank."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from rollgym.trainer.assembly.backends import critic_head, policy_head, run_schedule, training_head
from rollgym.trainer.assembly.policy import build_policy
from rollgym.trainer.assembly.rank_makers import maker_of
from rollgym.trainer.backends.heads import Head
from rollgym.trainer.backends.layers import bodies_of
from rollgym.trainer.backends.optimizer import Schedule
from rollgym.trainer.backends.packing import attention_of, may_pack
from rollgym.trainer.backends.rank_group import RankGroup
from rollgym.trainer.backends.reference import ShardedPolicyWithoutAdapters
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.device import DTYPES
from rollgym.trainer.models.load import set_attention

Role = Literal["policy", "critic", "reference", "warm_start"]


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
    role: Role
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


def _role_head(settings: RunSettings, role: Role, model: PreTrainedModel) -> Head:
    if role == "policy":
        return training_head(settings, model)
    return policy_head(model, 1.0 if role == "warm_start" else settings.rollout.temperature)
