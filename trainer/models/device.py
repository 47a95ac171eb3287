"""What a device offers: memory and its peak, as far as torch reports them, and Liger's fused kernels."""

import torch
from transformers import PreTrainedModel

from rollgym.extras import install_line
from rollgym.trainer.core.errors import ConfigError


def peak_bytes(device: torch.device) -> int | None:
    """Return the most that tensors took of an accelerator so far; None if torch does not report it."""
    if device.type == "cpu" or not hasattr(torch.accelerator, "max_memory_allocated"):
        return None
    return int(torch.accelerator.max_memory_allocated(device))


def give_back(device: torch.device) -> None:
    """Give back to an accelerator what torch keeps of its memory for tensors to come."""
    if device.type != "cpu" and hasattr(torch.accelerator, "empty_cache"):
        torch.accelerator.empty_cache()


def free_bytes(device: torch.device) -> int | None:
    """Return an accelerator's free memory, in bytes; None if torch does not report it. Initialises the device."""
    module = torch.get_device_module(device)
    if device.type == "cpu" or not hasattr(module, "mem_get_info"):
        return None
    return int(module.mem_get_info(device)[0])


def total_bytes(device: torch.device) -> int | None:
    """Return an accelerator's memory; None if torch does not report it."""
    module = torch.get_device_module(device)
    if device.type == "cpu" or not hasattr(module, "get_device_properties"):
        return None
    total = getattr(module.get_device_properties(device), "total_memory", None)
    return None if total is None else int(total)


def use_liger(model: PreTrainedModel) -> None:
    """Make a model compute norms, gates and rotary embeddings with Liger's kernels (`model.kernels: liger`).

    The package is imported here: it is an extra. It replaces the library's classes of a family in this process, so that
    every model of that family computes by it from then on, if its layers are not compiled. Logits and losses stay ours.

    Args:
        model: The model, before adapters are added to it.

    Raises:
        ConfigError: If the package is not there, its kernels do not run on the device, or it does not know the family.
    """
    if model.device.type == "cpu":
        raise ConfigError(
            "model.kernels liger: its kernels are written in Triton for accelerators, and model.device is a processor "
            "here: leave it out"
        )
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise ConfigError(
            f"model.kernels liger needs the package liger-kernel ({error}): {install_line('liger')}"
        ) from error
    family = str(model.config.model_type)
    if family not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(
            f"model.kernels liger: the package has no kernels for models of the type {family}: leave it out"
        )
    with torch.no_grad():
        _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
