"""The kinds of filters, which choose the groups that are trained on: one class each, and the tuple that lists them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self, assert_never

from pydantic import Field, NonNegativeFloat, model_validator

from rollgym.trainer.core.kinds import Kinds
from rollgym.trainer.core.numbers import NO_DEVIATION
from rollgym.trainer.core.plugins import load_plugin
from rollgym.trainer.core.strict import Count, Fraction, Settings

if TYPE_CHECKING:
    from rollgym.trainer.algorithms.batch import TrajectoryBatch

_ZERO = 1e-10
"""A score up to this is none (RAGEN)."""


@dataclass(frozen=True, slots=True)
class JudgedGroups:
    """The groups of a step, and what filters judge them by.

    Attributes:
        groups: Group of each trajectory.
        returns: Return of each trajectory.
        solved: Whether each trajectory reached its goal.
        lengths: Sampled tokens of each trajectory.
        sizes: Trajectories of each group, in the order in which groups first occur.
        mean: Mean of the returns of each group.
        deviation: Their deviation; 0 for a group of one.
        batch: The whole batch; None if the caller did not give it.
    """

    groups: Sequence[int]
    returns: Sequence[float]
    solved: Sequence[bool]
    lengths: Sequence[int]
    sizes: dict[int, int]
    mean: dict[int, float]
    deviation: dict[int, float]
    batch: "TrajectoryBatch | None"

    def means(self, values: Sequence[float]) -> dict[int, float]:
        """Return the mean of each group of numbers of trajectories."""
        of_groups: dict[int, list[float]] = {}
        for group, value in zip(self.groups, values, strict=True):
            of_groups.setdefault(group, []).append(value)
        return {group: sum(each) / len(each) for group, each in of_groups.items()}


class Filter(Settings):
    """A kind of filter: its settings, and the groups that it keeps.

    One that judges each group by itself is a `GroupwiseFilter`, so that others are played for those that it drops.
    """

    kind: str
    keeps: ClassVar[str]
    """What it keeps, in Markdown, for the documentation's table."""

    def kept(self, groups: JudgedGroups) -> set[int]:
        """Return the groups that are trained on."""
        raise NotImplementedError


class NoFilter(Filter):
    """Train on every group of the batch."""

    kind: Literal["none"] = "none"
    keeps: ClassVar[str] = "all"

    def kept(self, groups: JudgedGroups) -> set[int]:
        """Return the groups that are trained on."""
        return set(groups.sizes)


class GroupwiseFilter(Filter):
    """What filters have in common that judge each group by itself."""

    refill: bool = Field(
        True,
        description="Play another group for each that is dropped, so that a step trains on groups_per_step of them "
        "(DAPO's dynamic sampling); false: a step trains on what is left of groups_per_step.",
    )
    max_rounds: Count = Field(
        10,
        description="With refill: a step that has dropped so many times groups_per_step groups is filled no further "
        "and trains on what it has; if that is nothing, the run ends (verl: max_num_gen_batches 10).",
    )

    @model_validator(mode="after")
    def _rounds_are_read(self) -> Self:
        if not self.refill and self.max_rounds != type(self).model_fields["max_rounds"].default:
            raise ValueError("max_rounds is read with refill: true only: leave it out")
        return self


class ZeroVarianceFilter(GroupwiseFilter):
    """Drop groups whose members all got the same return (DAPO, arXiv:2503.14476); groups of one stay."""

    kind: Literal["zero_variance"]
    keeps: ClassVar[str] = "U > 1e-6, and groups of one (DAPO)"

    tolerance: NonNegativeFloat = Field(1e-6, description="A deviation up to this counts as none.")

    def kept(self, groups: JudgedGroups) -> set[int]:
        """Return the groups that are trained on."""
        return {
            group
            for group, size in groups.sizes.items()
            if size == 1 or groups.deviation[group] > self.tolerance
        }


class RangeFilter(GroupwiseFilter):
    """What filters have in common that keep groups between two bounds."""

    above: float
    below: float

    @model_validator(mode="after")
    def _range_is_one(self) -> Self:
        if self.above >= self.below:
            raise ValueError("above must be smaller than below")
        return self


class SuccessRangeFilter(RangeFilter):
    """Drop groups whose share of solved episodes is not between two bounds: by default all solved, and none."""

    kind: Literal["success_range"]
    keeps: ClassVar[str] = (
        "the share of solved episodes is above `above` and below `below` (0 and 1: neither none nor all)"
    )

    above: Fraction = Field(0.0, description="The share must be larger than this.")
    below: Fraction = Field(1.0, description="The share must be smaller than this.")

    def kept(self, groups: JudgedGroups) -> set[int]:
        """Return the groups that are trained on."""
        share = groups.means([float(flag) for flag in groups.solved])
        return {group for group in groups.sizes if self.above < share[group] < self.below}


class ScoreRangeFilter(RangeFilter):
    """Drop groups whose mean return is not between two bounds (ROLL's difficulty_mask and mean_filter)."""

    kind: Literal["score_range"]
    keeps: ClassVar[str] = "the mean return is above `above` and below `below` (ROLL's `difficulty_mask`)"

    above: float = Field(0.0, description="The mean must be larger than this.")
    below: float = Field(1.0, description="The mean must be smaller than this.")

    def kept(self, groups: JudgedGroups) -> set[int]:
        """Return the groups that are trained on."""
        return {group for group in groups.sizes if self.above < groups.mean[group] < self.below}


class RankedFilter(Filter):
    """What filters have in common that compare the groups of a step by a score (RAGEN-2, arXiv:2604.06268)."""

    by: Literal["deviation", "mean", "sum", "length"] = Field(
        "deviation",
        description="Score of a group: deviation, mean or sum of its returns, or its episodes' mean length in sampled "
        "tokens.",
    )
    keep: Literal["largest", "smallest"] = Field("largest", description="Which scores are kept first.")
    include_zero: bool = Field(True, description="Whether groups of score 0 take part at all.")

    def kept(self, groups: JudgedGroups) -> set[int]:
        """Return the groups of the best scores (RAGEN's rollout_filter.py); ties stay in order of occurrence."""
        scores = {
            group: score
            for group, score in self._scores(groups).items()
            if self.include_zero or abs(score) > _ZERO
        }
        sign = -1 if self.keep == "largest" else 1
        ranked = sorted(scores, key=lambda group: sign * scores[group])
        return self.best(ranked, scores, len(groups.sizes))

    def best(self, ranked: Sequence[int], scores: Mapping[int, float], groups: int) -> set[int]:
        """Return the groups that are kept of a ranking.

        Args:
            ranked: The groups that take part, the best first.
            scores: Their scores.
            groups: How many groups there are, with those that do not take part.
        """
        raise NotImplementedError

    def _scores(self, groups: JudgedGroups) -> dict[int, float]:
        """Return what groups are ranked by, in the order in which they first occur."""
        match self.by:
            case "deviation":
                scores = groups.deviation
            case "mean":
                scores = groups.mean
            case "sum":
                scores = {group: groups.mean[group] * size for group, size in groups.sizes.items()}
            case "length":
                scores = groups.means([float(length) for length in groups.lengths])
            case _:
                assert_never(self.by)
        return {group: scores[group] for group in groups.sizes}


class TopFractionFilter(RankedFilter):
    """Keep the groups whose returns differ most (StarPO-S, arXiv:2504.20073)."""

    kind: Literal["top_fraction"]
    keeps: ClassVar[str] = "the `int(fraction * groups)` largest U, at least one (StarPO-S)"

    fraction: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.25, description="Part of the groups that is kept, rounded down, at least one."
    )

    def best(self, ranked: Sequence[int], scores: Mapping[int, float], groups: int) -> set[int]:
        """Return the groups that are kept of a ranking."""
        return set(ranked[: max(1, int(self.fraction * groups))])


class TopCountFilter(RankedFilter):
    """Keep so many groups, those that score highest (RAGEN's top_k_abs)."""

    kind: Literal["top_count"]
    keeps: ClassVar[str] = "the `count` largest U"

    count: Count = Field(description="How many groups are kept.")

    def best(self, ranked: Sequence[int], scores: Mapping[int, float], groups: int) -> set[int]:
        """Return the groups that are kept of a ranking."""
        return set(ranked[: self.count])


class TopPFilter(RankedFilter):
    """Keep the groups of largest deviation that make up a part of all deviation (RAGEN-2, arXiv:2604.06268)."""

    kind: Literal["top_p"]
    keeps: ClassVar[str] = (
        "the largest until their sum reaches `mass` of all, less `slack`; none if all are 0 (RAGEN-2); "
        "`shares: softmax` sums `softmax(U)`"
    )

    mass: Annotated[float, Field(gt=0.0, le=1.0)] = Field(0.9, description="Part of the summed deviation.")
    slack: NonNegativeFloat = Field(0.01, description="How far below that sum is enough; linear only.")
    shares: Literal["linear", "softmax"] = Field(
        "linear", description="Share of a group: its score itself, or the softmax of the scores."
    )

    @model_validator(mode="after")
    def _slack_is_read(self) -> Self:
        if self.shares != "linear" and self.slack != type(self).model_fields["slack"].default:
            raise ValueError("slack is read with shares: linear only: leave it out")
        return self

    def best(self, ranked: Sequence[int], scores: Mapping[int, float], groups: int) -> set[int]:
        """Return the groups that are kept of a ranking: none if all of them do not make up that part."""
        if self.shares == "softmax":
            return self._of_softmax(ranked, scores)
        target = self.mass * sum(scores[group] for group in ranked) - self.slack
        kept: set[int] = set()
        reached = 0.0
        for group in ranked:
            if reached >= target or scores[group] <= NO_DEVIATION:
                break
            kept.add(group)
            reached += scores[group]
        return kept if reached >= target else set()

    def _of_softmax(self, ranked: Sequence[int], scores: Mapping[int, float]) -> set[int]:
        import torch

        if not ranked:
            return set()
        sign = 1 if self.keep == "largest" else -1
        values = torch.tensor([sign * scores[group] for group in ranked], dtype=torch.float64)
        reached = torch.softmax(values, 0).cumsum(0)
        return set(ranked[: int((reached < self.mass).sum()) + 1])


class MinPFilter(RankedFilter):
    """Keep the groups whose deviation is at least a part of the largest one (RAGEN-2)."""

    kind: Literal["min_p"]
    keeps: ClassVar[str] = "U >= `fraction` of the largest; none if all are 0"

    fraction: Fraction = Field(0.1, description="Part of the largest deviation.")

    def best(self, ranked: Sequence[int], scores: Mapping[int, float], groups: int) -> set[int]:
        """Return the groups that are kept of a ranking."""
        if not ranked:
            return set()
        first = scores[ranked[0]]
        if self.keep == "smallest":
            bound = first / (self.fraction + _ZERO) + _ZERO
            return {group for group in ranked if scores[group] <= bound}
        return {group for group in ranked if first > 0 and scores[group] >= self.fraction * first - _ZERO}


class CustomFilter(Filter):
    """Keep the groups that a function of the user's names."""

    kind: Literal["custom"]
    keeps: ClassVar[str] = (
        "what `function: module:attr` returns for (groups, returns), an entry per trajectory; with "
        "`sees: batch` for the `TrajectoryBatch`"
    )

    function: str = Field(
        description="module:attr of a function (groups, returns) -> the groups to keep; entries per trajectory."
    )
    sees: Literal["returns", "batch"] = Field(
        "returns", description="What it is given: (groups, returns), or the whole TrajectoryBatch."
    )

    def kept(self, groups: JudgedGroups) -> set[int]:
        """Return the groups that are trained on."""
        plugin = load_plugin(self.function, "algorithm.filter.function")
        if self.sees == "batch":
            if groups.batch is None:
                raise ValueError("the filter asks for the whole batch, which is not given")
            given = plugin(groups.batch.copied())
        else:
            given = plugin([*groups.groups], [*groups.returns])
        chosen = plugin.elements(given, "the numbers of the groups to keep", ordered=False)
        # A list of flags would otherwise be read as groups 0 and 1.
        if any(isinstance(each, bool) or not isinstance(each, Integral) for each in chosen):
            raise plugin.broken("must return the numbers of the groups to keep")
        if strangers := set(chosen) - set(groups.groups):
            raise plugin.broken(f"keeps unknown groups {sorted(strangers)}")
        return set(chosen)


FILTERS = (
    NoFilter,
    ZeroVarianceFilter,
    SuccessRangeFilter,
    ScoreRangeFilter,
    TopFractionFilter,
    TopCountFilter,
    TopPFilter,
    MinPFilter,
    CustomFilter,
)
"""Ours, in the order of the documentation."""

FilterSettings = Annotated[Filter, Kinds("rollgym.filters", Filter, FILTERS)]
