"""`roll-train`: train, learn from examples, play episodes, evaluate, export and replay what was trained."""

import asyncio
import atexit
import gc
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rollgym.clients.process.modules import FormerNameWarning
from rollgym.clients.process.terminal import visible
from rollgym.clients.protocol.addresses import explain_refusal, server_token
from rollgym.clients.protocol.arrays import DecodeError, EncodeError
from rollgym.clients.protocol.errors import ProblemError
from rollgym.extras import missing_extra
from rollgym.trainer.config.load import check_command
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.errors import PluginError, TrainerError
from rollgym.trainer.run.command import Command, Invocation, PlainCommand
from rollgym.trainer.run.internal_errors import (
    described,
    is_short_of_memory,
    keep_traceback,
    memory_does_not_suffice,
    remedies_of_playing,
)
from rollgym.trainer.run.learning import learn
from rollgym.trainer.run.table import dry_run, parser_of, read_settings, split_command

USER_ERRORS = (TrainerError, ProblemError, EncodeError, DecodeError, ConnectionError, TimeoutError)
"""Errors that end a command with one line, which names the remedy: our own, and those of connections to servers.

An exception in the user's code arrives as a `PluginError` that names its setting. Any other exception is an internal
error, or a package that is not installed.
"""


@contextmanager
def _former_names_in_lines() -> Iterator[None]:
    """Have warnings of former names read as the command's other messages while the context is open.

    They are about words that the user wrote, and Python would show one of our lines.
    """
    plain = warnings.formatwarning

    def written(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if issubclass(category, FormerNameWarning):
            return f"roll-train: {visible(str(message))}\n"
        return plain(message, category, filename, lineno, line)

    warnings.formatwarning = written
    try:
        yield
    finally:
        warnings.formatwarning = plain


@_former_names_in_lines()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    # A console script does not look in the current directory, where users keep the modules that a config names.
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    # The end of the process looks for garbage, among all that torch and transformers made: two seconds for nothing.
    atexit.register(gc.freeze)
    command, words = split_command(list(sys.argv[1:] if arguments is None else arguments))
    parser = parser_of(command)
    options = parser.parse_intermixed_args(words)
    settings: RunSettings | None = None
    try:
        if isinstance(command, PlainCommand):
            return command.run(Invocation(options, parser))
        settings = read_settings(command, options)
        if options.dry_run:
            return dry_run(command, settings, options)
        if command.carry_out is None:
            return asyncio.run(learn(settings, command.name))
        check_command(settings, command.name)
        return asyncio.run(command.carry_out(settings, options))
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the end of the program: every error is reported here
        return _reported(error, command, settings)
    finally:
        atexit.register(_end_without_a_word)  # the last to be registered is the first to be called


def _end_without_a_word() -> None:
    """Have a further Ctrl-C end the process at once: it is ending, and a traceback of where it stands is of no use."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _reported(error: Exception | KeyboardInterrupt, command: Command, settings: RunSettings | None) -> int:
    """Print one line for the error that ended a command, and return the exit code."""
    if isinstance(error, KeyboardInterrupt):
        print("roll-train: interrupted", file=sys.stderr)
        return 130
    if isinstance(error, USER_ERRORS):
        kept = ""
        if isinstance(error, PluginError):
            kept = f"; traceback in {keep_traceback(settings, error)}"
        if isinstance(error, ProblemError) and settings is not None:
            error = explain_refusal(error, server_token(settings.env_token), "env_token=...")
        kept += "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
        print(visible(f"roll-train: {error}{kept}"), file=sys.stderr)
        return getattr(error, "exit_code", 2)
    if (missing := missing_extra(error, command.name)) is not None:
        print(f"roll-train: {missing}", file=sys.stderr)
        return 2
    if settings is not None and is_short_of_memory(error):
        line = memory_does_not_suffice(settings, error, remedies_of_playing(settings))
        print(f"roll-train: {line}", file=sys.stderr)
        return 2
    file = keep_traceback(settings, error)
    line = f"internal error, please report it: {described(error)}; traceback in {file}"
    print(visible(f"roll-train: {line}"), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
