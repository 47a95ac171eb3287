"""What a task's answer is stays with the environment: no reset and no step tells it before it is given.

Only who may ask for experts is told, by the option of the reset that a server refuses unless its operator allows it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium
import pytest

from rollgym.envs.registry import builtin_environments
from rollgym.envs.verifiers.base import VerifierEnv
from rollgym.envs.verifiers.code_tests import CodeTestsEnv
from tests.support.code_items import FUNCTION_ITEMS, PROGRAM_ITEMS

CLASSES: dict[str, type[gymnasium.Env[Any, Any]]] = {
    env_id: environment.load() for env_id, environment in builtin_environments().items()
}
VERIFIERS = [env_id for env_id, each in CLASSES.items() if issubclass(each, VerifierEnv)]
NOT_ALONE = frozenset({"CodeTests-v0", "Judge-v0"})


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for each in value.values():
            yield from leaves(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from leaves(each)
    else:
        yield value


@pytest.mark.parametrize("env_id", VERIFIERS)
def test_a_verifier_tells_nothing_of_its_task_but_the_prompt(env_id):
    verifier = CLASSES[env_id]()
    prompt, info = verifier.reset(seed=3)
    assert prompt
    assert info["state"] == {}
    assert set(info) == {"instruction", "success", "action_is_valid", "state", "anchor", "optimal_steps"}
    again, asked = verifier.reset(seed=3, options={"expert": True})
    assert again == prompt
    assert asked["state"]["task"] == verifier.task
    assert {**asked, "state": {}} == info
    # It is asked for anew at each reset.
    assert verifier.reset(seed=3)[1] == info
    verifier.close()


@pytest.mark.parametrize("env_id", sorted(set(VERIFIERS) - NOT_ALONE))
def test_a_step_tells_no_more_of_the_task_than_its_verdict(env_id):
    verifier = CLASSES[env_id]()
    verifier.reset(seed=3)
    *_, info = verifier.step("I do not know.")
    assert info["state"] == {}
    verifier.reset(seed=3, options={"expert": True})
    *_, info = verifier.step("I do not know.")
    assert info["state"]["task"] == verifier.task
    verifier.close()


@pytest.mark.parametrize("item", [*FUNCTION_ITEMS, *PROGRAM_ITEMS])
def test_tests_and_solutions_of_a_program_stay_hidden(item):
    fields = {"question": "Find the largest.", **{**FUNCTION_ITEMS, **PROGRAM_ITEMS}[item]()}
    if "prompt" in fields and not fields["prompt"].strip():
        fields["prompt"] = "Find the largest."
    _, info = CodeTestsEnv().reset(options=fields)
    told = " ".join(map(str, leaves(info)))
    assert "max(numbers)" not in told
    assert "100" not in told


@pytest.mark.parametrize(("env_id", "hidden"), [("ToolUse-v0", "store"), ("Retail-v0", "user_id")])
def test_what_a_policy_has_to_find_out_is_told_to_experts_only(env_id, hidden):
    env = CLASSES[env_id]()
    for seed in range(6):
        assert hidden not in env.reset(seed=seed)[1]["state"]
        assert hidden in env.reset(seed=seed, options={"expert": True})[1]["state"]


def test_the_answer_of_a_store_stands_in_nothing_that_is_told():
    env = CLASSES["ToolUse-v0"]()
    for seed in range(40):
        _, asked = env.reset(seed=seed, options={"expert": True})
        values = {text for text in asked["state"]["store"].values() if len(text) > 1}
        _, info = env.reset(seed=seed)
        told = {str(each) for each in leaves({**info, "instruction": ""})}
        assert not values & told
