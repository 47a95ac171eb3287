"""Settings of evaluations: their times, and their sets."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self

from pydantic import Field, model_validator

from rollgym.trainer.config.data import DatasetSettings
from rollgym.trainer.core.former_names import with_current_keys
from rollgym.trainer.core.strict import Amount, Count, JsonObject, ServerUrl, Settings

FORMER_EVALUATION_KEYS: Mapping[str, str] = MappingProxyType({"panels": "sets"})
"""Names that settings of evaluations had before; they are still understood in this release."""


class EvaluationSetSettings(Settings):
    """A fixed set of tasks to evaluate on."""

    env_id: str = Field("", description="The environment; empty where a data set is named.")
    dataset: DatasetSettings | None = Field(
        None, description="In place of an environment: the set's tasks are the first rows."
    )
    kwargs: JsonObject = Field({}, description="What the environment is made with.")
    options: JsonObject | None = None
    episodes: Count = 200
    distinct: bool = Field(
        True, description="Keep only tasks whose first state (of a data set: row) differs from all before it."
    )
    max_turns: Amount | None = Field(None, description="The rollout's max_turns if absent.")
    url: ServerUrl | None = None
    baselines: bool = Field(
        True,
        description="Also play the random baseline and the blind one (the best fixed sequence of actions), once. The "
        "blind one is the expert's on training tasks of this environment; a line says why where there is none.",
    )

    @model_validator(mode="after")
    def _environment_or_rows(self) -> Self:
        if bool(self.env_id) == (self.dataset is not None):
            raise ValueError("an evaluation set needs either an env_id or a dataset")
        ignored = [name for name in ("kwargs", "options", "url") if getattr(self, name)]
        if self.dataset is not None and ignored:
            raise ValueError(
                f"an evaluation set with a dataset takes no {ignored[0]} of its own: the data set's rows, kwargs "
                "and url count"
            )
        return self


class EvaluationSettings(Settings):
    """When and how the policy is measured."""

    every: int = Field(
        25, ge=0, description="Training steps between evaluations; 0 evaluates at the ends only."
    )
    sampled: bool = True
    greedy: bool = True
    interim_episodes: Count | None = Field(
        None, description="Episodes per evaluation set between the two ends; all if absent."
    )
    sets: dict[str, EvaluationSetSettings] = Field(
        {}, description="Named evaluation sets; any environment, trained on or not."
    )

    @model_validator(mode="before")
    @classmethod
    def _by_current_keys(cls, values: Any) -> Any:
        return with_current_keys(values, FORMER_EVALUATION_KEYS, "evaluation")

    @model_validator(mode="after")
    def _evaluation_sets_are_played(self) -> Self:
        if self.sets and not self.sampled and not self.greedy:
            raise ValueError(
                "sampled and greedy are both false, so nobody plays the evaluation sets: set one of them, or no "
                "evaluation.sets"
            )
        return self
