"""Decides whether rows are packed without padding or padded, and estimates what calls of a model cost from its shape.

The constants of the costs are measured with `python benchmarks/training/shared_prefixes.py --calibrate`: processor time
(on an accelerator, time) of forward and backward passes of calls of many shapes, fitted by least squares.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from rollgym.trainer.backends.heads import Head
from rollgym.trainer.backends.prefix_tree import CallCosts
from rollgym.trainer.backends.rank_group import RankGroup
from rollgym.trainer.backends.weight_pieces import WholeModel
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.models.packed_attention import name_of_kernel

PackingChoice = Literal["auto", "on", "off"]
"""Values of `optimizer.packed_rows`: whether rows are packed without padding."""


def may_pack(setting: PackingChoice, attention: str, device: torch.device, dtype: torch.dtype) -> bool:
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


def packs_rows(head: Head, setting: PackingChoice, device: torch.device, dtype: torch.dtype) -> bool:
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


@dataclass(frozen=True, slots=True)
class Kernels:
    """How fast a kind of device is at the parts of a call, beside multiplying by weights.

    Attributes:
        pair: Time of one of the multiplications between a query and a key of rows without a prefix, as a multiple of
            the time of a multiplication by a weight.
        masked_pair: The same behind a prefix.
        copied: Time to copy a number of a key or value.
        layer: Time that a layer takes, whatever is computed.
        weight: Time to read a weight and to add to its gradient, once a call.
    """

    pair: float
    masked_pair: float
    copied: float
    layer: float
    weight: float


PROCESSOR = Kernels(pair=0.75, masked_pair=1.05, copied=40.0, layer=6e6, weight=24.0)
"""One core, float32, Qwen3's shape, 64 to 512 wide: times are met within 15 %."""

ACCELERATOR = Kernels(pair=1.0, masked_pair=22.0, copied=800.0, layer=4e10, weight=200.0)
"""Estimated from an H200's throughput; calls and copies are dear. `masked_pair` is of a step that was measured on an
H100: behind a prefix, where torch's attention needs a mask, it costs what eager attention does."""


_NUMBERS_READ = 32
"""Numbers that a loss holds of each token of a row: its fields, masks, ratios and what it makes of them, about."""


def sharing_costs(head: Head, setting: Literal["auto", "off"], device: torch.device) -> CallCosts | None:
    """Return what calls of a head's model cost, or None if rows are to go through it as they are.

    Args:
        head: What is computed, before anything wraps it: whether it can share is found out here.
        setting: `optimizer.shared_prefixes`.
        device: The device that will compute it.
    """
    if setting == "off":
        return None
    _ = head.why_not_shared
    return costs_of_calls(head.body, PROCESSOR if device.type == "cpu" else ACCELERATOR)


def sharing_and_packing(
    head: Head,
    shared_prefixes: Literal["auto", "off"],
    packed_rows: PackingChoice,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[CallCosts | None, bool]:
    """Decide how rows go through a head's model: what calls cost, if prefixes are shared, and whether rows are packed.

    Args:
        head: What is computed, before anything wraps it: what it can is found out here.
        shared_prefixes: `optimizer.shared_prefixes`.
        packed_rows: `optimizer.packed_rows`.
        device: The device that will compute it.
        dtype: Number format of its activations.

    Raises:
        ConfigError: If rows are to be packed, and cannot be.
    """
    return sharing_costs(head, shared_prefixes, device), packs_rows(head, packed_rows, device, dtype)


def shell_and_costs(
    head: Head | None,
    group: RankGroup,
    shared_prefixes: Literal["auto", "off"],
    packed_rows: PackingChoice,
    dtype: torch.dtype,
) -> tuple[WholeModel, CallCosts | None, bool]:
    """Return the weights that ranks divide, with what `sharing_and_packing` decides for the shell of their model.

    Args:
        head: The model, whole; the first rank's counts, and it is emptied.
        group: The ranks.
        shared_prefixes: `optimizer.shared_prefixes`.
        packed_rows: `optimizer.packed_rows`.
        dtype: Number format of its activations.
    """

    def look(each: Head) -> tuple[CallCosts | None, bool]:
        return sharing_and_packing(each, shared_prefixes, packed_rows, group.device, dtype)

    whole = WholeModel(head, group, look)
    return whole, *look(whole.shell)


def costs_of_calls(body: PreTrainedModel, kernels: Kernels) -> CallCosts:
    """Return what calls of a language model cost, in tokens.

    Args:
        body: The model without its output embedding.
        kernels: Of the device.
    """
    config = body.config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    layers = config.num_hidden_layers
    queries = layers * heads * width
    copies = 2 * layers * (getattr(config, "num_key_value_heads", None) or heads) * width
    weights = _weights_of_a_token(body)
    # A matrix's input and output are held, and the matrices of a layer are about `hidden_size` wide.
    numbers_held = 2 * weights / config.hidden_size
    return CallCosts(
        # Each query and key are multiplied twice: for the weight of the value, and with the value.
        pair=kernels.pair * 2 * queries / weights,
        masked_pair=kernels.masked_pair * 2 * queries / weights,
        copied=kernels.copied * copies / weights,
        call=kernels.layer * layers / weights + kernels.weight,
        held=copies / numbers_held,
        read=_NUMBERS_READ / numbers_held,
    )


def _weights_of_a_token(body: PreTrainedModel) -> float:
    """Return how many weights a token is multiplied by; of experts, those that it is sent to."""
    config = body.config.get_text_config()
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1
    active = min(1.0, (getattr(config, "num_experts_per_tok", None) or experts) / experts)
    embedding = _embedding(body)
    return sum(
        weight.numel() * (active if ".experts." in name else 1.0)
        for name, weight in body.named_parameters()
        if weight is not embedding
    )


def _embedding(body: PreTrainedModel) -> torch.Tensor | None:
    """Return the weights that tokens are looked up in, and not multiplied by."""
    try:
        weight = body.get_input_embeddings().weight
        return weight if isinstance(weight, torch.Tensor) else None
    except NotImplementedError:
        # Decoders that were made for an encoder do not say: the largest table is that of the vocabulary.
        tables = [each.weight for each in body.modules() if isinstance(each, nn.Embedding)]
        return max(tables, key=torch.Tensor.numel, default=None)
