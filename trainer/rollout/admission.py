"""Windowed first-in-first-out admission: how old training data may be, decided when groups start and are taken.

Of the groups that are admitted and not yet trained there are never more than `(max_staleness + 1) * groups_per_step`.
Finished groups are taken oldest first, from a window anchored at the oldest group that is still unfinished: a slow
group can be overtaken by at most `window - 1` later ones and is never thrown away. And a group is due: it is overtaken
only as long as all that are due before the overtaking one can still be trained in time. Together:

    lag = version trained on - version at admission  <=  max_staleness

Proof. Let P be `groups_per_step` and S `max_staleness`. A group that is admitted at version a is due at a + S. Write
w(d) for the groups that wait (are admitted and not taken) and are due at d or before, and f(d) = free + (d - v) * P for
the places until then, `free` being those that are left in the running step v. The invariant is w(d) <= f(d) for all
d >= v; for d = v it says that whatever is due now still fits into this step.
Admission concerns d >= v + S only, and there the budget gives w(d) <= (S + 1) * P - taken = free + S * P <= f(d).
Taking a group that is due at e lowers `free` by one; for d >= e it lowers w(d), too, and for d < e `take` allows it
only if w(d) < f(d) was true. Between two steps `free` goes from 0 to P and v up by one: f(d) stays. So when step v is
full, w(v) <= f(v) = 0: nothing that was due at v is left behind.

This is a pure state machine: no clock, no tasks, no I/O.
"""

import math
from collections import deque
from enum import Enum


class _State(Enum):
    RUNNING = 0
    FINISHED = 1
    TAKEN = 2


class AdmissionWindow:
    """Which groups may start, and which finished group is trained on next.

    Args:
        groups_per_step: Groups that one training step consumes (P).
        max_staleness: Largest lag in steps (S); 0 trains on-policy.
        window_fraction: Share of the budget that may overtake an unfinished group.
        start: Index of the first group.
        reissue: Indices that were admitted before a restart and never trained; they are admitted again first.
    """

    def __init__(
        self,
        groups_per_step: int,
        max_staleness: int,
        window_fraction: float = 0.3,
        *,
        start: int = 0,
        reissue: tuple[int, ...] = (),
    ) -> None:
        if groups_per_step < 1 or max_staleness < 0 or not 0.0 <= window_fraction <= 1.0:
            raise ValueError(
                "groups_per_step >= 1, max_staleness >= 0 and 0 <= window_fraction <= 1 are needed"
            )
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.budget = (max_staleness + 1) * groups_per_step
        self.window = max(1, math.floor(window_fraction * self.budget))
        self._next = start
        self._reissue = deque(sorted(reissue))
        self._active: dict[int, _State] = {}
        self._admitted_version: dict[int, int] = {}
        self._turn: dict[int, int] = {}
        self._turns = 0

    @property
    def next_index(self) -> int:
        """The first index of the stream that was never admitted."""
        return self._next

    @property
    def untrained(self) -> tuple[int, ...]:
        """Indices admitted (or to be issued again) and not trained, oldest first: what a checkpoint must keep."""
        return tuple(sorted([*self._active, *self._reissue]))

    def admitted_version(self, index: int) -> int:
        """The policy version at which an untrained group was admitted."""
        return self._admitted_version[index]

    def admit(self, version: int) -> list[int]:
        """Start as many groups as the budget allows and return their indices, oldest first."""
        admitted = []
        while len(self._active) < self.budget:
            if self._reissue:
                index = self._reissue.popleft()
            else:
                index = self._next
                self._next += 1
            self._active[index] = _State.RUNNING
            self._admitted_version[index] = version
            self._turn[index] = self._turns
            self._turns += 1
            admitted.append(index)
        return admitted

    def finish(self, index: int) -> None:
        """Say that all episodes of a group ended."""
        if self._active.get(index) is not _State.RUNNING:
            raise ValueError(f"group {index} is not running")
        self._active[index] = _State.FINISHED

    def take(self, version: int) -> int | None:
        """Return the oldest finished group that the step of `version` may train, or None if it has to wait."""
        # Dictionaries keep insertion order, which here is the order of admission.
        waiting = [index for index, state in self._active.items() if state is not _State.TAKEN]
        for index in waiting:
            if self._turn[index] >= self._turn[waiting[0]] + self.window:
                return None
            if self._active[index] is _State.FINISHED:
                if self._makes_another_late(index, waiting, version):
                    return None
                self._active[index] = _State.TAKEN
                return index
        return None

    def release(self, index: int) -> None:
        """Forget a group that was trained, or dropped with a reason; its place in the budget is free again."""
        del self._active[index]
        del self._admitted_version[index]
        del self._turn[index]

    def _makes_another_late(self, index: int, waiting: list[int], version: int) -> bool:
        """Whether taking a group leaves too few places for those that are due before it."""
        due = [self._admitted_version[each] + self.max_staleness for each in waiting]
        free = self.groups_per_step - (len(self._active) - len(waiting))
        own = self._admitted_version[index] + self.max_staleness
        return any(
            sum(each <= day for each in due) >= free + (day - version) * self.groups_per_step
            for day in {each for each in due if each < own}
        )
