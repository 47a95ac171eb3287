"""Code-v0: tries, feedback, and hidden tests that decide."""

import json

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from rollgym.envs.code.debugging import CodeEnv
from rollgym.envs.code.tasks import PROBLEMS, problems_of
from tests.support import code_items
from tests.support.sandboxes import working_sandbox


@pytest.fixture(autouse=True)
def sandbox():
    working_sandbox()


def fenced(code):
    return f"```python\n{code}\n```"


def begin(fields, **kwargs):
    environment = CodeEnv(seconds=1, **kwargs)
    observation, info = environment.reset(seed=1, options=fields)
    return environment, observation, info


def test_a_program_is_mended_turn_by_turn():
    environment, observation, info = begin(code_items.apps())
    assert "largest" in observation
    assert info["instruction"]
    text, reward, terminated, truncated, info = environment.step("I would use max.")
    assert (reward, terminated, truncated, info["action_is_valid"]) == (0.0, False, False, False)
    assert "```python" in text
    text, reward, terminated, _, info = environment.step(
        fenced("def largest(numbers): return numbers[len(numbers) // 3]")
    )
    assert (reward, terminated, info["action_is_valid"]) == (0.0, False, True)
    assert "1 of 2 visible tests passed" in text
    assert "largest([-5, -9])" not in text
    text, reward, terminated, truncated, info = environment.step(fenced(code_items.HONEST))
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)


def test_failures_show_what_was_expected_of_visible_tests_only():
    environment, _, _ = begin(code_items.code_contests())
    text, *_ = environment.step(fenced("print(0)"))
    assert "input: 3 1 2" in text
    assert "expected: 3" in text
    assert "got: 0" in text
    assert "100" not in text


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (code_items.mbpp, "test: assert largest([3, 1, 2]) == 3"),
        (code_items.human_eval, "test: assert candidate([3, 1, 2]) == 3"),
        (code_items.kod_code, "assert largest([3, 1, 2]) == 3"),
        (code_items.eval_plus, "call: largest([3, 1, 2])"),
    ],
)
def test_the_first_test_is_shown_where_no_others_are_public(make, said):
    environment, _, _ = begin(make())
    text, *_ = environment.step(fenced("def largest(n): return 0"))
    assert said in text
    assert "100" not in text


def test_the_last_program_is_scored_whatever_it_does():
    environment, _, _ = begin(code_items.apps(), max_turns=1)
    text, reward, terminated, truncated, info = environment.step(
        fenced("def largest(n): return 17 if 17 in n else None")
    )
    assert (terminated, truncated, info["success"]) == (False, True, False)
    assert reward == 0.25
    assert "1 of 4 hidden tests passed" in text


def test_passing_what_is_seen_ends_the_episode_and_pays_for_what_is_not():
    hard_coded = "def largest(n): return {3: 3, 2: -5}.get(len(n) if n[0] in (3, -5) else 0)"
    for scoring, expected in (("fraction", 0.0), ("all", 0.0)):
        environment, _, _ = begin(code_items.apps(), scoring=scoring, turn_penalty=-0.1)
        _, reward, terminated, _, info = environment.step(fenced(hard_coded))
        assert (reward, terminated, info["success"]) == (expected, True, False)


def test_later_turns_cost():
    environment, _, _ = begin(code_items.apps(), turn_penalty=-0.1, format_penalty=-0.5)
    assert environment.step("no")[1] == -0.5
    assert environment.step(fenced("def largest(n): return 0"))[1] == -0.1


def test_equal_seeds_draw_equal_problems_and_tests():
    first, second = (CodeEnv(split="train") for _ in range(2))
    for seed in range(3):
        assert first.reset(seed=seed)[0] == second.reset(seed=seed)[0]
    assert first.reset(seed=1)[0] != first.reset(seed=2)[0]


def test_the_expert_solves_a_problem_of_each_kind():
    environment = CodeEnv()
    for seed in range(5):
        _, info = environment.reset(seed=seed, options={"expert": True})
        *_, info = environment.step(info["expert_action"])
        assert info["success"]


def test_splits_share_no_problem():
    names = [{problem.name for problem in problems_of(split)} for split in ("train", "valid", "test")]
    assert all(names)
    assert sum(map(len, names)) == len(set().union(*names)) == len(PROBLEMS) == 40


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_a_problem_has_tests_that_no_constant_passes(problem):
    task = problem.task(np.random.default_rng(5))
    tests = json.loads(task["input_output"])
    assert len(tests["inputs"]) == len(tests["outputs"]) >= 10
    assert len({json.dumps(output) for output in tests["outputs"]}) >= 2
    assert problem.statement() in task["question"]
    names: dict = {}
    if not problem.reads:
        exec(task["solution"], names)
        for args, output in zip(tests["inputs"], tests["outputs"], strict=True):
            assert [names[problem.name](*args)] == output


def test_it_is_an_environment():
    check_env(CodeEnv(render_mode="ansi"), skip_render_check=False)


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"scoring": "most"}, "scoring"),
        ({"seconds": 0}, "seconds"),
        ({"max_turns": 0}, "max_turns"),
        ({"split": "mine"}, "split"),
        ({"data": "nothing.jsonl"}, "nothing.jsonl"),
        ({"data": "items.csv"}, "jsonl"),
        ({"render_mode": "rgb_array"}, "render_mode"),
    ],
)
def test_arguments_that_make_no_sense(kwargs, said):
    with pytest.raises(ValueError, match=said):
        CodeEnv(**kwargs)
