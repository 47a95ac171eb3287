"""A reply of a megabyte that repeats itself costs as much as it is long, whatever is repeated and whoever reads it.

Costs are CPU time of this process. They are compared between two sizes, of which one is four times the other: what is
quadratic costs sixteen times as much. The bound in all is generous, and there for what stalls.
"""

import functools
import importlib
import time
import warnings

import pytest

from clients.measuring.long_texts import long_texts
from envs.code.extraction import extract
from envs.core.profiles import PROFILES
from envs.core.replies import ANSWER_WITHIN, boxes, fenced_lines, last_tagged, strip_thinking
from envs.games.guess_number import GuessNumberEnv
from envs.registry import builtin_environments
from envs.tools.calls import read_calls
from envs.tools.formats.table import FORMATS
from envs.tools.tool_use import ToolUseEnv
from envs.verifiers.extraction import last_formula_or_number, marked_answer
from envs.verifiers.extraction import strip_thinking as answering
from envs.verifiers.judging.verdicts import CriteriaVerdict, TokenVerdict, UnreadableVerdictError
from envs.webshop.shop import parse_action

STALLS_S = 1.0
NOTICEABLE_S = 0.02
SMALL, LARGE, MEGABYTE = 10_000, 40_000, 1_000_000
ELSEWHERE = frozenset(
    {
        "Code-v0",
        "PythonRepl-v0",
        "Shell-v0",
        "CodeTests-v0",
        "ToolUsePython-v0",
        "ReasoningGym-v0",
        "Judge-v0",
    }
)
"""What they read is run, searched or judged in other processes; the reading itself is below."""


@functools.cache
def texts(size):
    return list(long_texts(size))


def cost(read, text):
    begun = time.process_time()
    read(text)
    return time.process_time() - begun


def assert_linear(read):
    for (name, short), (_, long) in zip(texts(SMALL), texts(LARGE), strict=True):
        if cost(read, long) > NOTICEABLE_S:
            once, four_times = (min(cost(read, text) for _ in range(5)) for text in (short, long))
            assert four_times < 8 * once + NOTICEABLE_S, (
                f"{name}: {once:.3f} s, and {four_times:.3f} s for 4 times it"
            )
    for name, text in texts(MEGABYTE):
        seconds = cost(read, text)
        if seconds >= STALLS_S:
            # The garbage of a thousand tests before it may have been collected in that time.
            seconds = min(cost(read, text) for _ in range(3))
        assert min(seconds, STALLS_S) < STALLS_S, f"{name}: over {STALLS_S} s of CPU time for a megabyte"


def inline_and_local():
    return sorted(builtin_environments().keys() - ELSEWHERE)


@pytest.mark.parametrize("env_id", inline_and_local())
def test_a_step_costs_as_much_as_its_reply_is_long(env_id):
    module, _, name = builtin_environments()[env_id].entry_point.partition(":")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env = getattr(importlib.import_module(module), name)()
    env.reset(seed=1)

    def step(text):
        if env.step(text)[2:4] != (False, False):
            env.reset(seed=1)

    assert_linear(step)
    env.close()


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_every_profile_reads_in_one_pass(profile):
    game = GuessNumberEnv(profile=profile, max_episode_steps=10**9)
    game.reset(seed=1)
    assert_linear(game.step)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_format_of_calls_reads_in_one_pass(name):
    schemas = ToolUseEnv().toolbox.schemas
    assert_linear(lambda text: read_calls(text, FORMATS[name], schemas))


def programs(text):
    extract(text, "python")
    fenced_lines(strip_thinking(text))


def judged(text):
    for verdict in (
        TokenVerdict(kind="token", tokens={"YES": 1, "NO": 0}),
        CriteriaVerdict(kind="criteria", key="met"),
    ):
        try:
            verdict.read(text, [1.0])
        except UnreadableVerdictError:
            continue


def answers(text):
    said = answering(text)
    marked_answer(said)
    last_formula_or_number(said)
    last_tagged(said, "answer")
    boxes(strip_thinking(text, ANSWER_WITHIN))


@pytest.mark.parametrize("read", [programs, judged, answers, parse_action])
def test_what_is_read_for_others_is_read_in_one_pass(read):
    assert_linear(read)
