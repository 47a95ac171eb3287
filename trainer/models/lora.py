"""Low-rank adapters beside a model's linear layers: put there, read, switched off, added to the weights, saved.

The adapters lie in the model itself, so all its users (training, the embedded engine, the reference with adapters
off) share one set of weights. The package peft makes the layers and names the files; its import takes seconds, and
therefore stands at its point of use.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rollgym.trainer.config.model import LoraSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.models.shards import disk_errors

ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_NAME = "default"
_PREFIX = "base_model.model."
_BASE = ".base_layer."


def add_lora(model: PreTrainedModel, settings: LoraSettings, seed: int) -> None:
    """Put adapters beside linear layers of `model` and freeze everything else.

    They are held in float32 in any model. They add nothing before they are trained, because one of the two
    factors starts at zero; equal seeds start the other one equally.

    Raises:
        ConfigError: If a name in the settings is that of no layer, or a pattern fits none.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora.layer import ParamWrapper

    targets = settings.target_modules
    if isinstance(targets, list):
        _check_names(model, targets)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        target_modules=_linear_layers(model) if targets == "all-linear" else targets,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        fan_in_fan_out=_holds_transposed(model),
    )
    # The run's other random numbers must not depend on whether there are adapters.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed % 2**63)
        try:
            inject_adapter_in_model(config, model)
        except ValueError as error:
            raise ConfigError(f"model.lora.target_modules: {error}") from error
    if any(isinstance(module, ParamWrapper) for module in model.modules()):
        raise ConfigError(
            "model.lora.target_modules: adapters of experts that lie in one tensor are not trained here; name the "
            "attention's layers, or take all-linear"
        )
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.float()


def _linear_layers(model: PreTrainedModel) -> list[str]:
    """The last parts of the names of all linear layers but the output embedding."""
    head = model.get_output_embeddings()
    return sorted(
        {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear | Conv1D) and module is not head
        }
    )


def _holds_transposed(model: nn.Module) -> bool:
    """Whether the layers' weights are `[in, out]`, as GPT-2's are."""
    return any(isinstance(module, Conv1D) for module in model.modules())


def _check_names(model: PreTrainedModel, targets: Sequence[str]) -> None:
    """Refuse names that no layer has: what they were meant for would stay as it is, and nothing would say so.

    Raises:
        ConfigError: If there is one.
    """
    names = [name for name, _ in model.named_modules()]
    unknown = [each for each in targets if not any(f".{name}".endswith(f".{each}") for name in names)]
    if unknown:
        together = any(".experts." in name for name, _ in model.named_parameters())
        raise ConfigError(
            f"model.lora.target_modules: {type(model).__name__} has no layer {', '.join(unknown)}; its linear layers "
            f"are called {', '.join(_linear_layers(model))}"
            + together
            * " (adapters of experts that lie in one tensor are not trained here)"
        )


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is that of an adapter."""
    return ".lora_" in name


def has_adapters(model: nn.Module) -> bool:
    """Whether there are adapters in `model`."""
    return any(is_adapter(name) for name, _ in model.named_parameters())


def plain_name(name: str) -> str:
    """The name that a weight has without adapters."""
    return name.replace(_BASE, ".")


@torch.no_grad()
def merged(model: nn.Module, name: str, weight: Tensor) -> Tensor:
    """Return a weight with the adapter that lies beside it added to it, if there is one."""
    layer, found, what = name.rpartition(_BASE)
    if not found or what != "weight":
        return weight
    change = model.get_submodule(layer).get_delta_weight(_NAME)  # type: ignore[operator]
    return (weight.float() + change.float()).to(weight.dtype)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """While inside, the model is what it was before it had adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(enabled=False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(enabled=True)


@contextmanager
def adapters_as(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """While inside, the adapters are other ones, which are given by the names that peft saves them with."""
    own = {saved_name(name): each for name, each in model.named_parameters() if is_adapter(name)}
    before = {name: parameter.detach().clone() for name, parameter in own.items()}
    _copy_into(own, tensors)
    try:
        yield
    finally:
        _copy_into(own, before)


@torch.no_grad()
def _copy_into(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    # In place: if weights are sharded, other tensors share their memory.
    for name, parameter in own.items():
        parameter.copy_(tensors[name])


def adapter_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapters by the names that peft saves them with."""
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            yield saved_name(name), parameter.detach()


def saved_name(name: str) -> str:
    """The name that peft saves an adapter with."""
    return _PREFIX + name.replace(f".{_NAME}.", ".")


def save_adapter(model: nn.Module, directory: Path) -> None:
    """Write the adapters as peft does; inference servers load such a folder beside the base model.

    Args:
        model: A model with adapters.
        directory: The target; created if missing.

    Raises:
        ValueError: If it has none.
    """
    write_adapter(model, {name: tensor.cpu() for name, tensor in adapter_tensors(model)}, directory)


def write_adapter(model: nn.Module, tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Write adapters that are given, with the configuration of a model's.

    Args:
        model: A model with adapters.
        tensors: Adapters by the names that peft saves them with, on the processor.
        directory: The target; created if missing.

    Raises:
        ValueError: If there are none.
    """
    if not tensors:
        raise ValueError("there are no adapters to save")
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / _ADAPTER_WEIGHTS
    with disk_errors(file):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    layer = next(module for module in model.modules() if hasattr(module, "lora_A"))
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": getattr(model, "name_or_path", ""),
        "r": layer.r[_NAME],  # type: ignore[index]
        "lora_alpha": layer.lora_alpha[_NAME],  # type: ignore[index]
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": _holds_transposed(model),
        "inference_mode": True,
    }
    (directory / ADAPTER_CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def load_adapter(model: PreTrainedModel, directory: Path) -> None:
    """Copy saved adapters into those of `model`.

    Raises:
        ConfigError: If they are those of another model, or of another shape.
    """
    own, saved = dict(adapter_tensors(model)), load_file(directory / _ADAPTER_WEIGHTS)
    if own.keys() != saved.keys() or any(own[name].shape != saved[name].shape for name in own):
        raise ConfigError(f"{directory} holds adapters of another model, or other ones than model.lora names")
    for name, tensor in own.items():
        tensor.copy_(saved[name])
