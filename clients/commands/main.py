"""The command `roll-env`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from clients.commands import audit, bench, check, doctor, listing, play, registering, replay
from clients.commands.arguments import UsageError
from clients.protocol.errors import ProblemError


def main(argv: Sequence[str] | None = None) -> int:
    """Look at, play, replay, check and measure environments."""
    parser = argparse.ArgumentParser(prog="roll-env", description=main.__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (listing, play, replay, check, audit, bench, doctor):
        command.add_parser(commands)
    registering.add_parsers(commands)
    options = parser.parse_args(argv)
    try:
        code: int = options.run(options)
    except UsageError as error:
        print(f"roll-env {options.command}: {error}", file=sys.stderr)
        return 2
    except (ProblemError, ConnectionError, TimeoutError) as error:
        print(f"roll-env {options.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
