"""Data sets as tasks: files, routes, shares, passes, and what is refused at load time."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rollgym.trainer.config.data import DatasetSettings, EvaluationSetSettings
from rollgym.trainer.config.load import load_settings
from rollgym.trainer.config.rollout import TaskSettings
from rollgym.trainer.core.errors import CheckpointError, ConfigError
from rollgym.trainer.core.run_files import WriteError
from rollgym.trainer.evaluation.evaluation_sets import build_evaluation_set
from rollgym.trainer.rollout.data_check import check_streams, keep_digests
from rollgym.trainer.rollout.environments import EnvironmentPool
from rollgym.trainer.run.environments import task_source
from rollgym.trainer.tasks.dataset import _index_in_pass, load_streams, row_streams
from rollgym.trainer.tasks.task import EnvironmentStream, InterleavedTaskSource
from tests.support.processes import env_server, read_lines, train

ROWS = [
    {"question": f"{number} + 1", "answer": str(number + 1), "kind": "sum", "pass_rate": number / 10}
    for number in range(10)
] + [{"question": f"Is {number} odd?", "gold": str(bool(number % 2)), "kind": "truth"} for number in range(5)]
ROUTE = {"column": "kind", "verifiers": {"sum": "Arithmetic-v0", "truth": "QA-v0"}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return written(tmp_path / "rows.jsonl", ROWS)


def written(path: Path, rows: list[dict]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return path


def streams(path: Path, **fields):
    return load_streams(DatasetSettings(path=str(path), **fields))


# -- rows ----------------------------------------------------------------------------------------------------------


def test_rows_are_routed_and_columns_become_task_fields(file):
    first, second = streams(file, route=ROUTE, omit=["pass_rate"], shuffle=False)
    assert [(each.domain, each.env_id, len(each.rows)) for each in (first, second)] == [
        ("sum", "Arithmetic-v0", 10),
        ("truth", "QA-v0", 5),
    ]
    assert first.item(2, 7, 0).options == {"question": "2 + 1", "answer": "3"}
    assert first.weight == pytest.approx(10 / 15)
    # A column of other rows that is named would be missing here; those that are not named go along.
    renamed = streams(file, route=ROUTE, columns={"q": "question"}, shuffle=False)[1]
    assert renamed.item(1, 0, 0).options == {"q": "Is 1 odd?", "gold": "True"}


def test_shares_of_routed_values_can_be_set(file):
    shares = {"sum": 1.0, "truth": 3.0}
    first, second = streams(file, route={**ROUTE, "weights": shares}, weight=2.0, omit=["pass_rate"])
    assert (first.weight, second.weight) == (0.5, 1.5)


def test_difficulty_and_limit_choose_rows(file, tmp_path):
    sums = written(tmp_path / "sums.jsonl", ROWS[:10])
    band = {"column": "pass_rate", "minimum": 0.2, "maximum": 0.5}
    (stream,) = streams(sums, verifier="Arithmetic-v0", difficulty=band)
    assert [json.loads(row)["question"] for row in stream.rows] == ["2 + 1", "3 + 1", "4 + 1", "5 + 1"]
    assert len(streams(file, verifier="QA-v0", limit=3)[0].rows) == 3
    with pytest.raises(ConfigError, match="has 10 rows, and the difficulty keeps none"):
        streams(sums, verifier="Arithmetic-v0", difficulty={"column": "pass_rate", "minimum": 2})
    with pytest.raises(ConfigError, match=r"line 11: 'pass_rate' must be a number, not None"):
        streams(file, route=ROUTE, difficulty=band)


def test_the_same_rows_come_from_every_kind_of_file(tmp_path):
    datasets = pytest.importorskip("datasets")
    parquet = pytest.importorskip("pyarrow.parquet")
    names = {name for row in ROWS for name in row}
    table = datasets.Dataset.from_list([{name: row.get(name) for name in names} for row in ROWS])
    lines = written(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    parquet.write_table(table.data.table, tmp_path / "rows.parquet")
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(tmp_path / "two")
    expected = [stream.digest for stream in streams(lines, route=ROUTE)]
    for path, split in (("rows.json", None), ("rows.parquet", None), ("one", None), ("two", "train")):
        found = streams(tmp_path / path, route=ROUTE, split=split)
        assert [stream.digest for stream in found] == expected, path
    with pytest.raises(ConfigError, match="has the splits train, test: name one of them"):
        streams(tmp_path / "two", route=ROUTE)
    with pytest.raises(ConfigError, match="has no splits"):
        streams(tmp_path / "one", route=ROUTE, split="train")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", '{"a": 1}\n{"a": \n', r"rows\.jsonl, line 2: .*'\{\"a\":'"),
        ("rows.jsonl", "[1]\n", "line 1: a row must be a JSON object, not list"),
        ("rows.jsonl", "", "has no rows"),
        (
            "rows.jsonl",
            '{"question": "q", "answer": "1"}\n{"question": "q", "answer": {"a": [1180591620717411303424]}}\n',
            "line 2: the integer 1180591620717411303424 has more than 64 bits: write it as text",
        ),
        (
            "rows.json",
            '[{"question": "12345678901234567890123", "answer": -18446744073709551616}]',
            "the integer -18446744073709551616 has more than 64 bits",
        ),
        ("rows.jsonl", f'{{"a": {"9" * 5000}}}\n', "number is infinity"),
        ("rows.json", '{"a": 1}', "must hold a list of rows"),
        ("rows.json", "[", "is no JSON"),
        ("rows.json", '[{"a": NaN}]', r"rows\.json is no JSON: .*line 1"),
        ("rows.json", '[{"a": "\\ud800"}]', "is no JSON: .*surrogate"),
        ("rows.parquet", "nothing", "is no Parquet file"),
        ("rows.csv", "a,b\n", r"ends in \.jsonl, \.json or \.parquet"),
        (None, "", "cannot be read: No such file"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, message):
    path = tmp_path / (name or "absent.jsonl")
    if name is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        streams(path, verifier="QA-v0")


def test_a_text_of_parquet_that_is_no_utf8_is_named(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    bounds, letters = bytes([0, 0, 0, 0, 2, 0, 0, 0]), b"\xff\xfe"
    parts = [None, pyarrow.py_buffer(bounds), pyarrow.py_buffer(letters)]
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 1, parts)
    parquet.write_table(pyarrow.table({"question": texts, "answer": texts}), tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match=r"rows\.parquet: a text behind row 0 is not UTF-8"):
        streams(tmp_path / "rows.parquet", verifier="QA-v0")


def test_a_data_set_that_its_library_cannot_make_is_named(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "rows.json").write_text("{broken")
    entry = DatasetSettings(hub=str(tmp_path / "broken"), verifier="QA-v0")
    with pytest.raises(ConfigError, match=r"broken cannot be loaded: .*generating the dataset"):
        load_streams(entry)


@pytest.mark.parametrize("value", [math.nan, math.inf, [1.0, math.nan], [{"part": math.nan}]])
def test_a_number_that_json_does_not_have_is_named_with_its_row(tmp_path, value):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"question": ["q"], "gold": [value]}), tmp_path / "rows.parquet")
    with pytest.raises(
        ConfigError, match=r"rows\.parquet, row 0: 'answer' is (nan|inf), which JSON has no number"
    ):
        streams(tmp_path / "rows.parquet", verifier="QA-v0", columns={"answer": "gold"})


def test_of_many_columns_some_are_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({f"column {number}": 1 for number in range(30)}) + "\n")
    with pytest.raises(
        ConfigError, match=r"has no gold; its columns are column 0, .*column 11, and 18 more$"
    ):
        streams(path, verifier="QA-v0", columns={"answer": "gold"})


def test_a_byte_order_mark_is_no_part_of_a_row(tmp_path):
    for name, text in (("rows.jsonl", '{"question": "é"}\n'), ("rows.json", '[{"question": "é"}]')):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8-sig")
        assert streams(path, verifier="QA-v0")[0].item(0, 0, 0).options == {"question": "é"}


def test_a_row_that_no_verifier_is_named_for_is_an_error(file):
    with pytest.raises(ConfigError, match=r"no verifier for these values of 'kind': 'truth' \(.*line 11\)"):
        streams(file, route={"column": "kind", "verifiers": {"sum": "Arithmetic-v0"}})
    with pytest.raises(ConfigError, match=r"line 1: the row has no 'colour' to route it by"):
        streams(file, route={"column": "colour", "verifiers": {"red": "QA-v0"}})
    with pytest.raises(ConfigError, match=r"line 11: the row has no answer; its columns are question, gold"):
        streams(file, verifier="QA-v0", columns={"answer": "answer"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"verifier": "QA-v0"}, "either a path or a hub name"),
        ({"path": "x", "hub": "y", "verifier": "QA-v0"}, "either a path or a hub name"),
        ({"path": "x"}, "either a verifier or a route"),
        ({"path": "x", "verifier": "QA-v0", "route": ROUTE}, "either a verifier or a route"),
        ({"path": "x", "subset": "y", "verifier": "QA-v0"}, "subset is for a data set of the hub"),
        ({"path": "x", "route": {**ROUTE, "weights": {"sum": 1}}}, r"must name the same values .*'truth'"),
        ({"path": "x", "verifier": "QA-v0", "difficulty": {"column": "c"}}, "a minimum, a maximum, or both"),
        (
            {"path": "x", "verifier": "QA-v0", "difficulty": {"column": "c", "minimum": 2, "maximum": 1}},
            "minimum 2 is above maximum 1",
        ),
        ({"path": "x", "verifiers": "QA-v0"}, "unknown key 'verifiers'; did you mean 'verifier'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        DatasetSettings(**fields)


# -- the stream ------------------------------------------------------------------------------------------------------


@given(count=st.integers(1, 300), seed=st.integers(0, 2**40))
@settings(max_examples=40)
def test_a_pass_visits_every_row_once(count, seed):
    assert sorted(_index_in_pass(count, seed, number) for number in range(count)) == list(range(count))


def test_every_pass_has_an_order_of_its_own(file):
    (stream,) = streams(file, verifier="QA-v0", limit=10)
    passes = [
        [stream.item(start + place, 0, 4).options["question"] for place in range(10)] for start in (0, 10, 20)
    ]
    assert all(sorted(each) == sorted(passes[0]) for each in passes)
    assert len({tuple(each) for each in passes}) == 3
    (fixed,) = streams(file, verifier="QA-v0", limit=10, shuffle=False)
    assert [fixed.item(place, 0, 4).options["question"] for place in (0, 9, 10)] == [
        "0 + 1",
        "9 + 1",
        "0 + 1",
    ]


def mixed(file: Path, seed: int, block: int) -> InterleavedTaskSource:
    lake = EnvironmentStream(TaskSettings(env_id="FrozenLake-v0", weight=0.5))
    routed = streams(file, route={**ROUTE, "weights": {"sum": 2, "truth": 1}}, weight=1.5, omit=["pass_rate"])
    return InterleavedTaskSource([lake, *routed], block, seed)


@given(seed=st.integers(0, 2**40), indices=st.lists(st.integers(0, 10**7), max_size=10))
@settings(max_examples=25)
def test_a_task_is_a_function_of_seed_and_index(tmp_path_factory, seed, indices):
    path = written(tmp_path_factory.mktemp("rows") / "rows.jsonl", ROWS)
    first, second = mixed(path, seed, 8), mixed(path, seed, 8)
    expected = {index: first.task(index) for index in indices}
    assert {index: second.task(index) for index in reversed(indices)} == expected


def test_every_step_has_its_share_of_every_domain_and_no_row_is_missed(file):
    source = mixed(file, 1, 8)
    assert source.counts == (2, 4, 2)
    tasks = [source.task(index) for index in range(8 * 5)]
    for step in range(5):
        counts = Counter(task.domain for task in tasks[8 * step : 8 * step + 8])
        assert counts == {"FrozenLake-v0": 2, "sum": 4, "truth": 2}
    orders = {tuple(task.domain for task in tasks[8 * step : 8 * step + 8]) for step in range(5)}
    assert len(orders) > 1
    seen = Counter(task.options["question"] for task in tasks if task.domain == "truth")
    assert len(seen) == 5
    assert set(seen.values()) == {2}
    assert len({task.seed for task in tasks}) == 40
    assert [task.index for task in tasks] == list(range(40))


def test_a_share_of_less_than_one_task_is_refused(file):
    with pytest.raises(
        ConfigError, match=r"'truth' has a share of 25\.00%, which is less than one task in 2"
    ):
        mixed(file, 1, 2)


def test_settings_choose_the_source(file):
    words = [f"datasets=[{{path: '{file}', verifier: QA-v0}}]", "rollout.groups_per_step=4"]
    source = task_source(
        load_settings(None, [*words, "tasks=[{env_id: FrozenLake-v0, weight: 3}]", "interleave=step"])
    )
    assert [stream.domain for stream in row_streams(source)] == ["QA-v0"]
    assert Counter(source.task(index).env_id for index in range(4)) == {"FrozenLake-v0": 3, "QA-v0": 1}
    with pytest.raises(ConfigError, match="either an env_id or a dataset"):
        load_settings(None, [*words, "evaluation.sets.p={episodes: 3}"])


# -- runs ------------------------------------------------------------------------------------------------------------

RUN = """
seed: 5
steps: 2
interleave: step
model: {hidden_size: 32, layers: 1, heads: 2, max_length: 256}
rollout: {groups_per_step: 3, group_size: 2, max_turns: 1, max_new_tokens: 4}
evaluation: {every: 0}
checkpoint: {every: 1, resume: auto}
tracking: {tensorboard: false}
"""


@pytest.fixture
def config(tmp_path: Path, file: Path) -> Path:
    path = tmp_path / "run.yaml"
    route = {**ROUTE, "weights": {"sum": 2, "truth": 1}}
    rows = [{**row, "answer": row.get("answer", row.get("gold"))} for row in ROWS]
    written(file, rows)
    data = {"path": str(file), "route": route, "omit": ["gold", "pass_rate"]}
    evaluation_set = {"dataset": {**data, "limit": 12}, "episodes": 4, "baselines": False}
    path.write_text(f"{RUN}datasets: [{json.dumps(data)}]\n")
    path.write_text(
        path.read_text().replace("every: 0}", f"every: 0, sets: {{rows: {json.dumps(evaluation_set)}}}}}")
    )
    return path


@pytest.mark.slow
def test_a_run_over_a_file_is_trained_and_measured(tmp_path, config):
    output = train("--config", str(config), f"output_dir={tmp_path}/run")
    assert "start  rows/greedy" in output
    played = read_lines(tmp_path / "run" / "episodes.jsonl")
    assert Counter(line["task"]["env_id"] for line in played) == {"Arithmetic-v0": 8, "QA-v0": 4}
    source = task_source(load_settings(config))
    assert {line["task"]["index"]: line["task"]["options"] for line in played} == {
        index: source.task(index).options for index in range(6)
    }
    for line in played:
        assert line["turns"][0]["observation"].startswith(line["task"]["options"]["question"])
    metrics = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert {"domain/sum/reward", "domain/truth/score"} <= set().union(*metrics)
    assert set(json.loads((tmp_path / "run" / "data.json").read_text())) == {"0 sum", "1 truth"}


@pytest.mark.parametrize("number", [2**53, -(2**53), 2**63, 2**64 - 1])
def test_integers_that_the_wire_does_not_take_are_refused_with_their_line(tmp_path, number):
    for answer in (number, [{"deep": number}]):
        rows = [{"question": "q", "answer": 2**53 - 1}, {"question": "1" * 20, "answer": answer}]
        path = written(tmp_path / "rows.jsonl", rows)
        with pytest.raises(
            ConfigError, match=rf"line 2: 'answer' holds the integer {number}, .* below 2\*\*53: write"
        ):
            streams(path, verifier="QA-v0")
        (found,) = streams(path, verifier="QA-v0", omit=["answer"])
        assert len(found.rows) == 2


def test_deep_nesting_beside_a_long_integer_is_refused_with_its_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"a": {"[" * 1000}{"1" * 19}{"]" * 1000}}}\n')
    with pytest.raises(ConfigError, match=r"line 1: .* nested (too|more than 200) deep"):
        streams(path, verifier="QA-v0")


def test_a_disk_that_does_not_take_the_record_of_the_data_is_named(tmp_path, file):
    (tmp_path / ".data.json.partial").mkdir()
    with pytest.raises(WriteError, match=r"cannot write .*data\.json"):
        keep_digests(streams(file, verifier="QA-v0"), tmp_path, resuming=False)


def test_the_data_of_a_run_do_not_change_under_it(tmp_path, file):
    keep_digests(streams(file, verifier="QA-v0"), tmp_path, resuming=False)
    keep_digests(streams(file, verifier="QA-v0"), tmp_path, resuming=True)
    file.write_text(file.read_text().replace("9 + 1", "9 + 2"))
    with pytest.raises(CheckpointError, match="the rows of QA-v0 are not those that the run in"):
        keep_digests(streams(file, verifier="QA-v0"), tmp_path, resuming=True)
    with pytest.raises(CheckpointError, match="the rows of QA-v0 are not"):
        keep_digests([], tmp_path, resuming=True)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_a_damaged_record_of_the_data_is_named_with_the_way_on(tmp_path, file, content):
    (tmp_path / "data.json").write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"cannot resume: .*data\.json is damaged.*bring it back, or delete"
    ):
        keep_digests(streams(file, verifier="QA-v0"), tmp_path, resuming=True)


async def test_an_evaluation_set_is_what_a_file_begins_with_whichever_verifiers_share_it(tmp_path):
    rows = [{**row, "answer": row.get("answer", row.get("gold"))} for row in ROWS]
    mixed_up = [rows[place] for place in (11, 0, 12, 1, 11, 13, 2)]
    data = DatasetSettings(
        path=str(written(tmp_path / "mixed.jsonl", mixed_up)), route=ROUTE, omit=["gold", "pass_rate"]
    )
    with env_server("--workers", "1") as url:
        async with EnvironmentPool(url, None, "json") as pool:
            evaluation_set = EvaluationSetSettings(dataset=data, episodes=5)
            tasks = (await build_evaluation_set("rows", evaluation_set, pool)).tasks
    assert [task.options["question"] for task in tasks] == [
        mixed_up[place]["question"]
        for place in (0, 1, 2, 3, 5)  # the fifth is the first one again
    ]
    assert [task.row[-6:] for task in tasks] == [f"line {number}" for number in (1, 2, 3, 4, 6)]
    assert [task.seed for task in tasks] == list(range(5))


@pytest.mark.slow
def test_rows_that_cannot_be_played_cost_their_groups_and_not_the_run(tmp_path, config, file):
    """In the middle of a run, that is: settings and data of a run that has begun cannot be changed."""
    rows = [json.loads(line) for line in file.read_text().split("\n") if line]
    rows[3]["question"] = "3 + 1, " * 200  # more than a row of the model
    del rows[10]["answer"]
    written(file, rows)
    words = ["steps=5", "evaluation.sets={}", "checkpoint.every=0", "tracking.digests=false"]
    output = train("--config", str(config), f"output_dir={tmp_path}/run", *words)
    ledger = read_lines(tmp_path / "run" / "ledger.jsonl")
    failed = [line for line in ledger if line["fate"] == "dropped" and line["reason"] == "failed:unplayable"]
    reasons = " ".join(line["detail"] for line in failed)
    assert f"QA-v0 does not take {file}, line 11: " in reasons
    assert "needs the field 'answer'" in reasons
    assert f"it passes model.max_length 256 ({file}, line 4): raise model.max_length" in reasons
    assert "unplayable in" in output
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) >= 5


async def test_verifiers_are_looked_up_and_shown_a_row_before_the_first_step(file):
    rows = {"path": str(file), "limit": 10}
    with env_server("--workers", "1") as url:
        async with EnvironmentPool(url, None, "json") as pool:
            await check_streams(load_streams(DatasetSettings(**rows, verifier="Arithmetic-v0")), pool)
            unknown = load_streams(DatasetSettings(**rows, verifier="QAA-v0"))
            with pytest.raises(ConfigError, match="no environment 'QAA-v0'; did you mean QA-v0"):
                await check_streams(unknown, pool)
            odd = load_streams(DatasetSettings(**rows, verifier="MultipleChoice-v0"))
            shown = odd[0].item(0, 0, 0).options["question"]
            line = next(number for number, row in enumerate(ROWS, 1) if row["question"] == shown)
            assert line != 1  # rows are shuffled, and the one that was tried is named
            with pytest.raises(
                ConfigError, match=rf"does not take a row \(tried: .* line {line}\): .*must be a letter"
            ):
                await check_streams(odd, pool)
            evaluation_set = EvaluationSetSettings(
                dataset=DatasetSettings(**rows, verifier="Arithmetic-v0"), episodes=4
            )
            tasks = (await build_evaluation_set("rows", evaluation_set, pool)).tasks
            assert [task.options["question"] for task in tasks] == ["0 + 1", "1 + 1", "2 + 1", "3 + 1"]
            with pytest.raises(ConfigError, match="has only 10 rows for 11 episodes"):
                await build_evaluation_set("rows", evaluation_set.model_copy(update={"episodes": 11}), pool)
