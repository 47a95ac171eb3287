"""Devices and number formats through torch's generic interface: no kind of accelerator is named."""

import functools

import torch

from rollgym.trainer.core.errors import ConfigError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Types of numbers by their names in the settings."""


def torch_device(name: str) -> torch.device:
    """Return the device that the setting `model.device` names.

    Args:
        name: `auto` (the accelerator that torch finds, else the processor), `cpu`, or a type of device of torch's, such
            as that of a plug-in, with an index if there are several.

    Raises:
        ConfigError: If it is not there; the message says what is.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return found if found is not None else torch.device("cpu")
    kind, _, index = name.partition(":")
    if kind == "cpu":
        return torch.device("cpu")
    if found is None or kind != found.type:
        there = "no accelerator" if found is None else f"only {found.type}"
        raise ConfigError(f"model.device {name}: torch finds {there} here; set model.device=auto or cpu")
    if index and int(index) >= torch.accelerator.device_count():
        raise ConfigError(
            f"model.device {name}: there are {torch.accelerator.device_count()} devices of that type, counted from 0"
        )
    return torch.device(name)


@functools.cache
def widest_float(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on a device that has no wider numbers."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64
