"""An episode's waits over time: its parts sum to the whole, however its waits overlap."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self


class Phase(StrEnum):
    """The things that an episode can wait for. If several occur at one time, the first of them in this order counts."""

    GENERATE = "generate"
    VERIFY = "verify"
    ENVIRONMENT = "environment"
    QUEUE = "queue"
    AGENT = "agent"


_NAMES = tuple(phase.value for phase in Phase)


class _During:
    """A context in which an episode waits. Written out: every turn of every episode goes through two of them."""

    __slots__ = ("_phase", "_timeline")

    def __init__(self, timeline: "Timeline", phase: Phase) -> None:
        self._timeline, self._phase = timeline, phase

    def __enter__(self) -> None:
        self._timeline.begin(self._phase)

    def __exit__(self, *_: object) -> None:
        self._timeline.done(self._phase)


@dataclass(slots=True)
class Timeline:
    """The phases of one episode, each until the next one begins.

    Attributes:
        clock: Gives the time in seconds; only differences mean anything.
        marks: When each phase began, in order: (time, phase).
        ended: When the episode ended; None while it runs.
    """

    clock: Callable[[], float] = time.monotonic
    marks: list[tuple[float, Phase]] = field(default_factory=list)
    ended: float | None = None
    _under_way: list[Phase] = field(default_factory=list)

    @classmethod
    def from_seconds(cls, seconds: Mapping[str, float]) -> Self:
        """Return a timeline that is over, with phases of these lengths one after the other."""
        timeline = cls(clock=lambda: 0.0)
        end = 0.0
        timeline.marks = []
        for phase in Phase:
            timeline.marks.append((end, phase))
            end += seconds.get(phase.value, 0.0)
        timeline.ended = end
        return timeline

    def __post_init__(self) -> None:
        self.marks.append((self.clock(), Phase.AGENT))

    def during(self, phase: Phase) -> "_During":
        """Note that the episode waits for `phase` inside the context."""
        return _During(self, phase)

    def begin(self, phase: Phase) -> None:
        """Note that the episode waits for `phase` from now on, in addition to its other waits."""
        self._under_way.append(phase)
        self._mark()

    def done(self, phase: Phase) -> None:
        """Note the end of the wait for `phase`."""
        self._under_way.remove(phase)
        self._mark()

    def queued(self, since: float, until: float) -> None:
        """Note that the episode waited for its session before this timeline was made."""
        made = self.marks[0][0]
        self.marks[:0] = [(min(since, made), Phase.QUEUE), (min(until, made), Phase.AGENT)]

    def end(self) -> None:
        """Note that the episode is over; later marks are ignored."""
        if self.ended is None:
            self.ended = self.clock()

    def spans(self) -> list[tuple[float, float, Phase]]:
        """Return the phases as (from, until, phase), without gaps or overlaps."""
        end = self.clock() if self.ended is None else self.ended
        ends = [moment for moment, _ in self.marks[1:]] + [end]
        return [
            (start, min(until, end), phase)
            for (start, phase), until in zip(self.marks, ends, strict=True)
            if start < min(until, end)
        ]

    def seconds(self) -> dict[str, float]:
        """Return how long each phase lasted in all; together they are the episode's whole time."""
        totals = dict.fromkeys(_NAMES, 0.0)
        for start, until, phase in self.spans():
            totals[phase.value] += until - start
        return totals

    def _mark(self) -> None:
        waits = self._under_way
        if not waits:
            phase = Phase.AGENT
        elif len(waits) == 1:
            phase = waits[0]
        else:
            phase = next(phase for phase in Phase if phase in waits)
        if phase is not self.marks[-1][1]:
            self.marks.append((self.clock(), phase))
