"""Command lines whose complaints are one line, with the remedy."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from rollgym.suggestions import did_you_mean

_LONGEST_SHOWN = 60


class CommandParser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line, names what was probably meant, and exits with code 2.

    Attributes:
        speaker: What the line begins with; the program and its command by default.
    """

    speaker: str | None = None

    def error(self, message: str) -> NoReturn:
        """End the process with a complaint."""
        message = f"{message}{self._nearest_option(message)}"
        self.exit(2, f"{self.speaker or self.prog}: {message} (see {self.prog} --help)\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        hint = did_you_mean(str(value), known) or f"choose from {', '.join(known)}"
        raise argparse.ArgumentError(action, f"there is no {str(value)[:_LONGEST_SHOWN]!r}: {hint}")

    def _nearest_option(self, message: str) -> str:
        unknown, _, rest = message.partition(": ")
        if unknown != "unrecognized arguments":
            return ""
        known = [word for action in self._actions for word in action.option_strings]
        hint = did_you_mean(rest.split()[0].partition("=")[0], known)
        return f": {hint}" if hint else ""
