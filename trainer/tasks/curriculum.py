"""A mixture whose shares follow the policy's progress, recorded in a file: tasks are functions of the record.

After each training step the shares of domains in the blocks of unissued tasks are recomputed, and a line of
`curriculum.jsonl` records them. Task i is a function of the run's seed, i and the lines whose blocks are not behind it.
So a resumed run, which keeps the lines of the steps that it keeps, plays the tasks that it would have played.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rollgym.trainer.config.rollout import CurriculumSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.run_files import DamagedFileError, LineFile, lines_and_sizes, write_errors
from rollgym.trainer.core.seeding import generator
from rollgym.trainer.tasks.task import Task, TaskStream, counts_in_block

CURRICULUM_FILE = "curriculum.jsonl"
"""The log's name in a run's directory."""

_KEPT_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class Change:
    """Shares from some block of tasks on.

    Attributes:
        block: The first block that has them.
        counts: Tasks of each stream in a block.
        before: Tasks of each stream in all blocks before this one.
    """

    block: int
    counts: tuple[int, ...]
    before: tuple[int, ...]


class CurriculumTaskSource:
    """Mixes streams in shares that follow the policy's success in their domains.

    A domain's weight is multiplied by its learnability, four times p (1 - p) with p the running mean of its success
    (Rutherford et al. 2024, "No Regrets", arXiv:2408.15099, section 4), but by no less than a floor.

    Args:
        streams: What is mixed.
        block: Tasks of a block: those of a training step.
        seed: Of the run.
        settings: How fast shares follow, and their floor.

    Raises:
        ConfigError: If there are more domains than tasks in a block.
    """

    def __init__(
        self, streams: Sequence[TaskStream], block: int, seed: int, settings: CurriculumSettings
    ) -> None:
        if len(streams) > block:
            raise ConfigError(
                f"curriculum: {len(streams)} domains do not fit into a step of {block} groups, and each has at least "
                "one: raise rollout.groups_per_step"
            )
        self.streams = tuple(streams)
        self._block = block
        self._seed = seed
        self._settings = settings
        self._rates: dict[str, float] = {}
        counts = self._counts()
        self._changes = [Change(0, counts, (0,) * len(streams))]
        self._order = lru_cache(maxsize=_KEPT_BLOCKS)(self._draw_order)
        self._file: LineFile | None = None

    def task(self, index: int) -> Task:
        """Return the task at `index`: equal for equal (seed, index, changes up to its block)."""
        block, position = divmod(index, self._block)
        change = self._changes[bisect_right(self._changes, block, key=lambda each: each.block) - 1]
        choice, rank = self._order(block, change.counts)[position]
        number = change.before[choice] + (block - change.block) * change.counts[choice] + rank
        return self.streams[choice].item(number, index, self._seed)

    def take_up(self, directory: Path, step: int) -> None:
        """Read what earlier processes wrote before a step, cut off what they wrote later, and write on there.

        Raises:
            DamagedFileError: If a line is none that a run wrote.
            WriteError: If the disk does not take it.
        """
        path = directory / CURRICULUM_FILE
        self._file = LineFile(path)
        kept = 0
        for number, (line, size) in enumerate(lines_and_sizes(path, "step"), start=1):
            if line["step"] >= step:
                break
            self._apply(line, path, number)
            kept += size
        with write_errors(path):
            self._file.truncate(kept)

    def follow(self, step: int, solved: Mapping[str, Sequence[bool]], next_task: int) -> dict[str, float]:
        """Set and record the shares of blocks that are not handed out yet, and return metrics.

        Args:
            step: The training step that has ended.
            solved: Which episodes of each domain solved their task in it.
            next_task: The first task that is not handed out yet.
        """
        keep = self._settings.smoothing
        for domain, flags in solved.items():
            if flags:
                now = sum(flags) / len(flags)
                self._rates[domain] = keep * self._rates.get(domain, now) + (1.0 - keep) * now
        block = max(-(-next_task // self._block), self._changes[-1].block)
        line = {"step": step, "block": block, "counts": list(self._counts()), "success": dict(self._rates)}
        if self._file is not None:
            self._file.write(line)
            self._file.flush()
        self._add(block, self._counts())
        return {
            f"domain/{stream.domain}/share": count / self._block
            for stream, count in zip(self.streams, self._counts(), strict=True)
        }

    def close(self) -> None:
        """Close the file that the blocks' shares are logged to, if there is one."""
        if self._file is not None:
            self._file.close()

    def _counts(self) -> tuple[int, ...]:
        weights = [stream.weight * self._learnability(stream.domain) for stream in self.streams]
        # Each has one task at least: a domain that is never played is never found to have become learnable.
        left = counts_in_block(weights, self._block - len(weights))
        return tuple(count + 1 for count in left)

    def _learnability(self, domain: str) -> float:
        rate = self._rates.get(domain, 0.5)
        return max(self._settings.floor, 4.0 * rate * (1.0 - rate))

    def _apply(self, line: Mapping[str, Any], path: Path, number: int) -> None:
        try:
            block, counts = int(line["block"]), tuple(int(count) for count in line["counts"])
            rates = {str(domain): float(rate) for domain, rate in line["success"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedFileError(path, number) from error
        if len(counts) != len(self.streams) or sum(counts) != self._block or block < self._changes[-1].block:
            raise DamagedFileError(path, number)
        self._rates = rates
        self._add(block, counts)

    def _add(self, block: int, counts: tuple[int, ...]) -> None:
        last = self._changes[-1]
        passed = block - last.block
        before = tuple(old + passed * count for old, count in zip(last.before, last.counts, strict=True))
        if not passed:
            self._changes.pop()
        self._changes.append(Change(block, counts, before))

    def _draw_order(self, block: int, counts: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        places = [(choice, rank) for choice, count in enumerate(counts) for rank in range(count)]
        order = generator(self._seed, "task", "block", block).permutation(len(places))
        return tuple(places[int(index)] for index in order)
