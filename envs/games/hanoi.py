"""TowerOfHanoi-v0: bring all disks to peg C, one at a time, none on a smaller one; from any start."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Unpack

import numpy as np
from pydantic import Field

from rollgym.envs.core.splits import SPLIT, Split, checked_split, split_of_text
from rollgym.envs.core.text_game import GameKwargs, Move, Refusal, TextGame

PEGS = "ABC"
_TARGET = 2
_TRIES = 1_000

Pegs = tuple[int, ...]
"""The peg of each disk, the smallest first: a position, since disks on a peg lie by size."""


class TowerOfHanoiEnv(TextGame[tuple[int, int]]):
    """Disks on three pegs.

    Raises:
        ValueError: If an argument makes no sense.
    """

    metadata: dict[str, Any] = TextGame.metadata | {
        "reset_options": ["expert", "pegs", "split"],
        "description": "Bring all disks to peg C, one at a time, none on a smaller one.",
        "observation": "The three pegs with their disks.",
        "actions": "Two pegs, from and to: `A C`.",
        "reward": "1 when all disks are on peg C, else 0.",
        "max_episode_steps": 50,
        "baselines": {
            "random": 0.44,
            "constant action": 0,
            "echo of the instruction": 0.06,
            "blind": 0.46,
            "expert": 1,
        },
    }

    def __init__(
        self,
        *,
        disks: Annotated[int, Field(ge=1, le=10, description="How many there are.")] = 3,
        random_start: Annotated[
            bool, Field(description="Begin with the disks anywhere, rather than all on peg A.")
        ] = True,
        min_moves: Annotated[
            int, Field(ge=1, description="Fewest moves from the start to the goal, at least.")
        ] = 1,
        split: Annotated[
            str | None, SPLIT, Field(description="Only random starts of this split, by content.")
        ] = None,
        max_episode_steps: Annotated[
            int, Field(ge=1, description="Moves, after which the episode is truncated.")
        ] = 50,
        **common: Unpack[GameKwargs],
    ) -> None:
        super().__init__("two pegs, from and to", "A C", max_episode_steps=max_episode_steps, **common)
        if min_moves >= 2**disks:
            raise ValueError(f"min_moves must be at most {2**disks - 1} for {disks} disks, not {min_moves}")
        if split is not None and not random_start:
            raise ValueError("split is for random starts: set random_start to true, or leave split out")
        self._disks = disks
        self._random_start = random_start
        self._least = min_moves
        self._split = checked_split(split)
        self._pegs: Pegs = (0,) * disks
        if random_start and _example(disks, min_moves, self._split) is None:
            raise ValueError(self._none_found(self._split))

    def start_episode(self, options: Mapping[str, Any]) -> None:
        given = options.get("pegs")
        if given is not None:
            self._pegs = checked_pegs(given)
        elif self._random_start:
            self._pegs = self._draw(options)
        else:
            self._pegs = (0,) * self._disks

    def _draw(self, options: Mapping[str, Any]) -> Pegs:
        split = checked_split(options.get("split", self._split))
        wishes = (self._disks, self._least, split)
        pegs = _drawn(self.np_random, *wishes) or _example(*wishes)
        if pegs is None:
            raise ValueError(self._none_found(split))
        return pegs

    def _none_found(self, split: Split | None) -> str:
        return (
            f"no start of {self._disks} disks with {self._least} moves or more is of split {split}: take more "
            "disks, or lower min_moves"
        )

    def parse_action(self, text: str) -> tuple[int, int] | Refusal:
        pegs = [PEGS.find(letter) for letter in text.upper() if letter.isalpha()]
        if len(pegs) != 2 or -1 in pegs or len(text) > 20:
            return Refusal("Name two of the pegs A, B and C, as in: A C.")
        disk, below = self._top(pegs[0]), self._top(pegs[1])
        if disk is None:
            return Refusal(f"There is no disk on peg {PEGS[pegs[0]]}.")
        if pegs[0] == pegs[1]:
            return Refusal("A disk must go to another peg.")
        if below is not None and below < disk:
            return Refusal(f"Disk {disk + 1} cannot lie on the smaller disk {below + 1}.")
        return pegs[0], pegs[1]

    def apply_action(self, action: tuple[int, int]) -> Move:
        disk = self._top(action[0])
        self._pegs = tuple(action[1] if each == disk else peg for each, peg in enumerate(self._pegs))
        solved = set(self._pegs) == {_TARGET}
        return Move(float(solved), solved, solved)

    def _top(self, peg: int) -> int | None:
        return next((disk for disk, where in enumerate(self._pegs) if where == peg), None)

    def draw_board(self) -> str:
        largest_first = range(len(self._pegs) - 1, -1, -1)
        rows = []
        for peg, name in enumerate(PEGS):
            disks = [str(disk + 1) for disk in largest_first if self._pegs[disk] == peg]
            rows.append(f"{name}: {' '.join(disks)}".rstrip())
        return "\n".join(rows)

    def state_info(self) -> dict[str, Any]:
        return {"anchor": _named(self._pegs), "state": {"pegs": list(_named(self._pegs))}}

    def available_actions(self) -> list[str]:
        moves = [(one, other) for one in range(3) for other in range(3)]
        return [self.describe_action(move) for move in moves if self._legal(*move)]

    def _legal(self, start: int, end: int) -> bool:
        disk, below = self._top(start), self._top(end)
        return disk is not None and start != end and (below is None or disk < below)

    def describe_rules(self) -> str:
        return (
            f"Disks 1 (the smallest) to {len(self._pegs)} lie on the pegs A, B and C; each peg is shown from its "
            "lowest disk to its top. Move the top disk of a peg to another peg, never onto a smaller disk, until all "
            "disks are on peg C."
        )

    def optimal_steps(self) -> int:
        return plan(self._pegs)[0]

    def expert_reply(self) -> str:
        move = plan(self._pegs)[1]
        return self.describe_action(move) if move is not None else self.available_actions()[0]

    def describe_action(self, action: tuple[int, int]) -> str:
        return f"{PEGS[action[0]]} {PEGS[action[1]]}"


def _drawn(generator: np.random.Generator, disks: int, least: int, split: Split | None) -> Pegs | None:
    """Draw a start that takes at least `least` moves; None if none was found soon."""
    for attempt in range(2 * _TRIES):
        if attempt < _TRIES:
            pegs = tuple(generator.integers(3, size=disks).tolist())
        else:
            # Long ways are rare among all positions.
            pegs = _position(generator, disks, int(generator.integers(least, 2**disks)))
        if plan(pegs)[0] >= least and (split is None or split_of_text(_named(pegs)) == split):
            return pegs
    return None


def _position(generator: np.random.Generator, disks: int, moves: int) -> Pegs:
    """Draw a position that takes exactly `moves` moves: as in `plan`, each misplaced disk adds its share."""
    pegs, target = [0] * disks, _TARGET
    for disk in range(disks - 1, -1, -1):
        pegs[disk] = target
        if moves >> disk & 1:
            pegs[disk] = (target + int(generator.integers(1, 3))) % 3
            target = 3 - pegs[disk] - target
    return tuple(pegs)


@lru_cache(maxsize=256)
def _example(disks: int, least: int, split: Split | None) -> Pegs | None:
    """Return a start that fits, always the same one; None if no start fits."""
    return _drawn(np.random.default_rng(0), disks, least, split)


def plan(pegs: Pegs) -> tuple[int, tuple[int, int] | None]:
    """Return the fewest moves that bring all disks to peg C, and the first of them.

    From the largest disk down: a misplaced one can only move when all smaller ones are on the third
    peg, and 2**n - 1 moves bring n of them from there onto it.
    """
    moves, first, target = 0, None, _TARGET
    for disk in range(len(pegs) - 1, -1, -1):
        if pegs[disk] != target:
            moves += 2**disk
            first = (pegs[disk], target)
            target = 3 - pegs[disk] - target
    return moves, first


def checked_pegs(pegs: Any) -> Pegs:
    """Return a position that a caller gave, such as `["A", "C", "C"]`, the smallest disk first.

    Raises:
        ValueError: If it is not a position, or solved already.
    """
    if (
        not isinstance(pegs, list | tuple)
        or not 1 <= len(pegs) <= 10
        or any(peg not in tuple(PEGS) for peg in pegs)
    ):
        raise ValueError(
            "pegs must be a list of 1 to 10 of the letters A, B and C: the peg of each disk, the smallest first"
        )
    if set(pegs) == {"C"}:
        raise ValueError("pegs is solved already: put some disk on A or B")
    return tuple(map(PEGS.index, pegs))


def _named(pegs: Pegs) -> str:
    return "".join(PEGS[peg] for peg in pegs)
