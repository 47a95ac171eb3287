"""`roll-env check`: checks of an author's environment."""

from __future__ import annotations

import argparse
from typing import Any

from rollgym.clients.checks.conformance import run_checks
from rollgym.clients.checks.report import print_report
from rollgym.clients.checks.target import CheckTarget, TargetError
from rollgym.clients.cli.arguments import UsageError, add_kwargs_argument, parse_kwargs


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("check", help="check an environment that you write")
    parser.add_argument(
        "target", metavar="TARGET", help="`module:Class`, or an id of ours or of Gymnasium's."
    )
    add_kwargs_argument(parser)
    parser.add_argument("--json", action="store_true", help="Print the findings as JSON.")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run all checks and print the report; the exit code is 1 if a check failed."""
    try:
        findings = run_checks(CheckTarget(options.target, parse_kwargs(options.kwarg)))
    except TargetError as error:
        raise UsageError(str(error)) from error
    return print_report(options.target, findings, as_json=options.json)
