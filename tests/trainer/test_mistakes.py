"""What a user gets wrong ends in one line that says what to do, with exit code 2."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollgym.trainer.backends.transport import RankFailedError
from rollgym.trainer.cli import main
from rollgym.trainer.core.run_files import output_lock
from tests.support.processes import env_server

LAKE = [
    "tasks=[{env_id: FrozenLake-v0, kwargs: {size: 4}}]",
    "rollout.max_turns=2",
    "rollout.max_new_tokens=3",
]
RANDOM = ["rollout", "--policy", "random", "--episodes", "1"]
RECORDED = ["rollout", "--policy", "recorded", "--recorded"]
SERVED = ["--env", "FrozenLake-v0=rollgym.envs.games.frozen_lake:FrozenLakeEnv"]
TINY = ["model.hidden_size=32", "model.layers=1", "model.heads=2", "tracking.tensorboard=false"]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)


def complaint(capfd, *words: str) -> str:
    """Run the command line and return the one line that it ends with."""
    try:
        code = main([*words, *LAKE])
    except SystemExit as end:
        code = end.code
    assert code == 2
    printed = capfd.readouterr().err.splitlines()
    assert len(printed) == 1, printed
    assert printed[0].startswith("roll-train: ")
    return printed[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read --recorded played.jsonl: No such file or directory; name a run's episodes.jsonl"),
        ("", "holds no episodes"),
        ("{}\n", "line 1 is not an episode: task: Field required; name a run's episodes.jsonl"),
        ("nothing\n", "line 1 is not an episode: Invalid JSON"),
        ('{"task": {"index": 0, "env_id": "X", "seed": 0}, "turns": []}\n', "not an episode: turns: "),
        (
            '{"task": {"index": 0}, "turns": [{"reply": "Up"}]}\n',
            "not an episode: task: env_id: Field required",
        ),
    ],
)
def test_a_recording_that_is_none(capfd, tmp_path, content, message):
    if content is not None:
        (tmp_path / "played.jsonl").write_text(content)
    assert message in complaint(capfd, *RECORDED, "played.jsonl")


@pytest.mark.parametrize("words", [["--policy", "recorded"], ["--policy", "random", "--recorded", "x.jsonl"]])
def test_a_recording_and_its_player_belong_together(capfd, words):
    assert "--policy recorded and --recorded FILE belong together" in complaint(capfd, "rollout", *words)


def test_no_terminal_to_play_in(capfd, monkeypatch):
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        message = complaint(capfd, "rollout", "--policy", "human")
    assert "standard input has ended" in message
    assert "play in a terminal" in message


def test_an_output_that_cannot_be_written_is_found_before_playing(capfd):
    assert main([*RANDOM, "--output", "missing/played.jsonl", *LAKE]) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err == (
        "roll-train: cannot write --output missing/played.jsonl: No such file or directory; name a file in a "
        "directory that exists\n"
    )


def test_an_output_that_another_command_writes_is_left_alone(capfd, tmp_path):
    (tmp_path / "played.jsonl").write_text("theirs")
    with output_lock(tmp_path / "played.jsonl"):
        said = complaint(capfd, *RANDOM, "--output", "played.jsonl")
    assert "--output played.jsonl is in use by another process: wait for it or end it" in said
    assert (tmp_path / "played.jsonl").read_text() == "theirs"


def test_episodes_before_a_mistake_are_kept(capfd, tmp_path, monkeypatch):
    (tmp_path / "replies").write_text("Right\nRight\n")
    with (tmp_path / "replies").open() as two_replies:
        monkeypatch.setattr(sys, "stdin", two_replies)
        complaint(capfd, "rollout", "--policy", "human", "--output", "played.jsonl")
    assert len((tmp_path / "played.jsonl").read_text().splitlines()) == 1


def test_a_directory_that_cannot_be_written(capfd, tmp_path):
    (tmp_path / "file").write_text("")
    message = complaint(capfd, f"output_dir={tmp_path}/file/out")
    assert (
        f"cannot write to output_dir {tmp_path}/file/out: Not a directory; name another output_dir" in message
    )


@pytest.mark.parametrize("count", ["-1", "0", "many"])
def test_a_number_of_episodes_that_is_none(capfd, count):
    words = ["rollout", "--policy", "random", "--episodes", count]
    assert f"'{count}' is no number of episodes: give 1 or more" in complaint(capfd, *words)


def test_replies_as_long_as_a_row(capfd):
    message = complaint(capfd, "model.max_length=3")
    assert (
        "model.max_length 3 leaves no room for a prompt beside replies of rollout.max_new_tokens 3" in message
    )


def test_prompts_too_long_for_a_row(capfd):
    message = complaint(capfd, *TINY, "model.max_length=8")
    assert "it passes model.max_length 8: raise model.max_length, lower rollout.max_new_tokens" in message


def test_an_evaluation_set_that_is_not_there(capfd):
    assert "no evaluation set 'nowhere'; the config has none" in complaint(
        capfd, *RANDOM, "--evaluation-set", "nowhere"
    )


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys\n\nprice = 1 / 0\n", "ZeroDivisionError: division by zero ({path}, line 3)"),
        ("raise SystemExit('not today')\n", "SystemExit: not today ({path}, line 1)"),
        ("def unfinished(:\n", "SyntaxError: invalid syntax ({path}, line 1)"),
        ("import no_such_module\n", "it imports 'no_such_module', which is not installed"),
    ],
)
@pytest.mark.parametrize("key", ["rollout.task_source=broken_{case}:thing", "serve=[broken_{case}:Thing]"])
def test_a_module_that_cannot_be_imported(capfd, tmp_path, code, reason, key):
    case = tmp_path.name  # a module is imported once in a process, whatever it was called for
    path = tmp_path / f"broken_{case}.py"
    path.write_text(code)
    message = complaint(capfd, *RANDOM, key.format(case=case))
    assert f"cannot import 'broken_{case}'" in message
    assert message.endswith(reason.format(path=path))


QUICK = [
    *TINY,
    *("steps=2", "rollout.groups_per_step=1", "rollout.group_size=2", "rollout.max_attempts=1"),
    *("rollout.max_failed_groups=2", "model.max_length=256"),
]


def test_a_reward_that_is_never_a_number_ends_the_run_and_harms_no_weights(capfd, tmp_path):
    case = f"nan_{tmp_path.name}"
    (tmp_path / f"{case}.py").write_text("def pay(t):\n    return [float('nan')] * len(t.turns)\n")
    message = complaint(capfd, *QUICK, f"rollout.reward={case}:pay", "output_dir=out")
    assert "FrozenLake-v0 failed 3 groups in a row (rollout.max_failed_groups 2): invalid_number" in message
    assert f"a reward of {case}:pay is nan" in message
    assert not list((tmp_path / "out").rglob("*.pt"))
    fates = [json.loads(line) for line in (tmp_path / "out" / "ledger.jsonl").read_text().splitlines()]
    assert [event["reason"] for event in fates if event["fate"] == "dropped"] == ["failed:invalid_number"] * 3


def test_a_bug_in_a_reward_names_it_and_leaves_its_traceback(capfd, tmp_path):
    case = f"bug_{tmp_path.name}"
    path = tmp_path / f"{case}.py"
    path.write_text("def pay(trajectory):\n    return [int('up') for _ in trajectory.turns]\n")
    message = complaint(capfd, *QUICK, f"rollout.reward={case}:pay", "output_dir=out")
    assert f"rollout.reward '{case}:pay' raised ValueError: invalid literal for int()" in message
    assert f"({path}, line 2)" in message
    assert message.endswith("; traceback in out/traceback.txt")
    assert "int('up')" in (tmp_path / "out" / "traceback.txt").read_text()


@pytest.mark.parametrize("half", ["", "\udc80"], ids=["text", "half a surrogate pair"])
def test_an_internal_error_asks_for_a_report(capfd, tmp_path, monkeypatch, half):
    def broken(_):
        raise ValueError(f"invalid literal{half}")

    monkeypatch.setattr("rollgym.trainer.run.train.open_run", broken)
    assert main([*LAKE, "output_dir=out"]) == 1
    said = capfd.readouterr().err
    assert said.startswith("roll-train: internal error, please report it: ValueError: invalid literal")
    assert f"{__file__}, line" in said
    assert "traceback in out/traceback.txt" in said
    assert "invalid literal" in (tmp_path / "out" / "traceback.txt").read_text()


@pytest.mark.parametrize(
    ("command", "function"),
    [
        ("eval", "rollgym.trainer.run.trained_policy.evaluate"),
        ("rollout", "rollgym.trainer.run.rollout.rollout"),
    ],
)
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError()])
def test_playing_without_memory_names_what_takes_less(capfd, monkeypatch, command, function, error):
    async def plays(*_, **__):
        raise error

    monkeypatch.setattr(function, plays)
    assert main([command, *LAKE, "output_dir=out"]) == 2
    said = capfd.readouterr().err
    assert said.startswith("roll-train: memory does not suffice: ")
    assert type(error).__name__ in said
    assert "lower rollout.max_concurrent_sequences (it is 256), or set model.dtype=bf16" in said
    assert "internal error" not in said
    assert Path("out/traceback.txt").exists()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
            "Tried to allocate 2.00 GiB",
        ),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"),
            "alloc_cpu",
        ),
        (RankFailedError("rank 1 of 2 failed: OutOfMemoryError: CUDA out of memory."), "rank 1 of 2 failed"),
        (MemoryError(), "MemoryError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_device_without_memory_names_what_takes_less(capfd, monkeypatch, error, said):
    def opens(_):
        raise error

    monkeypatch.setattr("rollgym.trainer.run.train.open_run", opens)
    message = complaint(capfd, "output_dir=out", "optimizer.tokens_per_micro_batch=512")
    assert "memory does not suffice: " in message
    assert said in message
    assert (
        "lower optimizer.tokens_per_micro_batch (it is 512), or set model.gradient_checkpointing=true"
        in message
    )
    assert message.endswith("nothing was learnt yet, and the same command begins again")
    assert Path("out/traceback.txt").exists()


def test_any_other_error_of_torch_is_an_internal_error(capfd, monkeypatch):
    def opens(_):
        raise RuntimeError("expected all tensors on one device")

    monkeypatch.setattr("rollgym.trainer.run.train.open_run", opens)
    assert main([*LAKE, "output_dir=out"]) == 1
    assert "internal error, please report it: RuntimeError: expected all tensors" in capfd.readouterr().err


def test_an_environment_that_can_never_be_made_ends_the_run(capfd, tmp_path):
    case = f"unmade_{tmp_path.name}"
    (tmp_path / f"{case}.py").write_text(
        "import gymnasium\nfrom rollgym.clients.protocol.spaces import UnicodeText\n\n\n"
        "class Unmade(gymnasium.Env):\n"
        "    observation_space = action_space = UnicodeText(64)\n"
        "    kwargs_schema = {'type': 'object', 'properties': {'level': {'type': 'integer'}}}\n\n"
        "    def __init__(self, level=0):\n"
        "        if level:\n"
        "            raise RuntimeError('no board of this level')\n\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        return 'x', {}\n\n"
        "    def step(self, action):\n"
        "        return 'x', 0.0, True, False, {}\n"
    )
    words = [*QUICK, f"serve=[{case}:Unmade]", "output_dir=out", "rollout.max_new_tokens=3"]
    assert main([*words, "tasks=[{env_id: Unmade, kwargs: {level: 1}}]"]) == 2
    # The embedded server logs what the environment raised; the last line is the run's.
    message = capfd.readouterr().err.splitlines()[-1]
    assert message.startswith("roll-train: Unmade failed 3 groups in a row")
    assert "no board of this level" in message


def test_an_environment_that_cannot_be_made(capfd, tmp_path):
    (tmp_path / "demanding.py").write_text(
        "import gymnasium\n\n\nclass Demanding(gymnasium.Env):\n    def __init__(self, board):\n        ...\n"
    )
    message = complaint(capfd, *RANDOM, "serve=[demanding:Demanding]")
    assert "Demanding cannot be made without kwargs" in message


def test_a_served_environment_is_a_class(capfd):
    assert "serve: 'game' is not of the form module:Class" in complaint(capfd, "serve=[game]")


def test_reading_words_and_settings_waits_for_no_tensors():
    said = "import sys, rollgym.trainer.cli; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    printed = subprocess.run(
        [sys.executable, "-c", said], capture_output=True, text=True, timeout=60, check=True
    )
    assert printed.stdout == "[]\n", "--help and --dry-run would take seconds"


def test_kwargs_that_are_more_than_the_server_takes_end_the_run_at_once(capfd, tmp_path):
    with env_server("--no-builtin", *SERVED, "--max-request-bytes", "1024") as url:
        capfd.readouterr()
        for words in (["rollout", "--policy", "random", "--episodes", "1"], [*TINY, "steps=1"]):
            words = [*words, f"env_url={url}", f"output_dir={tmp_path}/out"]
            junk = f"tasks=[{{env_id: FrozenLake-v0, kwargs: {{size: 4, junk: {'x' * 3000}}}}}]"
            assert main([*words, *LAKE, junk]) == 2
            printed = capfd.readouterr()
            said = re.fullmatch(
                r"roll-train: too_large: the request has \d+ bytes; 1024 are allowed; (.+)\n", printed.err
            )
            assert said is not None, printed.err
            assert "--max-request-bytes" in said[1]
            assert "environment_error" not in printed.out
        words = ["--dry-run", "--probe", *TINY, f"env_url={url}", f"output_dir={tmp_path}/out", *LAKE, junk]
        assert main(words) == 2
        assert "--max-request-bytes" in capfd.readouterr().err
