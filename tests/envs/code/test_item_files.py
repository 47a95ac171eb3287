"""Items in files, as an operator sets them."""

import json

import pytest

from rollgym.envs.code.debugging import CodeEnv
from rollgym.envs.code.tasks import ItemFile
from rollgym.envs.verifiers.code_tests import CodeTestsEnv
from tests.support import code_items

ROWS = [{**code_items.mbpp(), "task_id": number} for number in range(40)]


@pytest.fixture
def items(tmp_path):
    path = tmp_path / "items.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    return path


def test_json_lines(items):
    file = ItemFile(items)
    assert file.row(3) == ROWS[3]
    parts = [file.rows_of(split) for split in ("train", "valid", "test")]
    assert sorted(number for part in parts for number in part) == file.rows_of(None) == list(range(40))
    assert all(parts)


def test_parquet(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{**code_items.apps(), "problem_id": number} for number in range(5)]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "items.parquet")
    assert ItemFile(tmp_path / "items.parquet").row(4) == rows[4]


def test_tasks_are_drawn_from_the_file(items):
    environment = CodeTestsEnv(data=str(items), split="valid")
    drawn = {
        environment.reset(seed=seed, options={"expert": True})[1]["state"]["task"]["task_id"]
        for seed in range(20)
    }
    valid = {ROWS[number]["task_id"] for number in ItemFile(items).rows_of("valid")}
    assert drawn <= valid
    assert len(drawn) > 1
    assert "largest" in CodeEnv(data=str(items)).reset(seed=1)[0]


def test_integers_of_any_size_are_compared_as_they_are(tmp_path):
    path = tmp_path / "large.jsonl"
    tests = {"fn_name": "f", "inputs": [[1]], "outputs": [2**70]}
    path.write_text(json.dumps({"question": "q", "input_output": tests}) + "\n")
    assert ItemFile(path).row(0)["input_output"] == tests
    environment = CodeTestsEnv(data=str(path))
    for added, score in ((0, 1.0), (1, 0.0)):
        environment.reset(seed=1)
        assert environment.step(f"```python\ndef f(n):\n    return 2**70 + {added}\n```")[1] == score


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", "", "no rows"),
        ("a.jsonl", "{", "line 1 of a.jsonl is no JSON"),
        ("a.jsonl", "3", "no JSON object"),
        ("a.jsonl", '{"question": NaN}', "line 1 of a.jsonl is no JSON"),
        (
            "a.jsonl",
            '{"question": ' + "[" * 900 + "]" * 900 + "}",
            "line 1 of a.jsonl is no JSON: .*nested too deep",
        ),
        ("a.jsonl", '{"question": "x"}', "row 1 of a.jsonl is no item"),
        ("a.txt", "", "must end in"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=said):
        ItemFile(tmp_path / name)


def test_a_split_without_items(tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(ROWS[0]))
    split = next(each for each in ("train", "valid", "test") if not ItemFile(path).rows_of(each))
    with pytest.raises(ValueError, match=f"no item of the split {split}"):
        CodeTestsEnv(data=str(path), split=split)


def test_only_an_operator_names_a_file():
    for environment in (CodeTestsEnv, CodeEnv):
        assert environment.operator_kwargs == {"data"}
        assert "data" not in environment.kwargs_schema["properties"]
