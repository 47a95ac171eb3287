"""Which model a server serves, beside the run's: compared before it is sent anything. No I/O."""

import json
from collections.abc import Mapping
from typing import Any

from rollgym.trainer.core.errors import ConfigError

_NAMES = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "n_embd",
    "num_hidden_layers",
    "n_layer",
    "num_attention_heads",
    "n_head",
    "num_key_value_heads",
    "intermediate_size",
    "num_local_experts",
    "num_experts",
)
"""What of a configuration of transformers says which tensors a model has, and of which shapes."""


def config_in(text: str) -> Mapping[str, Any]:
    """Return the configuration that a file holds; empty if it holds none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def shape_of(config: Mapping[str, Any]) -> dict[str, int | str]:
    """Return the fields of a configuration that determine a model's tensors; of several models, the text model's."""
    text = config.get("text_config")
    named = dict(text) if isinstance(text, Mapping) else dict(config)
    named["model_type"] = config.get("model_type")
    return {name: named[name] for name in _NAMES if type(named.get(name)) in (int, str)}


def _is_text_model_of(policy: object, served: object) -> bool:
    """Say whether a policy is the text model of a family with pictures, which transformers loads alone."""
    return isinstance(policy, str) and isinstance(served, str) and policy.startswith(f"{served}_text")


def check_same_model(policy: Mapping[str, Any], served: Mapping[str, Any], url: str, name: str) -> None:
    """Refuse a server of another model than the run's, as far as both say which they are.

    Args:
        policy: The policy's configuration.
        served: The server's, as far as it is known.
        url: The server's address.
        name: What it calls its model.

    Raises:
        ConfigError: With what differs.
    """
    own, other = shape_of(policy), shape_of(served)
    if _is_text_model_of(own.get("model_type"), other.get("model_type")):
        own.pop("model_type")
    apart = [
        f"{key} {other[key]!r}, where the policy has {own[key]!r}"
        for key in _NAMES
        if key in own and key in other and own[key] != other[key]
    ]
    if apart:
        raise ConfigError(
            f"{url} serves another model, '{name}': {'; '.join(apart)}. Start it from the run's model, or name its "
            "own in model.path; nothing was sent to it"
        )
