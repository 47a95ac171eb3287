"""`roll-train`: train, learn from examples, play episodes, evaluate, export and replay what was trained."""

import argparse
import asyncio
import atexit
import gc
import os
import sys
from collections.abc import Callable, Sequence

from rollgym.clients.process.terminal import visible
from rollgym.clients.protocol.arrays import DecodeError, EncodeError
from rollgym.clients.protocol.errors import ProblemError
from rollgym.trainer.assembly.layout import check_model
from rollgym.trainer.cluster.placement import picture, place_roles
from rollgym.trainer.commands.arguments import parser_of, split_command
from rollgym.trainer.commands.defects import (
    described,
    is_short_of_memory,
    keep_traceback,
    memory_does_not_suffice,
    remedies_of_playing,
)
from rollgym.trainer.commands.learning import large_imports, learn
from rollgym.trainer.commands.memory import plan_lines
from rollgym.trainer.config.checks import check_settings
from rollgym.trainer.config.load import dump_settings, load_settings
from rollgym.trainer.config.pipelines import check_command
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.ending import Ending
from rollgym.trainer.core.errors import PluginError, TrainerError

_MISTAKES = (TrainerError, ProblemError, EncodeError, DecodeError, ConnectionError, TimeoutError)
"""What ends a command with a line for the user, who can mend it: our own errors, and those of connections to servers.

What code of the user's raises comes as a `PluginError` of its setting. Anything else is a defect.
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
    options = parser.parse_intermixed_args(words)
    if command == "report":
        if options.serve and options.output is not None:
            parser.error("--serve writes no file: leave --output out")
        if options.port and not options.serve:
            parser.error("--port belongs to --serve")
        return _told(lambda: _report(options))
    if command == "algorithms":
        return _told(lambda: _algorithms(options))
    if command == "config" or (command == "init" and options.list):
        return _told(lambda: _configs(None if options.list else options.name))
    if command == "init":
        return _told(lambda: _init(options))
    if command == "replay":
        return _told(lambda: _replay(options))
    if command == "rollout" and (options.recorded is not None) != (options.policy == "recorded"):
        return _refused(
            "--policy recorded and --recorded FILE belong together, for example a run's episodes.jsonl"
        )
    if options.probe and not options.dry_run:
        return _refused("--probe belongs to --dry-run, which trains nothing")
    if options.device_memory is not None and not options.dry_run:
        return _refused("--device-memory belongs to --dry-run, which prints the plan")
    overrides = list(options.overrides)
    if options.env_url is not None:
        overrides.append(f"env_url={options.env_url}")
    known: list[RunSettings] = []
    return _told(lambda: _with_settings(command, options, overrides, known), known)


def _refused(why: str) -> int:
    print(f"roll-train: {why}", file=sys.stderr)
    return 2


def _told(work: Callable[[], int], known: Sequence[RunSettings] = ()) -> int:
    """Do the work of a command, and tell of whatever ends it in a line.

    Args:
        work: What is done.
        known: The settings, once they were read: their directory keeps what went wrong.
    """
    try:
        return work()
    except _MISTAKES as error:
        kept = ""
        if isinstance(error, PluginError):
            kept = f"; traceback in {keep_traceback(_of(known), error)}"
        if isinstance(error, ProblemError) and error.code == "unauthorized":
            kept += "; give the server's token in the environment variable ROLLGYM_TOKEN, or as env_token=..."
        kept += "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
        print(visible(f"roll-train: {error}{kept}"), file=sys.stderr)
        return getattr(error, "exit_code", 2)
    except KeyboardInterrupt:
        print("roll-train: interrupted", file=sys.stderr)
        return 130
    except Exception as error:  # noqa: BLE001 - the end of the program: here every error is told
        settings = _of(known)
        if settings is not None and is_short_of_memory(error):
            told = memory_does_not_suffice(settings, error, remedies_of_playing(settings))
            print(f"roll-train: {told}", file=sys.stderr)
            return 2
        # Not a user's mistake: a defect of ours, or of a library.
        file = keep_traceback(_of(known), error)
        print(visible(f"roll-train: a defect: {described(error)}; traceback in {file}"), file=sys.stderr)
        return 1


def _of(known: Sequence[RunSettings]) -> RunSettings | None:
    return known[-1] if known else None


def _report(options: argparse.Namespace) -> int:
    """Make the page of a run; needs no settings, and nothing that trains."""
    from rollgym.trainer.commands.report import report, serve  # Imported late: --help needs no web server.

    if options.serve:
        return serve(options.run, options.port, open_page=options.open)
    return report(options.run, options.output, open_page=options.open)


def _algorithms(options: argparse.Namespace) -> int:
    """List the presets, or show one; needs no settings, and nothing that trains."""
    from rollgym.trainer.commands.algorithms import algorithms  # Imported late: --help needs no presets.

    return algorithms(options.name)


def _configs(name: str | None) -> int:
    """List the configurations of the package, or print one; needs nothing that trains."""
    from rollgym.trainer.commands.configs import configs

    return configs(name)


def _init(options: argparse.Namespace) -> int:
    """Write the folder of a first run; needs nothing that trains."""
    from rollgym.trainer.commands.init import init

    return init(options.folder, options.config)


def _replay(options: argparse.Namespace) -> int:
    """Take steps of a run again; its settings are those that it wrote."""
    with large_imports():  # Imported late: torch takes seconds.
        from transformers.utils.logging import disable_progress_bar

        from rollgym.trainer.commands.replay import replay
    disable_progress_bar()  # the command has a console of its own

    return asyncio.run(
        replay(options.run, options.step, from_start=options.from_start, output=options.output)
    )


def _with_settings(
    command: str, options: argparse.Namespace, overrides: Sequence[str], known: list[RunSettings]
) -> int:
    settings = load_settings(options.config, overrides, command)
    known.append(settings)
    if options.dry_run:
        print(dump_settings(settings), end="")
        check_command(settings, command)
        check_settings(settings)
        check_model(settings)
        # As comments: what is printed can be read as settings again.
        lines = [
            *picture(place_roles(settings)).splitlines(),
            "",
            *plan_lines(settings, options.device_memory),
        ]
        print("\n".join(f"# {line}".rstrip() for line in lines))
        if not options.probe:
            return 0
    check_command(settings, command)
    return asyncio.run(_run(command, settings, options))


async def _run(command: str, settings: RunSettings, options: argparse.Namespace) -> int:
    ending = Ending()
    with ending.watching():
        return await _command(command, settings, options, ending)


async def _command(command: str, settings: RunSettings, options: argparse.Namespace, ending: Ending) -> int:
    if command not in ("rollout", "eval", "export") and not options.probe:
        return await learn(settings, ending, command)
    # Imported late: torch and transformers take seconds, and --dry-run and --help need neither.
    with large_imports():
        from transformers.utils.logging import disable_progress_bar

        from rollgym.trainer.commands.policy import evaluate, export
        from rollgym.trainer.commands.probe import probe
        from rollgym.trainer.commands.rollout import rollout
    disable_progress_bar()  # the run has a console of its own
    if options.probe:
        return await probe(settings)
    if command == "rollout":
        return await rollout(
            settings,
            player=options.policy,
            episodes=options.episodes,
            evaluation_set=options.evaluation_set,
            recorded=options.recorded,
            checkpoint=options.checkpoint,
            output=options.output,
        )
    if command == "eval":
        return await evaluate(settings, checkpoint=options.checkpoint)
    return export(settings, options.checkpoint, options.output, adapter=options.adapter)


if __name__ == "__main__":
    sys.exit(main())
