"""A command of `roll-train`: its name, its description, its arguments, and the function that carries it out."""

import argparse
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from rollgym.clients.process.modules import add_version
from rollgym.command_line import CommandParser
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.strict import warn_of_former_name
from rollgym.user_paths import user_path


class Parser(CommandParser):
    """The parser of a command of `roll-train`."""

    speaker = "roll-train"


@dataclass(frozen=True, slots=True)
class Invocation:
    """One invocation of a command.

    Attributes:
        options: Its parsed arguments.
        parser: The parser that has read them.
    """

    options: argparse.Namespace
    parser: Parser


@dataclass(frozen=True, slots=True)
class Command:
    """A command.

    Attributes:
        name: The word for it.
        summary: Its line in the list of commands.
        description: First paragraph of its --help.
        own_arguments: Adds the arguments that it alone has to its parser.
    """

    name: str
    summary: str
    description: str
    own_arguments: Callable[[Parser], None] = lambda parser: None

    def add_arguments(self, parser: Parser) -> None:
        """Add the arguments of the command."""
        self.own_arguments(parser)

    def parser(self) -> Parser:
        """Return the argument parser of the command."""
        parser = Parser(prog=f"roll-train {self.name}", description=self.description)
        add_version(parser)
        self.add_arguments(parser)
        return parser


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainCommand(Command):
    """A command that needs no settings.

    Attributes:
        run: Carries it out and returns the exit code. What needs torch, a web server or much time is imported there.
    """

    run: Callable[[Invocation], int]


CarryOut = Callable[[RunSettings, argparse.Namespace], Coroutine[Any, Any, int]]
"""Does what a command is for, by settings, and returns the exit code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsCommand(Command):
    """A command that runs by settings.

    Attributes:
        carry_out: Does what it is for; None if it trains.
        check: Raises `ConfigError` for conflicting arguments, before settings are read.
    """

    carry_out: CarryOut | None = None
    check: Callable[[argparse.Namespace], None] = lambda options: None

    def add_arguments(self, parser: Parser) -> None:
        """Add what says with which settings it runs, and its own arguments."""
        add_settings(parser)
        self.own_arguments(parser)


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
