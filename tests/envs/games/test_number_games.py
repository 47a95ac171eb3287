"""Countdown, GuessNumber and Mastermind against independent searches."""

from fractions import Fraction
from itertools import compress, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.envs.games.countdown import CountdownEnv, ExpressionError, evaluate, solve
from rollgym.envs.games.guess_number import GuessNumberEnv
from rollgym.envs.games.mastermind import MastermindEnv, feedback

# -- Countdown ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8 / (3 - 8 / 3)", 24),
        ("1 + 2 * 3", 7),
        ("(1+2)*3", 9),
        ("7 - 2 - 1", 4),
        ("8 ÷ 2 × 3 − 1", 11),
        ("1 / 3", Fraction(1, 3)),
    ],
)
def test_values_are_exact(text, value):
    assert evaluate(text)[0] == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1 +",
        "2 ** 3",
        "7 // 2",
        "-3 + 4",
        "2(3)",
        "1 / (2 - 2)",
        "08 + 1",
        "1.5 + 2",
        "__import__('os')",
        "(" * 150,
        "(((1)",
        "1,2",
        "1 if 2 else 3",
        "9" * 300,
    ],
)
def test_what_is_no_expression_says_why(text):
    with pytest.raises(ExpressionError):
        evaluate(text)


def naive_values(values: tuple[Fraction, ...]) -> set[Fraction]:
    """All values that use each number once, by joining any two until one is left."""
    found = set(values) if len(values) == 1 else set()
    for i, one in enumerate(values):
        for j, other in enumerate(values):
            if i == j:
                continue
            rest = tuple(value for place, value in enumerate(values) if place not in (i, j))
            for value in (one + other, one - other, one * other, *([one / other] if other else [])):
                found |= naive_values((*rest, value))
    return found


@settings(max_examples=25)
@given(
    numbers=st.lists(st.integers(1, 12), min_size=2, max_size=4),
    target=st.integers(1, 60),
    use_all=st.booleans(),
)
def test_the_solver_finds_what_there_is_and_only_that(numbers, target, use_all):
    found = solve(numbers, target, use_all=use_all)
    masks = product((0, 1), repeat=len(numbers))
    subsets = [tuple(map(Fraction, compress(numbers, mask))) for mask in masks if all(mask) or not use_all]
    reachable = set().union(*map(naive_values, subsets))
    assert (found is not None) == (target in reachable)
    if found is not None:
        value, used = evaluate(found)
        assert value == target
        left = list(numbers)
        for number in used:
            left.remove(number)
        assert not (use_all and left)


def test_six_numbers_of_the_television_game():
    found = solve([75, 50, 2, 3, 8, 7], 812, use_all=False)
    assert found is not None
    assert evaluate(found)[0] == 812


def attempt(text, **options):
    environment = CountdownEnv(use_all=options.pop("use_all", True))
    environment.reset(seed=0, options={"numbers": [3, 3, 8, 8], "target": 24})
    return environment.step(text)


def test_the_reward_is_exact():
    assert attempt("8 / (3 - 8 / 3)")[1:3] == (1.0, True)
    assert attempt("<answer>8 / (3 - 8/3) = 24</answer>")[1:3] == (1.0, True)
    text, reward, terminated, _, info = attempt("3 * 8 + 3 - 8")
    assert (reward, terminated, info["action_is_valid"]) == (0.0, False, True)
    assert text.endswith("3 * 8 + 3 - 8 = 19")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("3 * 8", "3, 8 must be used, too"),
        ("3 * 8 + 3 - 3", "used too often"),
        ("4 * 6", "none of the numbers"),
        ("24", "none of the numbers"),
        ("three times eight", "An expression has"),
    ],
)
def test_a_slip_is_explained_and_changes_nothing(text, reason):
    observation, reward, terminated, _, info = attempt(text)
    assert (reward, terminated, info["action_is_valid"]) == (0.0, False, False)
    assert reason in observation
    assert info["state"]["attempts"] == []


def test_numbers_may_be_left_where_not_all_are_needed():
    assert attempt("3 * 8", use_all=False)[1:3] == (1.0, True)


def test_a_task_without_solution_says_so():
    _, info = CountdownEnv().reset(seed=0, options={"numbers": [1, 1], "target": 100, "expert": True})
    assert info["optimal_steps"] is None


def test_a_task_needs_numbers_and_target():
    for options in (
        {"numbers": [1, 2]},
        {"target": 3},
        {"numbers": "12", "target": 3},
        {"numbers": [1], "target": 1},
    ):
        with pytest.raises(ValueError, match="both options"):
            CountdownEnv().reset(options=options)


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), count=st.integers(2, 6), use_all=st.booleans())
def test_generated_tasks_keep_their_promises(seed, count, use_all):
    environment = CountdownEnv(count=count, use_all=use_all, target=[5, 50])
    _, info = environment.reset(seed=seed, options={"expert": True})
    assert 5 <= info["state"]["target"] <= 50
    assert len(info["state"]["numbers"]) == count
    assert environment.step(info["expert_action"])[1] == 1.0


# -- GuessNumber -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("low", "high"), [(1, 100), (0, 1), (1, 7), (1, 8), (10, 137)])
def test_bisection_never_needs_more_than_is_promised_and_once_needs_it(low, high):
    most, promised = 0, set()
    environment = GuessNumberEnv(low=low, high=high)
    found = set()
    for seed in range(12 * (high - low + 1)):
        _, info = environment.reset(seed=seed, options={"expert": True})
        promised.add(info["optimal_steps"])
        steps, terminated = 0, False
        while not terminated:
            *_, terminated, _, info = environment.step(info["expert_action"])
            steps += 1
        most = max(most, steps)
        found.add(info["state"]["low"])
    assert promised == {most}
    assert found == set(range(low, high + 1))


def test_hints_narrow_the_number_down_and_never_lie():
    environment = GuessNumberEnv()
    for seed in range(20):
        environment.reset(seed=seed)
        secret = environment._secret
        for guess in (1, 50, 100, 30, 70):
            _, reward, terminated, _, info = environment.step(str(guess))
            assert info["state"]["low"] <= secret <= info["state"]["high"]
            assert (reward == 1.0) == terminated == info["success"] == (guess == secret)
            if terminated:
                break


# -- Mastermind --------------------------------------------------------------------------------------------------------


def naive_feedback(guess, secret):
    """Cross places off, one after another, as people do."""
    places = [i for i, digit in enumerate(guess) if secret[i] == digit]
    mine = [digit for i, digit in enumerate(guess) if i not in places]
    theirs = [digit for i, digit in enumerate(secret) if i not in places]
    colours = 0
    for digit in mine:
        if digit in theirs:
            theirs.remove(digit)
            colours += 1
    return len(places), colours


codes = st.lists(st.integers(1, 4), min_size=4, max_size=4).map(tuple)


@given(guess=codes, secret=codes)
def test_feedback_is_exact(guess, secret):
    assert feedback(guess, secret) == naive_feedback(guess, secret) == feedback(secret, guess)


@pytest.mark.parametrize("kwargs", [{}, {"duplicates": False, "colours": 8}, {"length": 3, "colours": 9}])
def test_the_expert_only_guesses_what_could_be(kwargs):
    environment = MastermindEnv(**kwargs)
    for seed in range(25):
        _, info = environment.reset(seed=seed, options={"expert": True})
        terminated = False
        while not terminated:
            guess = tuple(map(int, info["expert_action"].split()))
            assert all(feedback(guess, tuple(code)) == (a, b) for code, a, b in info["state"]["guesses"])
            *_, terminated, truncated, info = environment.step(info["expert_action"])
            assert not truncated
        assert info["success"]


@pytest.mark.parametrize("text", ["1 2 3", "1 2 3 7", "0 1 2 3", "12345", "1 2 3 4 please", "", "-1234"])
def test_what_is_no_code_is_refused(text):
    environment = MastermindEnv()
    environment.reset(seed=0)
    assert not environment.step(text)[4]["action_is_valid"]


def test_a_code_of_different_digits_is_guessed_by_such_codes():
    environment = MastermindEnv(duplicates=False)
    environment.reset(seed=0)
    assert "All digits of a code are different." in environment.step("1123")[0]
    assert environment.step("1,2,3,4")[4]["action_is_valid"]
