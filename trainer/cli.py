"""`roll-train`: train, learn from examples, play episodes, evaluate, export and replay what was trained."""

import argparse
import asyncio
import atexit
import gc
import os
import sys
from collections.abc import Callable, Sequence

from rollgym.clients.client.server_token import explain_refusal, server_token
from rollgym.clients.process.terminal import visible
from rollgym.clients.protocol.arrays import DecodeError, EncodeError
from rollgym.clients.protocol.errors import ProblemError
from rollgym.extras import missing_extra
from rollgym.trainer.assembly.layout import check_model
from rollgym.trainer.cluster.placement import picture, place_roles
from rollgym.trainer.commands.arguments import parser_of, split_command
from rollgym.trainer.commands.internal_errors import (
    described,
    is_short_of_memory,
    keep_traceback,
    memory_does_not_suffice,
    remedies_of_playing,
)
from rollgym.trainer.commands.learning import large_imports, learn
from rollgym.trainer.commands.memory import plan_lines
from rollgym.trainer.config.checks import check_environments, check_settings
from rollgym.trainer.config.load import dump_settings, load_settings
from rollgym.trainer.config.pipelines import check_command
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.ending import Ending
from rollgym.trainer.core.errors import PluginError, TrainerError

USER_ERRORS = (TrainerError, ProblemError, EncodeError, DecodeError, ConnectionError, TimeoutError)
"""Errors that end a command with one line, which names the remedy: our own, and those of connections to servers.

An exception of the user's code arrives as a `PluginError` that names its setting. Any other exception is an internal
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
    options = parser.parse_intermixed_args(words)
    if command == "report":
        if options.serve and options.output is not None:
            parser.error("--serve writes no file: leave --output out")
        if options.port and not options.serve:
            parser.error("--port belongs to --serve")
        return _report_errors(command, lambda: _report(options))
    if command == "algorithms":
        return _report_errors(command, lambda: _algorithms(options))
    if command == "config" or (command == "init" and options.list):
        return _report_errors(command, lambda: _configs(None if options.list else options.name))
    if command == "init":
        return _report_errors(command, lambda: _init(options))
    if command == "replay":
        return _report_errors(command, lambda: _replay(options))
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
    return _report_errors(command, lambda: _with_settings(command, options, overrides, known), known)


def _refused(why: str) -> int:
    print(f"roll-train: {why}", file=sys.stderr)
    return 2


def _report_errors(command: str, work: Callable[[], int], known: Sequence[RunSettings] = ()) -> int:
    """Carry out a command, print one line for any error that ends it, and return the exit code.

    Args:
        command: The command's name.
        work: Carries it out.
        known: The settings, once they have been read: tracebacks are written to their output directory.
    """
    try:
        return work()
    except USER_ERRORS as error:
        settings, kept = _of(known), ""
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
        if (missing := missing_extra(error, command)) is not None:
            print(f"roll-train: {missing}", file=sys.stderr)
            return 2
        settings = _of(known)
        if settings is not None and is_short_of_memory(error):
            line = memory_does_not_suffice(settings, error, remedies_of_playing(settings))
            print(f"roll-train: {line}", file=sys.stderr)
            return 2
        file = keep_traceback(settings, error)
        line = f"internal error, please report it: {described(error)}; traceback in {file}"
        print(visible(f"roll-train: {line}"), file=sys.stderr)
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
    with large_imports("replay"):  # Imported late: torch takes seconds.
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
    if command != "export":
        check_environments(settings)
    if command == "rollout" and not options.probe:
        from rollgym.trainer.commands.rollout import rollout  # Without a model it plays without torch.

        return await rollout(
            settings,
            player=options.policy,
            episodes=options.episodes,
            evaluation_set=options.evaluation_set,
            recorded=options.recorded,
            checkpoint=options.checkpoint,
            output=options.output,
        )
    # Imported late: torch and transformers take seconds, and --dry-run and --help need neither.
    with large_imports(command):
        from transformers.utils.logging import disable_progress_bar

        from rollgym.trainer.commands.policy import evaluate, export
        from rollgym.trainer.commands.probe import probe
    disable_progress_bar()  # the run has a console of its own
    if options.probe:
        return await probe(settings)
    if command == "eval":
        return await evaluate(settings, checkpoint=options.checkpoint)
    return export(settings, options.checkpoint, options.output, adapter=options.adapter)


if __name__ == "__main__":
    sys.exit(main())
