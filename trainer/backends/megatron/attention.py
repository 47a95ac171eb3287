"""The core of attention: torch's own kernels, and rows that several ranks compute by gathering keys and values.

Megatron's own module keeps all scores of a layer at once, and splits rows only with TransformerEngine. Gathering the
keys and values of a row's other parts (Dubey et al. 2024, arXiv 2407.21783, section 3.3.2) takes grouped heads' small
part of the memory, and any mask.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from rollgym.trainer.backends.megatron.layout import pieces_of_row
from rollgym.trainer.backends.rank_group import MeshShape


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
