"""`POST /run_code` as data: nothing of a run or of its result is lost on the way."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.sandbox.core.base import LANGUAGES, Guarantees, Outcome, Program, RunResult
from rollgym.sandbox.core.limits import Limits
from rollgym.sandbox.remote.run_code import (
    RunCodeRequest,
    build_reply,
    build_request,
    read_reply,
    read_request,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NAMES = st.from_regex(r"[a-z]{1,4}(/[a-z]{1,4}){0,2}", fullmatch=True)
LIMITS = st.builds(
    Limits,
    wall_seconds=st.floats(0.1, 3600),
    cpu_seconds=st.none() | st.floats(0.1, 3600),
    memory_mb=st.integers(1, 4096),
    pids=st.integers(1, 1024),
    output_kb=st.integers(1, 4096),
    compile_seconds=st.floats(0.1, 3600),
    compile_memory_mb=st.integers(16, 4096),
)
GUARANTEES = Guarantees("namespaces", "namespaces", True, True, True, True, True, "watched", True)
ENDED = st.sampled_from([outcome for outcome in Outcome if outcome is not Outcome.COMPILE_ERROR])
ENDS = st.one_of(
    st.fixed_dictionaries({"exit_code": st.integers(0, 255)}),
    st.fixed_dictionaries({"signal": st.integers(1, 64)}),
)


@st.composite
def results(draw: st.DrawFn, outcomes: st.SearchStrategy[Outcome] = ENDED) -> RunResult:
    outcome = draw(outcomes)
    return RunResult(
        outcome=outcome,
        stdout=draw(st.binary(max_size=40) | TEXT.map(str.encode)),
        stderr=draw(st.binary(max_size=40)),
        stdout_truncated=draw(st.booleans()),
        wall_seconds=draw(st.floats(0, 100)),
        cpu_seconds=draw(st.floats(0, 100)),
        peak_memory_mb=draw(st.floats(0, 1000)),
        files=draw(st.dictionaries(NAMES, st.binary(max_size=20), max_size=2)),
        detail=draw(TEXT),
        guarantees=GUARANTEES,
        **(draw(ENDS) if outcome not in (Outcome.TIME_LIMIT, Outcome.SANDBOX_ERROR) else {}),
    )


@settings(max_examples=40)
@given(
    program=st.builds(
        Program, st.sampled_from(LANGUAGES), TEXT, st.tuples(TEXT.map(lambda t: t.replace("\0", "")))
    ),
    files=st.dictionaries(NAMES, st.binary(max_size=20), max_size=3),
    stdin=st.binary(max_size=20),
    limits=LIMITS,
    collect=st.lists(NAMES, max_size=3, unique=True),
)
def test_a_request_arrives_as_it_was_meant(
    program: Program, files: dict[str, bytes], stdin: bytes, limits: Limits, collect: list[str]
) -> None:
    sent = json.loads(json.dumps(build_request(program, files, stdin, limits, collect)))
    run = read_request(RunCodeRequest.model_validate(sent))
    assert (run.program, run.files, run.stdin, run.limits) == (program, files, stdin, limits)
    assert run.collect == tuple(collect)


@settings(max_examples=40)
@given(result=results(), compiling=st.none() | results(st.just(Outcome.OK)))
def test_a_result_arrives_as_it_was(result: RunResult, compiling: RunResult | None) -> None:
    if compiling is not None:
        compiling = replace(compiling, files={}, guarantees=None)
    result = replace(result, compiling=compiling)
    sent = json.loads(json.dumps(build_reply(result, host=None)))
    assert read_reply(sent) == replace(result, guarantees=replace(GUARANTEES, backend="remote(namespaces)"))


@settings(max_examples=40)
@given(compiling=results(st.just(Outcome.NON_ZERO_EXIT)))
def test_a_failure_to_compile_arrives_as_it_was(compiling: RunResult) -> None:
    compiling = replace(compiling, files={})
    failed = replace(
        compiling, outcome=Outcome.COMPILE_ERROR, detail="the compiler failed", compiling=compiling
    )
    answer = build_reply(failed, host=None)
    assert answer["run_result"] is None
    found = read_reply(json.loads(json.dumps(answer)))
    assert found.compiling == replace(compiling, guarantees=None)
    assert (found.outcome, found.stderr) == (Outcome.COMPILE_ERROR, compiling.stderr)


def test_a_fault_of_the_sandbox_is_no_result_of_the_program() -> None:
    answer = build_reply(RunResult(outcome=Outcome.SANDBOX_ERROR, detail="no room"), host="here")
    assert (answer["status"], answer["message"], answer["run_result"]) == ("SandboxError", "no room", None)
    assert read_reply(answer).outcome is Outcome.SANDBOX_ERROR


@pytest.mark.parametrize(
    "change",
    [
        {"files": {"/etc/passwd": ""}},
        {"files": {"a/../b": ""}},
        {"fetch_files": [""]},
        {"stdin_base64": "no"},
        {"arguments": ["a\0b"]},
    ],
)
def test_what_no_sandbox_could_do_is_refused(change: dict[str, Any]) -> None:
    request = RunCodeRequest.model_validate({"code": "", "language": "bash"} | change)
    with pytest.raises(ValueError, match=r"."):
        read_request(request)


def test_a_request_of_sandboxfusion_gets_our_limits_where_it_has_none() -> None:
    request = RunCodeRequest.model_validate(
        {"code": "", "language": "bash", "memory_limit_MB": -1, "extra": 1}
    )
    assert read_request(request).limits == Limits(wall_seconds=10, compile_seconds=10)
