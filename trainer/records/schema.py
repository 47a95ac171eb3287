"""The form of an episode as plain data, one line of JSON, and the checks before it is accepted.

Everything that the episode holds is there, numbers to their last digit, so that reading gives back what was written.
Lists of what was sampled have an entry for each sampled token only; versions and turns, which come in runs, are kept as
`[value, how often]`. The advantages of a reply are one number if its tokens share it.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import chain, groupby, repeat
from math import isfinite
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, InstanceOf, ValidationError

from rollgym.trainer.core.errors import TrainerError

EPISODE_FORMAT = 1
"""The version of the form that this release writes and reads."""

_LONGEST_REASON = 300
_Enumeration = TypeVar("_Enumeration", bound=StrEnum)


class EpisodeFormatError(TrainerError, ValueError):
    """Data is not an episode that this release can read; the message names the fault's place."""


def _finite(value: float) -> float:
    if not isfinite(value):
        raise ValueError("must be finite")
    return value


_Count = Annotated[int, Field(ge=0)]
_Number = Annotated[float, AfterValidator(_finite)]
# Environments may say any text that JSON can hold, half of a surrogate pair too.
_Text = InstanceOf[str]
_Pairs = Annotated[list[Annotated[list[int], Field(min_length=2, max_length=2)]], Field(fail_fast=True)]


class _Schema(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class RewardPartSchema(_Schema):
    """A verifier beside the task's own; see `rollgym.trainer.tasks.task.RewardPart`."""

    name: _Text
    verifier: _Text
    weight: _Number
    gate: _Number | None
    fields: dict[_Text, _Text]
    task: dict[_Text, Any]
    url: _Text | None


class RewardMixtureSchema(_Schema):
    """The parts of a task's reward; see `rollgym.trainer.tasks.task.RewardMixture`."""

    own: _Number
    parts: list[RewardPartSchema]


class TaskSchema(_Schema):
    """The task that the episode played."""

    index: _Count
    env_id: _Text
    seed: int
    kwargs: dict[_Text, Any]
    options: dict[_Text, Any] | None
    domain: _Text
    url: _Text | None
    mixture: RewardMixtureSchema | None = None
    row: _Text = ""


class ImageSchema(_Schema):
    """A picture and its tokens; see `rollgym.trainer.records.images.PlacedImage`."""

    start: _Count
    end: _Count
    png: str


class SegmentSchema(_Schema):
    """One sequence of tokens; see `rollgym.trainer.records.trajectory.Segment`."""

    ids: list[_Count] = Field(fail_fast=True)
    action_mask: list[Annotated[int, Field(ge=0, le=1)]] = Field(fail_fast=True)
    logprobs: list[_Number] = Field(fail_fast=True)
    versions: _Pairs
    turn_index: _Pairs
    parent: Annotated[list[_Count], Field(min_length=2, max_length=2)] | None
    fork: _Text | None
    images: list[ImageSchema] = Field([], fail_fast=True)
    experts: Annotated[list[str | int], Field(min_length=3, max_length=3)] | None = None


class TurnSchema(_Schema):
    """One reply of the policy; see `rollgym.trainer.records.trajectory.Turn`."""

    observation: _Text
    reply: _Text
    reward: _Number
    valid: bool
    format_penalty: _Number
    anchor: _Text | None
    finish_reason: _Text
    tokens: Annotated[list[int], Field(min_length=3, max_length=3)]
    advantages: list[_Number] = Field([], fail_fast=True)
    reward_parts: dict[_Text, _Number] = Field({})
    is_summary: bool = False
    structured: bool = False


class EpisodeSchema(_Schema):
    """One recorded episode; see `rollgym.trainer.records.trajectory.Trajectory`."""

    task: TaskSchema
    member: _Count
    attempt: _Count
    outcome: _Text
    detail: _Text
    metrics: dict[_Text, _Number]
    seconds: dict[_Text, _Number] = Field({})
    turns: list[TurnSchema] = Field(fail_fast=True)
    segments: list[SegmentSchema] = Field(fail_fast=True)
    next_prompt: list[_Count] = Field([], fail_fast=True)


def read_schema(record: object) -> EpisodeSchema:
    """Return data as an episode, with its types and ranges checked.

    Raises:
        EpisodeFormatError: If it is not an episode.
    """
    if not isinstance(record, dict):
        raise EpisodeFormatError(f"an episode is an object, not a {type(record).__name__}")
    version = record.get("format")
    if version is None:
        raise EpisodeFormatError(
            "it has no 'format': an earlier release wrote it, with rounded log-probabilities and without anchors, so "
            "it can be played again (rollout --policy recorded) but not be read back whole"
        )
    if version != EPISODE_FORMAT or type(version) is not int:
        raise EpisodeFormatError(f"its format is {_short(version)}, and this release reads {EPISODE_FORMAT}")
    try:
        return EpisodeSchema.model_validate(record)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part)[:80] for part in problem["loc"])
        raise EpisodeFormatError(f"{where}: {problem['msg']}"[:_LONGEST_REASON]) from None


def runs(values: Iterable[int]) -> list[list[int]]:
    """Return values as `[value, how often]`, in order."""
    return [[value, sum(1 for _ in equal)] for value, equal in groupby(values)]


def spread(pairs: Sequence[Sequence[int]], length: int, name: str) -> list[int]:
    """Return the values that `runs` shortened.

    Raises:
        EpisodeFormatError: If they are not `length` in all.
    """
    if any(count < 1 for _, count in pairs) or sum(count for _, count in pairs) != length:
        raise EpisodeFormatError(f"{name} does not have a value for each of {length} sampled tokens")
    return list(chain.from_iterable(repeat(value, count) for value, count in pairs))


def member_of(kind: type[_Enumeration], value: str, name: str) -> _Enumeration:
    """Return the member of an enumeration that a text names.

    Raises:
        EpisodeFormatError: If it names none.
    """
    if value not in [*kind]:
        raise EpisodeFormatError(f"{name}: {value[:40]!r} is none of {', '.join(kind)}")
    return kind(value)


def _short(value: object) -> str:
    return str(value)[:40] if isinstance(value, int | str | float) else f"a {type(value).__name__}"
