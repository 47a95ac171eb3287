"""The command `roll-env`, with its subcommands."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from types import FrameType

_AGAIN_S = 0.05
_SANDBOX_HELP = "show which sandboxes work here; `sandbox run` runs a program in one"


def main(argv: Sequence[str] | None = None) -> int:
    """Look at, play, replay, check and measure environments."""
    if argv is None:
        # This process is the command's own, and a server that the command has started must not outlive it.
        _end_in_order_when_terminated()
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] == ["sandbox"] and arguments[1:2] != ["--version"]:
        # One program for each call: it must not wait for the imports of the client. And `doctor` has to work even if
        # another package is called `sandbox`.
        from rollgym.sandbox import command as sandbox_command

        return sandbox_command.main(arguments[1:])
    return _environments(arguments)


def _environments(arguments: Sequence[str]) -> int:
    """Carry out the commands that talk to servers."""
    from rollgym.clients.cli.arguments import UsageError
    from rollgym.clients.protocol.addresses import explain_refusal
    from rollgym.clients.protocol.arrays import DecodeError, EncodeError
    from rollgym.clients.protocol.errors import ProblemError
    from rollgym.extras import missing_extra

    options = client_parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except UsageError as error:
        print(f"roll-env {options.command}: {error}", file=sys.stderr)
        return 2
    except (ProblemError, DecodeError, EncodeError, ConnectionError, TimeoutError) as error:
        if isinstance(error, ProblemError):
            error = explain_refusal(error, getattr(options, "token", None), "--token")
        print(f"roll-env {options.command}: {error}", file=sys.stderr)
        # An answer that cannot be read is not the user's mistake.
        return 1 if isinstance(error, DecodeError | EncodeError) else 2
    except ModuleNotFoundError as error:
        if (missing := missing_extra(error, options.command)) is None:
            raise
        print(f"roll-env: {missing}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code


def client_parser() -> argparse.ArgumentParser:
    """Return the parser of `roll-env`'s words, but for those of `roll-env sandbox`."""
    from rollgym.clients.cli import (
        audit,
        bench,
        check,
        doctor,
        evaluate,
        init,
        listing,
        play,
        registering,
        replay,
        show,
        verify,
    )
    from rollgym.clients.process.modules import add_version
    from rollgym.command_line import CommandParser

    parser = CommandParser(
        prog="roll-env", description="Look at, play, replay, check and measure environments."
    )
    add_version(parser)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (listing, show, play, replay, verify, evaluate, check, audit, bench, doctor, init):
        command.add_parser(commands)
    registering.add_parsers(commands)
    commands.add_parser("sandbox", help=_SANDBOX_HELP)
    for command_parser in commands.choices.values():
        add_version(command_parser)
    return parser


class _Terminated(SystemExit):
    """Raised when SIGTERM has arrived."""


def _end_in_order_when_terminated() -> None:
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, _end_in_order)
    sys.unraisablehook = _raise_again


def _end_in_order(number: int, frame: FrameType | None) -> None:
    raise _Terminated(128 + signal.SIGTERM)


def _raise_again(lost: sys.UnraisableHookArgs) -> None:
    """Raise the exception that ends the command again if Python has dropped it, as in a finaliser."""
    if isinstance(lost.exc_value, _Terminated):
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
    else:
        sys.__unraisablehook__(lost)


if __name__ == "__main__":
    sys.exit(main())
