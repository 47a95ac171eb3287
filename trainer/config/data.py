"""Settings of data sets, whose rows are tasks of verifiers, and of evaluations: their times, and their sets."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rollgym.trainer.core.strict import (
    Amount,
    Count,
    JsonObject,
    ServerUrl,
    Settings,
    UserPath,
    Weight,
    with_current_keys,
)


class RouteSettings(Settings):
    """Which verifier scores a row, by one of its columns. A value that no verifier is named for is an error."""

    column: str = Field(description="Column whose value decides.")
    verifiers: dict[str, str] = Field(
        min_length=1, description="Environment id of the verifier, by the column's value."
    )
    weights: dict[str, Weight] = Field(
        {},
        description="Shares of the values among the data set's tasks; by their numbers of rows if empty. Name all "
        "values or none.",
    )


class DifficultySettings(Settings):
    """Which rows are kept, by a number in one of their columns, such as a pass rate. A row without it is an error."""

    column: str
    minimum: float | None = Field(None, description="Rows below it are left out.")
    maximum: float | None = Field(None, description="Rows above it are left out.")

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.minimum is None and self.maximum is None:
            raise ValueError("difficulty needs a minimum, a maximum, or both")
        if self.minimum is not None and self.maximum is not None and self.minimum > self.maximum:
            raise ValueError(f"difficulty: minimum {self.minimum:g} is above maximum {self.maximum:g}")
        return self


class RowsSettings(Settings):
    """Rows of a file, or of a Hugging Face data set."""

    path: UserPath | None = Field(
        None,
        description="A file of JSON lines (.jsonl), a JSON list (.json), a Parquet file (.parquet), or a folder that "
        "`datasets` has saved to disk.",
    )
    hub: str | None = Field(
        None, description="In place of a path: a data set that `datasets` loads by its name."
    )
    subset: str | None = Field(None, description="Configuration of a data set that is loaded by its name.")
    split: str | None = Field(None, description="Split of a Hugging Face data set; needed if it has several.")
    limit: Amount | None = Field(None, description="Only so many rows, from the first one on.")

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.path is None) == (self.hub is None):
            raise ValueError("a data set needs either a path or a hub name")
        if self.path is not None and self.subset is not None:
            raise ValueError("subset is for a data set of the hub")
        return self

    @property
    def name(self) -> str:
        """The data set's path or hub name, for messages."""
        return self.path or f"{self.hub}"


class ExamplesSettings(RowsSettings):
    """Rows as examples to learn from: conversations, pairs of replies, or replies that are good or bad."""

    columns: dict[str, str] = Field(
        {},
        description="What our columns are called in the data: messages, prompt, completion, chosen, rejected, label, "
        "margin, tools, system, domain, and within messages messages.role and messages.content. `a.b` is `b` in the "
        "column `a`. Others are passed over.",
    )
    texts: Literal["chat", "plain"] = Field(
        "chat",
        description="How prompts and replies that are texts are written: as messages, by the chat template; or as they "
        "are, one behind the other, with the tokenizer's end of text behind the reply (TRL).",
    )


class RewardPartSettings(Settings):
    """A further verifier that scores the responses to a data set's tasks: one part of a mixture of rewards."""

    verifier: str = Field(
        min_length=1, description="Environment id of a stateless verifier, such as Judge-v0."
    )
    name: str = Field("", description="Its name in reward_parts and in the metrics; its id if empty.")
    weight: float = Field(
        1.0, allow_inf_nan=False, description="What its score is multiplied by; below 0 it is a penalty."
    )
    gate: float | None = Field(
        None,
        gt=0.0,
        le=1.0,
        description="The least score it must give. Otherwise the response earns nothing, and no other verifier is "
        "asked. Gates are asked first, and add nothing themselves unless weight is set.",
    )
    fields: dict[str, str] = Field(
        {},
        description="Task fields of this verifier and those of the task that they come from; others are handed on as "
        "they are.",
    )
    task: JsonObject = Field({}, description="Fields that every task has for this verifier.")
    url: ServerUrl | None = Field(None, description="Its server; the data set's if absent.")


class DatasetSettings(RowsSettings):
    """Rows as tasks: each is the options of one reset."""

    verifier: str | None = Field(None, description="Environment id of the verifier that scores all rows.")
    route: RouteSettings | None = Field(None, description="In place of one verifier for all rows.")
    columns: dict[str, str] = Field(
        {},
        description="Task fields of the verifier and the columns they come from; `a.b` is `b` in the column `a`. Other "
        "columns are task fields under their own names, but for those that the route and the difficulty read.",
    )
    omit: list[str] = Field([], description="Columns that are not task fields.")
    kwargs: JsonObject = Field({}, description="What the verifiers are made with.")
    reward_weight: float = Field(
        1.0, allow_inf_nan=False, description="With rewards: what the verifier's own score is multiplied by."
    )
    rewards: list[RewardPartSettings] = Field(
        [],
        max_length=16,
        description="Further verifiers, whose weighted scores are added: a mixture of rewards.",
    )
    difficulty: DifficultySettings | None = None
    shuffle: bool = Field(True, description="Every pass over the rows in an order of its own.")
    weight: Weight = Field(
        1.0, description="Share of the tasks, relative to the other data sets and environments."
    )
    domain: str = Field(
        "", description="Name in the metrics; the route's value, or else the verifier's id, if empty."
    )
    url: ServerUrl | None = Field(None, description="Server of the verifiers; the run's default if absent.")

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        if (self.verifier is None) == (self.route is None):
            raise ValueError("a data set needs either a verifier or a route")
        if self.reward_weight != 1.0 and not self.rewards:
            raise ValueError("reward_weight is read with rewards only: leave it out")
        names = [part.name or part.verifier for part in self.rewards]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"rewards names '{twice[0]}' twice: give each a name of its own")
        if self.route is not None and self.route.weights:
            odd = set(self.route.weights) ^ set(self.route.verifiers)
            if odd:
                raise ValueError(
                    f"route.weights must name the same values as route.verifiers, not {sorted(odd)}"
                )
        return self

    @property
    def played_by(self) -> frozenset[str]:
        """Environment ids of the verifiers that play the rows."""
        if self.route is not None:
            return frozenset(self.route.verifiers.values())
        return frozenset(() if self.verifier is None else (self.verifier,))


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
        "blind one is the expert's on training tasks of this environment. If it is missing, a line says why.",
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
