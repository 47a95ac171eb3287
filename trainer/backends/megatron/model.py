"""Megatron's modules of a model, by the model's own configuration.

The core of attention is ours: Megatron's own module keeps all scores of a layer at once, and splits rows only with
TransformerEngine. Gathering the keys and values of a row's other parts (Dubey et al. 2024, arXiv 2407.21783, section
3.3.2) takes grouped heads' small part of the memory, and any mask.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PretrainedConfig

from rollgym.trainer.backends.megatron.layout import layers_of_stage, pieces_of_row
from rollgym.trainer.backends.rank_group import MeshShape, RankGroup
from rollgym.trainer.models.division import expert_count


class TorchAttention(nn.Module):
    """Causal attention of some heads, as `SelfAttention` of Megatron calls it.

    Args:
        config: Megatron's configuration.
        pg_collection: Megatron's groups.
        softmax_scale: What scores are multiplied by; by default one through the square root of a head's width.
    """

    def __init__(
        self,
        config: Any,
        pg_collection: ProcessGroupCollection,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self._scale = softmax_scale
        self._group: dist.ProcessGroup = pg_collection.cp
        self._mesh = MeshShape(context=config.context_parallel_size)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
    ) -> Tensor:
        """Return what heads read, `[tokens, rows, heads * width]`.

        Args:
            query: `[tokens, rows, heads, width]`.
            key: The same of the heads of keys.
            value: The same.
            attention_mask: None: rows are filled up at their ends, which nothing before attends to.
        """
        assert attention_mask is None
        mask = None
        if self._mesh.context > 1:
            mask = self._mask(query.shape[0], query.device)
            key, value = (_Gathered.apply(each, self._group) for each in (key, value))
        read = scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self._scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return read.permute(2, 0, 1, 3).flatten(2).contiguous()

    def _mask(self, tokens: int, device: torch.device) -> Tensor:
        """Which of the gathered tokens each of this rank's attends to, `[tokens, tokens * context]`."""
        whole = tokens * self._mesh.context
        columns = [
            torch.cat([torch.tensor(piece) for piece in pieces_of_row(whole, self._mesh, rank)])
            for rank in range(self._mesh.context)
        ]
        mine = columns[self._group.rank()]
        return (mine[:, None] >= torch.cat(columns)[None]).to(device)


class _Gathered(torch.autograd.Function):
    """All-gathers the ranks' parts in order; backward sums the gradients of a part on the rank that it came from."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        whole = part.new_empty(part.shape[0] * group.size(), *part.shape[1:])
        dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        tokens = gradient.shape[0] // ctx.group.size()
        part = gradient.new_empty(tokens, *gradient.shape[1:])
        dist.reduce_scatter_tensor(part, gradient.contiguous(), group=ctx.group)
        return part, None


def join_groups(mesh: MeshShape) -> None:
    """Have Megatron make its groups of ranks, which all models of this process share; a second call changes nothing.

    Args:
        mesh: How ranks share the work.
    """
    if parallel_state.model_parallel_is_initialized():
        return
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=mesh.tensor,
        pipeline_model_parallel_size=mesh.pipeline,
        context_parallel_size=mesh.context,
        expert_model_parallel_size=mesh.expert,
    )
    # What is drawn is overwritten, but Megatron asks for its streams of random numbers.
    model_parallel_cuda_manual_seed(0, force_reset_rng=True)


class Body(GPTModel):
    """A language model up to its last hidden states.

    The head reads its outputs off them, for the requested tokens alone.
    """

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states


class Norm(nn.RMSNorm):
    """Normalisation by the root mean square, which Megatron knows to have parts of the tokens only."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        # Where the ranks of a layer normalise a part of the tokens each, their gradients are parts of a sum.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def megatron_config(
    config: PretrainedConfig,
    mesh: MeshShape,
    *,
    dtype: torch.dtype,
    sequence_parallel: bool,
    gradient_checkpointing: bool,
) -> TransformerConfig:
    """Return Megatron's configuration of a model.

    Args:
        config: The model's own.
        mesh: How ranks share the work.
        dtype: Type of numbers that it computes in.
        sequence_parallel: Whether activations between layers are divided over the ranks of a layer.
        gradient_checkpointing: Whether activations are computed once more for the gradient in place of being kept.
    """
    heads = config.num_attention_heads
    recompute = (
        {"granularity": "full", "method": "uniform", "num_layers": 1} if gradient_checkpointing else {}
    )
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=getattr(config, "head_dim", None) or config.hidden_size // heads,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=config.model_type in ("qwen3", "qwen3_moe"),
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=mesh.tensor,
        pipeline_model_parallel_size=mesh.pipeline,
        context_parallel_size=mesh.context,
        expert_model_parallel_size=mesh.expert,
        sequence_parallel=sequence_parallel and mesh.tensor > 1,
        # Micro-batches are of unlike lengths, and stages have to tell each other.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # Shares of the loss are added up, over micro-batches and over ranks.
        calculate_per_token_loss=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Kernels that are compiled apart from torch and need not be there.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        **{f"recompute_{name}": value for name, value in recompute.items()},
        **_experts(config),
    )


def _experts(config: PretrainedConfig) -> dict[str, Any]:
    experts = expert_count(config)
    if not experts:
        return {}
    return {
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_router_topk": config.num_experts_per_tok,
        # Softmax over those that were taken is softmax over all, divided by the sum of those.
        "moe_router_pre_softmax": not config.norm_topk_prob,
        # The algorithm's loss is the only one.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def megatron_body(
    config: PretrainedConfig,
    group: RankGroup,
    megatron: TransformerConfig,
    frequencies: Tensor,
    *,
    critic: bool,
) -> Body:
    """Return a rank's part of a model, its weights not yet loaded.

    Args:
        config: The model's own configuration.
        group: The ranks.
        megatron: Megatron's configuration.
        frequencies: The rotary embeddings' table, `[width of a head / 2]`.
        critic: Whether nothing makes logits of it.
    """
    mesh = group.shape
    stage = mesh.stage(group.rank)
    if not hasattr(moe_utils, "te_general_gemm"):
        # Without TransformerEngine 0.16.1 does not define what its routers look at; None is "there is none".
        moe_utils.te_general_gemm = None
    layer = get_gpt_layer_local_spec(
        num_experts=expert_count(config) or None,
        qk_layernorm=megatron.qk_layernorm,
        normalization="RMSNorm",
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    attention = parts.self_attention.submodules
    attention.core_attention = TorchAttention
    if megatron.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    block = TransformerBlockSubmodules(
        layer_specs=[layer] * len(layers_of_stage(config.num_hidden_layers, mesh, stage)), layer_norm=Norm
    )
    body = Body(
        config=megatron,
        transformer_layer_spec=block,
        vocab_size=padded_vocabulary(config.vocab_size, mesh),
        max_sequence_length=config.max_position_embeddings,
        pre_process=stage == 0,
        post_process=stage == mesh.pipeline - 1,
        share_embeddings_and_output_weights=bool(config.tie_word_embeddings) and not critic,
        position_embedding_type="rope",
    )
    if critic:
        body.output_layer = None
    body.rotary_pos_emb.inv_freq = frequencies.detach().clone().to(group.device)
    return body.to(group.device).train()


def padded_vocabulary(vocabulary: int, mesh: MeshShape) -> int:
    """Return how many rows the embeddings of all ranks have together: as many in each."""
    return -(-vocabulary // mesh.tensor) * mesh.tensor
