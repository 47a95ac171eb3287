"""The words that `roll-train` understands: its commands, their options, and what was probably meant by others."""

import argparse
import textwrap
from collections.abc import Sequence
from typing import Any

from rollgym.clients.process.installed import add_version
from rollgym.command_line import CommandParser
from rollgym.suggestions import did_you_mean
from rollgym.trainer.core.former_names import warn_of_former_name
from rollgym.user_paths import user_path

COMMANDS = {
    "train": "train a policy in served environments (what is done without a command)",
    "sft": "imitate replies: chat data, or the environments' experts",
    "dpo": "learn from preferences: dpo, ipo, kto, orpo, simpo and others",
    "distill": "learn from a teacher's distributions, on its data or on your own policy's replies",
    "reward": "train a reward model on pairs",
    "rollout": "play episodes without training, in one process where a debugger works",
    "eval": "measure a policy on the evaluation sets of a config",
    "export": "write a trained policy as a folder in Hugging Face layout",
    "replay": "take a step of a recorded run again, and compare its weights",
    "report": "make one HTML page of a run",
    "algorithms": "list the algorithms by name, or show what one of them sets",
    "config": "list the configurations that come with rollgym, or print one",
    "init": "write the folder of a first run: a configuration, a reward function, a README",
}
"""The commands, each with what it does."""

_PLAYERS = ("model", "random", "human", "recorded")
_WIDTH = 79
_SHOWN = {
    "train": "Train a policy in served environments.",
    "sft": "Imitate replies, token by token: conversations of `sft.data`, or demonstrations of the environments' "
    "experts (`sft.expert`).",
    "dpo": "Learn from preferences: of the two replies of a pair, the better one becomes likelier. `dpo.loss` names "
    "how.",
    "distill": "Learn from teachers' distributions: on examples of theirs (`distill.data`), or on the student's own "
    "replies in the environments of `tasks`.",
    "reward": "Train a reward model on pairs of replies (Bradley and Terry).",
    "rollout": "Play episodes without training, in one process where a debugger works.",
    "eval": "Measure a policy on the evaluation sets of a config.",
    "export": "Write a trained policy as a folder in Hugging Face layout, adapters added to the weights.",
}

_LONGEST_SHOWN = 60


class Parser(CommandParser):
    """The parser of a command of `roll-train`."""

    speaker = "roll-train"


class _FormerOption(argparse.Action):
    """An option by the name that it had before."""

    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Take the value, and warn."""
        warn_of_former_name(str(option_string), f"--{self.dest.replace('_', '-')}")
        setattr(namespace, self.dest, values)


def split_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the command that words begin with, and the rest of them.

    Raises:
        SystemExit: If they begin with what is no command, no option and no setting.
    """
    first = words[0] if words else ""
    if first in COMMANDS:
        return first, list(words[1:])
    if not first or first.startswith("-") or "=" in first:
        return "train", list(words)
    parser = Parser(prog="roll-train")
    if first.endswith((".yaml", ".yml")):
        parser.error(f"there is no command '{first}': a file of settings is given as --config {first}")
    hint = did_you_mean(first, COMMANDS) or f"there are {', '.join(COMMANDS)}"
    parser.error(f"there is no command '{first[:_LONGEST_SHOWN]}': {hint}")


def parser_of(command: str) -> Parser:
    """Return the parser of a command's words."""
    match command:
        case "report":
            return _report_parser()
        case "algorithms":
            return _algorithms_parser()
        case "config":
            return _config_parser()
        case "init":
            return _init_parser()
        case "replay":
            return _replay_parser()
        case _:
            return _settings_parser(command)


def _settings_parser(command: str) -> Parser:
    parser = Parser(
        prog="roll-train" if command == "train" else f"roll-train {command}",
        description=_SHOWN[command],
        epilog=_command_list() if command == "train" else None,
        formatter_class=argparse.RawDescriptionHelpFormatter
        if command == "train"
        else argparse.HelpFormatter,
    )
    add_version(parser)
    parser.add_argument("--env-url", help="environment server; without it one is started on loopback")
    parser.add_argument(
        "--config",
        type=user_path,
        help="YAML file with the run's settings, or the name of a configuration that comes with rollgym "
        "(roll-train config lists them)",
    )
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
            "--checkpoint",
            type=user_path,
            help="checkpoint folder or model directory; default: the run's newest"
            + ("" if command == "export" else ", or the model of model.path as it is before there is a run"),
        )
    if command == "export":
        parser.add_argument("--output", type=user_path, required=True, help="folder to write, new or empty")
        parser.add_argument(
            "--adapter",
            action="store_true",
            help="write the adapters alone, as peft and inference servers load them",
        )
    if command == "rollout":
        parser.add_argument("--policy", choices=_PLAYERS, default="model", help="who plays")
        parser.add_argument("--episodes", type=_count, default=4, help="how many episodes")
        chosen = parser.add_mutually_exclusive_group()
        chosen.add_argument(
            "--evaluation-set",
            metavar="NAME",
            help="play this evaluation set's tasks instead of training tasks",
        )
        chosen.add_argument("--panel", dest="evaluation_set", action=_FormerOption, help=argparse.SUPPRESS)
        parser.add_argument(
            "--recorded", type=user_path, help="episodes.jsonl that --policy recorded plays again"
        )
        parser.add_argument(
            "--output", type=user_path, help="write the episodes here as JSON lines, each once it is over"
        )
    return parser


def _algorithms_parser() -> Parser:
    parser = Parser(
        prog="roll-train algorithms",
        description="The algorithms by name: presets and corrections, each with a line and its source.",
    )
    add_version(parser)
    parser.add_argument("name", nargs="?", metavar="NAME", help="show what this one sets")
    return parser


def _config_parser() -> Parser:
    parser = Parser(
        prog="roll-train config",
        description="The configurations that come with rollgym, each with a line; --config takes their names.",
    )
    add_version(parser)
    parser.add_argument("name", nargs="?", metavar="NAME", help="print this one")
    parser.add_argument("--list", action="store_true", help="list them (what is done without a name)")
    return parser


def _init_parser() -> Parser:
    parser = Parser(
        prog="roll-train init",
        description="Write the folder of a run: run.yaml from a configuration that comes with rollgym, reward.py with "
        "a reward function to change, and a README with the commands. Nothing is overwritten.",
    )
    add_version(parser)
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
    return parser


def _report_parser() -> Parser:
    parser = Parser(
        prog="roll-train report",
        description="One HTML page of a run, made from its records: curves, evaluation sets, where its time went, "
        "episodes with their tokens. The run may still be going on.",
    )
    add_version(parser)
    parser.add_argument("run", type=user_path, metavar="RUN", help="the run's output_dir")
    parser.add_argument(
        "--output", type=user_path, help="where the page is written; default: RUN/report.html"
    )
    parser.add_argument("--open", action="store_true", help="show it in the browser")
    parser.add_argument(
        "--serve", action="store_true", help="serve it on loopback instead, following the run"
    )
    parser.add_argument("--port", type=port, default=0, help="port for --serve; default: any that is free")
    return parser


def _replay_parser() -> Parser:
    parser = Parser(
        prog="roll-train replay",
        description="Take steps of a recorded run again, from its records, and compare the weights that come out with "
        "the digests that it wrote (tracking.digests). No environment and no sampling is needed. It begins at the "
        "newest checkpoint before the step, or at the run's beginning.",
    )
    add_version(parser)
    parser.add_argument("run", type=user_path, metavar="RUN", help="the run's output_dir")
    parser.add_argument(
        "--step",
        type=_step,
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
    return parser


def _command_list() -> str:
    width = max(map(len, COMMANDS)) + 4
    lines = [
        textwrap.fill(text, _WIDTH, initial_indent=f"  {name}".ljust(width), subsequent_indent=" " * width)
        for name, text in COMMANDS.items()
    ]
    lines.append("")
    return "\n".join(["commands (roll-train COMMAND --help says more):", *lines])


def port(text: str) -> int:
    """Read a port, of a command line."""
    # Some systems take the rest of a larger number, and others would look for it in vain.
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


def _step(text: str) -> int:
    if not text.isdecimal() or not text.isascii():
        raise argparse.ArgumentTypeError(f"'{text}' is no step: give a whole number, the first step is 0")
    return int(text)
