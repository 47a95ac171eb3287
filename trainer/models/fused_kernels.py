"""Norms, gates and rotary embeddings by Liger's Triton kernels (`model.kernels: liger`), if layers are not compiled.

The package is imported at its point of use: it is an extra. It replaces the library's classes of a family in this
process, so that every model of that family computes by it from then on. Logits and losses stay ours.
"""

import torch
from transformers import PreTrainedModel

from rollgym.extras import install_line
from rollgym.trainer.core.errors import ConfigError


def use_liger(model: PreTrainedModel) -> None:
    """Make a model on its device compute with Liger's kernels.

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
