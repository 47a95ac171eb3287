"""`roll-env check` calls every tool with all that its schema allows."""

import pytest

from rollgym.clients.checks import tools
from rollgym.clients.checks.report import Finding, Status
from rollgym.clients.checks.target import CheckTarget
from rollgym.clients.checks.tool_replies import ToolReplies, described_call
from rollgym.clients.checks.tools import check_tools
from rollgym.clients.checks.trace import digests_of_episode
from rollgym.clients.protocol.tool_calls import ToolCall
from rollgym.clients.replies.formats.calls import read_calls
from rollgym.clients.replies.formats.table import FORMATS
from tests.support import tool_envs
from tests.support.tool_envs import Orders


def findings(name: str) -> list[Finding]:
    return list(check_tools(CheckTarget(name if "-v0" in name else f"{tool_envs.__name__}:{name}")))


def texts(found: list[Finding], status: Status) -> list[str]:
    return [each.detail for each in found if each.status is status]


@pytest.mark.parametrize("name", ["Orders", "ToolUse-v0", "Retail-v0"])
def test_sound_tools_pass_in_every_format(name: str) -> None:
    found = findings(name)
    assert [(each.check, each.status) for each in found if each.status is not Status.PASS] == []
    if name != "Orders":
        assert found[-1].detail == "mistral, qwen-xml, hermes, llama, openai, python, tags"


def test_an_environment_without_tools_is_asked_nothing() -> None:
    assert findings("FrozenLake-v0") == []


def test_what_a_tool_raises_fails_with_tool_arguments_and_place() -> None:
    failed = [each for each in findings("Raising") if each.status is Status.FAIL]
    failed.sort(key=lambda each: each.detail)
    bare, unwritable, extra, query = failed
    assert query.detail.startswith("query(sql='")
    assert "raises OperationalError: near" in query.detail
    assert f"{tool_envs.__file__}:" in query.remedy
    assert "in run; raise `rollgym.ToolError`" in query.remedy
    assert bare.detail.startswith("bare() raises TypeError")
    assert "must take all that its schema allows" in bare.remedy
    assert extra.detail.startswith("open(unexpected='extra') raises TypeError")
    assert "the tool 'bytes' must return text, or what JSON can hold" in unwritable.detail


def test_a_call_that_does_not_end_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "_CALL_TIMEOUT_S", 0.2)
    (detail,) = texts(findings("Sleeping"), Status.FAIL)
    assert detail == "wait(seconds=11) raises TimeoutError: it takes more than 0.2 s"


def test_a_tool_that_no_reply_reaches_is_a_warning() -> None:
    (detail,) = texts(findings("Deaf"), Status.WARN)
    assert detail == "no call of query was taken; the last one was answered: error: there is no call."


def test_a_schema_that_is_not_drawn_from_is_a_note() -> None:
    info = {"tools": [{"name": "odd", "parameters": {"properties": {"a": {"not": {}}}, "required": ["a"]}}]}
    replies = ToolReplies(info)
    assert list(replies.calls("odd")) == []
    assert replies.notes == ["odd: values for the keyword 'not' are not drawn"]


def test_an_unknown_format_is_a_note() -> None:
    replies = ToolReplies({"tools": [{"name": "a"}], "call_format": "smoke"})
    assert list(replies.calls("a")) == []
    assert "'smoke' cannot be written; known are mistral" in replies.notes[0]


def test_calls_that_a_format_has_no_form_for_are_left_out() -> None:
    parameters = {"properties": {"a": {"type": ["string", "integer"]}}, "required": ["a"]}
    replies = ToolReplies({"tools": [{"name": "odd", "parameters": parameters}], "call_format": "qwen-xml"})
    drawn = list(replies.calls("odd"))
    assert drawn
    for call in drawn:
        (read,) = read_calls(replies.write(call), FORMATS["qwen-xml"], replies.tools).calls
        assert dict(read.arguments) == dict(call.arguments)
    assert replies.notes == []


def test_a_tool_that_a_format_has_no_call_for_is_a_note() -> None:
    tools = [{"name": "not a name", "parameters": {"properties": {}}}]
    replies = ToolReplies({"tools": tools, "call_format": "python"})
    assert list(replies.calls("not a name")) == []
    assert "not a name: the format python has no form for the call" in replies.notes[0]


def test_random_play_calls_tools() -> None:
    env = Orders()
    called = 0
    for seed in range(5):
        list(digests_of_episode(env, seed))
        called += env.toolbox is not None and env._calls
    assert called > 0


def test_a_call_is_described_in_a_line() -> None:
    assert described_call(ToolCall("a", {"b": 1, "c": "x" * 500})) == f"a(b=1, c={'x' * 500!r:.97}...)"
