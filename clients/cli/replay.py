"""`roll-env replay`: plays a portable episode again, and compares every step by its digest."""

from __future__ import annotations

import argparse
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
from pydantic import ValidationError

from rollgym.clients.cli.arguments import (
    CONNECT_TIMEOUT_S,
    PATIENCE_S,
    UsageError,
    add_server_arguments,
    server_url,
)
from rollgym.clients.client.client import EnvClient
from rollgym.clients.client.session import EnvSession
from rollgym.clients.process.background import BackgroundLoop
from rollgym.clients.process.terminal import ask
from rollgym.clients.protocol.arrays import DecodeError
from rollgym.clients.protocol.episode import PortableEpisode, step_digest
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.json_text import read_json
from rollgym.clients.protocol.values import decode_value, encode_value
from rollgym.user_paths import user_path

_SHOWN_ELEMENTS = 16
"""An array with more elements than this is shown by its shape and range."""

_DECIMALS = 4


class EpisodeError(Exception):
    """A text is not a portable episode that can be replayed; the message says why."""


class ReplayFailed(Exception):  # noqa: N818 - the name says what happened
    """The server or the environment refused a recorded action.

    Args:
        step: The step that was refused; None for the begin of the episode.
        reason: The answer.
    """

    def __init__(self, step: int | None, reason: str) -> None:
        super().__init__(f"{place(step)}: {reason}")
        self.step = step
        self.reason = reason


class ReplayedStep(NamedTuple):
    """The return value of a replayed step, and whether it equals the recorded one.

    Attributes:
        step: Index of the step; None for the reset.
        action: The action, in JSON's encoding; None for the reset.
        observation: The observation in the replay.
        reward: The reward; 0 for the reset.
        terminated: Whether the task ended.
        truncated: Whether a limit cut the episode.
        digest: The digest of the replayed return value.
        recorded: The digest in the episode.
    """

    step: int | None
    action: Any
    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    digest: str
    recorded: str

    @property
    def same(self) -> bool:
        """Whether the digests are equal."""
        return self.digest == self.recorded


def place(step: int | None) -> str:
    """Name a place in an episode."""
    return "the reset" if step is None else f"step {step}"


def read_episode(text: str | bytes) -> PortableEpisode:
    """Read a portable episode that has begun.

    Raises:
        EpisodeError: It is none, or was never reset.
    """
    try:
        episode = PortableEpisode.model_validate(read_json(text))
    except orjson.JSONDecodeError as error:
        raise EpisodeError(f"it is not JSON: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise EpisodeError(
            f"it is not a portable episode: {field and field + ': '}{first['msg']}"
            " (`roll-env play --save` and GET /v1/sessions/ID/episode give one)"
        ) from error
    if episode.seed is None:
        raise EpisodeError("its session was never reset, so there is nothing to replay")
    return episode


def first_steps(episode: PortableEpisode, count: int) -> PortableEpisode:
    """Return the episode as it was after its first steps."""
    return episode.model_copy(
        update={
            "actions": episode.actions[:count],
            "digests": episode.digests[:count],
            "reseeds": [each for each in episode.reseeds if each[0] <= count],
        }
    )


async def replay(client: EnvClient, episode: PortableEpisode) -> AsyncIterator[ReplayedStep]:
    """Play an episode again: make, reset with its seed and options, and take its actions.

    Replay continues past a digest that differs; the caller decides when to stop iterating.

    Args:
        client: A client of the server to replay on.
        episode: An episode that has begun.

    Raises:
        ReplayFailed: The server or the environment refused a step.
        ConnectionError: The server cannot be reached.
        TimeoutError: The server does not answer.
    """
    session = await client.make(episode.env_id, decode_value(None, episode.kwargs))
    step: int | None = None
    try:
        observation, _ = await session.reset(episode.seed, decode_value(None, episode.options))
        yield _compare(session, None, None, (observation, 0.0, False, False), episode.reset_digest or "")
        reseeded = {steps for steps, _ in episode.reseeds}
        for step, (action, recorded) in enumerate(zip(episode.actions, episode.digests, strict=True)):
            if step in reseeded:
                # No operation sets a new seed in mid-episode; restoring the episode up to here does, and compares
                # digests.
                await session.close()
                session = await client.restore(first_steps(episode, step))
            taken = _recorded(session, step, action)
            observation, reward, terminated, truncated, _ = await session.step(taken)
            yield _compare(session, step, action, (observation, reward, terminated, truncated), recorded)
    except (ProblemError, DecodeError) as error:
        raise ReplayFailed(step, str(error)) from error


def _recorded(session: EnvSession, step: int, action: Any) -> Any:
    try:
        return decode_value(session.action_space, action)
    except DecodeError as error:
        raise ReplayFailed(step, f"the recorded action does not fit the action space: {error}") from error


def _compare(
    session: EnvSession,
    step: int | None,
    action: Any,
    outcome: tuple[Any, float, bool, bool],
    recorded: str,
) -> ReplayedStep:
    seen = encode_value(session.observation_space, outcome[0], binary=False)
    return ReplayedStep(step, action, *outcome, step_digest(seen, *outcome[1:]), recorded)


def shorten(value: Any) -> str:
    """Write an observation or action for a terminal: text as it is, large arrays by shape and range."""
    if isinstance(value, str):
        return value
    return orjson.dumps(_summary(value)).decode()


def _summary(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _summary(part) for key, part in value.items()}
    if isinstance(value, np.ndarray):
        return _array_summary(value)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_summary(part) for part in value]
    return encode_value(None, value, binary=False)


def _array_summary(array: np.ndarray[Any, Any]) -> Any:
    if array.size <= _SHOWN_ELEMENTS:
        exact = array.astype(np.float64).round(_DECIMALS) if array.dtype.kind == "f" else array
        return encode_value(None, exact.tolist(), binary=False)
    return f"{array.dtype.name}{list(array.shape)} from {array.min():g} to {array.max():g}"


class ReplayVerdict(NamedTuple):
    """The result of a replay.

    Attributes:
        result: `same`, `differs` or `failed`.
        steps: Steps that were to be replayed.
        same: Steps that were the same, before the first one that was not.
        at: The place that differs or failed; None if all is the same.
        detail: The difference or the failure.
        notes: Possible explanations.
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
    parser.add_argument(
        "file", type=user_path, metavar="FILE", help="The portable episode, JSON; `-` is standard input."
    )
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
    if options.interactive and options.file == Path("-"):
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


def _read(name: Path) -> PortableEpisode:
    try:
        content = sys.stdin.read() if name == Path("-") else name.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror}") from error
    try:
        return read_episode(content)
    except EpisodeError as error:
        raise UsageError(f"{name} cannot be replayed: {error}") from error


def _replay(url: str, options: argparse.Namespace, episode: PortableEpisode) -> ReplayVerdict:
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
) -> ReplayVerdict:
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
                return ReplayVerdict("differs", steps, same, place(each.step), detail, notes)
            same += each.step is not None
            if options.interactive and same < steps and not _goes_on():
                return ReplayVerdict("same", steps, same, None, "you left before the end", notes)
    except ReplayFailed as failure:
        return ReplayVerdict("failed", steps, same, place(failure.step), failure.reason, notes)
    return ReplayVerdict("same", steps, same, None, "every digest is the same", notes)


async def _next(replayed: AsyncIterator[ReplayedStep]) -> ReplayedStep | None:
    return await anext(replayed, None)


def _goes_on() -> bool:
    """Wait for Enter; whether the reader wants the next step."""
    try:
        return ask("[Enter, or q] ").strip() != "q"
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


def _print_verdict(verdict: ReplayVerdict) -> None:
    steps = f"{verdict.same} of {verdict.steps} steps"
    if verdict.result == "same":
        print(f"\nSAME: {steps}; {verdict.detail}")
    else:
        print(f"\n{verdict.result.upper()} at {verdict.at}, after {steps}: {verdict.detail}")
    for note in verdict.notes:
        print(f"note: {note}")
