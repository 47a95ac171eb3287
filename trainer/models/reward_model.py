"""A reward model: a language model's body with one number per text in place of its vocabulary."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.models.language_head import state_width
from rollgym.trainer.models.shards import disk_errors
from rollgym.trainer.models.value_head import ValueModel

_BODY, _HEAD = "body.", "head."


class RewardModel(ValueModel):
    """Rewards of texts, read at their last token.

    It has no bias: the order of two texts does not depend on it, so no gradient would hold it in place.

    Args:
        policy: A causal language model, whose body's weights the model's own body starts with.
    """

    def __init__(self, policy: PreTrainedModel) -> None:
        super().__init__(policy)
        self.head = nn.Linear(state_width(policy), 1, bias=False, device=policy.device, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)


def save_reward_model(
    model: PreTrainedModel, parameters: Iterable[tuple[str, Tensor]], tokenizer: Any, directory: Path
) -> None:
    """Write a reward model as transformers has them (`AutoModelForSequenceClassification` with one label).

    Args:
        model: The language model that it began with: its configuration.
        parameters: The trained weights, by the names of `RewardModel`'s modules.
        tokenizer: Its tokenizer, which is written beside it.
        directory: The target folder.

    Raises:
        ConfigError: If transformers has no such class for this family.
    """
    classifier = empty_classifier(model)
    if tokenizer.pad_token_id is not None:
        # The library reads the last token that is not padding.
        classifier.config.pad_token_id = tokenizer.pad_token_id
    body = dict(classifier.base_model.named_parameters())
    with torch.no_grad():
        for name, tensor in parameters:
            if name.startswith(_HEAD):
                classifier.score.weight.copy_(tensor)
            else:
                body[name.removeprefix(_BODY)].copy_(tensor)
    directory.mkdir(parents=True, exist_ok=True)
    with disk_errors(directory):
        classifier.to(model.dtype).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def empty_classifier(model: PreTrainedModel) -> Any:
    """Return a model of one label of the same family, whose weights mean nothing yet.

    Raises:
        ConfigError: If transformers has no such class for this family.
    """
    config = type(model.config).from_dict(model.config.to_dict())
    config.num_labels = 1
    try:
        classifier = AutoModelForSequenceClassification.from_config(config)
    except ValueError as error:
        raise ConfigError(
            f"model.path: transformers has no reward model of the family {config.model_type}: take another model"
        ) from error
    if not isinstance(getattr(classifier, "score", None), nn.Linear):
        raise ConfigError(
            f"model.path: the reward models of the family {config.model_type} are of a form that is not known here: "
            "take another model"
        )
    return classifier
