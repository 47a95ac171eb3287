"""Rows as the data sets of other libraries have them: each is read rightly, or refused with its line and what to do.

What is expected of a conversation is written in one line: `u:` before a user's text, `a:`, `s:`, `t:`, `d:` likewise,
`!look{...}` for a call, `>>` before the first message that may be learnt, `[0]` behind one that is not,
`#look` for a tool.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollgym.trainer.config.data import DatasetSettings, ExamplesSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.learn.pipelines.example_rows import conversation_rows
from rollgym.trainer.models.tiny import build_tiny_tokenizer
from rollgym.trainer.rollout.prompts import ChatRenderer
from rollgym.trainer.tasks.dataset import load_streams
from rollgym.trainer.tasks.examples import (
    ExampleConversation,
    Judged,
    Pair,
    read_conversations,
    read_judged,
    read_pairs,
)
from rollgym.trainer.tasks.layouts import EXAMPLES, TASKS
from tests.support.dataset_rows import (
    ASKED,
    JUDGED,
    NAMED,
    PAIRS,
    REFUSED,
    RLVR,
    SFT,
    TALK,
    VERL,
    a,
    share,
    u,
)


def shown(talk: ExampleConversation) -> str:
    parts = []
    for number, message in enumerate(talk.messages):
        calls = "".join(
            f"!{call['function']['name']}{json.dumps(call['function']['arguments'])}"
            for call in message.get("tool_calls", [])
        )
        learnt = ">>" if number == talk.learnt_from else ""
        weight = "[0]" if message.get("weight") == 0 else ""
        parts.append(f"{learnt}{message['role'][0]}:{message['content']}{calls}{weight}")
    tools = "".join(f" #{tool['function']['name']}" for tool in talk.tools)
    return "|".join(parts) + tools


def data(path: Path, row: dict[str, Any], **columns: str) -> list[ExamplesSettings]:
    path.write_text(json.dumps(row) + "\n")
    return [ExamplesSettings(path=str(path), columns=columns)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


@pytest.mark.parametrize("name", SFT)
def test_conversations(path, name):
    row, expected = SFT[name]
    (found,) = read_conversations(data(path, row))
    assert shown(found) == expected


@pytest.mark.parametrize("name", NAMED)
def test_conversations_of_columns_with_other_names(path, name):
    row, columns, expected = NAMED[name]
    (found,) = read_conversations(data(path, row, **columns))
    assert shown(found) == expected


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(path, name):
    row, expected = PAIRS[name]
    (found,) = read_pairs(data(path, row))
    assert (shown(found.chosen), shown(found.rejected)) == expected
    assert found.chosen.prompt == found.rejected.prompt


@pytest.mark.parametrize("name", JUDGED)
def test_judged_replies(path, name):
    row, expected = JUDGED[name]
    assert [(shown(each.reply), each.good) for each in read_judged(data(path, row))] == expected


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_with_its_line(path, name):
    kind, row, message = REFUSED[name]
    read = {"sft": read_conversations, "pairs": read_pairs, "judged": read_judged}[kind]
    with pytest.raises(ConfigError, match=rf"rows\.jsonl, line 1: .*{message}"):
        list(read(data(path, row)))


@pytest.mark.parametrize("name", RLVR)
def test_tasks_of_verifiers(path, name):
    row, columns, expected = RLVR[name]
    path.write_text(json.dumps(row) + "\n")
    given_data = DatasetSettings(path=str(path), verifier="Math-v0", columns=columns)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=rf"rows\.jsonl, line 1: .*{expected}"):
            load_streams(given_data)
        return
    options = load_streams(given_data)[0].item(0, 0, 0).options
    assert options is not None
    assert (options.get("question"), options.get("answer")) == expected
    if "prompt" in options:
        assert isinstance(options["prompt"], str), "verifiers that read a prompt want a text"


def test_rows_of_parquet_whose_other_columns_are_filled_up(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [
        {"conversations": [share("human", "q"), share("gpt", "r", weight=None)], "messages": None},
        {"messages": TALK},
    ]
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert [shown(each) for each in read_conversations([ExamplesSettings(path=str(path))])] == [
        ">>u:q|a:r"
    ] * 2
    parquet.write_table(pyarrow.Table.from_pylist([VERL]), path)
    (stream,) = load_streams(DatasetSettings(path=str(path), verifier="Math-v0"))
    assert stream.item(0, 0, 0).options["answer"] == "72"


def test_each_layout_has_a_row_here():
    rows = [row for row, *_ in (*SFT.values(), *NAMED.values(), *PAIRS.values(), *JUDGED.values())]
    taken = {next((index for index, each in enumerate(EXAMPLES) if each.matches(row)), None) for row in rows}
    assert set(range(len(EXAMPLES))) <= taken
    assert len(rows) + len(REFUSED) + len(RLVR) > 100


def test_each_pair_of_columns_is_one_layout_of_tasks():
    assert len(TASKS) == len({(each.question, each.answer) for each in TASKS})


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [share("function_call", "[" * 100_000)]},
        {"messages": TALK, "tools": "[" * 100_000},
        {"messages": [u("q"), a("r")], "history": [], "images": ["x" * 1_000_000]},
        {"comparison": {}, "label": "x" * 1_000_000},
    ],
)
def test_large_and_deep_rows_are_refused_in_a_few_words(path, row):
    with pytest.raises(ConfigError) as caught:
        list(read_pairs(data(path, row)) if "comparison" in row else read_conversations(data(path, row)))
    assert len(str(caught.value).replace(str(path), "")) < 400


@pytest.mark.parametrize("depth", [201, 500, 900, 1020, 100_000])
def test_what_is_nested_deep_is_refused_with_its_line(path, depth):
    deep = '{"a":' * depth + "1" + "}" * depth
    rows = [
        *(
            f'{{"messages": [{{"role": "assistant", "tool_calls": [{{"name": "f", "arguments": {each}}}]}}]}}'
            for each in (deep, json.dumps(deep))
        ),
        f'{{"messages": [{{"role": "user", "content": "q", "more": {deep}}}]}}',
        f'{{"messages": {json.dumps(TALK)}, "tools": [{{"name": "f", "parameters": {deep}}}]}}',
        f'{{"messages": {json.dumps(TALK)}, "tools": {json.dumps(f"[{deep}]")}}}',
        json.dumps({"conversations": [share("function_call", deep)]}),
        json.dumps({"messages": f"[{deep}]"}),
    ]
    for row in rows:
        path.write_text(f"{row}\n")
        with pytest.raises(ConfigError, match=r"rows\.jsonl, line 1: .*(nested|depth limit)"):
            list(read_conversations([ExamplesSettings(path=str(path))]))
    path.write_text(f'{{"question": "q", "answer": {deep}}}\n')
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line 1: .*(nested|depth limit)"):
        load_streams(DatasetSettings(path=str(path), verifier="Math-v0"))


def test_what_is_nested_as_deep_as_is_read_is_written_into_prompts(path):
    renderer = ChatRenderer(build_tiny_tokenizer())
    deep = '{"<|end|>":' * 190 + "1" + "}" * 190
    (found,) = read_conversations(
        data(path, {"messages": [u("q"), a("", tool_calls=[{"name": "f", "arguments": deep}])]})
    )
    assert conversation_rows(renderer, found)


def test_numbers_of_tables_that_json_has_no_form_for_are_refused_with_their_row(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    for value in (float("nan"), float("inf"), b"x"):
        call = {"name": "look", "arguments": {"q": value}}
        parquet.write_table(
            pyarrow.Table.from_pylist([{"messages": [u("q"), a("", tool_calls=[call])]}]), path
        )
        with pytest.raises(ConfigError, match=r"rows\.parquet, row 0: .*arguments holds .*no form for"):
            list(read_conversations([ExamplesSettings(path=str(path))]))


def test_long_texts_and_histories_are_read(path):
    (found,) = read_conversations(data(path, {"input": "x" * 1_000_000, "output": "<" * 1_000_000}))
    assert [len(each["content"]) for each in found.messages] == [1_000_000] * 2
    turns = {"instruction": "x", "output": "r", "history": [["a", "b"]] * 10_000}
    (found,) = read_conversations(data(path, turns))
    assert len(found.messages) == 20_002


_NAMES = sorted(
    {name for each in EXAMPLES for name in (*each.columns, *each.unless)} | {"tools", "system", "history"}
)
_KEYS = st.sampled_from(
    ["role", "content", "from", "value", "tool_calls", "function_call", "weight", "text", "rank"]
)
_PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(
        ["", "x", "user", "assistant", "gpt", "function_call", "A", "{", "[1]", '{"name": 1}', "1" * 30]
    )
)
_VALUE = st.recursive(
    _PLAIN | st.sampled_from([TALK, ASKED, [a("x")], a("y"), [share("human", "q")], [["a", "b"]]]),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(_KEYS, each, max_size=3),
    max_leaves=6,
)

_FUZZ = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _talks(found: ExampleConversation | Pair | Judged) -> list[ExampleConversation]:
    match found:
        case ExampleConversation():
            return [found]
        case Pair():
            return [found.chosen, found.rejected]
        case Judged():
            return [found.reply]


@_FUZZ
@given(row=st.dictionaries(st.sampled_from(_NAMES), _VALUE, max_size=6))
def test_any_row_is_read_or_refused_with_its_line(path, row):
    found = data(path, row)
    for read in (read_conversations, read_pairs, read_judged):
        try:
            talks = [talk for each in read(found) for talk in _talks(each)]
        except ConfigError as error:
            assert "rows.jsonl" in str(error)  # noqa: PT017 - either is right
            continue
        assert all(isinstance(message["content"], str) for talk in talks for message in talk.messages)


@_FUZZ
@given(
    row=st.dictionaries(st.sampled_from(["prompt", "question", "label", "messages", "reward_model"]), _VALUE)
)
def test_any_task_is_read_or_refused_with_its_line(path, row):
    path.write_text(json.dumps(row) + "\n")
    try:
        (stream,) = load_streams(DatasetSettings(path=str(path), verifier="Math-v0"))
    except ConfigError as error:
        assert "rows.jsonl, line 1" in str(error)  # noqa: PT017 - either is right
        return
    options = stream.item(0, 0, 0).options
    assert options is not None
    assert not isinstance(options.get("prompt"), list)
