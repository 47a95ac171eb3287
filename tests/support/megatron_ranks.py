"""Recipes by which ranks make the small models that Megatron-Core divides; they are sent to other processes."""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rollgym.trainer.backends.heads import PolicyHead, ValueHead
from rollgym.trainer.backends.megatron.heads import sharded_logprobs
from rollgym.trainer.backends.optimizer import Schedule
from rollgym.trainer.backends.rank_group import MeshShape
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.models.value_head import ValueModel
from rollgym.trainer.models.weights import without_chance
from tests.support.tiny_models import VOCABULARY, sharp_model

_COMMON = {
    "vocab_size": VOCABULARY + 1,  # which two ranks do not divide evenly
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def family_model(family: str, seed: int = 0):
    """A small model of a family, whose distributions are far from uniform."""
    if family == "qwen3":
        return sharp_model(seed)
    torch.manual_seed(seed)
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**_COMMON, head_dim=8, rope_parameters=_LLAMA3))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**_COMMON))
    else:
        config = Qwen3MoeConfig(
            **_COMMON, head_dim=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8
        )
        config.norm_topk_prob = True
        model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(12.0)
            else:
                parameter.add_(torch.randn(parameter.shape) * 0.3)
            if name.endswith("mlp.gate.weight"):
                parameter.mul_(4.0)
    return without_chance(model)


def family_head(family: str, role: str, temperature: float = 1.0):
    """What is read off the small model of a family."""
    model = family_model(family)
    return ValueHead(ValueModel(model)) if role == "critic" else PolicyHead(model, temperature)


def leave_groups():
    """Have Megatron forget its groups of ranks, and close them: each keeps threads and sockets of its own.

    Groups that others made, such as those of a mesh, stay.
    """
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return
    made = parallel_state._global_process_group_list
    parallel_state.destroy_model_parallel()
    # It has closed few of them; None among them stands for all ranks.
    for group in made:
        if group in torch.distributed.distributed_c10d._world.pg_map:
            torch.distributed.destroy_process_group(group)


@dataclass(frozen=True)
class MegatronRecipe:
    """A small model's part in a rank.

    Attributes:
        mesh: How the ranks share the work; it may be another one for each model, one after the other.
        options: Further arguments of the backend.
    """

    mesh: MeshShape
    family: str
    role: str
    optimizer: OptimizerSettings
    rate: float
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, group, backends):
        torch.set_num_threads(1)
        if group.device.type == "cpu":
            from tests.support.cuda_on_cpu import install

            install()
        from rollgym.trainer.backends.megatron.backend import megatron_backend, megatron_model

        if group.shape != self.mesh:
            leave_groups()
            group.shape = self.mesh
        head = family_head(self.family, self.role) if group.rank == 0 else None
        if self.role == "reference":
            return megatron_model(
                head,
                group,
                dtype=torch.float32,
                tokens_per_micro_batch=self.optimizer.tokens_per_micro_batch,
                **self.options,
            )
        schedule = Schedule(self.rate, 0, 1, "constant")
        return megatron_backend(head, group, self.optimizer, schedule, **self.options)


class Vocabulary:
    """Computes log-probabilities of a vocabulary that the ranks have divided; it needs no Megatron."""

    def __init__(self, group):
        self._group = group

    def read(self, logits, targets, cut, entropy, weights):
        """Return this rank's results, and the gradient of its slice.

        Args:
            logits: All of them; each rank takes its slice.
            targets: Token ids.
            cut: Where the second rank's slice begins.
            entropy: Whether entropies are wanted.
            weights: What results are weighed by in the loss whose gradient is taken, one row for each kind.
        """
        torch.set_num_threads(1)
        part = slice(0, cut) if self._group.rank == 0 else slice(cut, None)
        own = logits[:, part].clone().requires_grad_()
        chosen, spread = sharded_logprobs(own, targets, part.start, self._group.tensor.get_group(), entropy)
        loss = (chosen * weights[0]).sum()
        if entropy == "gradient":
            loss = loss + (spread * weights[1]).sum()
        loss.backward()
        return chosen.detach(), None if spread is None else spread.detach(), own.grad


def vocabulary(group, backends):
    """Make one."""
    return Vocabulary(group)


class Generated:
    """Tells which groups of ranks Megatron makes."""

    def __init__(self, group):
        from megatron.core import parallel_state

        self._state = parallel_state
        self._group = group

    def generated(self, meshes):
        """Return Megatron's groups of each mesh by dimension, as its generator of ranks has them."""
        found = []
        for mesh in meshes:
            dense = self._generator(mesh.tensor, 1, mesh.data, mesh)
            sparse = self._generator(mesh.tensor, mesh.expert, mesh.data * mesh.context // mesh.expert, mesh)
            names = {"tensor": "tp", "context": "cp", "data": "dp", "stage": "pp"}
            found.append({name: dense.get_ranks(short) for name, short in names.items()})
            found[-1]["expert"] = sparse.get_ranks("ep")
        return found

    def _generator(self, tensor, expert, data, mesh):
        return self._state.RankGenerator(
            tp=tensor,
            ep=expert,
            dp=data,
            pp=mesh.pipeline,
            cp=1 if expert > 1 or data != mesh.data else mesh.context,
            order="tp-cp-ep-dp-pp",
        )

    def joined(self, mesh):
        """Return the ranks of this rank's own groups, of which messages really go."""
        state = self._state
        from rollgym.trainer.backends.megatron.model import join_groups

        leave_groups()

        self._group.shape = mesh
        join_groups(mesh)
        made = {
            "tensor": state.get_tensor_model_parallel_group(),
            "context": state.get_context_parallel_group(),
            "data": state.get_data_parallel_group(),
            "stage": state.get_pipeline_model_parallel_group(),
            "expert": state.get_expert_model_parallel_group(),
        }
        return {name: torch.distributed.get_process_group_ranks(group) for name, group in made.items()}


def generated(group, backends):
    """Make one."""
    from tests.support.cuda_on_cpu import install

    if group.device.type == "cpu":
        install()
    return Generated(group)
