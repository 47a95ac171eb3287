"""`roll-train`: train, learn from examples, play episodes, evaluate, export and replay what was trained."""

import atexit
import gc
import os
import sys
from collections.abc import Sequence

from rollgym.clients.client.server_token import explain_refusal, server_token
from rollgym.clients.process.terminal import visible
from rollgym.clients.protocol.arrays import DecodeError, EncodeError
from rollgym.clients.protocol.errors import ProblemError
from rollgym.extras import missing_extra
from rollgym.trainer.commands.command import Command, Invocation
from rollgym.trainer.commands.internal_errors import (
    described,
    is_short_of_memory,
    keep_traceback,
    memory_does_not_suffice,
    remedies_of_playing,
)
from rollgym.trainer.commands.table import parser_of, split_command
from rollgym.trainer.core.errors import PluginError, TrainerError

USER_ERRORS = (TrainerError, ProblemError, EncodeError, DecodeError, ConnectionError, TimeoutError)
"""Errors that end a command with one line, which names the remedy: our own, and those of connections to servers.

An exception in the user's code arrives as a `PluginError` that names its setting. Any other exception is an internal
error, or a package that is not installed.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    # A console script does not look in the current directory, where users keep the modules that a config names.
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    # The end of the process looks for garbage, among all that torch and transformers made: two seconds for nothing.
    atexit.register(gc.freeze)
    command, words = split_command(list(sys.argv[1:] if arguments is None else arguments))
    parser = parser_of(command)
    return _carry_out(command, Invocation(parser.parse_intermixed_args(words), parser))


def _carry_out(command: Command, invocation: Invocation) -> int:
    """Carry out a command, print one line for any error that ends it, and return the exit code."""
    try:
        return command.run(invocation)
    except USER_ERRORS as error:
        settings, kept = invocation.settings, ""
        if isinstance(error, PluginError):
            kept = f"; traceback in {keep_traceback(settings, error)}"
        if isinstance(error, ProblemError) and settings is not None:
            error = explain_refusal(error, server_token(settings.env_token), "env_token=...")
        kept += "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
        print(visible(f"roll-train: {error}{kept}"), file=sys.stderr)
        return getattr(error, "exit_code", 2)
    except KeyboardInterrupt:
        print("roll-train: interrupted", file=sys.stderr)
        return 130
    except Exception as error:  # noqa: BLE001 - the end of the program: every error is reported here
        if (missing := missing_extra(error, command.name)) is not None:
            print(f"roll-train: {missing}", file=sys.stderr)
            return 2
        settings = invocation.settings
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
