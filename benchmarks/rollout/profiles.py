"""How long generation, environments and training take, as others have measured it. Equal for every schedule.

`retool`: step 60 of verl's ReTool recipe (Qwen2.5-32B, DAPO, code interpreter, 512 prompts of 16 episodes, 8 GPUs), a
log of 2025-10-07 that is published in the notes of the ai-agent-book project. It says, a step:

    episodes 8192 (38,357,151 tokens), response tokens mean 4352.7, most 10240, 3.28 % of them cut there
    messages of an episode mean 7.78, from 2 to 16: every second one is a reply
    timing_s/agent_loop/generate_sequences  mean 2723.7, max 4152.4 an episode, waiting in the engine included
    timing_s/agent_loop/tool_calls          mean 1.61, max 150.5 an episode
    timing_s/gen 4191.6, old_log_prob 769.5, update_actor 2761.5

What is modelled of it: 1/32 of the episodes, and of the engine. Tokens are log-normal with that mean, cut at 10240, so
that 3.28 % are; turns are binomial over 1 .. 8 with mean 3.89, each with its share of the tokens; tool calls are
log-normal with the mean of a call and, among as many as a step has, that maximum. How many sequences the engine decodes
at once and how long a token takes is not in the log: the two are set so that a synchronous step of this model takes the
generation time of the log, and its episodes the mean time of the log (`--calibrate` shows both).

`frozen_lake`: the environment step of a served FrozenLake under load, log-normal with a median of 1.36 ms and a 99th
percentile of 37 ms as measured for a peer's server with 2,000 sessions, times 100 for agentic lengths; replies of
0.5 s, 32 at once; 4 to 16 turns; 10 s of training for 16 groups of 8.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from rollgym.trainer.core.seeding import generator

_Z_99 = 2.3263478740408408
_Z_CUT = 1.8419  # quantile of 1 - 0.0328
_Z_MOST_CALLS = 3.93  # quantile of the largest of the 23,700 tool calls of a step


@dataclass(frozen=True)
class Profile:
    """A workload.

    Attributes:
        groups: Groups of a step.
        group_size: Episodes of a group.
        slots: Replies that the engine samples at once.
        train_s: Seconds of training a step.
    """

    groups: int
    group_size: int
    slots: int
    train_s: float

    def turns(self, task: int, member: int) -> list[tuple[float, float]]:
        """Seconds of generation and of the environment in each turn of an episode."""
        raise NotImplementedError


@dataclass(frozen=True)
class FrozenLake(Profile):
    """Short replies, short steps with a heavy tail."""

    groups: int = 16
    group_size: int = 8
    slots: int = 32
    train_s: float = 10.0

    @lru_cache(maxsize=100_000)  # noqa: B019
    def turns(self, task: int, member: int) -> list[tuple[float, float]]:
        count = int(generator(0, "turns", task, member).integers(4, 17))
        draws = generator(0, "latency", task, member).standard_normal(count)
        latencies = 0.136 * np.exp(math.log(37 / 1.36) / _Z_99 * draws)
        return [(0.5, float(latency)) for latency in latencies]


@dataclass(frozen=True)
class ReTool(Profile):
    """Long replies with a heavy tail, a code interpreter that is quick but for rare calls."""

    groups: int = 16
    group_size: int = 16
    slots: int = 77
    train_s: float = 3531.7
    token_s: float = 0.2368

    @lru_cache(maxsize=100_000)  # noqa: B019
    def turns(self, task: int, member: int) -> list[tuple[float, float]]:
        draw = generator(0, "retool", task, member)
        count = 1 + int(draw.binomial(7, 2.89 / 7))
        sigma = _LENGTH_SIGMA
        tokens = min(10240.0, max(262.0, 10240.0 * math.exp(sigma * (draw.standard_normal() - _Z_CUT))))
        shares = draw.dirichlet([2.0] * count)
        calls = _CALL_MEDIAN_S * np.exp(_CALL_SIGMA * draw.standard_normal(count))
        calls[-1] = 0.0  # the last reply is the answer
        return [
            (float(share * tokens * self.token_s), float(call))
            for share, call in zip(shares, calls, strict=True)
        ]


def _sigma_of_lengths() -> float:
    """Solve for the spread at which log-normal lengths, 3.28 % of them cut at 10240, have a mean of 4352.7."""
    z = np.linspace(-8, 8, 20_001)
    weights = np.exp(-z * z / 2)
    low, high = 0.1, 2.0
    for _ in range(60):
        sigma = (low + high) / 2
        lengths = np.clip(10240.0 * np.exp(sigma * (z - _Z_CUT)), 262.0, 10240.0)
        mean = float((lengths * weights).sum() / weights.sum())
        low, high = (sigma, high) if mean > 4352.7 else (low, sigma)
    return sigma


_LENGTH_SIGMA = _sigma_of_lengths()
_CALL_SIGMA = _Z_MOST_CALLS - math.sqrt(_Z_MOST_CALLS**2 - 2 * math.log(150.5 / (1.61 / 2.89)))
_CALL_MEDIAN_S = 1.61 / 2.89 * math.exp(-(_CALL_SIGMA**2) / 2)

PROFILES = {"retool": ReTool, "frozen_lake": FrozenLake}
