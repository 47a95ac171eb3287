"""The commands of `roll-train`, each with its arguments and the function that carries it out.

The settings of those that run by settings are read and checked, or shown, before anything large is imported.
"""

import argparse
import asyncio
import sys
import textwrap
from collections.abc import Sequence

from rollgym.clients.process.modules import add_version
from rollgym.suggestions import did_you_mean
from rollgym.trainer.cluster.placement import picture, place_roles
from rollgym.trainer.config.checks import check_environments, check_settings
from rollgym.trainer.config.load import check_command, dump_settings, load_settings, shipped_configs
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.shutdown import GracefulShutdown
from rollgym.trainer.run.command import (
    Command,
    FormerOption,
    Invocation,
    Parser,
    PlainCommand,
    SettingsCommand,
    add_checkpoint,
    add_run,
    count,
    port,
    step,
)
from rollgym.trainer.run.layout import check_model
from rollgym.trainer.run.learning import large_imports
from rollgym.trainer.run.memory import plan_lines
from rollgym.user_paths import user_path


def read_settings(command: SettingsCommand, options: argparse.Namespace) -> RunSettings:
    """Return the settings that a command line names.

    Raises:
        ConfigError: If they cannot be used, or an option belongs to another one.
    """
    command.check(options)
    if options.probe and not options.dry_run:
        raise ConfigError("--probe belongs to --dry-run, which trains nothing")
    if options.device_memory is not None and not options.dry_run:
        raise ConfigError("--device-memory belongs to --dry-run, which prints the plan")
    overrides = list(options.overrides)
    if options.env_url is not None:
        overrides.append(f"env_url={options.env_url}")
    return load_settings(options.config, overrides, command.name)


def dry_run(command: SettingsCommand, settings: RunSettings, options: argparse.Namespace) -> int:
    """Print what a command would run with, and with --probe try what it needs; return the exit code."""
    _show(settings, options.device_memory, command.name)
    return asyncio.run(_probe(command.name, settings)) if options.probe else 0


def _show(settings: RunSettings, device_memory: float | None, name: str) -> None:
    """Print settings, followed by the placement of models as comments: the output can be read as settings again."""
    sys.stdout.write(dump_settings(settings))
    check_command(settings, name)
    check_settings(settings)
    check_model(settings)
    lines = [*picture(place_roles(settings)).splitlines(), "", *plan_lines(settings, device_memory)]
    sys.stdout.write("".join(f"# {line}".rstrip() + "\n" for line in lines))


async def _probe(name: str, settings: RunSettings) -> int:
    if name != "export":  # which meets no environment
        check_environments(settings)
    with large_imports(name):
        from transformers.utils.logging import disable_progress_bar

        from rollgym.trainer.run.dry_run import probe
    disable_progress_bar()  # the command has a console of its own
    with GracefulShutdown().watching():
        return await probe(settings)


_PLAYERS = ("model", "random", "human", "recorded")
_WIDTH = 79
_LONGEST_SHOWN = 60
_OR_UNTRAINED = ", or the model of model.path as it is before there is a run"


def _add_rollout(parser: Parser) -> None:
    add_checkpoint(parser, _OR_UNTRAINED)
    parser.add_argument("--policy", choices=_PLAYERS, default="model", help="who plays")
    parser.add_argument("--episodes", type=count, default=4, help="how many episodes")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--evaluation-set", metavar="NAME", help="play this evaluation set's tasks instead of training tasks"
    )
    chosen.add_argument("--panel", dest="evaluation_set", action=FormerOption, help=argparse.SUPPRESS)
    parser.add_argument(
        "--recorded", type=user_path, help="episodes.jsonl that --policy recorded plays again"
    )
    parser.add_argument(
        "--output", type=user_path, help="write the episodes here as JSON lines, each once it is over"
    )


def _check_rollout(options: argparse.Namespace) -> None:
    if (options.recorded is not None) != (options.policy == "recorded"):
        raise ConfigError(
            "--policy recorded and --recorded FILE belong together, for example a run's episodes.jsonl"
        )


async def _rollout(settings: RunSettings, options: argparse.Namespace) -> int:
    check_environments(settings)
    from rollgym.trainer.run.rollout import rollout  # Without a model it plays without torch.

    with GracefulShutdown().watching():
        return await rollout(
            settings,
            player=options.policy,
            episodes=options.episodes,
            evaluation_set=options.evaluation_set,
            recorded=options.recorded,
            checkpoint=options.checkpoint,
            output=options.output,
        )


def _add_eval(parser: Parser) -> None:
    add_checkpoint(parser, _OR_UNTRAINED)


async def _eval(settings: RunSettings, options: argparse.Namespace) -> int:
    check_environments(settings)
    with large_imports("eval"):
        from transformers.utils.logging import disable_progress_bar

        from rollgym.trainer.run.trained_policy import evaluate
    disable_progress_bar()  # the command has a console of its own
    with GracefulShutdown().watching():
        return await evaluate(settings, checkpoint=options.checkpoint)


def _add_export(parser: Parser) -> None:
    add_checkpoint(parser)
    parser.add_argument("--output", type=user_path, required=True, help="folder to write, new or empty")
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="write the adapters alone, as peft and inference servers load them",
    )


async def _export(settings: RunSettings, options: argparse.Namespace) -> int:
    with large_imports("export"):
        from transformers.utils.logging import disable_progress_bar

        from rollgym.trainer.run.trained_policy import export
    disable_progress_bar()  # the command has a console of its own
    with GracefulShutdown().watching():
        return export(settings, options.checkpoint, options.output, adapter=options.adapter)


def _add_replay(parser: Parser) -> None:
    add_run(parser)
    parser.add_argument(
        "--step",
        type=step,
        action="append",
        required=True,
        help="the step, counted from 0; may be given again",
    )
    parser.add_argument(
        "--from-start",
        action="store_true",
        help="begin at the run's beginning, whatever checkpoints there are",
    )
    parser.add_argument(
        "--output", type=user_path, help="write the model as it is after the last of the steps to this folder"
    )


def _replay(invocation: Invocation) -> int:
    """Repeat steps of a run, with the settings that it wrote."""
    with large_imports("replay"):
        from transformers.utils.logging import disable_progress_bar

        from rollgym.trainer.run.replay import replay
    disable_progress_bar()  # the command has a console of its own
    options = invocation.options
    return asyncio.run(
        replay(options.run, options.step, from_start=options.from_start, output=options.output)
    )


def _add_report(parser: Parser) -> None:
    add_run(parser)
    parser.add_argument(
        "--output", type=user_path, help="where the page is written; default: RUN/report.html"
    )
    parser.add_argument("--open", action="store_true", help="show it in the browser")
    parser.add_argument(
        "--serve", action="store_true", help="serve it on loopback instead, following the run"
    )
    parser.add_argument("--port", type=port, default=0, help="port for --serve; default: any that is free")


def _report(invocation: Invocation) -> int:
    """Make the page of a run; needs no settings, and nothing that trains."""
    options = invocation.options
    if options.serve and options.output is not None:
        invocation.parser.error("--serve writes no file: leave --output out")
    if options.port and not options.serve:
        invocation.parser.error("--port belongs to --serve")
    from rollgym.trainer.evaluation.reporting.live import report, serve

    if options.serve:
        return serve(options.run, options.port, open_page=options.open)
    return report(options.run, options.output, open_page=options.open)


def _add_algorithms(parser: Parser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="show what this one sets")


def _algorithms(invocation: Invocation) -> int:
    """List the presets, or show one; needs no settings, and nothing that trains."""
    from rollgym.trainer.run.catalogue import algorithms

    return algorithms(invocation.options.name)


def _add_config(parser: Parser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="print this one")
    parser.add_argument("--list", action="store_true", help="list them (what is done without a name)")


def _config(invocation: Invocation) -> int:
    """List the configurations of the package, or print one; needs nothing that trains."""
    from rollgym.trainer.run.catalogue import configs

    return configs(None if invocation.options.list else invocation.options.name)


def _add_init(parser: Parser) -> None:
    parser.add_argument(
        "folder",
        nargs="?",
        type=user_path,
        metavar="FOLDER",
        help="a new folder; default: the configuration's name",
    )
    parser.add_argument(
        "--from",
        dest="config",
        default="frozen_lake",
        metavar="NAME",
        help="the configuration; default: frozen_lake, which learns on a CPU in minutes",
    )
    parser.add_argument("--list", action="store_true", help="list the configurations, and write nothing")


def _init(invocation: Invocation) -> int:
    """Write the folder of a first run; needs nothing that trains."""
    from rollgym.trainer.run.catalogue import configs, init

    return (
        configs(None)
        if invocation.options.list
        else init(invocation.options.folder, invocation.options.config)
    )


TRAIN = SettingsCommand(
    "train",
    "train a policy in served environments (what is done without a command)",
    "Train a policy in served environments.",
)

COMMANDS: tuple[PlainCommand | SettingsCommand, ...] = (
    TRAIN,
    SettingsCommand(
        "sft",
        "imitate replies: chat data, or the environments' experts",
        "Imitate replies, token by token: conversations of `sft.data`, or demonstrations of the environments' experts "
        "(`sft.expert`).",
    ),
    SettingsCommand(
        "dpo",
        "learn from preferences: dpo, ipo, kto, orpo, simpo and others",
        "Learn from preferences: of the two replies of a pair, the better one becomes likelier. `dpo.loss` names how.",
    ),
    SettingsCommand(
        "distill",
        "learn from a teacher's distributions, on its data or on your own policy's replies",
        "Learn from teachers' distributions: on examples of theirs (`distill.data`), or on the student's own replies "
        "in the environments of `tasks`.",
    ),
    SettingsCommand(
        "reward",
        "train a reward model on pairs",
        "Train a reward model on pairs of replies (Bradley and Terry).",
    ),
    SettingsCommand(
        "rollout",
        "play episodes without training, in one process where a debugger works",
        "Play episodes without training, in one process where a debugger works.",
        _add_rollout,
        carry_out=_rollout,
        check=_check_rollout,
    ),
    SettingsCommand(
        "eval",
        "measure a policy on the evaluation sets of a config",
        "Measure a policy on the evaluation sets of a config.",
        _add_eval,
        carry_out=_eval,
    ),
    SettingsCommand(
        "export",
        "write a trained policy as a folder in Hugging Face layout",
        "Write a trained policy as a folder in Hugging Face layout, adapters added to the weights.",
        _add_export,
        carry_out=_export,
    ),
    PlainCommand(
        "replay",
        "take a step of a recorded run again, and compare its weights",
        "Take steps of a recorded run again, from its records, and compare the weights that come out with the digests "
        "that it wrote (tracking.digests). No environment and no sampling is needed. It begins at the newest "
        "checkpoint before the step, or at the run's beginning.",
        _add_replay,
        run=_replay,
    ),
    PlainCommand(
        "report",
        "make one HTML page of a run",
        "One HTML page of a run, made from its records: curves, evaluation sets, where its time went, episodes with "
        "their tokens. The run may still be going on.",
        _add_report,
        run=_report,
    ),
    PlainCommand(
        "algorithms",
        "list the algorithms by name, or show what one of them sets",
        "The algorithms by name: presets and corrections, each with a line and its source.",
        _add_algorithms,
        run=_algorithms,
    ),
    PlainCommand(
        "config",
        "list the configurations that come with rollgym, or print one",
        "The configurations that come with rollgym, each with a line; --config takes their names.",
        _add_config,
        run=_config,
    ),
    PlainCommand(
        "init",
        "write the folder of a first run: a configuration, a reward function, a README",
        "Write the folder of a run: run.yaml from a configuration that comes with rollgym, reward.py with a reward "
        "function to change, and a README with the commands. Nothing is overwritten.",
        _add_init,
        run=_init,
    ),
)
"""All commands, in the order of --help."""

_BY_NAME = {command.name: command for command in COMMANDS}


def split_command(words: Sequence[str]) -> tuple[PlainCommand | SettingsCommand, list[str]]:
    """Return the command at the start of the arguments, and the other arguments.

    Raises:
        SystemExit: If the first word is not a command, an option or a setting.
    """
    first = words[0] if words else ""
    if first in _BY_NAME:
        return _BY_NAME[first], list(words[1:])
    if not first or first.startswith("-") or "=" in first:
        return TRAIN, list(words)
    parser = Parser(prog="roll-train")
    if first.endswith((".yaml", ".yml")):
        parser.error(f"there is no command '{first}': a file of settings is given as --config {first}")
    if first in shipped_configs():
        parser.error(f"there is no command '{first}': a configuration is given as --config {first}")
    hint = did_you_mean(first, _BY_NAME) or f"there are {', '.join(_BY_NAME)}"
    parser.error(f"there is no command '{first[:_LONGEST_SHOWN]}': {hint}")


def parser_of(command: Command) -> Parser:
    """Return the argument parser of a command; that of the default command lists the others, too."""
    if command is not TRAIN:
        return command.parser()
    parser = Parser(
        prog="roll-train",
        description=TRAIN.description,
        epilog=_command_list(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_version(parser)
    TRAIN.add_arguments(parser)
    return parser


def _command_list() -> str:
    width = max(len(command.name) for command in COMMANDS) + 4
    lines = [
        textwrap.fill(
            command.summary,
            _WIDTH,
            initial_indent=f"  {command.name}".ljust(width),
            subsequent_indent=" " * width,
        )
        for command in COMMANDS
    ]
    return "\n".join(["commands (roll-train COMMAND --help says more):", *lines, ""])
