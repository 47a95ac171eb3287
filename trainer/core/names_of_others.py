"""What ROLL, verl and TRL call settings that are here under another name.

Only names of equal meaning: `rollout_batch_size` of ROLL counts episodes, and
`rollout.groups_per_step` groups, so it is not here. Tables with those are in docs/coming_from/. Names that two of them
use in different meanings are not here either (`beta` is a KL coefficient of TRL's GRPO, and a temperature of its DPO).
"""

from collections.abc import Mapping
from types import MappingProxyType

NAMES_OF_OTHERS: Mapping[str, str] = MappingProxyType(
    {
        # ROLL
        "adv_estimator": "algorithm",
        "pretrain": "model.path",
        "sequence_length": "model.max_length",
        "num_return_sequences_in_group": "rollout.group_size",
        "kl_loss_coef": "algorithm.kl.coefficient",
        "entropy_loss_coef": "algorithm.entropy_coefficient",
        "advantage_clip": "algorithm.advantage.clip",
        "whiten_advantages": "algorithm.advantage.whiten",
        "lambd": "algorithm.advantage.gae_lambda",
        "ppo_epochs": "algorithm.epochs",
        "max_grad_norm": "optimizer.gradient_clip",
        "save_steps": "checkpoint.every",
        "eval_steps": "evaluation.every",
        "attn_implementation": "model.attention",
        # verl
        "lr": "optimizer.learning_rate",
        "n": "rollout.group_size",
        "train_batch_size": "rollout.groups_per_step",
        "total_training_steps": "steps",
        "clip_ratio_low": "algorithm.surrogate.clip_low",
        "clip_ratio_high": "algorithm.surrogate.clip_high",
        "clip_ratio_c": "algorithm.surrogate.dual_clip",
        "entropy_coeff": "algorithm.entropy_coefficient",
        "loss_agg_mode": "algorithm.aggregation.mode",
        "grad_clip": "optimizer.gradient_clip",
        "lr_warmup_steps": "optimizer.warmup_steps",
        "lora_rank": "model.lora.rank",
        "lora_alpha": "model.lora.alpha",
        "enable_gradient_checkpointing": "model.gradient_checkpointing",
        "gpu_memory_utilization": "inference.launch.memory_fraction",
        "tensor_model_parallel_size": "inference.launch.tensor_parallel",
        "save_freq": "checkpoint.every",
        "test_freq": "evaluation.every",
        "default_local_dir": "output_dir",
        "project_name": "tracking.wandb.project",
        # TRL and transformers
        "num_generations": "rollout.group_size",
        "max_tool_calling_iterations": "rollout.max_turns",
        "num_iterations": "algorithm.epochs",
        "lr_scheduler_type": "optimizer.schedule",
        "peft_config": "model.lora",
        "reward_funcs": "rollout.reward",
        "model_name_or_path": "model.path",
    }
)
"""The path of the setting, by the last part of the other library's name."""
