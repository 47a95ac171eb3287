"""Arguments of `roll-train` that several commands share, and the parsing of option values."""

import argparse
from collections.abc import Sequence
from typing import Any

from rollgym.trainer.commands.command import Parser
from rollgym.trainer.core.former_names import warn_of_former_name
from rollgym.user_paths import user_path


class FormerOption(argparse.Action):
    """An option by the name that it had before."""

    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Store the value, and warn."""
        warn_of_former_name(str(option_string), f"--{self.dest.replace('_', '-')}")
        setattr(namespace, self.dest, values)


def add_settings(parser: Parser) -> None:
    """Add what says with which settings a command runs."""
    parser.add_argument("--env-url", help="environment server; without it one is started on loopback")
    parser.add_argument(
        "--config",
        type=user_path,
        help="YAML file with the run's settings, or the name of a configuration that comes with rollgym "
        "(roll-train config lists them)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved settings and the memory plan, and stop"
    )
    parser.add_argument(
        "--probe", action="store_true", help="with --dry-run: also ask server, data sets and model"
    )
    parser.add_argument(
        "--device-memory",
        type=gigabytes,
        metavar="GB",
        help="with --dry-run: memory of a device that the plan is held against; default: 80, or the machine's where "
        "model.device is cpu",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings laid over the file's")


def add_checkpoint(parser: Parser, otherwise: str = "") -> None:
    """Add what says which weights a command takes.

    Args:
        parser: The command's.
        otherwise: The model to take if the run has none yet.
    """
    parser.add_argument(
        "--checkpoint",
        type=user_path,
        help=f"checkpoint folder or model directory; default: the run's newest{otherwise}",
    )


def add_run(parser: Parser) -> None:
    """Add the directory of a run."""
    parser.add_argument("run", type=user_path, metavar="RUN", help="the run's output_dir")


def port(text: str) -> int:
    """Read a port, of a command line."""
    # Some systems take the rest of a larger number, and others would look for it in vain.
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"'{text}' is no port: give a number up to 65535")
    return int(text)


def gigabytes(text: str) -> float:
    """Read the size of a memory."""
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0.0 < size <= 1e6:
        raise argparse.ArgumentTypeError(f"'{text}' is no size of a memory: give gigabytes, such as 80")
    return size


def count(text: str) -> int:
    """Parse a number of episodes from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no number of episodes: give 1 or more")
    return int(text)


def step(text: str) -> int:
    """Read the number of a step."""
    if not text.isdecimal() or not text.isascii():
        raise argparse.ArgumentTypeError(f"'{text}' is no step: give a whole number, the first step is 0")
    return int(text)
