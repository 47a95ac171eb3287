"""`roll-train`: train, play episodes without training, evaluate, export what was trained."""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from clients.commands.version import add_version
from clients.protocol.arrays import DecodeError, EncodeError
from clients.protocol.errors import ProblemError
from trainer.cluster.placement import picture, place_roles
from trainer.commands.defects import described, keep_traceback
from trainer.commands.memory import plan_lines
from trainer.config.checks import check_settings
from trainer.config.load import dump_settings, load_settings
from trainer.config.run import RunSettings
from trainer.core.ending import Ending
from trainer.core.errors import PluginError, TrainerError

_PLAYERS = ("model", "random", "human", "recorded")
_MISTAKES = (TrainerError, ProblemError, EncodeError, DecodeError, ConnectionError, TimeoutError)
"""What ends a command with a line for the user, who can mend it: our own errors, and those of connections to servers.

What code of the user's raises comes as a `PluginError` of its setting. Anything else is a defect.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    # A console script does not look in the current directory, where users keep the modules that a config names.
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["report"]:
        return _report(words[1:])
    if words[:1] == ["algorithms"]:
        return _algorithms(words[1:])
    command = words.pop(0) if words and words[0] in ("rollout", "eval", "export") else "train"
    options = _parser(command).parse_intermixed_args(words)
    if command == "rollout" and (options.recorded is not None) != (options.policy == "recorded"):
        print(
            "roll-train: --policy recorded and --recorded FILE belong together, for example a run's episodes.jsonl",
            file=sys.stderr,
        )
        return 2
    if options.probe and not options.dry_run:
        print("roll-train: --probe belongs to --dry-run, which trains nothing", file=sys.stderr)
        return 2
    overrides = list(options.overrides)
    if options.env_url is not None:
        overrides.append(f"env_url={options.env_url}")
    if options.device_memory is not None and not options.dry_run:
        print("roll-train: --device-memory belongs to --dry-run, which prints the plan", file=sys.stderr)
        return 2
    settings = None
    try:
        settings = load_settings(options.config, overrides)
        if options.dry_run:
            print(dump_settings(settings), end="")
            check_settings(settings)
            # As comments: what is printed can be read as settings again.
            lines = [
                *picture(place_roles(settings)).splitlines(),
                "",
                *plan_lines(settings, options.device_memory),
            ]
            print("\n".join(f"# {line}".rstrip() for line in lines))
            if not options.probe:
                return 0
        return asyncio.run(_run(command, settings, options))
    except _MISTAKES as error:
        kept = f"; traceback in {keep_traceback(settings, error)}" if isinstance(error, PluginError) else ""
        if isinstance(error, ProblemError) and error.code == "unauthorized":
            kept += "; give the server's token in the environment variable ROLLGYM_TOKEN, or as env_token=..."
        print(f"roll-train: {error}{kept}", file=sys.stderr)
        return getattr(error, "exit_code", 2)
    except KeyboardInterrupt:
        print("roll-train: interrupted", file=sys.stderr)
        return 130
    except Exception as error:  # noqa: BLE001 - the end of the program: here every error is told
        # Not a user's mistake: a defect of ours, or of a library.
        file = keep_traceback(settings, error)
        print(f"roll-train: a defect: {described(error)}; traceback in {file}", file=sys.stderr)
        return 1


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line each, like all others."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"roll-train: {message} (see {self.prog} --help)\n")


def _report(words: Sequence[str]) -> int:
    """Make the page of a run; needs no settings, and nothing that trains."""
    parser = _Parser(
        prog="roll-train report",
        description="One HTML page of a run, made from its records: curves, panels, where its time went, episodes with "
        "their tokens. The run may still be going on.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's output_dir")
    parser.add_argument("--output", type=Path, help="where the page is written; default: RUN/report.html")
    parser.add_argument("--open", action="store_true", help="show it in the browser")
    parser.add_argument(
        "--serve", action="store_true", help="serve it on loopback instead, following the run"
    )
    parser.add_argument("--port", type=_port, default=0, help="port for --serve; default: any that is free")
    options = parser.parse_args(words)
    if options.serve and options.output is not None:
        parser.error("--serve writes no file: leave --output out")
    if options.port and not options.serve:
        parser.error("--port belongs to --serve")
    from trainer.commands.report import report, serve  # Imported late: --help needs no web server.

    try:
        if options.serve:
            return serve(options.run, options.port, open_page=options.open)
        return report(options.run, options.output, open_page=options.open)
    except TrainerError as error:
        print(f"roll-train: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _algorithms(words: Sequence[str]) -> int:
    """List the presets, or show one; needs no settings, and nothing that trains."""
    parser = _Parser(
        prog="roll-train algorithms",
        description="The algorithms by name: presets and corrections, each with a line and its source.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="show what this one sets")
    options = parser.parse_args(words)
    from trainer.commands.algorithms import algorithms  # Imported late: --help needs no presets.

    try:
        return algorithms(options.name)
    except TrainerError as error:
        print(f"roll-train: {error}", file=sys.stderr)
        return 2


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"'{text}' is no port: give a number up to 65535")
    return int(text)


def _gigabytes(text: str) -> float:
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0.0 < size <= 1e6:
        raise argparse.ArgumentTypeError(f"'{text}' is no size of a memory: give gigabytes, such as 80")
    return size


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no number of episodes: give 1 or more")
    return int(text)


def _parser(command: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="roll-train" if command == "train" else f"roll-train {command}",
        description={
            "train": "Train a policy in served environments. Other commands: roll-train rollout, eval, export, "
            "report and algorithms.",
            "rollout": "Play episodes without training, in one process where a debugger works.",
            "eval": "Measure a policy on the panels of a config.",
            "export": "Write a trained policy as a folder in Hugging Face layout, adapters added to the weights.",
        }[command],
    )
    add_version(parser)
    parser.add_argument("--env-url", help="environment server; without it one is started on loopback")
    parser.add_argument("--config", type=Path, help="YAML file with the run's settings")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved settings and the memory plan, and stop"
    )
    parser.add_argument(
        "--probe", action="store_true", help="with --dry-run: also ask server, data sets and model"
    )
    parser.add_argument(
        "--device-memory",
        type=_gigabytes,
        metavar="GB",
        help="with --dry-run: memory of a device that the plan is held against; default: 80, or the machine's where "
        "model.device is cpu",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings laid over the file's")
    if command in ("rollout", "eval", "export"):
        parser.add_argument(
            "--checkpoint", type=Path, help="checkpoint folder or model directory; default: the run's newest"
        )
    if command == "export":
        parser.add_argument("--output", type=Path, required=True, help="folder to write, new or empty")
        parser.add_argument(
            "--adapter",
            action="store_true",
            help="write the adapters alone, as peft and inference servers load them",
        )
    if command == "rollout":
        parser.add_argument("--policy", choices=_PLAYERS, default="model", help="who plays")
        parser.add_argument("--episodes", type=_count, default=4, help="how many episodes")
        parser.add_argument("--panel", help="play this panel's tasks instead of training tasks")
        parser.add_argument("--recorded", type=Path, help="episodes.jsonl that --policy recorded plays again")
        parser.add_argument(
            "--output", type=Path, help="write the episodes here as JSON lines, each once it is over"
        )
    return parser


async def _run(command: str, settings: RunSettings, options: argparse.Namespace) -> int:
    ending = Ending()
    with ending.watching():
        return await _command(command, settings, options, ending)


async def _command(command: str, settings: RunSettings, options: argparse.Namespace, ending: Ending) -> int:
    # Imported late: torch and transformers take seconds, and --dry-run and --help need neither.
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # the run has a console of its own
    if options.probe:
        from trainer.commands.probe import probe

        return await probe(settings)
    if command == "rollout":
        from trainer.commands.rollout import rollout

        return await rollout(
            settings,
            player=options.policy,
            episodes=options.episodes,
            panel=options.panel,
            recorded=options.recorded,
            checkpoint=options.checkpoint,
            output=options.output,
        )
    if command == "eval":
        from trainer.commands.evaluate import evaluate

        return await evaluate(settings, checkpoint=options.checkpoint)
    if command == "export":
        from trainer.commands.export import export

        return export(settings, options.checkpoint, options.output, adapter=options.adapter)
    from trainer.commands.train import train

    return await train(settings, ending)


if __name__ == "__main__":
    sys.exit(main())
