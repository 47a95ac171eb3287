"""A command of `roll-train`: its name, its description, its arguments, and the function that carries it out."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from rollgym.clients.process.installed import add_version
from rollgym.command_line import CommandParser
from rollgym.trainer.config.run import RunSettings


class Parser(CommandParser):
    """The parser of a command of `roll-train`."""

    speaker = "roll-train"


@dataclass(slots=True)
class Invocation:
    """One invocation of a command.

    Attributes:
        options: Its parsed arguments.
        parser: The parser that has read them.
        settings: The run's settings, once a command has read them: tracebacks are written to their output directory.
    """

    options: argparse.Namespace
    parser: Parser
    settings: RunSettings | None = None


@dataclass(frozen=True, slots=True)
class Command:
    """A command.

    Attributes:
        name: The word for it.
        summary: Its line in the list of commands.
        description: First paragraph of its --help.
        run: Carries it out and returns the exit code. What needs torch, a web server or much time is imported there.
        add_arguments: Adds its arguments to its parser.
    """

    name: str
    summary: str
    description: str
    run: Callable[[Invocation], int]
    add_arguments: Callable[[Parser], None]

    def parser(self) -> Parser:
        """Return the argument parser of the command."""
        parser = Parser(prog=f"roll-train {self.name}", description=self.description)
        add_version(parser)
        self.add_arguments(parser)
        return parser
