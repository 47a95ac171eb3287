"""`roll-env sandbox`: this machine's back-ends, and one run. Heavy imports are avoided, as it starts once per run."""

import argparse
import json
import os
import stat
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rollgym.command_line import CommandParser
from rollgym.sandbox.core.base import (
    LANGUAGES,
    LEVELS,
    Guarantees,
    Language,
    Outcome,
    Program,
    RunResult,
    Sandbox,
    SandboxUnavailableError,
)
from rollgym.sandbox.core.kinds import BY_NAME, SANDBOXES, parse_sandbox_name
from rollgym.sandbox.core.limits import Limits
from rollgym.sandbox.local.supervised import SupervisedSandbox
from rollgym.sandbox.selection import known_backends, open_sandbox, survey
from rollgym.user_paths import user_path

_LANGUAGE_OF: dict[str, Language] = {
    ".py": "python",
    ".sh": "bash",
    ".cpp": "cpp",
    ".cc": "cpp",
}


def main(arguments: Sequence[str]) -> int:
    """Show which sandboxes work on this machine, or run a program in one."""
    options = sandbox_parser().parse_args(arguments)
    try:
        code: int = options.run(options) if hasattr(options, "run") else _show()
    except KeyboardInterrupt:
        return 130
    return code


def sandbox_parser() -> argparse.ArgumentParser:
    """Return the parser of the words of `roll-env sandbox`."""
    parser = CommandParser(prog="roll-env sandbox", description=main.__doc__)
    commands = parser.add_subparsers(metavar="COMMAND")
    _add_run(commands)
    _add_check(commands)
    return parser


def _add_run(commands: Any) -> None:
    parser = commands.add_parser("run", help="run a program; its standard input is the command's")
    parser.add_argument("file", type=user_path, metavar="FILE", help="The program's source.")
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="Of the program.")
    parser.add_argument(
        "--lang", choices=LANGUAGES, help="What it is written in; by default, what the suffix of FILE says."
    )
    parser.add_argument("--timeout", type=float, default=10.0, metavar="S", help="Seconds (default 10).")
    for name, default, what in (
        ("memory-mb", 256, "MiB of memory"),
        ("pids", 64, "processes and threads"),
        ("disk-mb", 64, "MiB of files"),
        ("fds", 256, "open files of each process"),
        ("output-kb", 1024, "KiB kept of each output stream"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{what} (default {default})."
        )
    ways = [name for each in SANDBOXES for name in each.names]
    parser.add_argument(
        "--backend",
        type=_backend,
        default="auto",
        metavar="NAME",
        help=f"Which sandbox: auto (the best; the default), {', '.join(ways)}.",
    )
    parser.add_argument(
        "--minimum-level",
        choices=LEVELS,
        default="landlock",
        metavar="LEVEL",
        help=f"The weakest that will do: {', '.join(LEVELS)} (default landlock).",
    )
    parser.add_argument("--json", action="store_true", help="Print the result as one JSON object.")
    parser.set_defaults(run=_run)


def _add_check(commands: Any) -> None:
    parser = commands.add_parser("check", help="hold a back-end against what every back-end must do")
    parser.add_argument(
        "backend", type=_backend, metavar="NAME", help="Which; also docker:IMAGE, remote:URL."
    )
    parser.set_defaults(run=_check)


def _check(options: argparse.Namespace) -> int:
    """Print the result of each case of the suite; the exit code is 1 if a case fails."""
    from rollgym.sandbox.conformance import check_backend  # Imported late: one run has no use for it.

    try:
        sandbox = open_sandbox(options.backend, minimum_level="none")
    except (SandboxUnavailableError, ValueError) as error:
        print(f"roll-env sandbox check: {error}", file=sys.stderr)
        return 2
    failed = 0
    try:
        for case, verdict, detail in check_backend(sandbox):
            failed += verdict == "fail"
            print(f"{verdict:4}  {case}{': ' + detail if detail else ''}", flush=True)
    finally:
        sandbox.close()
    return 1 if failed else 0


def _backend(text: str) -> str:
    """Check the name of a back-end.

    Raises:
        argparse.ArgumentTypeError: If there is none of this name.
    """
    try:
        name, _ = parse_sandbox_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if name not in ("auto", *BY_NAME) and name not in (known := known_backends()):
        raise argparse.ArgumentTypeError(f"there is no sandbox {name!r}: auto, {', '.join(known)}")
    return text


def _run(options: argparse.Namespace) -> int:
    """Run a program; the exit code is 0 if the sandbox worked, whatever became of the program."""
    language = options.lang or _LANGUAGE_OF.get(options.file.suffix)
    if language is None:
        suffixes = ", ".join(_LANGUAGE_OF)
        why = f"{options.file}: the suffix is none of {suffixes}: name the language with --lang"
        print(f"roll-env sandbox run: {why}", file=sys.stderr)
        return 2
    try:
        limits = Limits(
            wall_seconds=options.timeout,
            memory_mb=options.memory_mb,
            pids=options.pids,
            disk_mb=options.disk_mb,
            open_files=options.fds,
            output_kb=options.output_kb,
        )
        source = options.file.read_text(encoding="utf-8", errors="surrogateescape")
    except (OSError, ValueError) as error:
        why = f"cannot read {options.file}: {error.strerror}" if isinstance(error, OSError) else str(error)
        print(f"roll-env sandbox run: {why}", file=sys.stderr)
        return 2
    try:
        sandbox = open_sandbox(options.backend, minimum_level=options.minimum_level)
    except (SandboxUnavailableError, ValueError) as error:
        result = RunResult(outcome=Outcome.SANDBOX_ERROR, detail=str(error))
        _print(result, options.json)
        return 1
    result = _result(sandbox, Program(language, source, tuple(options.arguments)), limits)
    _print(result, options.json)
    sandbox.close()
    return 1 if result.outcome is Outcome.SANDBOX_ERROR else 0


def _result(sandbox: Sandbox, program: Program, limits: Limits) -> RunResult:
    """Run the program with our standard input, which may never end and is then read as the program runs."""
    kind = os.fstat(0).st_mode
    if isinstance(sandbox, SupervisedSandbox) and not stat.S_ISREG(kind):
        return sandbox.run_from(0, program, limits=limits)
    return sandbox.run(program, stdin=sys.stdin.buffer.read(), limits=limits)


def result_as_json(result: RunResult) -> dict[str, Any]:
    """Return a result as a JSON object: bytes become text, with invalid UTF-8 replaced."""
    return {
        "outcome": result.outcome.value,
        "exit_code": result.exit_code,
        "signal": None if result.signal is None else int(result.signal),
        "detail": result.detail,
        "stdout": result.stdout.decode(errors="replace"),
        "stderr": result.stderr.decode(errors="replace"),
        "stdout_truncated": result.stdout_truncated,
        "stderr_truncated": result.stderr_truncated,
        "wall_seconds": round(result.wall_seconds, 6),
        "cpu_seconds": round(result.cpu_seconds, 6),
        "peak_memory_mb": round(result.peak_memory_mb, 3),
        "compiling": None if result.compiling is None else result_as_json(result.compiling),
        "guarantees": None if result.guarantees is None else asdict(result.guarantees),
    }


def _print(result: RunResult, for_machines: bool) -> None:
    if for_machines:
        print(json.dumps(result_as_json(result)), flush=True)
    else:
        _print_for_people(result)


def _print_for_people(result: RunResult) -> None:
    sys.stdout.buffer.write(result.stdout)
    sys.stdout.flush()
    sys.stderr.buffer.write(result.stderr)
    where = f" ({result.guarantees.backend})" if result.guarantees is not None else ""
    detail = f": {result.detail}" if result.detail else ""
    print(
        f"{result.outcome.value}{detail}; {result.wall_seconds:.3f} s, CPU {result.cpu_seconds:.3f} s, "
        f"{result.peak_memory_mb:.1f} MiB{where}",
        file=sys.stderr,
    )


def _show() -> int:
    """Print the table; the exit code is 1 if there is nothing that `auto` would use."""
    header = (
        "backend",
        "level",
        "files",
        "network",
        "processes",
        "privileges",
        "system calls",
        "memory",
        "disk",
    )
    rows: list[tuple[str, ...]] = [header]
    reasons, usable = [], False
    for name, seen in survey():
        if isinstance(seen, Guarantees):
            rows.append((name, *_words(seen)))
            usable = usable or seen.level != "none"
        else:
            rows.append((name, "unavailable", *[""] * (len(header) - 2)))
            reasons.append(f"- {seen}")
    widths = [max(len(row[index]) for row in rows) for index in range(len(header))]
    for row in rows:
        print("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())
    if reasons:
        print("\n" + "\n".join(reasons))
    return 0 if usable else 1


def _words(seen: Guarantees) -> tuple[str, ...]:
    kept = (seen.files, seen.network, seen.processes, seen.privileges, seen.system_calls)
    return (seen.level, *("yes" if one else "no" for one in kept), seen.memory, "yes" if seen.disk else "no")
