"""`roll-env replay`: plays a portable episode again and compares every step by its digest."""

from __future__ import annotations

import argparse
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from clients.cli.arguments import (
    CONNECT_TIMEOUT_S,
    PATIENCE_S,
    UsageError,
    add_server_arguments,
    server_url,
)
from clients.cli.replaying import (
    EpisodeError,
    ReplayedStep,
    ReplayFailed,
    first_steps,
    place,
    read_episode,
    replay,
    shorten,
)
from clients.client.client import EnvClient
from clients.process.background import BackgroundLoop
from clients.protocol.episode import PortableEpisode


class Verdict(NamedTuple):
    """What came of a replay.

    Attributes:
        result: `same`, `differs` or `failed`.
        steps: Steps that were to be replayed.
        same: Steps that were the same, before the first one that was not.
        at: The place that differs or failed; None where all is the same.
        detail: What happened there.
        notes: What may explain it.
    """

    result: str
    steps: int
    same: int
    at: str | None
    detail: str
    notes: list[str]


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "replay",
        help="play a recorded episode again and prove that it is the same",
        description="Play a portable episode again, on a server or here, and compare the digest of every step. The "
        "exit code is 1 at the first one that differs.",
    )
    parser.add_argument("file", metavar="FILE", help="The portable episode, JSON; `-` is standard input.")
    add_server_arguments(parser)
    parser.add_argument("--steps", type=int, metavar="N", help="Only the first N steps.")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument(
        "--interactive", action="store_true", help="Wait for Enter before each step; `q` ends it."
    )
    shown.add_argument("--quiet", action="store_true", help="Print the verdict only.")
    shown.add_argument("--json", action="store_true", help="Print the verdict as one line of JSON.")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Replay and print; the exit code is 0 if every digest that was compared is the same."""
    if options.interactive and options.file == "-":
        raise UsageError("--interactive reads the keyboard from standard input, so FILE cannot be `-`")
    episode = _read(options.file)
    if options.steps is not None:
        if not 0 <= options.steps <= len(episode.actions):
            raise UsageError(f"--steps is from 0 to {len(episode.actions)}, the steps of the episode")
        episode = first_steps(episode, options.steps)
    with server_url(options) as url:
        verdict = _replay(url, options, episode)
    if options.json:
        print(orjson.dumps({"env_id": episode.env_id, "seed": episode.seed, **verdict._asdict()}).decode())
    else:
        _print_verdict(verdict)
    return 0 if verdict.result == "same" else 1


def _read(name: str) -> PortableEpisode:
    try:
        content = sys.stdin.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror}") from error
    try:
        return read_episode(content)
    except EpisodeError as error:
        raise UsageError(f"{name} cannot be replayed: {error}") from error


def _replay(url: str, options: argparse.Namespace, episode: PortableEpisode) -> Verdict:
    client = EnvClient(url, token=options.token, connect_timeout_s=CONNECT_TIMEOUT_S, timeout_s=PATIENCE_S)
    # The client lives in a thread of its own, so that a reader at the keyboard can be interrupted.
    background = BackgroundLoop()
    try:
        return _compare_all(background, client, options, episode)
    finally:
        background.run(client.close())
        background.close()


def _compare_all(
    background: BackgroundLoop, client: EnvClient, options: argparse.Namespace, episode: PortableEpisode
) -> Verdict:
    shown = not (options.quiet or options.json)
    steps = len(episode.actions)
    same = 0
    env = background.run(client.env(episode.env_id))
    notes = []
    if env.version != episode.env_version:
        notes.append(f"recorded with version {episode.env_version}, played with version {env.version}")
    if not env.deterministic:
        notes.append(f"{env.env_id} does not declare that seed and actions decide what happens")
    if shown:
        print(f"{episode.env_id} version {env.version}, seed {episode.seed}, {steps} steps")
    replayed = replay(client, episode)
    try:
        while (each := background.run(_next(replayed))) is not None:
            if shown:
                _show(each)
            if not each.same:
                detail = f"its digest is {each.digest}, and {each.recorded} was recorded"
                return Verdict("differs", steps, same, place(each.step), detail, notes)
            same += each.step is not None
            if options.interactive and same < steps and not _goes_on():
                return Verdict("same", steps, same, None, "you left before the end", notes)
    except ReplayFailed as failure:
        return Verdict("failed", steps, same, place(failure.step), failure.reason, notes)
    return Verdict("same", steps, same, None, "every digest is the same", notes)


async def _next(replayed: AsyncIterator[ReplayedStep]) -> ReplayedStep | None:
    return await anext(replayed, None)


def _goes_on() -> bool:
    """Wait for Enter; whether the reader wants the next step."""
    try:
        return input("[Enter, or q] ").strip() != "q"
    except EOFError:
        print()
        return False


def _show(each: ReplayedStep) -> None:
    digest = f"digest {each.digest} " + ("ok" if each.same else f"DIFFERS from {each.recorded}")
    if each.step is None:
        print(f"\nreset  {digest}")
    else:
        flags = "".join(f"  {name}" for name in ("terminated", "truncated") if getattr(each, name))
        print(f"\nstep {each.step}  action {shorten(each.action)!r}  reward {each.reward:g}{flags}  {digest}")
    print(shorten(each.observation))


def _print_verdict(verdict: Verdict) -> None:
    steps = f"{verdict.same} of {verdict.steps} steps"
    if verdict.result == "same":
        print(f"\nSAME: {steps}; {verdict.detail}")
    else:
        print(f"\n{verdict.result.upper()} at {verdict.at}, after {steps}: {verdict.detail}")
    for note in verdict.notes:
        print(f"note: {note}")
