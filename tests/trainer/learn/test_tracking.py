"""Trackers of others: what they are told, and that nothing they do ends a run."""

import errno
import json
import resource
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.utils

from rollgym.extras import extra_of
from rollgym.trainer.config.checks import check_settings
from rollgym.trainer.config.load import load_settings, public_settings
from rollgym.trainer.config.output import TRACKERS, CheckpointSettings, TrackingSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.run_files import WriteError
from rollgym.trainer.learn.tracking import (
    BOARDS_FILE,
    RunIdentity,
    ThreadedTracker,
    Tracker,
    flat,
    open_trackers,
)
from rollgym.trainer.records.group import Group
from rollgym.trainer.records.trajectory import Trajectory
from rollgym.trainer.tasks.task import Task
from tests.support.processes import ROOT, read_lines

TASKS = "tasks=[{env_id: FrozenLake-v0}]"


class Notebook:
    """A tracker that writes down what it is told, and fails at the steps that it is to fail at."""

    def __init__(self, fails_at=()) -> None:
        self.fails_at = set(fails_at)
        self.told: dict[int, dict[str, float]] = {}
        self.closed = False

    def log(self, step, values):
        if step in self.fails_at:
            raise ConnectionError(f"no server\nat step {step}")
        self.told[step] = dict(values)

    def close(self):
        self.closed = True


def guarded(board, said) -> ThreadedTracker:
    return ThreadedTracker("notebook", lambda: board, said.append)


def test_a_tracker_is_told_every_step_in_order():
    board, said = Notebook(), []
    guard = guarded(board, said)
    for step in range(50):
        guard.log(step, {"loss": float(step)})
    guard.close(30.0)
    assert board.told == {step: {"loss": float(step)} for step in range(50)}
    assert list(board.told) == sorted(board.told)
    assert board.closed
    assert said == []


def test_a_failure_is_told_once_and_what_is_missing_at_the_end():
    board, said = Notebook(fails_at=(1, 2)), []
    guard = guarded(board, said)
    for step in range(5):
        guard.log(step, {})
    guard.close(30.0)
    assert set(board.told) == {0, 3, 4}, "it is asked again: its server may be back"
    assert said == [
        "tracker notebook fails, and the run goes on without it: ConnectionError: no server at step 1",
        "tracker notebook: 2 of 5 records are missing there; metrics.jsonl has all",
    ]


def test_a_tracker_that_cannot_be_opened_at_first_is_tried_again():
    board, said, calls = Notebook(), [], []

    def opened():
        calls.append(1)
        if len(calls) == 1:
            raise TimeoutError("nobody answers")
        return board

    guard = ThreadedTracker("notebook", opened, said.append)
    for step in range(3):
        guard.log(step, {})
    guard.close(30.0)
    assert set(board.told) == {1, 2}
    assert len(said) == 2


def test_a_tracker_that_hangs_holds_nobody_up():
    never, said = threading.Event(), []

    class Hangs(Notebook):
        def log(self, step, values):
            never.wait()

    guard = guarded(Hangs(), said)
    for step in range(3):
        guard.log(step, {})
    guard.close(0.05)
    never.set()
    assert said == [
        "tracker notebook fails, and the run goes on without it: it has not ended within the "
        "tracking.patience_s that it had",
        "tracker notebook: 3 of 3 records are missing there; metrics.jsonl has all",
    ]


def test_a_run_s_tracker_passes_on_what_is_finite(tmp_path):
    board, said = Notebook(), []
    tracker = Tracker(tmp_path, TrackingSettings(tensorboard=False), 0, [guarded(board, said)])
    tracker.metrics(1, {"loss": 0.5, "broken": float("nan")})
    tracker.metrics(2, {})
    tracker.close()
    assert board.told == {1: {"loss": 0.5}}
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 0.5, "broken": None}, {"step": 2}]


def test_a_watched_metric_is_found_by_the_name_that_it_had(tmp_path):
    with pytest.warns(FutureWarning, match="'rollout/forks_retry' is called rollout/prefix_breaks_retry now"):
        watched = CheckpointSettings(keep_best=1, best_metric="rollout/forks_retry").best_metric
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "rollout/forks_retry": 0.5}\n')
    tracker = Tracker(tmp_path, TrackingSettings(tensorboard=False, episodes=False), 1, watched=watched)
    tracker.metrics(2, {"rollout/prefix_breaks_retry": 0.25})
    tracker.close()
    assert tracker.scores == {1: 0.5, 2: 0.25}


@pytest.mark.parametrize("fails", ["opening", "writing", "closing"])
def test_a_run_goes_on_without_tensorboard_where_its_files_cannot_be_written(tmp_path, monkeypatch, fails):
    class FullDisk:
        def __init__(self, folder, purge_step):
            self._at("opening")

        def add_scalar(self, name, value, step):
            self._at("writing")

        def close(self):
            self._at("closing")

        def _at(self, moment):
            if moment == fails:
                raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch.utils, "tensorboard", SimpleNamespace(SummaryWriter=FullDisk), raising=False)
    said = []
    tracker = Tracker(tmp_path, TrackingSettings(), 0, say=said.append)
    for step in (1, 2):
        tracker.metrics(step, {"loss": 0.5})
    tracker.close()
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2]
    assert said == [
        "tracker tensorboard fails, and the run goes on without it: [Errno 28] No space left on device"
    ]


PACKAGED = [each for each in TRACKERS if each.package]


@pytest.mark.parametrize("kind", TRACKERS, ids=lambda kind: kind.name)
def test_each_of_ours_is_in_the_guide(kind):
    guide = (ROOT / "docs" / "guides" / "seeing.md").read_text()
    assert f"{kind.name}: {{" in guide, "a line of docs/guides/seeing.md"


@pytest.mark.parametrize("kind", PACKAGED, ids=lambda kind: kind.name)
def test_a_package_of_ours_is_an_extra_that_ci_installs(kind):
    assert extra_of(kind.package) == kind.name, "an extra of its name: pyproject.toml, rollgym/extras.py"
    assert kind.name in (ROOT / ".ci" / "run").read_text(), "beside the others in .ci/run, for the tests here"


@pytest.mark.parametrize("name", [kind.name for kind in PACKAGED])
def test_a_package_that_is_missing_is_named_with_its_command(name, monkeypatch):
    monkeypatch.setattr("rollgym.trainer.config.checks.find_spec", lambda _: None)
    settings = load_settings(None, [TASKS, f"tracking.{name}={{}}"])
    with pytest.raises(
        ConfigError, match=rf"tracking\.{name} needs the package {name}: pip install .*\[{name}\]"
    ):
        check_settings(settings)


def test_no_secret_is_told():
    settings = load_settings(
        None,
        [
            "tasks=[{env_id: Any-v0, url: 'http://me:pass@far:1/x', kwargs: {api_key: abc, max_tokens: 5}}]",
            "env_token=sesame",
            "serve=['a:B']",
        ],
    )
    told = public_settings(settings)
    assert "sesame" not in json.dumps(told)
    assert "env_token" not in told
    task = told["tasks"][0]
    assert task["url"] == "http://far:1/x"
    assert task["kwargs"] == {"api_key": "(hidden)", "max_tokens": 5}
    assert told["rollout"]["max_new_tokens"] == settings.rollout.max_new_tokens


def test_settings_are_flat_for_trackers_that_want_them_so():
    config = {"a": {"b": [1, 2], "c": None}, "tasks": [{"env_id": "X"}], "name": "run"}
    assert dict(flat(config)) == {"a.b": "[1, 2]", "a.c": "null", "tasks.0.env_id": "X", "name": "run"}


def test_a_resumed_run_keeps_its_names(tmp_path):
    run = RunIdentity(tmp_path, "run", {}, 0)
    assert run.known("wandb") is None
    run.keep("wandb", "abc")
    run.keep("mlflow", "def")
    assert RunIdentity(tmp_path, "run", {}, 0).known("wandb") == "abc"
    (tmp_path / BOARDS_FILE).write_text('{"wandb": "ab')
    assert RunIdentity(tmp_path, "run", {}, 0).known("wandb") is None


def test_trackers_that_open_at_the_same_time_are_all_kept(tmp_path):
    run = RunIdentity(tmp_path, "run", {}, 0)
    together = threading.Barrier(8)

    def keep(number: int) -> None:
        together.wait()
        for each in range(25):
            run.keep(f"{number}-{each}", "abc")

    threads = [threading.Thread(target=keep, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    known = {
        name for name in (f"{number}-{each}" for number in range(8) for each in range(25)) if run.known(name)
    }
    assert len(known) == 200


def test_a_full_disk_takes_no_records_from_trackers(tmp_path):
    board, said = Notebook(), []
    tracker = Tracker(tmp_path, TrackingSettings(tensorboard=False), 0, [guarded(board, said)])
    task = Task(0, "Echo-v0", 0)
    tracker.episodes(0, [Group(0, task, 0, [Trajectory(task, 0, detail="long " * 500)])])
    tracker.metrics(1, {"loss": 0.5})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(WriteError, match=r"cannot write .*episodes\.jsonl: File too large"):
            tracker.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert board.told == {1: {"loss": 0.5}}
    assert board.closed
    assert said == []


def report_twice(directory: Path, **trackers) -> list[str]:
    """Report three steps to real trackers, as two processes of one run do, and return what was said.

    The second process goes on from step 1, and finds something else in step 2 than the first one.
    """
    settings, said = TrackingSettings(tensorboard=False, patience_s=120, **trackers), []
    for begins, steps in ((0, [1, 2]), (1, [2, 3])):
        run = RunIdentity(directory, "a run", {"seed": 1, "tasks": [{"env_id": "X"}]}, begins)
        boards = open_trackers(settings, run, said.append)
        for step in steps:
            for board in boards:
                board.log(step, {"rollout/success": step / 4 + begins, "domain/a b/x": 1.0})
        for board in boards:
            board.close(120.0)
    return said


def test_wandb_takes_a_run_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    assert report_twice(tmp_path, wandb={"mode": "offline", "tags": ["t"]}) == []
    wandb.teardown()  # Its files are written by a process of its own, which a program waits for as it ends.
    files = list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert files
    assert all(b"rollout/success" in path.read_bytes() for path in files)
    names = {path.stem for path in files}
    assert names == {f"run-{RunIdentity(tmp_path, '', {}, 0).known('wandb')}"}, (
        "both processes are one run there"
    )


def test_swanlab_takes_a_run_offline(tmp_path, monkeypatch):
    pytest.importorskip("swanlab")
    monkeypatch.chdir(tmp_path)
    assert report_twice(tmp_path, swanlab={"mode": "offline"}) == []
    assert any(path.is_file() for path in (tmp_path / "swanlab").rglob("*"))


def test_mlflow_takes_a_run_into_a_file(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert report_twice(tmp_path, mlflow={"uri": uri, "experiment": "e"}) == []
    client = mlflow.MlflowClient(tracking_uri=uri)
    found, void = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert RunIdentity(tmp_path, "", {}, 0).known("mlflow") == found.info.run_id
    assert {run.info.run_name for run in (found, void)} == {"a run"}
    assert (found.info.status, void.info.status) == ("FINISHED", "KILLED")
    assert found.data.tags["rollgym.goes_on_from"] == void.info.run_id
    assert void.data.tags["rollgym.goes_on_in"] == found.info.run_id
    assert found.data.params == {"seed": "1", "tasks.0.env_id": "X"}
    history = client.get_metric_history(found.info.run_id, "rollout/success")
    assert [(entry.step, entry.value) for entry in history] == [(1, 0.25), (2, 1.5), (3, 1.75)]


def test_mlflow_goes_on_in_one_run_where_nothing_is_void(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    settings, said = TrackingSettings(tensorboard=False, patience_s=120, mlflow={"uri": uri}), []
    for begins in (0, 1, 2):
        run = RunIdentity(tmp_path, "a run", {}, begins)
        (board,) = open_trackers(settings, run, said.append)
        board.log(begins + 1, {"x": float(begins)})
        board.close(120.0)
    client = mlflow.MlflowClient(tracking_uri=uri)
    (found,) = client.search_runs([client.get_experiment_by_name(settings.mlflow.experiment).experiment_id])
    assert [entry.step for entry in client.get_metric_history(found.info.run_id, "x")] == [1, 2, 3]
    assert said == []
