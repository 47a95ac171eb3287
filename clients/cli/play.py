"""`roll-env play`: a person plays an environment in the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
from gymnasium import Space, spaces

from rollgym.clients.cli.arguments import (
    CONNECT_TIMEOUT_S,
    PATIENCE_S,
    UsageError,
    add_kwargs_argument,
    add_server_arguments,
    parse_kwargs,
    read_seed,
    server_url,
)
from rollgym.clients.client.env import RemoteEnv
from rollgym.clients.process.terminal import ask, is_picture, picture_text, wrapped
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.json_text import read_json
from rollgym.clients.protocol.spaces import UnicodeText
from rollgym.clients.protocol.values import DecodeError, decode_value, encode_value
from rollgym.user_paths import user_path

_HELP = """\
  :quit         leave (so does the end of input)
  :reset [N]    begin another episode, with seed N if given
  :info         show the last info
  :save FILE    write the episode so far, for `roll-env replay`
  :help         this"""


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("play", help="play an environment in the terminal")
    parser.add_argument("env_id", help="Which environment.")
    add_server_arguments(parser)
    add_kwargs_argument(parser)
    parser.add_argument("--seed", type=read_seed, help="Seed of the first episode.")
    parser.add_argument(
        "--save",
        type=user_path,
        metavar="FILE",
        help="At the end, write the last episode for `roll-env replay`.",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Play until the player leaves."""
    kwargs = parse_kwargs(options.kwarg)
    if options.save is not None and not options.save.parent.is_dir():
        raise UsageError(f"--save: there is no directory {options.save.parent}")
    with server_url(options) as url:
        env = RemoteEnv(
            url,
            options.env_id,
            kwargs,
            token=options.token,
            timeout_s=PATIENCE_S,
            connect_timeout_s=CONNECT_TIMEOUT_S,
        )
        try:
            try:
                Game(env).play(options.seed)
            except EOFError:
                print()
            if options.save is not None:
                print(save_episode(env, options.save))
        finally:
            env.close()
    return 0


class Game:
    """A player at an environment.

    Args:
        env: The environment.
    """

    def __init__(self, env: RemoteEnv) -> None:
        self._env = env
        self._info: dict[str, Any] = {}
        self._ended = False

    def play(self, seed: int | None) -> None:
        """Prompt for actions until `:quit`.

        Raises:
            EOFError: The input ended.
        """
        print("Type an action, or :help.\n")
        self._begin(seed)
        while True:
            line = _ask("another episode? [Enter, or :quit] " if self._ended else "> ")
            command, _, argument = line.strip().partition(" ")
            if command == ":quit":
                return
            if command == ":help":
                print(_HELP)
            elif command == ":info":
                print(_pretty(self._info))
            elif command == ":save":
                self._save(argument.strip())
            elif command == ":reset" or self._ended:
                self._begin_again(argument.strip())
            else:
                self._step(line)

    def _begin_again(self, seed: str) -> None:
        try:
            self._begin(read_seed(seed) if seed else None)
        except argparse.ArgumentTypeError as error:
            print(error)

    def _begin(self, seed: int | None) -> None:
        observation, self._info = self._env.reset(seed=seed)
        self._ended = False
        instruction = self._info.get("instruction")
        if instruction:
            print(f"{wrapped(str(instruction))}\n")
        self._show(observation)

    def _save(self, name: str) -> None:
        try:
            print(save_episode(self._env, user_path(name)) if name else "expected :save FILE")
        except (UsageError, argparse.ArgumentTypeError) as error:
            print(error)

    def _step(self, line: str) -> None:
        try:
            action = read_action(self._env.action_space, line)
        except UsageError as error:
            print(error)
            return
        try:
            observation, reward, terminated, truncated, self._info = self._env.step(action)
        except ProblemError as problem:
            if problem.code != "invalid_action":
                raise
            print(problem.detail)
            return
        self._ended = terminated or truncated
        print(f"reward {reward:g}")
        self._show(observation)
        if self._ended:
            success = self._info.get("success")
            verdict = "" if success is None else (": success" if success else ": no success")
            print(f"The episode is {'over' if terminated else 'cut off by a limit'}{verdict}.")

    def _show(self, observation: Any) -> None:
        """Show the agent's observation, and the rendering for a person."""
        space = self._env.observation_space
        if isinstance(observation, str):
            print(wrapped(observation))
        elif is_picture(observation):
            print(picture_text(observation, coloured=sys.stdout.isatty()))
            if isinstance(caption := self._info.get("caption"), str):
                print(wrapped(caption))
        else:
            print(_pretty(encode_value(space, observation, binary=False)))
        if not self._ended:
            actions = self._info.get("available_actions") or describe_actions(self._env.action_space)
            named = ", ".join(map(str, actions)) if isinstance(actions, list) else str(actions)
            print(wrapped(f"actions: {named}"))


def save_episode(env: RemoteEnv, path: Path) -> str:
    """Write the portable episode of an environment; return a line that says so.

    Raises:
        UsageError: The file cannot be written.
    """
    episode = env.episode_record()
    try:
        path.write_bytes(orjson.dumps(episode.model_dump(mode="json"), option=orjson.OPT_INDENT_2) + b"\n")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    return f"saved {len(episode.actions)} steps of seed {episode.seed} in {path}"


def describe_actions(space: Space[Any]) -> str:
    """Describe the actions that may be typed."""
    if isinstance(space, (UnicodeText, spaces.Text)):
        return "any text"
    if isinstance(space, spaces.Discrete):
        return f"{space.start} to {space.start + space.n - 1}"
    return f"JSON for {space}"


def read_action(space: Space[Any], line: str) -> Any:
    """Read an action that was typed: text as it is, everything else as JSON.

    Raises:
        UsageError: It does not fit the space.
    """
    if isinstance(space, (UnicodeText, spaces.Text)):
        return line
    try:
        action = decode_value(space, read_json(line))
    except orjson.JSONDecodeError:
        raise UsageError(f"expected {describe_actions(space)}") from None
    except DecodeError as error:
        raise UsageError(f"{error}; expected {describe_actions(space)}") from error
    if action not in space:
        raise UsageError(f"expected {describe_actions(space)}")
    return action


def _ask(prompt: str) -> str:
    line = ask(prompt)
    if not sys.stdin.isatty():
        print(line)  # a terminal echoes the input; a pipe does not
    return line


def _pretty(value: Any) -> str:
    plain: Mapping[str, Any] | Any = encode_value(None, value, binary=False)
    return orjson.dumps(plain, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS).decode()
