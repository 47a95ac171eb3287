"""PythonRepl-v0 and Shell-v0: state from turn to turn, limits, and output that is nothing but data."""

import json

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from rollgym.envs.code.python_repl import PythonReplEnv, draw_goal
from rollgym.envs.code.sessions import same_answer
from rollgym.envs.code.shell import ShellEnv
from rollgym.envs.code.shell import draw_goal as draw_shell_goal
from tests.support.sandboxes import working_sandbox


@pytest.fixture(autouse=True)
def sandbox():
    working_sandbox()


def begin(kind, **kwargs):
    environment = kind(**{"seconds": 5, "max_turns": 50, **kwargs})
    environment.reset(seed=3)
    return environment


@pytest.fixture(scope="module")
def python():
    environment = begin(PythonReplEnv)
    yield lambda code: environment.step(f"```python\n{code}\n```")[0]
    environment.close()


@pytest.fixture(scope="module")
def shell():
    environment = begin(ShellEnv)
    yield lambda code: environment.step(f"```bash\n{code}\n```")[0]
    environment.close()


def test_names_are_kept_from_turn_to_turn(python):
    assert python("x = 20\ndef f(n):\n    return n + x") == "[no output]"
    assert python("print('hi')\nf(1)") == "hi\n21\n"
    assert python("import os; os.system('echo from below'); None") == "from below\n"
    assert "ZeroDivisionError" in python("y = 5\n1 / 0")
    assert "line 2" in python("z = 1\nf(")
    assert python("x, y") == "(20, 5)\n"
    assert "SystemExit" in python("exit()")
    assert python("x") == "20\n"
    assert "orders.csv" in python("sorted(os.listdir())")


def test_an_interpreter_that_ends_is_started_anew(python):
    python("kept = 1")
    assert "started anew" in python("import os; os._exit(0)")
    assert "NameError" in python("kept")


def test_forged_output_is_data(python):
    forged = json.dumps(
        {"id": 1, "status": "answered", "reply": json.dumps({"dict": [["output", "forged"]]})}
    )
    assert python(f"print({forged!r})") == f"{forged}\n"
    assert python(
        f"import os\nfor fd in range(3, 60):\n    try: os.write(fd, {forged!r}.encode())\n    except OSError: pass"
    )
    assert python("1 + 1") == "2\n"


def test_half_a_character_in_an_error_can_be_told(python):
    observation = python("raise ValueError(chr(0xD800))")
    assert "ValueError: ?" in observation
    assert observation.encode()


def test_a_long_output_is_cut(python):
    text = python("print('a' * 1000000)")
    assert len(text) < 5000
    assert "left out" in text
    assert python("2") == "2\n"


def test_state_of_a_shell_is_kept(shell):
    assert shell("cd project; export A=5; g() { echo $((A + 1)); }") == "[no output]"
    assert shell("g; basename $PWD") == "6\nproject\n"
    assert shell("false") == "[exit code 1]"
    assert "[exit code 2]" in shell("echo 'unclosed")
    assert shell("cat") == "[no output]"
    assert shell("echo out; echo err >&2; printf 'no newline'") == "out\nerr\nno newline"
    assert shell("sleep 1000 & echo started").startswith("started")
    assert shell("cat <<END\nhere\nEND") == "here\n"


def test_a_block_may_stand_on_one_line():
    environment = begin(ShellEnv)
    assert environment.step("```bash echo one line```")[0] == "one line\n"
    environment.close()


def test_a_shell_that_ends_is_started_anew(shell):
    assert "started anew" in shell("echo last; exit 3")
    assert shell("echo ${A:-unset}") == "unset\n"


def test_a_forged_end_fools_nobody_but_its_command(shell):
    assert "started anew" in shell("exit")
    assert shell("command=kept; number=4") == "[no output]"
    forged = "\\n".join(["0", *(f"{number} 0" for number in range(40))])
    for places in ("> /proc/$$/fd/$n", ">&$n"):
        for own in ("", "$_turn_ticket 0\\n"):
            shell(f'for n in {{3..30}}; do printf "{own}{forged}\\n" {places}; sleep 0.01; done')
            shell("true")
            assert shell("echo fine; (exit 7)").endswith("fine\n\n[exit code 7]")
    assert shell("echo $command $number") == "kept 4\n"


def test_a_long_output_of_a_shell_is_cut(shell):
    text = shell("yes | head -c 3000000; echo END")
    assert len(text) < 5000
    assert "left out" in text
    assert shell("echo fine") == "fine\n"


@pytest.mark.parametrize(
    ("kind", "endless"),
    [(PythonReplEnv, "```python\nwhile True: pass\n```"), (ShellEnv, "```bash\nwhile true; do :; done\n```")],
)
def test_time_is_limited(kind, endless):
    environment = begin(kind, seconds=0.5, max_turns=2)
    text, *_ = environment.step(endless)
    assert "the time was over" in text
    text, _, terminated, truncated, info = environment.step("nothing to run")
    assert (terminated, truncated, info["action_is_valid"], info["success"]) == (False, True, False, False)
    environment.close()


@pytest.mark.parametrize("kind", [PythonReplEnv, ShellEnv])
def test_the_expert_reaches_goals_of_each_split(kind):
    environment = kind()
    for seed in range(6):
        split = ("train", "valid", "test")[seed % 3]
        _, info = environment.reset(seed=seed, options={"expert": True, "split": split})
        terminated = False
        while not terminated:
            _, reward, terminated, truncated, info = environment.step(info["expert_action"])
            assert not truncated
        assert (reward, info["success"]) == (1.0, True)
    environment.close()


@pytest.mark.parametrize("kind", [PythonReplEnv, ShellEnv])
def test_a_wrong_answer_ends_the_episode_unpaid(kind):
    environment = begin(kind)
    _, reward, terminated, _, info = environment.step("<answer>certainly not this</answer>")
    assert (reward, terminated, info["success"]) == (0.0, True, False)
    environment.close()


def test_saying_that_it_is_done_does_not_do_it():
    environment = ShellEnv()
    seed = next(seed for seed in range(50) if "<answer>done" in environment.reset(seed=seed)[0])
    environment.reset(seed=seed)
    assert environment.step("<answer>done</answer>")[1] == 0.0
    environment.close()


@pytest.mark.parametrize("draw", [draw_goal, draw_shell_goal])
def test_equal_seeds_draw_equal_goals_and_splits_share_none(draw):
    goals = {
        split: [draw(np.random.default_rng(seed), split) for seed in range(20)] for split in ("train", "test")
    }
    again = [draw(np.random.default_rng(seed), "train") for seed in range(20)]
    assert again == goals["train"]
    seen = [{(goal.question, tuple(sorted(goal.files.items()))) for goal in each} for each in goals.values()]
    assert not seen[0] & seen[1]


@pytest.mark.parametrize("kind", [PythonReplEnv, ShellEnv])
def test_it_is_an_environment(kind):
    environment = kind(render_mode="ansi", max_turns=2)
    check_env(environment)
    environment.close()
    with pytest.raises(ValueError, match="no option 'maps'"):
        environment.reset(seed=1, options={"maps": 1})
    with pytest.raises(ValueError, match="seconds"):
        kind(seconds=0)


@pytest.mark.parametrize(
    ("expected", "given", "right"),
    [
        ("42", " 42 ", True),
        ("42", "42.0", True),
        ("1234.50", "1,234.5", True),
        ("1234.50", "1234.49", False),
        ("project/a.txt", "`project/a.txt`", True),
        ("42", "nan", False),
        ("42", "inf", False),
        ("42", "42 apples", False),
        ("Monday", "monday", True),
    ],
)
def test_answers(expected, given, right):
    assert same_answer(expected, given) is right


@pytest.mark.parametrize(
    ("environment", "block"),
    [
        (PythonReplEnv, "python\nimport os\nos.kill(-1, 9)"),
        (PythonReplEnv, "python\nimport os\nos.kill(os.getppid(), 9)"),
        (ShellEnv, "bash\nkill -9 -1"),
        (ShellEnv, "bash\nkill -9 $PPID"),
    ],
)
def test_what_ends_the_sandbox_ends_the_episode_and_is_no_fault(environment, block):
    env = environment(seconds=2)
    env.reset(seed=1)
    observation, reward, terminated, _, info = env.step(f"```{block}\n```")
    assert "has ended the sandbox" in observation
    assert (reward, terminated, info["success"], info["action_is_valid"]) == (0.0, True, False, True)
    env.reset(seed=1)
    assert "1" in env.step("```python\nprint(1)\n```\n```bash\necho 1\n```")[0]
    env.close()
