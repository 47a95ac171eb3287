"""What a person sees while a run is in progress: a live table in a terminal, plain lines elsewhere."""

import textwrap
import time
from collections.abc import Mapping, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from rollgym.clients.process.terminal import visible
from rollgym.trainer.core.run_metric import RunMetric, span_of

_UNBROKEN = "\N{NO-BREAK SPACE}"
"""Stands between a number and its name while a line is broken."""


class RunConsole:
    """Progress of one run.

    Args:
        steps: Training steps in all.
        live: Whether to draw a live table; only a terminal can show one.
        metrics: The numbers of a step that may be shown, in this order: those with a column, and the parts of its time,
            of which the table says what takes at least one per cent.
    """

    def __init__(self, steps: int, *, live: bool, metrics: Sequence[RunMetric] = ()) -> None:
        self._columns = [(each.name, each.console) for each in metrics if each.console is not None]
        self._parts = [each.name for each in metrics if each.is_part]
        self._console = Console(highlight=False, emoji=False)
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._steps = steps
        self._bar: TaskID | None = None
        self._status: Text | None = None
        self._latest: dict[str, float] = {}
        self._live: Live | None = None
        self._started = time.monotonic()
        if live and self._console.is_terminal:
            self._live = Live(self._draw(), console=self._console, refresh_per_second=4)
            self._live.start()

    def say(self, text: str) -> None:
        """Print permanent text verbatim: an observation may contain what otherwise means a colour or a picture.

        What a terminal would obey is shown as escapes: agents, environments and servers may say anything.
        """
        self._console.print(visible(text), markup=False, soft_wrap=True)

    def explain(self, text: str) -> None:
        """Print a long, permanent sentence, broken between words."""
        self._console.print(visible(text), markup=False)

    def numbers(self, head: str, parts: Sequence[str]) -> None:
        """Print a line of numbers that stays: a whole one in files and pipes; a terminal has it broken between them."""
        line = head + "  ".join(parts)
        if self._console.is_terminal:
            kept = "  ".join(part.replace(" ", _UNBROKEN) for part in parts)
            lines = textwrap.wrap(head + kept, self._console.width, subsequent_indent=" " * 4)
            line = "\n".join(lines).replace(_UNBROKEN, " ")
        self.say(line)

    @property
    def live(self) -> bool:
        """Whether there is a terminal, which can redraw a line."""
        return self._live is not None

    def begin(self, title: str, total: int, done: int = 0) -> None:
        """Show a progress bar for a new task, in place of the last one."""
        if self._bar is not None:
            self._progress.remove_task(self._bar)
        self._bar = self._progress.add_task(title, total=total, completed=done)
        self._redraw()

    def advance(self, done: int) -> None:
        """Report the progress of the present task."""
        if self._bar is not None:
            self._progress.update(self._bar, completed=done)
            self._redraw()

    def begin_training(self, step: int, steps: int | None = None) -> None:
        """Show the bar of training steps, of which `step` are done, and of which there may be others than expected."""
        self.begin("training", self._steps if steps is None else steps, step)

    def status(self, text: str | None) -> None:
        """Show a line below the table until another takes its place; only in a terminal."""
        self._status = None if text is None else Text(visible(text))
        self._redraw()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the numbers of a finished step."""
        self._latest = dict(metrics)
        self.advance(step + 1)
        if self._live is None:
            parts = [
                f"{column.label} {column.form.format(metrics[name])}"
                for name, column in self._columns
                if name in metrics
            ]
            self.numbers(f"[{time.monotonic() - self._started:6.1f} s] step {step + 1}: ", parts)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._redraw()
        if self._live is not None:
            self._live.stop()

    def _redraw(self) -> None:
        if self._live is not None:
            self._live.update(self._draw())

    def _draw(self) -> Group:
        table = Table(show_header=True, box=None, pad_edge=False)
        present = [(name, column) for name, column in self._columns if name in self._latest]
        for _, column in present:
            table.add_column(column.label, justify="right")
        if present:
            table.add_row(*(column.form.format(self._latest[name]) for name, column in present))
        # A table without columns is drawn as an empty line.
        tables = [table] if present else []
        lines = [text for text in (self._split(), self._status) if text is not None]
        return Group(self._progress, *tables, *lines)

    def _split(self) -> Text | None:
        whole = self._latest.get("time/step_s", 0.0)
        shares = {span_of(name): self._latest.get(name, 0.0) / whole for name in self._parts if whole > 0}
        shown = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.01)
        return Text(f"of the step: {shown}", style="dim") if shown else None
