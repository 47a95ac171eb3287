"""Verifiers of a few lines: a decorated function, and a class that names its tasks."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from rollgym.env_server.catalog.catalog import Catalog
from rollgym.env_server.common.settings import ServerSettings
from rollgym.envs.verifiers.base import Verdict
from rollgym.envs.verifiers.function import Score, TaskVerifier, verifier

TASKS = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(20)]


@verifier(tasks=TASKS, instruction="Reply with the number.", version="2")
def exact(response: str, task: Mapping[str, Any]) -> bool:
    """Sums with one.

    More of it.
    """
    return bool(response.strip() == task["answer"])


@verifier(tasks=lambda generator: {"question": f"Say {generator.integers(1000)}."})
def drawn(response: str, task: Mapping[str, Any]) -> float:
    return 0.25


class Long(TaskVerifier):
    tasks = TASKS

    def grade(self, response: str, task: Mapping[str, Any]) -> Score:
        return Verdict(0.5, "partial", "half", {"length": len(response)})


class Odd(TaskVerifier):
    tasks = TASKS
    given: Any = 2.0

    def grade(self, response: str, task: Mapping[str, Any]) -> Score:
        return self.given  # type: ignore[no-any-return]


def test_a_decorated_function_is_a_verifier() -> None:
    env = exact()
    question, info = env.reset(seed=3)
    assert info["instruction"] == "Reply with the number."
    answer = str(int(question.split()[2]) + 1)
    assert env.step(f" {answer}\n")[1:4] == (1.0, True, False)
    assert [env.score(text, env.task).outcome for text in (answer, "0")] == ["correct", "wrong"]
    assert (exact.metadata["description"], exact.metadata["version"]) == ("Sums with one.", "2")
    assert exact.__name__ == "exact"


def test_a_seed_fixes_the_task() -> None:
    def questions(seed: int) -> list[str]:
        return [env.reset(seed=seed)[0] for env in (exact(), drawn())]

    assert questions(5) == questions(5)
    assert len({exact().reset(seed=seed)[0] for seed in range(40)}) > 10
    assert len({drawn().reset(seed=seed)[0] for seed in range(40)}) > 30


def test_a_caller_gives_a_task_and_one_without_a_question_is_refused() -> None:
    env = exact()
    assert env.reset(options={"question": "And?", "answer": "yes"})[0] == "And?"
    assert env.step("yes")[1] == 1.0
    with pytest.raises(ValueError, match=r"needs the field 'question', a text; this one has \['answer'\]"):
        env.reset(options={"answer": "yes"})


def test_a_class_of_three_lines_gives_verdicts_of_its_own() -> None:
    env = Long()
    env.reset(seed=0)
    _, reward, _, _, info = env.step("four")
    assert (reward, info["outcome"], info["detail"]) == (0.5, "partial", "half")
    assert info["metrics"] == {"score": 0.5, "length": 4}


@pytest.mark.parametrize("given", [2.0, -0.1, math.nan, math.inf, None, "1", [1.0]])
def test_what_is_no_number_from_0_to_1_is_no_score(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Odd, "given", given)
    with pytest.raises(ValueError, match="must be a number from 0 to 1"):
        Odd().score("x", TASKS[0])


@pytest.mark.parametrize(
    ("given", "outcome"), [(True, "correct"), (False, "wrong"), (np.float32(0.5), "partial"), (1, "correct")]
)
def test_what_a_number_means(given: Any, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Odd, "given", given)
    assert Odd().score("x", TASKS[0]).outcome == outcome


@pytest.mark.parametrize(
    "verdict",
    [Verdict(5.0, "correct", ""), Verdict(math.nan, "correct", ""), Verdict(0.5, "good", "")],  # type: ignore[arg-type]
)
def test_a_verdict_of_ones_own_is_looked_at_as_a_number_is(
    verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Odd, "given", verdict)
    with pytest.raises(ValueError, match=r"must be a number from 0 to 1|the outcome of a verdict"):
        Odd().score("", {"question": ""})


def test_what_is_done_to_a_task_is_done_to_no_other() -> None:
    @verifier(tasks=[{"question": "", "options": ["b", "a"]}])
    def sorts(response: str, task: Mapping[str, Any]) -> bool:
        task["options"].sort()
        return bool(response == task["options"][0])

    env = sorts()
    for _ in range(2):
        env.reset(seed=0)
        assert env.task["options"] == ["b", "a"]
        assert env.step("a")[1] == 1.0


def test_what_is_missing_is_named() -> None:
    class Bare(TaskVerifier):
        def grade(self, response: str, task: Mapping[str, Any]) -> Score:
            return 1.0

    class Silent(TaskVerifier):
        tasks = TASKS

    with pytest.raises(ValueError, match="Bare has no tasks"):
        Bare()
    with pytest.raises(TypeError, match="Silent must define grade"):
        Silent()


def test_a_server_offers_it_by_its_name() -> None:
    entry = Catalog.load(ServerSettings(env=[f"Exact-v0={__name__}:exact"], builtin=False)).get("Exact-v0")
    described = entry.describe()
    assert (described["kind"], described["description"]) == ("stateless", "Sums with one.")
