"""Removes randomness from a model's forward: the sampled and the trained distribution must be the same."""

from typing import TypeVar

from torch import nn
from transformers import PreTrainedModel

Model = TypeVar("Model", bound=PreTrainedModel)

_NOISE = frozenset({"layerdrop", "jitter_noise", "input_jitter_noise"})
"""Attributes of modules that are read in training mode alone, beside all that have "dropout" in their name.

`router_jitter_noise` is not among them: Phi-3.5-MoE's router reads it in evaluation as well, as how near to the best an
expert must be.
"""


def without_chance(model: Model) -> Model:
    """Remove dropout, randomly skipped layers and the noise of routers from a model; return it.

    Most families keep what they drop by in modules or in attributes of modules. Falcon's layers read the configuration.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in [name for name, value in vars(module).items() if isinstance(value, float)]:
            if "dropout" in name or name in _NOISE:
                setattr(module, name, 0.0)
    if isinstance(getattr(model.config, "hidden_dropout", None), float):
        model.config.hidden_dropout = 0.0
    # With it the library would compute a loss of its own for the balance of experts: the algorithm's is the only one.
    if getattr(model.config, "output_router_logits", False):
        model.config.output_router_logits = False
    return model.eval()
