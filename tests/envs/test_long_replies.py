"""A reply of a megabyte that repeats itself costs as much as it is long, whatever is repeated and whoever reads it.

Costs are CPU time of this process. They are compared between two sizes, of which one is four times the other: what is
quadratic costs sixteen times as much. The bound in all is generous, and there for what stalls.
"""

import functools
import time
import warnings

import pytest

from rollgym.clients.measuring.long_texts import long_texts
from rollgym.clients.replies.formats.calls import read_calls
from rollgym.clients.replies.formats.table import FORMATS
from rollgym.clients.replies.marks import ANSWER_WITHIN, boxes, fenced_lines, last_tagged
from rollgym.clients.replies.thinking import strip_thinking
from rollgym.envs.code.extraction import extract
from rollgym.envs.core.profiles import PROFILES
from rollgym.envs.games.guess_number import GuessNumberEnv
from rollgym.envs.registry import builtin_environments
from rollgym.envs.tools.tool_use import ToolUseEnv
from rollgym.envs.verifiers.extraction import last_formula_or_number, marked_answer, without_thoughts
from rollgym.envs.verifiers.instructions.environment import InstructionFollowingEnv
from rollgym.envs.verifiers.judging.templates import CriteriaVerdict, TokenVerdict, UnreadableVerdictError
from rollgym.envs.webshop.shop import parse_action

STALLS_S = 1.0
PARSED_S = 0.15
NOTICEABLE_S = 0.02
MEGABYTE = 1_000_000
# Two within the part of a reply in which an answer is looked for, and two beyond it.
SIZES = ((ANSWER_WITHIN // 4 - 500, ANSWER_WITHIN - 2_000), (10_000, 40_000))
CLASSES = {env_id: environment.load() for env_id, environment in builtin_environments().items()}
INLINE_AND_LOCAL = sorted(env_id for env_id, each in CLASSES.items() if "needs" not in each.metadata)
"""What others read is run, searched or judged in other processes; the reading itself is below."""


@functools.cache
def texts(size):
    return list(long_texts(size))


def cost(read, text):
    begun = time.process_time()
    read(text)
    return time.process_time() - begun


def assert_linear(read):
    for small, large in SIZES:
        for (name, short), (_, long) in zip(texts(small), texts(large), strict=True):
            # First the short one: of what is worse than quadratic, the long one may take minutes.
            if max(cost(read, short), cost(read, long)) > NOTICEABLE_S:
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


@pytest.mark.parametrize("env_id", INLINE_AND_LOCAL)
def test_a_step_costs_as_much_as_its_reply_is_long(env_id):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env = CLASSES[env_id]()
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


HARD_TO_PARSE = {
    "fields of a formatted text": "f'" + "{1}" * 30_000 + "'",
    "fields of a formatted raw text": "Rf'''" + "{1}" * 30_000 + "'''",
    "comparisons": "1<" * 45_000 + "1",
    "numbers, and an error": "[" + "1," * 45_000 + "+]",
    "escaped quotes": "\\'" * 45_000,
    "escaped double quotes": '\\"' * 45_000,
    "quotes that open three at a time": "\\'''\n" * 18_000,
    "numbers behind a text that ends with its line": "['\\\r\n', " + "1," * 45_000 + "+ ']",
    "numbers behind a comment": "[ #'''\n" + "1," * 45_000 + "+]",
}


def replies_with(value):
    """Replies that give a value as an argument, one for each format that parses it, and one in many parts."""
    wrapped = "<tool_call><function=book><parameter=nights>{}</parameter></function></tool_call>"
    yield "python", f"book(nights={value})"
    yield "qwen-xml", wrapped.format(value)
    yield "qwen-xml", "".join(wrapped.format(value[:15_000]) for _ in range(12))


@pytest.mark.parametrize("value", HARD_TO_PARSE.values(), ids=HARD_TO_PARSE)
def test_an_argument_is_not_parsed_where_that_takes_long(value):
    schemas = {"book": {"properties": {"nights": {"type": "integer"}}}}
    for name, reply in replies_with(value):
        read = functools.partial(read_calls, form=FORMATS[name], schemas=schemas)
        seconds = min(cost(read, reply) for _ in range(2))
        assert seconds < PARSED_S, f"{name}: {seconds:.3f} s of CPU time"


@pytest.mark.parametrize("value", HARD_TO_PARSE.values(), ids=HARD_TO_PARSE)
def test_a_task_is_not_parsed_where_that_takes_long(value):
    seconds = min(
        cost(lambda text: InstructionFollowingEnv().score("yes", {"ground_truth": text}), value)
        for _ in range(2)
    )
    assert seconds < PARSED_S, f"{seconds:.3f} s of CPU time"


@pytest.mark.parametrize("quote", ["'", '"', "'''", '"""'])
def test_a_long_file_is_an_argument_like_any_other(quote):
    line = "x = [{1: (2)}, f(3)]  # one - - - line"
    content = f"{line}\\n" * 2_000
    reading = read_calls(f"write(content={quote}{content}{quote})", FORMATS["python"], {"write": {}})
    assert [call.arguments for call in reading.calls] == [{"content": f"{line}\n" * 2_000}]


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
    said = without_thoughts(text)
    marked_answer(said)
    last_formula_or_number(said)
    last_tagged(said, "answer")
    boxes(strip_thinking(text, ANSWER_WITHIN))


@pytest.mark.parametrize("read", [programs, judged, answers, parse_action])
def test_what_is_read_for_others_is_read_in_one_pass(read):
    assert_linear(read)
