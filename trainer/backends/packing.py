"""Decides whether rows are packed without padding, or padded in buckets of similar length."""

from typing import Literal

import torch

from rollgym.trainer.backends.heads import Head
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.models.packed_attention import name_of_kernel

PackedRows = Literal["auto", "on", "off"]
"""Values of `optimizer.packed_rows`: whether rows are packed without padding."""


def may_pack(setting: PackedRows, attention: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether rows are packed if the model can compute them so.

    Args:
        setting: `optimizer.packed_rows`.
        attention: The model's implementation of attention, as the library calls it.
        device: The device that computes it.
        dtype: Number format of its activations.
    """
    if setting == "auto":
        return name_of_kernel(attention, device, dtype) is not None
    return setting == "on"


def packs_rows(head: Head, setting: PackedRows, device: torch.device, dtype: torch.dtype) -> bool:
    """Decide whether the rows of a head's model are packed.

    Args:
        head: What is computed, before anything wraps it: whether it can is found out here.
        setting: `optimizer.packed_rows`.
        device: The device that will compute it.
        dtype: Number format of its activations.

    Raises:
        ConfigError: If they are to be packed, and cannot be.
    """
    if setting == "off":
        return False
    if setting == "auto" and not may_pack(setting, attention_of(head), device, dtype):
        return False
    why_not = head.why_not_packed
    if setting == "on" and why_not is not None:
        raise ConfigError(f"optimizer.packed_rows on: {why_not}: set it to auto")
    return why_not is None


def attention_of(head: Head) -> str:
    """Return a model's implementation of attention, as the library calls it."""
    return str(head.body.config.get_text_config()._attn_implementation)
