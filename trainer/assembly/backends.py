"""Heads and training backends of a run's models in this process."""

from transformers import PreTrainedModel

from rollgym.trainer.assembly.teachers import distillation_head
from rollgym.trainer.backends.base import Scorer
from rollgym.trainer.backends.heads import Head, PolicyHead, ValueHead
from rollgym.trainer.backends.optimizer import Schedule
from rollgym.trainer.backends.packing import packs_rows
from rollgym.trainer.backends.prefix_costs import sharing_costs
from rollgym.trainer.backends.prefix_plan import Plans
from rollgym.trainer.backends.reference import FrozenModel, PolicyWithoutAdapters
from rollgym.trainer.backends.torch_backend import TorchBackend
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.device import DTYPES
from rollgym.trainer.core.seeding import derive_seed
from rollgym.trainer.models.lora import add_lora
from rollgym.trainer.models.reward_model import RewardModel
from rollgym.trainer.models.value_head import ValueModel
from rollgym.trainer.models.weights import twin_of


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
    budget = settings.optimizer.micro_batch_tokens
    costs = sharing_costs(head, settings.optimizer.shared_prefixes, frozen.device)
    packs = packs_rows(head, settings.optimizer.packed_rows, frozen.device, DTYPES[settings.model.dtype])
    if adapted:
        warm = settings.warm_start is not None
        return PolicyWithoutAdapters(head, budget, costs, plans, warm=warm, packs=packs)
    return FrozenModel(head, budget, costs, plans, packs=packs)


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
