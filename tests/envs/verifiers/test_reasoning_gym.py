"""ReasoningGym-v0: other people's generators and scorers, behind a wall clock."""

import json
import subprocess
import sys

import pytest
from gymnasium.utils.env_checker import check_env

from rollgym.envs.core.splits import split_of_text
from rollgym.envs.verifiers.pool import CallFailed, CallTimeout, NoProcess, PoolShare
from rollgym.envs.verifiers.reasoning_gym import ReasoningGymEnv

pytest.importorskip("reasoning_gym")

NAMES = (
    "chain_sum",
    "countdown",
    "prime_factorization",
    "word_ladder",
    "mini_sudoku",
    "family_relationships",
)


@pytest.fixture(scope="module")
def environment():
    environment = ReasoningGymEnv()
    yield environment
    environment.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_data_set_pays_its_own_answers_and_no_junk(environment, name):
    for seed in range(3):
        prompt, _ = environment.reset(seed=seed, options={"dataset": name, "seed": seed})
        task = environment.task
        assert prompt == task["question"]
        verdict = environment.score(f"<think>junk</think><answer>{task['answer']}</answer>", task)
        assert verdict.outcome == "correct", verdict
        for junk in ("no idea", "<answer>∞×@</answer>", "[[1, 2], 'x'", "<answer>\x00</answer>"):
            verdict = environment.score(junk, task)
            assert verdict.outcome in ("wrong", "partial", "unparsable"), (junk, verdict)
            assert verdict.score < 0.5


def test_a_scorer_that_raises_on_junk_says_that_it_is_no_answer(environment):
    environment.reset(options={"dataset": "prime_factorization", "seed": 4})
    verdict = environment.score("<answer>two times three</answer>", environment.task)
    assert (verdict.score, verdict.outcome) == (0.0, "unparsable")
    assert verdict.detail.startswith("no_such_answer: the scorer raised ValueError")


@pytest.mark.parametrize(
    ("refused", "own", "outcome"),
    [
        (CallTimeout("no result within 10 s"), {"score": 1.0}, "unparsable"),
        (CallFailed("the process died"), {"score": 1.0}, "unparsable"),
        (CallTimeout("no result within 10 s"), CallTimeout("no result within 10 s"), "timeout"),
        (CallFailed("the process died"), CallFailed("the process died"), "error"),
        (CallFailed("the process died"), {"raised": "KeyError"}, "error"),
        (NoProcess("the process did not start"), {"score": 1.0}, "error"),
    ],
)
def test_a_response_that_ends_the_scorer_is_no_answer_where_the_scorer_works(
    monkeypatch, refused, own, outcome
):
    environment = ReasoningGymEnv()

    class Pool:
        def call(self, request, timeout_s):
            found = refused if request["answer"] == "hostile" else own
            if isinstance(found, Exception):
                raise found
            return found

    monkeypatch.setattr(PoolShare, "pool", Pool())
    task = {"dataset": "chain_sum", "seed": 1, "answer": "7"}
    verdict = environment.score("<answer>hostile</answer>", task)
    assert (verdict.score, verdict.outcome) == (0.0, outcome)
    environment.close()


def test_tasks_keep_to_their_split():
    environment = ReasoningGymEnv(dataset="chain_sum", config={"min_terms": 3, "max_terms": 3}, split="test")
    check_env(environment)
    for seed in range(10):
        prompt, _ = environment.reset(seed=seed)
        assert split_of_text(prompt) == "test"
        assert prompt.count("+") + prompt.count("-") >= 2
    environment.close()


def test_equal_seeds_give_equal_tasks_in_any_process(environment):
    script = (
        "import json, sys\n"
        "from rollgym.envs.verifiers.reasoning_gym import ReasoningGymEnv\n"
        "env = ReasoningGymEnv()\n"
        f"print(json.dumps([env.reset(options={{'dataset': name, 'seed': 5}})[0] for name in {NAMES!r}]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    here = [environment.reset(options={"dataset": name, "seed": 5})[0] for name in NAMES]
    assert json.loads(done.stdout) == here


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dataset": "chain_sun", "seed": 1}, "no data set 'chain_sun'"),
        ({"dataset": 5, "seed": 1}, "must name a data set"),
        ({"seed": -1}, "needs the field 'seed'"),
        ({"seed": 1, "config": {"size": 3}}, "without 'seed' and 'size'"),
        ({"seed": 1, "config": {"min_terms": 9, "max_terms": 2}}, "chain_sum with"),
        ({"seed": 1, "config": {"colour": "red"}}, "unexpected keyword argument 'colour'"),
    ],
)
def test_a_task_that_makes_no_sense_is_refused(environment, fields, message):
    with pytest.raises(ValueError, match=message):
        environment.reset(options=fields)
    verdict = environment.score("5", fields)
    assert (verdict.score, verdict.outcome) == (0.0, "error")


def test_bad_kwargs_are_refused():
    with pytest.raises(ValueError, match="timeout_s must be"):
        ReasoningGymEnv(timeout_s=100)
    with pytest.raises(ValueError, match="must not have 'seed' or 'size'"):
        ReasoningGymEnv(config={"size": 5})
