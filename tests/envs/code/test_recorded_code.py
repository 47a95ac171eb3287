"""Verdicts on recorded solutions, mutants and failures; all of them are judged in benchmarks/conformance."""

import json

import pytest

from rollgym.envs.verifiers.code_tests import CodeTestsEnv
from tests.support.recorded_data import recorded
from tests.support.sandboxes import working_sandbox

ENVIRONMENT = CodeTestsEnv(seconds=1)
SAMPLE = 10


def rows(name):
    with recorded(name).open() as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize("fenced", [True, False], ids=["fenced", "plain"])
def test_human_eval(fenced):
    working_sandbox()
    all_rows = [row for row in rows("code_humaneval.jsonl") if row["kind"] != "infinite_loop"]
    exits = [row for row in all_rows if row["kind"] == "exits_zero"]
    assert exits
    apart = []
    for row in [*exits[:3], *all_rows[int(fenced) :: len(all_rows) // SAMPLE]]:
        response = f"```python\n{row['code']}\n```" if fenced else row["code"]
        fields = {"prompt": "", "entry_point": row["entry_point"], "test": row["test"]}
        verdict = ENVIRONMENT.score(response, fields)
        if (verdict.outcome == "correct") != row["expected_pass"] or verdict.outcome == "error":
            apart.append((row["id"], verdict))
    assert apart == []


def test_mbpp():
    working_sandbox()
    all_rows = rows("code_mbpp_sample.jsonl")
    apart = []
    for row in all_rows[:: len(all_rows) // SAMPLE]:
        verdict = ENVIRONMENT.score(
            f"```python\n{row['code']}\n```", {name: row[name] for name in ("prompt", "test_list")}
        )
        if verdict.outcome == "error" or abs(verdict.score - row["pass_fraction"]) > 1e-9:
            apart.append((row["id"], verdict))
    assert apart == []
