"""The boundary to code of environments: the only place that catches any exception of it."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, NoReturn, TypeVar

import gymnasium
from gymnasium.utils import seeding

from rollgym.clients.protocol.frames import dumps
from rollgym.clients.protocol.spaces import check_size, describe_space
from rollgym.env_server.workers.base import (
    EnvironmentRaised,
    EnvSource,
    NoWorker,
    Spaces,
    StepOutcome,
    Verdict,
)

Environment = gymnasium.Env[Any, Any]
_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_MAX_MESSAGE = 10_000


def guarded(function: Callable[..., _T], *arguments: Any) -> _T:
    """Call a function that runs code of an environment's author.

    Raises:
        EnvironmentRaised: It raised anything, `SystemExit` and `asyncio.CancelledError` included: an environment ends
            neither the server nor the thread that it runs in.
    """
    try:
        return function(*arguments)
    except BaseException as error:  # noqa: BLE001 - the boundary to user code
        _refuse(error)


def _refuse(error: BaseException) -> NoReturn:
    if isinstance(error, EnvironmentRaised):
        raise error
    bases = [each.__name__ for each in type(error).__mro__ if each.__module__ == "builtins"]
    raise EnvironmentRaised(type(error).__name__, _message(error), bases) from error


def report(error: EnvironmentRaised, **about: str) -> None:
    """Log an exception of an environment's code with its stack; the client receives one line only.

    Args:
        error: The error that the exception became.
        about: The subject of the record, such as the session.
    """
    _log.warning("code of an environment raised", exc_info=error.__cause__, extra=about)


def _message(error: BaseException) -> str:
    """The text of an exception, in Unicode that can be sent. Its own method may raise, too."""
    try:
        text = str(error)
    except BaseException as another:  # noqa: BLE001 - the boundary to user code
        return f"its message cannot be had: {type(another).__name__}"
    return text[:_MAX_MESSAGE].encode(errors="backslashreplace").decode()


def build(source: EnvSource, kwargs: Mapping[str, Any]) -> Environment:
    """Build an environment from its factory."""
    return guarded(source.build, kwargs)


def spaces(environment: Environment) -> Spaces:
    """The spaces of an environment; an environment whose spaces cannot be described has failed."""
    return guarded(_spaces, environment)


def _spaces(environment: Environment) -> Spaces:
    try:
        found = environment.action_space, environment.observation_space
    except AttributeError as error:
        if error.obj is not environment or error.name not in ("action_space", "observation_space"):
            raise
        # The place is ours, so that a stack would say nothing to the author.
        remedy = f"it has no {error.name}: set it in `__init__`, to a space of Gymnasium or `rollgym.UnicodeText()`"
        raise EnvironmentRaised("AttributeError", remedy, ["AttributeError", "Exception"]) from None
    for space in found:
        description = describe_space(space)
        check_size(description)
        dumps(description, binary=False)
    return found


def reset(
    environment: Environment, seed: int | None, options: dict[str, Any] | None
) -> tuple[Any, Mapping[str, Any]]:
    """Begin an episode of an environment."""
    return guarded(_reset, environment, seed, options)


def _reset(
    environment: Environment, seed: int | None, options: dict[str, Any] | None
) -> tuple[Any, Mapping[str, Any]]:
    observation, info = environment.reset(seed=seed, options=options)
    return observation, info if type(info) is dict else _plain_info(info)


def step(environment: Environment, action: Any) -> StepOutcome:
    """Take a step; `guarded`, written out, since this is the hot path."""
    try:
        outcome = StepOutcome(*environment.step(action))  # type: ignore[arg-type]
        if type(outcome.info) is not dict:
            outcome = outcome._replace(info=_plain_info(outcome.info))
        return outcome
    except BaseException as error:  # noqa: BLE001 - the boundary to user code
        _refuse(error)


def _plain_info(info: Any) -> dict[Any, Any]:
    """An info as a dictionary of its own: reading another mapping runs code of the environment's author."""
    if not isinstance(info, Mapping):
        raise TypeError(f"the info is of type {type(info).__name__}, not a mapping")
    return dict(info)


def render(environment: Environment, mode: str | None) -> Any:
    """Draw the state in a mode, whatever mode the environment was made with."""
    return guarded(_render, environment, mode)


def _render(environment: Environment, mode: str | None) -> Any:
    if mode is None:
        return environment.render()
    base = environment.unwrapped
    made_with = base.render_mode
    base.render_mode = mode
    try:
        return environment.render()
    finally:
        base.render_mode = made_with


def reseed(environment: Environment, seed: int) -> None:
    """Give an environment's generator a new seed.

    That is Gymnasium's `np_random`; an environment with other generators has a method `reseed(seed)`.
    """
    guarded(_reseed, environment, seed)


def _reseed(environment: Environment, seed: int) -> None:
    base = environment.unwrapped
    own = getattr(base, "reseed", None)
    if own is not None:
        own(seed)
    else:
        base.np_random, _ = seeding.np_random(seed)


def score(environment: Environment, item: Mapping[str, Any]) -> Verdict:
    """Score one response. Raises like the other calls."""
    return guarded(_score, environment, item)


def _score(environment: Environment, item: Mapping[str, Any]) -> Verdict:
    task = dict(item)
    response = task.pop("response")
    verdict: Any = environment.unwrapped.score(response, task)  # type: ignore[attr-defined]
    if is_dataclass(verdict) and not isinstance(verdict, type):
        # Field by field: `asdict` would copy plain data, which costs more than most verdicts.
        found: Any = verdict
        detail = getattr(found, "detail", None)
        return {
            "score": float(found.score),
            "outcome": str(found.outcome),
            "detail": asdict(detail) if is_dataclass(detail) and not isinstance(detail, type) else detail,
        }
    fields = dict(verdict)
    return {
        "score": float(fields["score"]),
        "outcome": str(fields["outcome"]),
        "detail": fields.get("detail"),
    }


def error_verdict(error: EnvironmentRaised | NoWorker) -> Verdict:
    """The verdict on a response that the verifier failed on, or that there was nothing to score with."""
    return {"score": 0.0, "outcome": "error", "detail": str(error)}


def close(environment: Environment) -> None:
    """Close an environment; an exception that it raises is only logged."""
    try:
        guarded(environment.close)
    except EnvironmentRaised as error:
        report(error)
