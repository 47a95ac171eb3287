"""Models that are tried before they are used: what their settings rule out, and what their code raises at a trial."""

from typing import Any

UNLIKE = (
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors of a model's code that treats its inputs differently from other families."""


def why_not_by_keys_and_values(config: Any) -> str | None:
    """Return why tokens cannot be computed from keys, values and positions of those before them, or None if they may.

    Args:
        config: The settings of the text part of a model.
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    if odd := sorted(kinds - {"full_attention", "sliding_attention"}):
        return f"it has layers of the kind {odd[0]}, whose state is more than keys and values"
    if lengthy := sorted(_rope_types(config) & {"dynamic", "longrope"}):
        return f"its positions ({lengthy[0]}) depend on how long the row is"
    return None


def why_no_cache_of_its_own(config: Any) -> str | None:
    """Return the same for layers that must also have keys and values of their own."""
    if getattr(config, "num_kv_shared_layers", 0):
        return "its layers share keys and values with each other"
    return why_not_by_keys_and_values(config)


def _rope_types(config: Any) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer = [each for each in parameters.values() if isinstance(each, dict)] or [parameters]
    return {str(each.get("rope_type", "default")) for each in by_layer}
