"""Traces: an environment's answers to seeded random play, as comparable digests.

`python -m rollgym.clients.checks.trace` prints one, so that another process can be compared with this one.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import gymnasium
import orjson

from rollgym.clients.checks.target import CheckTarget
from rollgym.clients.checks.tool_replies import ToolReplies
from rollgym.clients.protocol.episode import step_digest
from rollgym.clients.protocol.values import encode_value

MAX_EPISODE_STEPS = 200
"""The number of steps after which random play abandons an episode."""

SEEDS = (0, 1, 2)
"""Of the episodes of a trace."""


class RandomActions:
    """Seeded random play; if an environment lists its actions or tools, mostly those.

    Args:
        space: The action space.
        seed: The seed of the choices.
    """

    def __init__(self, space: gymnasium.Space[Any], seed: int) -> None:
        # A copy: environments of a class may share a space, and play of one would change the draws for another.
        self._space = deepcopy(space)
        self._random = random.Random(seed)
        self._replies = ToolReplies({})
        self._space.seed(seed)

    def choose(self, info: Mapping[str, Any]) -> Any:
        """Return an action.

        Args:
            info: The info of the previous reset or step; the tools of a reset are remembered.
        """
        listed = info.get("available_actions")
        if isinstance(listed, (list, tuple)) and listed and self._random.random() < 0.9:
            return self._random.choice(listed)
        if "tools" in info:  # of a reset
            self._replies = ToolReplies(info)
        if self._replies.tools and self._random.random() < 0.7:
            reply = self._replies.draw(self._random)
            if reply is not None and reply in self._space:
                return reply
        return self._space.sample()


def digests_of_episode(env: gymnasium.Env[Any, Any], seed: int) -> Iterator[str]:
    """Play an episode; give the digest of the reset and of each step."""
    space = env.observation_space
    actions = RandomActions(env.action_space, seed)
    observation, info = env.reset(seed=seed)
    yield step_digest(encode_value(space, observation, binary=False), 0.0, False, False)
    for _ in range(MAX_EPISODE_STEPS):
        observation, reward, terminated, truncated, info = env.step(actions.choose(info))
        yield step_digest(
            encode_value(space, observation, binary=False), float(reward), terminated, truncated
        )
        if terminated or truncated:
            return


def trace(env: gymnasium.Env[Any, Any]) -> list[list[str]]:
    """Return the digests of an episode for each of `SEEDS`."""
    return [list(digests_of_episode(env, seed)) for seed in SEEDS]


def first_difference(first: list[list[str]], second: list[list[str]]) -> str | None:
    """Return where two traces differ first, or None if they are equal."""
    for seed, one, other in zip(SEEDS, first, second, strict=True):
        for step, (left, right) in enumerate(zip(one, other, strict=False)):
            if left != right:
                return f"with seed {seed} they differ at {'the reset' if step == 0 else f'step {step}'}"
        if len(one) != len(other):
            return f"with seed {seed} one episode has {len(one) - 1} steps, the other {len(other) - 1}"
    return None


def main() -> None:
    """Print the trace of the target that the arguments name (its name, and its kwargs as JSON)."""
    name, kwargs = sys.argv[1:3]
    env = CheckTarget(name, orjson.loads(kwargs)).build()
    sys.stdout.buffer.write(orjson.dumps(trace(env)))
    env.close()


if __name__ == "__main__":
    main()
