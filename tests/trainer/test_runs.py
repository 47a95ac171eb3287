"""Whole runs as a user starts them: real server, real model, killed and resumed."""

from pathlib import Path

import pytest

from tests.support.processes import env_server, read_lines, refused, train, train_until

CONFIG = """
seed: 3
steps: 5
threads: 1
tasks:
  - {env_id: FrozenLake-v0, kwargs: {size: 4, split: train, max_episode_steps: 6, format_penalty: -0.1}}
model: {hidden_size: 32, layers: 1, heads: 2, max_length: 96}
prompt: {context: single_turn, instruction: none}
warm_start: {demonstrations: 30, epochs: 6, batch_rows: 32, learning_rate: 5.0e-3}
rollout: {groups_per_step: 2, group_size: 3, max_turns: 6, max_new_tokens: 3}
evaluation:
  every: 0
  sets:
    held_out: {env_id: FrozenLake-v0, kwargs: {size: 4, split: test, max_episode_steps: 6}, episodes: 8}
checkpoint: {every: 1, resume: auto}
tracking: {tensorboard: false, digests: true}
"""

WAITS = ("generate", "environment", "verify", "wait")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path


def digests(directory: Path) -> list[dict]:
    return read_lines(directory / "digests.jsonl")


def check_times(directory: Path) -> None:
    """The parts of every step's time sum to the whole, and those of every episode's."""
    steps = [line for line in read_lines(directory / "metrics.jsonl") if "time/step_s" in line]
    assert len(steps) == 5
    for line in steps:
        parts = [line[f"time/{part}_s"] for part in (*WAITS, "train", "sync", "record")]
        assert sum(parts) == pytest.approx(line["time/step_s"])
        assert min(line[f"time/{part}_s"] for part in ("generate", "environment", "train", "sync")) > 0.0
        assert line["time/verify_s"] == 0.0, "nobody verifies in FrozenLake"
        assert line["time/trained_tokens_per_s"] > 0.0
        assert line["memory/rss_gib"] > 0.1
        assert 0.0 <= line["response/clipped"] <= 1.0
        assert sum(value for name, value in line.items() if name.startswith("outcome/")) == pytest.approx(1.0)
    episodes = read_lines(directory / "episodes.jsonl")
    assert all(set(episode["seconds"]) == {*WAITS[:3], "queue", "agent"} for episode in episodes)
    assert all(turn["advantages"] for episode in episodes for turn in episode["turns"])


@pytest.mark.slow
def test_deterministic_runs_are_equal_embedded_remote_and_killed(tmp_path, config):
    common = ["--config", str(config), "deterministic=true"]
    output = train(*common, f"output_dir={tmp_path}/embedded")
    assert "started an embedded environment server" in output
    assert "Fatal" not in output
    assert "ended with code" not in output
    expected = digests(tmp_path / "embedded")
    assert [line["step"] for line in expected] == [0, 1, 2, 3, 4]
    assert {"ids", "rewards", "weights"} <= expected[0].keys()
    assert len({line["weights"] for line in expected}) == 5, "the weights must change at every step"
    assert (tmp_path / "embedded" / "curves.png").stat().st_size > 10_000
    check_times(tmp_path / "embedded")

    with env_server("--allow-expert") as url:
        train(*common, "--env-url", url, f"output_dir={tmp_path}/remote", fresh=True)
        assert digests(tmp_path / "remote") == expected

        killed = [*common, "--env-url", url, f"output_dir={tmp_path}/killed"]
        train_until("step 3:", *killed)
        assert len(digests(tmp_path / "killed")) < 5
        assert "resuming" in train(*killed, fresh=True)
        assert digests(tmp_path / "killed") == expected


@pytest.mark.slow
def test_batches_that_are_filled_where_a_filter_drops_groups_are_equal_after_a_kill_too(tmp_path, config):
    with env_server("--allow-expert") as url:
        common = ["--config", str(config), "--env-url", url, "deterministic=true", "evaluation.sets={}"]
        common += ["algorithm.filter={kind: zero_variance, max_rounds: 40}"]
        train(*common, f"output_dir={tmp_path}/whole")
        killed = [*common, f"output_dir={tmp_path}/killed"]
        train_until("step 3:", *killed)
        assert "resuming" in train(*killed, fresh=True)
    assert digests(tmp_path / "killed") == digests(tmp_path / "whole")
    events = read_lines(tmp_path / "whole" / "ledger.jsonl")
    trained = [event for event in events if event["fate"] == "trained"]
    assert [sum(event["step"] == step for event in trained) for step in range(5)] == [2] * 5
    dropped = [event for event in events if event["fate"] == "dropped"]
    assert {event["reason"] for event in dropped} == {"filter:zero_variance"}
    # The stream has no gaps: each task was trained or dropped by name.
    assert sorted(event["task"] for event in [*trained, *dropped]) == list(range(10 + len(dropped)))


@pytest.mark.slow
def test_an_asynchronous_run_accounts_for_every_task_after_a_kill(tmp_path, config):
    with env_server("--allow-expert") as url:
        arguments = [
            "--config",
            str(config),
            "--env-url",
            url,
            f"output_dir={tmp_path}/run",
            "rollout.max_staleness=1",
            "evaluation.sets={}",
        ]
        train_until("step 2:", *arguments)
        train(*arguments)
    fates: dict[int, list[str]] = {}
    for event in read_lines(tmp_path / "run" / "ledger.jsonl"):
        fates.setdefault(event["task"], []).append(event["fate"])
    last = {task: history[-1] for task, history in fates.items()}
    assert sum(fate == "trained" for fate in last.values()) == 5 * 2
    assert set(last) == set(range(len(last))), "no task of the stream may be missing"
    for history in fates.values():
        # Once trained, a task is trained again only if a checkpoint without it was resumed.
        assert history.count("trained") <= 1 + history.count("reissued")
    # The stream is that of any other run with this seed.
    played = {
        line["task"]["index"]: line["task"]["seed"]
        for line in read_lines(tmp_path / "run" / "episodes.jsonl")
    }
    from rollgym.trainer.config.load import load_settings
    from rollgym.trainer.tasks.task import MixtureTaskSource

    settings = load_settings(config)
    source = MixtureTaskSource(settings.tasks, settings.seed)
    assert played == {index: source.task(index).seed for index in played}


def test_resuming_with_other_settings_is_refused(tmp_path, config):
    common = ["--config", str(config), f"output_dir={tmp_path}/run", "evaluation.sets={}", "steps=1"]
    train(*common)
    assert "optimizer.learning_rate" in refused(*common, "optimizer.learning_rate=0.5", "steps=2")


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


@pytest.mark.slow
def test_a_run_never_writes_into_another(tmp_path, config):
    run, other = tmp_path / "run", tmp_path / "other"
    short = ["--config", str(config), "evaluation.sets={}", "warm_start=null"]
    with env_server() as url:
        common = [*short, "--env-url", url]
        train(*common, f"output_dir={run}", "steps=3")
        before = contents(run)
        message = refused(*common, f"output_dir={run}", "steps=1", "checkpoint.resume=never")
        assert f"output_dir {run} holds a run already" in message
        assert "checkpoint.resume=auto goes on with it, another output_dir starts anew" in message
        assert contents(run) == before

        # Another run's checkpoint begins a run of its own, and is no way into a directory that holds one.
        theirs = f"checkpoint.resume={run}/checkpoints/step_000002"
        assert "resuming at step 2" in train(*common, f"output_dir={other}", "steps=3", theirs)
        ours = f"checkpoint.resume={other}/checkpoints/step_000003"
        assert "is no checkpoint of" in refused(*common, f"output_dir={run}", "steps=4", ours)
        assert contents(run) == before

        # Its own older checkpoint is: the run goes back, and on from there when it is resumed.
        assert "resuming at step 2" in train(*common, f"output_dir={run}", "steps=3", theirs)
        assert [line["step"] for line in digests(run)] == [0, 1, 2]
        assert "resuming at step 3" in train(*common, f"output_dir={run}", "steps=4")
        assert [line["step"] for line in digests(run)] == [0, 1, 2, 3]


def test_a_run_that_left_no_checkpoint_begins_again(tmp_path, config):
    directory = tmp_path / "run"
    with env_server() as url:
        common = ["--config", str(config), "--env-url", url, f"output_dir={directory}", "warm_start=null"]
        common += ["evaluation.sets={}", "checkpoint.every=0", "steps=3"]
        train_until("step 2:", *common)
        assert digests(directory)
        assert "holds a run already" in refused(*common, "checkpoint.resume=never")
        assert "it begins again" in train(*common, "seed=4")
    assert [line["step"] for line in digests(directory)] == [0, 1, 2]
    fates = [event["fate"] for event in read_lines(directory / "ledger.jsonl")]
    assert "reissued" not in fates, "nothing of the other run may be in the ledger"


def test_the_steps_of_a_decaying_schedule_are_kept(tmp_path, config):
    with env_server() as url:
        common = ["--config", str(config), "--env-url", url, f"output_dir={tmp_path}/run", "warm_start=null"]
        common += ["evaluation.sets={}", "optimizer.schedule=cosine"]
        train(*common, "steps=1")
        message = refused(*common, "steps=2")
    assert "cannot resume: steps differ" in message
    assert "cosine schedule ends at the last of the steps" in message
