"""Attention of rows that stand behind each other in one line, without padding: no row sees another.

torch has a kernel for that (`torch.nn.attention.varlen`), and so has flash attention. Without either, each run of
rows of equal length is computed separately: that is exact, and as fast as rows that are padded to equal length.

The library's models pass the arguments of their forward to attention, so that a call's arguments say whether its
rows are packed. What stands for `sdpa` in the library's table looks at them, and else computes what stood there before.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby, pairwise
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

Attention = tuple[Tensor, Tensor | None]
"""The output of attention `[rows, tokens, heads, width]`, and its weights, which are unused."""

_FLASH = "flash_attention"
_HALF = (torch.bfloat16, torch.float16)
"""Numbers that kernels for rows of unequal lengths compute in."""
_BOUNDS = "cu_seq_lens_q"
"""The library's name of the argument with the boundaries of packed rows."""


def _torch_kernel() -> Callable[..., Any] | None:
    """Return torch's own function if this version has it, with windows to look back."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    wanted = {"window_size", "scale", "enable_gqa"}
    return varlen_attn if wanted <= set(inspect.signature(varlen_attn).parameters) else None


_TORCH_KERNEL = _torch_kernel()


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The boundaries of rows that are packed one after another.

    Attributes:
        bounds: The first token of each row, and the end of the last, int32 `[rows + 1]`.
        longest: Tokens of the longest row.
    """

    bounds: Tensor
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Self:
        """Lay rows of some lengths behind each other."""
        bounds = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
        return cls(bounds.to(device), max(lengths))

    def arguments(self, body: PreTrainedModel) -> dict[str, Any]:
        """Return what a model's forward is given beside ids and positions."""
        bounds = {_BOUNDS: self.bounds, "cu_seq_lens_k": self.bounds}
        lengths = {"max_length_q": self.longest, "max_length_k": self.longest}
        if _FLASH in str(body.config.get_text_config()._attn_implementation):
            return bounds | lengths
        # The library builds no mask if it receives a four-dimensional one, which is unused here.
        mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=self.bounds.device)
        return bounds | lengths | {"attention_mask": mask}


def name_of_kernel(attention: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the kernel that computes packed rows at full speed; None without one.

    Args:
        attention: The model's implementation of attention, as the library calls it.
        device: The device that computes.
        dtype: The number format.
    """
    if _FLASH in attention:
        return attention if dtype in _HALF and device.type != "cpu" else None
    return "torch.nn.attention.varlen" if attention == "sdpa" and _has_kernel(device.type, dtype) else None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
@cache
def _has_kernel(device_type: str, dtype: torch.dtype) -> bool:
    """Whether torch's kernel runs on a kind of device, which is tried: it is built for some only."""
    if _TORCH_KERNEL is None or dtype not in _HALF or device_type == "cpu":
        return False
    states = torch.zeros((2, 2, 64), dtype=dtype, device=device_type)
    bounds = torch.tensor([0, 2], dtype=torch.int32, device=device_type)
    try:
        with torch.no_grad():
            _TORCH_KERNEL(states, states, states, bounds, bounds, 2, 2, window_size=(-1, 0))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # the device has none
        return False
    return True


def take_packed_rows() -> None:
    """Make the library's models with `sdpa` attention accept packed rows; all else is unchanged."""
    AttentionInterface.register("sdpa", attention_forward)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **given: Any,
) -> Attention:
    """Compute attention for the library's models: of packed rows if the call gives their boundaries.

    Args:
        module: The layer.
        query: `[rows, heads, tokens, width]`; one row if several are packed.
        key: Keys, maybe of fewer heads.
        value: Their values.
        attention_mask: Mask of the tokens that a token sees; unused if rows are packed.
        scaling: Factor of the scores.
        sliding_window: Number of tokens that a token sees, including itself; None for all before it.
        given: Further arguments of the library.

    Raises:
        ValueError: If rows are packed and scores are more than products of queries and keys.
    """
    bounds = given.get(_BOUNDS)
    if bounds is None:
        computed: Attention = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=scaling,
            sliding_window=sliding_window,
            **given,
        )
        return computed
    if any(given.get(name) is not None for name in ("softcap", "position_bias", "s_aux")):
        raise ValueError(
            "the scores of this model's attention are more than products: its rows are not packed"
        )
    if not _has_kernel(query.device.type, query.dtype):
        return _by_stretches(module, query, key, value, bounds, scaling, sliding_window), None
    return _by_kernel(query, key, value, bounds, given["max_length_q"], scaling, sliding_window), None


def _by_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    assert _TORCH_KERNEL is not None
    computed: Tensor = _TORCH_KERNEL(
        *(states[0].transpose(0, 1) for states in (query, key, value)),
        bounds,
        bounds,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return computed[None]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _by_stretches(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Compute neighbours of equal length together, as rows of their own."""
    parts = []
    start = 0
    for length, rows in _stretches(bounds.tolist()):
        stop = start + length * rows
        asked, keys, values = (_as_rows(each[:, :, start:stop], rows) for each in (query, key, value))
        mask = None if window is None or length <= window else _near(length, window, query.device)
        output, _ = sdpa_attention_forward(
            module, asked, keys, values, mask, scaling=scaling, is_causal=mask is None
        )
        parts.append(output.flatten(0, 1))
        start = stop
    return torch.cat(parts)[None]


def _stretches(bounds: Sequence[int]) -> list[tuple[int, int]]:
    """Return the lengths of rows, and how many of each there are behind each other."""
    lengths = (stop - start for start, stop in pairwise(bounds))
    return [(length, len(list(rows))) for length, rows in groupby(lengths)]


def _as_rows(states: Tensor, rows: int) -> Tensor:
    """Return `[rows, heads, length, width]` of `[1, heads, rows * length, width]`."""
    return states[0].unflatten(1, (rows, -1)).transpose(0, 1)


def _near(length: int, window: int, device: torch.device) -> Tensor:
    """Return which tokens each token sees, bool `[1, 1, length, length]`."""
    seen = torch.ones((length, length), dtype=torch.bool, device=device)
    return (seen.tril() & seen.triu(1 - window))[None, None]
