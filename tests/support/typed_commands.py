"""Commands of the documentation, held against the parsers that the real commands have."""

import contextlib
import importlib
import io
import itertools
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence

import yaml
from pydantic import BaseModel, ValidationError

from rollgym.clients.cli.main import client_parser
from rollgym.clients.protocol.messages import MakeRequest, RegisterRequest, StepRequest
from rollgym.env_server.cli import server_parser, token_parser
from rollgym.env_server.common.settings import ConfigurationError
from rollgym.env_server.common.settings_loading import load_settings as load_server_settings
from rollgym.envs.registry import builtin_environments
from rollgym.sandbox.command import sandbox_parser
from rollgym.trainer.config.load import check_command, load_settings, shipped_configs
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.run import agent_proxy
from rollgym.trainer.run.table import parser_of, split_command
from tests.support.processes import ROOT

_SYSTEMS = (
    *("cat", "cd", "cp", "curl", "docker", "export", "git", "kill", "kubectl", "mkdir", "printf", "ray"),
    "redis-server",
)
_OTHERS = frozenset({*_SYSTEMS, "pytest", "vllm/bin/pip", "vllm/bin/python", ".ci/run"})
"""Programs of others, and of the shell, whose options are not looked at."""

_OURS_IN_FOLDERS = re.compile(r"(?:\.github|benchmarks|deploy|docs|examples|peers|tests)/[\w./-]+")
_READERS_RUN = ROOT / "examples" / "frozen_lake_ray.yaml"
"""Stands for the configuration that a reader has."""
_READERS_ENVIRONMENT = "WordHunt-v0"
"""What docs/guides/own_environment.md lets a reader write; tests/docs/test_first_steps.py types its commands."""

_BODIES: tuple[tuple[str, type[BaseModel]], ...] = (
    (r"/v1/envs$", RegisterRequest),
    (r"/v1/sessions$", MakeRequest),
    (r"/v1/sessions/[^/]+/step$", StepRequest),
)
# Reads the command line as the program does, and ends before it does anything.
_PARSE_ONLY = """
import argparse, runpy, sys
parse = argparse.ArgumentParser.parse_args
def parse_and_end(self, args=None, namespace=None):
    parse(self, args, namespace)
    sys.exit(0)
argparse.ArgumentParser.parse_args = parse_and_end
how, what, *sys.argv[1:] = sys.argv[1:]
sys.argv[0] = what
if how == "-m":
    runpy.run_module(what, run_name="__main__", alter_sys=True)
else:
    sys.path[0] = what.rpartition("/")[0]
    runpy.run_path(what, run_name="__main__")
sys.exit("no command line was read")
"""


class MistakeError(Exception):
    """A command does not do what the page says."""


def commands_of(text: str) -> list[list[str]]:
    """The commands of a block for a shell, as words; pipes, lists and redirections separate them.

    Raises:
        MistakeError: A quotation is never closed.
    """
    return [command for typed in statements_of(text) for command in _split(_words(typed))]


def statements_of(text: str) -> list[str]:
    """What is typed before each Enter that has something done; lines that go on in the next belong together.

    Raises:
        MistakeError: A quotation is never closed.
    """
    found: list[str] = []
    waiting = ""
    if re.search(r"^\$ ", text, re.MULTILINE):  # typed lines, with what came of them
        text = "\n".join(line[2:] for line in text.splitlines() if line.startswith("$ "))
    for line in text.splitlines():
        waiting += line
        if line.endswith("\\"):
            waiting += "\n"
            continue
        try:
            words = _words(waiting)
        except ValueError:
            waiting += "\n"
            continue
        if words:
            found.append(waiting)
        waiting = ""
    if waiting:
        raise MistakeError(f"a quotation is never closed: {waiting}")
    return found


def programs_of(text: str) -> list[str]:
    """The programs that a block for a shell starts.

    Raises:
        MistakeError: A quotation is never closed.
    """
    return [words[0] for command in commands_of(text) if (words := _without_variables(command))]


def _words(typed: str) -> list[str]:
    lexer = shlex.shlex(typed.replace("\\\n", " "), posix=True, punctuation_chars="|&;<")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    return list(lexer)


def _split(words: Sequence[str]) -> Iterator[list[str]]:
    command: list[str] = []
    redirected = False
    for word in words:
        if word and set(word) <= set("|&;"):
            if command:
                yield command
            command, redirected = [], False
        elif word == "<":
            redirected = True
        elif redirected:
            redirected = False
        else:
            command.append(word)
    if command:
        yield command


def check_commands(text: str) -> int:
    """Hold the commands of a block against their parsers; gives how many there are of which that can be said.

    Raises:
        MistakeError: One is not understood, or names what is not there.
    """
    return sum(_check(words) for words in commands_of(text))


def _check(words: list[str]) -> bool:
    for path in _OURS_IN_FOLDERS.findall(" ".join(words)):
        if not (ROOT / path).exists():
            raise MistakeError(f"{path} is not there")
    words = _without_variables(words)
    first = next((index for index, word in enumerate(words) if word in _CHECKS), None)
    if first is None or (first and words[0] not in _OTHERS):
        if words and words[0] not in _OTHERS and not words[0].startswith("/"):
            raise MistakeError(f"{words[0]} is no command that is known here: {' '.join(words)}")
        return False
    program, *arguments = words[first:]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            return _CHECKS[program](arguments) is not False
    except SystemExit as ended:
        if ended.code in (0, None):
            return True
        raise MistakeError(f"{' '.join(words)}: {said.getvalue().strip()}") from ended
    except (ConfigError, ConfigurationError, ValidationError) as error:
        raise MistakeError(f"{' '.join(words)}: {error}") from error


def _without_variables(words: list[str]) -> list[str]:
    """The command that is given variables, or whose output is one."""
    words = _asked_for_output(words)
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]
    return words


def _asked_for_output(words: list[str]) -> list[str]:
    """The command in `name=$(command ...)`, where there is one, and else the words as they are."""
    for index, word in enumerate(words):
        _, opening, program = word.partition("=$(")
        if opening:
            return [
                *program.removesuffix(")").split(),
                *(each.removesuffix(")") for each in words[index + 1 :]),
            ]
    return [re.sub(r"^python3(\.\d+)?$", "python", words[0]), *words[1:]] if words else words


def _train(arguments: Sequence[str]) -> None:
    command, words = split_command(arguments)
    options = parser_of(command).parse_intermixed_args(words)
    if not hasattr(options, "overrides"):
        return
    overrides = list(options.overrides)
    if options.env_url is not None:
        overrides.append(f"env_url={options.env_url}")
    config = options.config
    if config is not None and str(config) not in shipped_configs():
        config = ROOT / config if (ROOT / config).exists() else _READERS_RUN
    check_command(load_settings(config, overrides, command.name), command.name)
    for word in overrides:
        for module, name in re.findall(r"(examples(?:\.\w+)+):(\w+)", word):
            _importable(module, name)


def _serve(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["token"]:
        token_parser().parse_args(arguments[1:])
        return
    flags = vars(server_parser().parse_args(arguments))
    config = flags.pop("config")
    in_repository = config is not None and (ROOT / config).exists()
    settings = load_server_settings(flags, ROOT / config if in_repository else None)
    for entry in settings.env:
        module, _, name = entry.rpartition("=")[2].partition(":")
        if module.partition(".")[0] in ("rollgym", "examples"):
            _importable(module, name)
    for name in settings.operator_kwargs:
        _served(name, [entry.partition("=")[0] for entry in settings.env])


def _env(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["sandbox"]:
        if arguments[1:2] == ["check"]:
            arguments = ["sandbox", "check", "namespaces"]  # stands for the back-end that a reader has
        sandbox_parser().parse_args(arguments[1:])
        return
    options = client_parser().parse_args(arguments)
    wanted = getattr(options, "env_id", getattr(options, "env", getattr(options, "target", None)))
    if not isinstance(wanted, str) or getattr(options, "url", None) is not None:
        return
    if options.command in ("play", "show", "audit", "check", "verify", "bench"):
        module, colon, name = wanted.partition(":")
        if colon:
            _importable(module, name)
        else:
            _served(wanted, [*getattr(options, "gymnasium", ()), *getattr(options, "gymnasium_text", ())])


def _served(name: str, others: Sequence[str]) -> None:
    if name not in builtin_environments() and name not in (_READERS_ENVIRONMENT, *others):
        raise MistakeError(f"no environment {name!r} is served")


def _importable(module: str, name: str) -> None:
    try:
        found = hasattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise MistakeError(f"{module}:{name} cannot be imported: {error}") from error
    if not found:
        raise MistakeError(f"{module} has no {name}")


def _make(arguments: Sequence[str]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for word in arguments:
        if "=" not in word and word not in targets:
            raise MistakeError(f"make {word}: there is no such target")


def _python(arguments: Sequence[str]) -> bool | None:
    if arguments[:2] == ["-m", "venv"]:
        return False
    if arguments[:2] == ["-m", "pytest"]:
        return None  # files that are named exist, as those of all commands
    is_module = arguments[0] == "-m"
    how, what, words = (
        ("-m", *arguments[1:2], arguments[2:]) if is_module else ("", arguments[0], arguments[1:])
    )
    if not how and not what.startswith(("benchmarks/", "peers/")):
        if not (ROOT / what).exists() and what != "my_agent.py":
            raise MistakeError(f"{what} is not there")
        return None
    ended = subprocess.run(
        [sys.executable, "-c", _PARSE_ONLY, how, what, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if ended.returncode:
        raise MistakeError(f"python {' '.join(arguments)}: {ended.stderr.strip().splitlines()[-1]}")
    return None


def _pip(arguments: Sequence[str]) -> bool:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"(?:rollgym|\.)\[([\w,-]+)\]", " ".join(arguments))
    for extra in (each for one in named for each in one.split(",")):
        if extra not in extras:
            raise MistakeError(f"there is no extra {extra!r}")
    return bool(named) or "." in arguments


def _compose(arguments: Sequence[str]) -> bool:
    if arguments[:1] != ["compose"]:
        return False
    composed = yaml.safe_load((ROOT / "compose.yaml").read_text())
    profiles = {
        profile for service in composed["services"].values() for profile in service.get("profiles", ())
    }
    for option, value in itertools.pairwise(arguments):
        if option == "--profile" and value not in profiles:
            raise MistakeError(f"compose.yaml has no profile {value!r}")
        if option == "--scale" and value.partition("=")[0] not in composed["services"]:
            raise MistakeError(f"compose.yaml has no service {value!r}")
    # `docker compose run tokens roll-serve token ...`
    inside = next((index for index, word in enumerate(arguments) if word.startswith("roll-")), None)
    if inside is not None:
        _check(list(arguments[inside:]))
    return True


def _curl(arguments: Sequence[str]) -> bool:
    bodies = [value for option, value in itertools.pairwise(arguments) if option == "-d"]
    for body in bodies:
        try:
            read = json.loads(body)
        except json.JSONDecodeError as error:
            raise MistakeError(f"curl sends what is no JSON: {body}") from error
        for pattern, model in _BODIES:
            if any(re.search(pattern, word) for word in arguments):
                model.model_validate(read)
    return bool(bodies)


_CHECKS: dict[str, Callable[[Sequence[str]], bool | None]] = {
    "curl": _curl,
    "docker": _compose,
    "make": _make,
    "pip": _pip,
    "python": _python,
    "roll-agent-proxy": lambda arguments: agent_proxy.parse(arguments) and None,
    "roll-env": _env,
    "roll-serve": _serve,
    "roll-train": _train,
}
