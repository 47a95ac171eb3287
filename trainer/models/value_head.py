"""A language model's body with a number in place of its vocabulary: a critic's per token, a reward model's per text."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.models.language_head import state_width
from rollgym.trainer.models.shards import disk_errors
from rollgym.trainer.models.weights import twin_of


class ValueModel(nn.Module):
    """Values of the states before each token.

    Args:
        policy: A causal language model, whose body's weights the critic's body starts with; the policy stays unchanged,
            and later changes to it do not affect the critic.

    Raises:
        ConfigError: If its body and its head cannot be separated.
    """

    def __init__(self, policy: PreTrainedModel) -> None:
        super().__init__()
        self.config = policy.config
        body = policy.base_model if policy.base_model is not policy else policy.get_decoder()
        if not isinstance(body, PreTrainedModel) or body is policy:
            raise ConfigError(
                f"model.path: {type(policy).__name__} has no body apart from its head, which a critic or a reward "
                "model could begin with: take another model, or an algorithm without a critic"
            )
        self.body = twin_of(body)
        # The one layer whose outputs are numbers to be compared: it stays in float32.
        self.head = nn.Linear(state_width(policy), 1, device=policy.device, dtype=torch.float32)
        # Values start at zero, so that the first advantages are the returns themselves.
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return values `[...]` of hidden states `[..., hidden]`."""
        # A sum of one, and no view of it: what leaves a module that is sharded must be a tensor of its own.
        values: Tensor = self.head(hidden.to(self.head.weight.dtype)).float().sum(dim=-1)
        return values


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
