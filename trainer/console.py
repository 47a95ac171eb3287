"""What a person sees while a run goes on: a live table in a terminal, plain lines elsewhere."""

import time
from collections.abc import Mapping

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

_SHOWN = (
    ("rollout/success", "success", "{:.3f}"),
    ("rollout/reward", "reward", "{:.3f}"),
    ("policy/entropy", "entropy", "{:.3f}"),
    ("time/tokens_per_s", "tokens/s", "{:.0f}"),
    ("rollout/lag_mean", "staleness", "{:.2f}"),
    ("time/step_s", "s/step", "{:.2f}"),
)


class RunConsole:
    """Progress of one run.

    Args:
        steps: Training steps in all.
        live: Whether to draw a live table; only a terminal can show one.
    """

    def __init__(self, steps: int, *, live: bool) -> None:
        self._console = Console(highlight=False, emoji=False)
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._bar = self._progress.add_task("training", total=steps)
        self._latest: dict[str, float] = {}
        self._live: Live | None = None
        self._started = time.monotonic()
        if live and self._console.is_terminal:
            self._live = Live(self._draw(), console=self._console, refresh_per_second=4)
            self._live.start()

    def say(self, text: str) -> None:
        """Print text that stays, as it is: an observation may hold what elsewhere means a colour or a picture."""
        self._console.print(text, markup=False, soft_wrap=True)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the numbers of a finished step."""
        self._latest = dict(metrics)
        self._progress.update(self._bar, completed=step + 1)
        if self._live is not None:
            self._live.update(self._draw())
        else:
            shown = "  ".join(
                f"{label} {form.format(metrics[key])}" for key, label, form in _SHOWN if key in metrics
            )
            self.say(f"[{time.monotonic() - self._started:6.1f} s] step {step + 1}: {shown}")

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._live is not None:
            self._live.update(self._draw())
            self._live.stop()

    def _draw(self) -> Group:
        table = Table(show_header=True, box=None, pad_edge=False)
        present = [entry for entry in _SHOWN if entry[0] in self._latest]
        for _, label, _ in present:
            table.add_column(label, justify="right")
        if present:
            table.add_row(*(form.format(self._latest[key]) for key, _, form in present))
        return Group(self._progress, table)
