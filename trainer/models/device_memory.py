"""A device's memory and its peak use, as far as torch reports them for its kind."""

import torch


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
