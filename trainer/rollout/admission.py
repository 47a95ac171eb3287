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
only if w(d) < f(d) was true. A group that fails, or that a filter leaves out, only lowers w(d), and the group that
takes its place is admitted like any other. Between two steps `free` goes from 0 to P and v up by one: f(d) stays. So
when step v is full, w(v) <= f(v) = 0: nothing that was due at v is left behind. A step that is not full may end only
once nothing waits: then w(d) = 0 <= f(d) whatever it left free.


With `extra` groups E the budget is E larger, so that w(d) <= f(d) + E: when step v is full, at most E groups that are
due at v are left, and these are put aside: they stop, and restart at a later version. As soon as P are aside they
form a long round: they are admitted before any other and without extra ones, and they are never put aside again. For
the groups l(d) among w(d) that are of a long round, `take` keeps l(d) <= f(d) as above, so they are trained in time,
too; their admission keeps to the smaller budget. Hence no group starves, and what is trained on has the lengths of what
was started, only that the long ones come later.

This is a pure state machine: no clock, no tasks, no I/O.
"""

import math
from collections import Counter, deque
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
        window_fraction: Share of the budget that may overtake an unfinished group. Without effect if there are
            extra groups: those that would be overtaken too often are put aside.
        start: Index of the first group.
        reissue: Indices that were admitted before a restart and never trained; they are admitted again first.
        aside: Those among them that were put aside and wait for a long round.
        long_round: Those among them that were of a long round that had begun: it continues.
        extra: Groups that are started beyond the budget, and put aside if they are not ready when they are due (E).
    """

    def __init__(
        self,
        groups_per_step: int,
        max_staleness: int,
        window_fraction: float = 0.3,
        *,
        start: int = 0,
        reissue: tuple[int, ...] = (),
        aside: tuple[int, ...] = (),
        long_round: tuple[int, ...] = (),
        extra: int = 0,
    ) -> None:
        if groups_per_step < 1 or max_staleness < 0 or extra < 0 or not 0.0 <= window_fraction <= 1.0:
            raise ValueError(
                "groups_per_step >= 1, max_staleness >= 0, extra >= 0 and 0 <= window_fraction <= 1 are needed"
            )
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.budget = (max_staleness + 1) * groups_per_step
        self.extra = extra
        self.window = max(1, math.floor(window_fraction * self.budget))
        self._next = start
        self._reissue = deque(sorted(set(reissue) - {*aside, *long_round}))
        self._aside = deque(aside)
        self._round = deque(sorted(long_round))
        self._long: set[int] = set()
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
        """Indices admitted (or to be issued again) and not trained, in order: what a checkpoint must keep."""
        return tuple(sorted([*self._active, *self._reissue, *self._aside, *self._round]))

    @property
    def aside(self) -> tuple[int, ...]:
        """Those of the untrained that were put aside and wait for a long round, in their order."""
        return tuple(self._aside)

    @property
    def long_round(self) -> tuple[int, ...]:
        """Those of the untrained that are of a long round that has begun, in order."""
        return tuple(sorted([*self._round, *self._long]))

    @property
    def waits(self) -> bool:
        """Whether a group is admitted that was neither taken nor dropped."""
        return any(state is not _State.TAKEN for state in self._active.values())

    def admitted_version(self, index: int) -> int:
        """The policy version at which an untrained group was admitted."""
        return self._admitted_version[index]

    def admit(self, version: int) -> list[int]:
        """Start as many groups as the budget allows and return their indices, oldest first."""
        if not self._round and len(self._aside) >= self.groups_per_step:
            self._round.extend(self._aside.popleft() for _ in range(self.groups_per_step))
        admitted = []
        while len(self._active) < self.budget + (0 if self._round or self._long else self.extra):
            index = self._next_in_line()
            self._active[index] = _State.RUNNING
            self._admitted_version[index] = version
            self._turn[index] = self._turns
            self._turns += 1
            admitted.append(index)
        return admitted

    def finish(self, index: int) -> None:
        """Mark a group as finished: all its episodes ended."""
        if self._active.get(index) is not _State.RUNNING:
            raise ValueError(f"group {index} is not running")
        self._active[index] = _State.FINISHED

    def take(self, version: int) -> int | None:
        """Return the oldest finished group that the step of `version` may train, or None if it has to wait."""
        # Dictionaries keep insertion order, which here is the order of admission.
        waiting = [index for index, state in self._active.items() if state is not _State.TAKEN]
        free = self.groups_per_step - (len(self._active) - len(waiting))
        latest = self._full_day(waiting, version, free + self.extra)
        latest_long = self._full_day([index for index in waiting if index in self._long], version, free)
        for index in waiting:
            if not self.extra and self._turn[index] >= self._turn[waiting[0]] + self.window:
                return None
            of_long_round = index in self._long
            in_time = self._due(index) <= latest and (
                self._due(index) <= latest_long if of_long_round else latest_long == math.inf
            )
            if in_time and self._active[index] is _State.FINISHED:
                self._active[index] = _State.TAKEN
                return index
        return None

    def put_aside(self, version: int) -> list[int]:
        """Withdraw the groups due at `version` that were not ready when its step was full; they restart later."""
        late = [
            index
            for index, state in self._active.items()
            if state is not _State.TAKEN and self._due(index) <= version  # none of a long round: see above
        ]
        for index in late:
            self.release(index)
        self._aside.extend(late)
        return late

    def release(self, index: int) -> None:
        """Forget a group that was trained, or dropped with a reason; its place in the budget is free again."""
        del self._active[index]
        del self._admitted_version[index]
        del self._turn[index]
        self._long.discard(index)

    def _next_in_line(self) -> int:
        if self._round:
            index = self._round.popleft()
            self._long.add(index)
            return index
        if self._reissue:
            return self._reissue.popleft()
        self._next += 1
        return self._next - 1

    def _due(self, index: int) -> int:
        return self._admitted_version[index] + self.max_staleness

    def _full_day(self, waiting: list[int], version: int, free: int) -> float:
        """Return the first version at which those due until then need all places: nothing due later may take one."""
        due = Counter(self._due(index) for index in waiting)
        waits = 0
        for day in sorted(due):
            waits += due[day]
            if waits >= free + (day - version) * self.groups_per_step:
                return day
        return math.inf
