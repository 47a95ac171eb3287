"""The command `roll-serve`, which runs an environment server."""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence

from pydantic import ValidationError

from rollgym.clients.process.modules import add_version
from rollgym.command_line import CommandParser
from rollgym.env_server.access.tokens import (
    ROLES,
    Quota,
    add_token,
    retire_tokens,
    revoke_tokens,
    rotate_token,
)
from rollgym.env_server.common.io_process import ProcessRank
from rollgym.env_server.common.settings import ConfigurationError, ServerSettings
from rollgym.env_server.common.settings_loading import add_flags, load_settings
from rollgym.env_server.process.server import bind, run_process, url_of
from rollgym.env_server.process.supervisor import supervise
from rollgym.extras import missing_extra
from rollgym.user_paths import user_path


def main(argv: Sequence[str] | None = None) -> int:
    """Serve environments until SIGTERM (`roll-serve`), or make a token (`roll-serve token`)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # A console command does not look in the working directory, where authors keep what they work on.
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    if arguments[:1] == ["token"]:
        return _make_token(arguments[1:])
    parser = server_parser()
    flags = vars(parser.parse_args(arguments))
    config = flags.pop("config")
    try:
        settings = load_settings(flags, config)
    except ConfigurationError as error:
        parser.exit(2, f"roll-serve: {error}\n")
    try:
        return _serve(settings)
    except ConfigurationError as error:
        parser.exit(2, f"roll-serve: {error}\n")
    except OSError as error:
        parser.exit(1, f"roll-serve: {error}\n")
    except ModuleNotFoundError as error:
        if (missing := missing_extra(error, "the server")) is None:
            raise
        parser.exit(2, f"roll-serve: {missing}\n")


def server_parser() -> argparse.ArgumentParser:
    """Return the parser of `roll-serve`'s words."""
    parser = CommandParser(
        prog="roll-serve",
        usage="%(prog)s [--config FILE] [settings]\n       %(prog)s token [--help]",
        description="Serve environments over HTTP and WebSocket.",
        epilog="`roll-serve token --help` makes tokens. Every flag may stand in the file of --config instead.",
    )
    add_version(parser)
    parser.add_argument(
        "--config",
        type=user_path,
        metavar="FILE",
        help="YAML file with any of these settings, under the same names.",
    )
    add_flags(parser)
    return parser


def _serve(settings: ServerSettings) -> int:
    settings.make_state_dir()
    if settings.stop_at_end_of_input:
        threading.Thread(target=_stop_at_end_of_input, name="end-of-input", daemon=True).start()
    if settings.processes > 1:
        return supervise(settings, lambda url: _announce(settings, url))
    listening = bind(settings.host, settings.port)
    rank = ProcessRank(directory=settings.state_dir)
    return run_process(
        settings, rank, listening, lambda: _announce(settings, url_of(settings.host, listening))
    )


def _stop_at_end_of_input() -> None:
    # A buffered read would hold a lock that the interpreter wants when it ends.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _announce(settings: ServerSettings, url: str) -> None:
    # A server that another program starts and ends is that program's own: it has no other users.
    embedded = settings.stop_at_end_of_input
    if settings.token_file is None and settings.log_format == "text" and not embedded:
        print("roll-serve: no tokens are configured, so only loopback is served", file=sys.stderr, flush=True)
    print(f"rollgym serving on {url} (console: {url}/console)", flush=True)


def token_parser() -> argparse.ArgumentParser:
    """Return the parser of the words of `roll-serve token`."""
    parser = CommandParser(
        prog="roll-serve token",
        description="Make a token, add its hash to the token file and print the token: it is shown only here.",
        epilog="A server that runs reads the file again on SIGHUP.",
    )
    add_version(parser)
    parser.add_argument(
        "--file", type=user_path, required=True, help="The token file; made if it does not exist."
    )
    parser.add_argument(
        "--name", required=True, help="Whose token it is; sessions and metrics show this name."
    )
    parser.add_argument(
        "--role", choices=ROLES, action="append", help="What it may do (repeatable; default play)."
    )
    parser.add_argument("--max-sessions", type=int, help="At most so many sessions.")
    parser.add_argument("--rate-limit", type=float, help="At most so many operations a second.")
    parser.add_argument("--max-sockets", type=int, help="At most so many open sockets.")
    parser.add_argument("--max-registrations", type=int, help="At most so many registrations at a gateway.")
    parser.add_argument("--max-runs", type=int, help="At most so many programs that run or wait at one time.")
    change = parser.add_mutually_exclusive_group()
    change.add_argument(
        "--rotate",
        action="store_true",
        help="Make a new token for the name; the old one works on until --retire.",
    )
    change.add_argument("--retire", action="store_true", help="Let only the newest token of the name work.")
    change.add_argument("--revoke", action="store_true", help="Take the name and its tokens out of the file.")
    return parser


def _make_token(arguments: Sequence[str]) -> int:
    parser = token_parser()
    options = parser.parse_args(arguments)
    limits = {name: getattr(options, name) for name in Quota.model_fields}
    if (options.rotate or options.retire or options.revoke) and (
        options.role or any(value is not None for value in limits.values())
    ):
        parser.error("roles and limits are set when a token is made; edit the file to change them")
    try:
        if options.revoke:
            revoke_tokens(options.file, options.name)
        elif options.retire:
            retire_tokens(options.file, options.name)
        elif options.rotate:
            print(rotate_token(options.file, options.name))
        else:
            print(add_token(options.file, options.name, options.role or ["play"], Quota(**limits)))
    except ValidationError as error:
        parser.error(f"--{str(error.errors()[0]['loc'][0]).replace('_', '-')}: {error.errors()[0]['msg']}")
    except ConfigurationError as error:
        parser.exit(2, f"roll-serve token: {error}\n")
    return 0
