"""ToolUsePython-v0: programs as tools, in a real sandbox."""

import pytest
from gymnasium.utils.env_checker import check_env

from rollgym.clients.protocol.tool_calls import ToolCall
from rollgym.clients.replies.formats.hermes import HERMES
from rollgym.clients.replies.formats.tags import TAGS
from rollgym.envs.code.sandboxes import operator_sandbox
from rollgym.envs.tools.tool import Toolbox
from rollgym.envs.tools.tool_use_python import SandboxFailedError, ToolUsePythonEnv, python_tool
from rollgym.sandbox.core.base import Outcome, RunResult, SandboxUnavailableError
from rollgym.sandbox.core.limits import Limits


@pytest.fixture(scope="module", autouse=True)
def _a_sandbox():
    try:
        operator_sandbox()
    except SandboxUnavailableError as error:
        pytest.skip(str(error))


def run(code, **limits):
    box = Toolbox([python_tool(operator_sandbox, Limits(**limits))])
    call = ToolCall("python", {"code": code})
    assert box.fault(call) is None
    return box.run(call)


@pytest.mark.parametrize("kind", ["primes", "digits"])
def test_the_expert_solves_what_needs_a_program(kind):
    env = ToolUsePythonEnv(kinds=[kind])
    for seed in range(5):
        _, info = env.reset(seed=seed, options={"expert": True})
        assert "python" in info["expert_action"]
        *_, info = env.step(info["expert_action"])
        _, reward, terminated, *_ = env.step(info["expert_action"])
        assert (reward, terminated) == (1.0, True)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print(6 * 7)", "42"),
        ("x = 1", "nothing was printed; print what you want to know"),
    ],
)
def test_what_a_program_prints_is_the_result(code, said):
    result = run(code)
    assert (result.text, result.error) == (said, False)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("print('half'); raise SystemExit(3)", "exit code 3\nhalf"),
        ("while True: pass", "more than 1 seconds"),
        ("bytearray(10 ** 9)", "memory"),
        ("open('/etc/shadow')", "Error"),
        ("import socket; socket.create_connection(('192.0.2.1', 80), 1)", "Error"),
    ],
)
def test_what_a_program_may_not_or_cannot_is_told_as_an_error(code, said):
    # Only what never ends has a short time: on a busy machine all else may need more than a second.
    result = run(code, wall_seconds=1.0 if code.startswith("while") else 30.0, memory_mb=128)
    assert result.error
    assert result.text.startswith("error: ")
    assert said in result.text


def test_a_long_output_keeps_both_of_its_ends():
    text = run("print('first'); print('x' * 50_000); print('last')").text
    assert len(text) < 5_000
    assert text.startswith("first")
    assert text.endswith("last")


def test_programs_know_nothing_of_each_other():
    assert not run("open('kept.txt', 'w').write('x'); print('ok')").error
    assert run("open('kept.txt')").error


def test_code_may_come_in_tags():
    env = ToolUsePythonEnv(call_format="tags", tools=["python"], kinds=["digits"])
    env.reset(seed=1)
    for reply in (
        "<python>print(1 + 1)</python>",
        "```python\nprint(1 + 1)\n```",
        "<code>print(1 + 1)</code>",
    ):
        assert env.step(reply)[0] == TAGS.show_result("python", "2")


def test_a_sandbox_that_fails_is_no_fault_of_the_policy():
    class Broken:
        def run(self, program, **_):
            return RunResult(outcome=Outcome.SANDBOX_ERROR, detail="no room")

    box = Toolbox([python_tool(Broken, Limits())])
    with pytest.raises(SandboxFailedError, match="no room"):
        box.run(ToolCall("python", {"code": "1"}))


def test_it_is_an_environment_that_says_what_it_is():
    check_env(ToolUsePythonEnv(), skip_render_check=True)
    assert not ToolUsePythonEnv.metadata["deterministic"]
    assert not ToolUsePythonEnv.metadata["inline"]
    env = ToolUsePythonEnv(tools=["dates"])
    env.reset(seed=1)
    assert "there is no tool 'python'" in env.step(HERMES.write([ToolCall("python", {"code": "1"})]))[0]
