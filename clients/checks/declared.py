"""What an environment declares of playing it: replies that make sense, and how far players come."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

from rollgym.clients.checks.report import Finding, Status, shortened_repr
from rollgym.clients.checks.target import CheckTarget

EXAMPLE_REPLIES = "example_replies"
"""The key of an environment's metadata."""

_EXAMPLES = "example replies are valid"
_EXAMPLES_REMEDY = "metadata['example_replies'] lists whole replies, each of which makes sense after a reset"


def example_replies(metadata: Mapping[str, Any]) -> Sequence[Any]:
    """Return the replies that an environment declares as examples; none if it declares no list."""
    declared = metadata.get(EXAMPLE_REPLIES)
    return declared if isinstance(declared, list | tuple) else ()


def check_examples(target: CheckTarget) -> Iterator[Finding]:
    """Play each example reply after a reset of its own."""
    env = target.build()
    try:
        if EXAMPLE_REPLIES not in env.metadata:
            return
        replies = example_replies(env.metadata)
        if not replies:
            given = type(env.metadata[EXAMPLE_REPLIES]).__name__
            yield Finding(_EXAMPLES, Status.FAIL, f"they are an empty list or a {given}", _EXAMPLES_REMEDY)
            return
        for seed, reply in enumerate(replies):
            if reply not in env.action_space:
                yield Finding(
                    _EXAMPLES,
                    Status.FAIL,
                    f"{shortened_repr(reply)} is not in the action space",
                    _EXAMPLES_REMEDY,
                )
                return
            env.reset(seed=seed)
            observation, _, _, _, info = env.step(reply)
            if info.get("action_is_valid") is False:
                detail = f"{shortened_repr(reply)} is not valid with seed {seed}: {str(observation)[:200]}"
                yield Finding(_EXAMPLES, Status.FAIL, detail, _EXAMPLES_REMEDY)
                return
        yield Finding(_EXAMPLES, Status.PASS, f"{len(replies)} of them")
    finally:
        env.close()


BASELINES = "baselines"
"""The key of an environment's metadata."""

PLAYERS = (
    "random",
    "example replies",
    "constant action",
    "empty reply",
    "echo",
    "echo of the instruction",
    "blind",
    "expert",
)
"""The players of an audit."""

_BASELINES = "baselines are readable"
BASELINES_REMEDY = (
    "metadata['baselines'] has for players of `roll-env audit` the share of episodes that they solve, or "
    "[share, mean return] where the two differ"
)


class Baseline(NamedTuple):
    """How far a player comes that learns nothing.

    Attributes:
        solved: The share of episodes that it solves.
        mean_return: Its mean return.
    """

    solved: float
    mean_return: float


def declared_baselines(metadata: Mapping[str, Any]) -> dict[str, Baseline]:
    """Return the baselines that an environment declares, by player; none if it declares none.

    They are those of its default kwargs. `{"random": 0.15, "expert": [1, 10.5]}` says that random play solves 15 % of
    the episodes, with a mean return of 0.15, and that the expert solves all, with 10.5.

    Raises:
        ValueError: They have another form, or name another player.
    """
    declared = metadata.get(BASELINES, {})
    if not isinstance(declared, Mapping):
        raise ValueError(f"they are a {type(declared).__name__}")
    return {player: _baseline(player, value) for player, value in declared.items()}


def _baseline(player: str, value: Any) -> Baseline:
    if player not in PLAYERS:
        raise ValueError(f"an audit has no player {player!r}; it has {', '.join(PLAYERS)}")
    numbers = value if isinstance(value, list | tuple) else (value, value)
    if len(numbers) != 2 or not all(map(_is_number, numbers)) or not 0 <= numbers[0] <= 1:
        raise ValueError(f"{player} has {shortened_repr(value)}")
    return Baseline(*map(float, numbers))


def _is_number(value: Any) -> bool:
    """Whether a value is a number that is finite as a float; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def check_baselines(target: CheckTarget) -> Iterator[Finding]:
    """Read the baselines; an audit plays them."""
    env = target.build()
    env.close()
    try:
        declared = declared_baselines(env.metadata)
    except ValueError as error:
        yield Finding(_BASELINES, Status.FAIL, str(error), BASELINES_REMEDY)
        return
    if declared:
        yield Finding(_BASELINES, Status.PASS, ", ".join(declared))
