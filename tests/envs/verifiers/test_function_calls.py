"""FunctionCalls-v0: requests and the calls that they mean, in every format, and rows of BFCL's."""

import json

import pytest
from gymnasium.utils.env_checker import check_env

from rollgym.clients.protocol.tool_calls import ToolCall
from rollgym.clients.replies.formats.table import FORMATS
from rollgym.envs.core.splits import split_of_text
from rollgym.envs.verifiers.function_calls import CATEGORIES, FunctionCallsEnv
from tests.support.recorded_data import recorded


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("category", CATEGORIES)
def test_the_reference_answer_is_right_and_others_are_not(name, category):
    env = FunctionCallsEnv(call_format=name, categories=[category])
    for seed in range(6):
        env.reset(seed=seed)
        task = env.task
        assert env.score(task["answer"], task).outcome == "correct"
        other = FORMATS[name].write([ToolCall(task["functions"][0]["name"], {})])
        assert env.score(other, task).outcome == "wrong"
        assert env.score("<answer>None</answer>", task).score == (category == "irrelevance")
        for silent in ("", "0", "I cannot do that.", f"<think>{task['answer']}</think>"):
            assert env.score(silent, task).outcome == "unparsable"


def test_an_answer_that_cannot_be_read_is_no_wrong_one():
    env = FunctionCallsEnv(categories=["simple"])
    env.reset(seed=1)
    _, reward, terminated, _, info = env.step("<tool_call>{</tool_call>")
    assert (reward, terminated, info["outcome"], info["action_is_valid"]) == (0.0, True, "unparsable", False)


def test_gymnasium_accepts_it_and_splits_are_by_content():
    check_env(FunctionCallsEnv(render_mode="ansi"), skip_render_check=True)
    env = FunctionCallsEnv(split="valid")
    questions = {
        env.reset(seed=seed, options={"expert": True})[1]["state"]["task"]["question"] for seed in range(20)
    }
    assert {split_of_text(question) for question in questions} == {"valid"}


def test_rows_of_bfcl_are_tasks():
    env = FunctionCallsEnv(call_format="python")
    rows = [json.loads(line) for line in recorded("bfcl_ast_cases.jsonl").read_text().splitlines()[::7]]
    for row in rows:
        if not row["calls"]:
            continue
        task = env.checked_task(
            {
                "question": row["question"][0][-1]["content"],
                "functions": row["functions"],
                "accepted": row["possible_answer"],
                "category": row["category"],
            }
        )
        calls = [ToolCall(*next(iter(call.items()))) for call in row["calls"]]
        verdict = env.score(FORMATS["python"].write(calls), task)
        assert verdict.outcome == ("correct" if row["valid"] else "wrong"), row["id"]


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({}, "'question'"),
        ({"question": "a"}, "'functions'"),
        ({"question": "a", "functions": [{"name": "f"}]}, "'functions'"),
        (
            {
                "question": "a",
                "functions": [{"name": "f", "parameters": {"properties": {"x": {"type": "y"}}}}],
            },
            "'functions'",
        ),
        ({"question": "a", "functions": []}, "'accepted'"),
        ({"question": "a", "functions": [], "accepted": [{"f": {"x": 1}}]}, "'accepted'"),
        ({"question": "a", "functions": [], "accepted": [{"f": {}}]}, "none of the functions"),
        ({"question": "a", "functions": [], "accepted": [], "category": 1}, "category"),
    ],
)
def test_tasks_that_do_not_fit_together(task, said):
    env = FunctionCallsEnv()
    with pytest.raises(ValueError, match=said):
        env.checked_task(task)
    if "question" in task:
        assert env.score("x", task).outcome == "error"


def test_arguments_that_make_no_sense():
    with pytest.raises(ValueError, match="categories must be some of"):
        FunctionCallsEnv(categories=["java"])
