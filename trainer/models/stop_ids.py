"""The ids that end what a model says."""

from collections.abc import Iterable

from transformers import PreTrainedModel


def stop_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the ids that the model's generation_config (and its config) name as ends: one, or a list of them.

    Instruct models often end their turns with another token than their tokenizer's end of text, and some with several.
    """
    configs = (getattr(model, "generation_config", None), model.config)
    return frozenset(each for config in configs for each in _listed(getattr(config, "eos_token_id", None)))


def _listed(value: int | Iterable[int] | None) -> Iterable[int]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else value
