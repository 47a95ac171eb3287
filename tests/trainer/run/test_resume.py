"""Which settings a run may change when it goes on."""

import pytest

from rollgym.trainer.config.load import load_settings
from rollgym.trainer.core.errors import CheckpointError, ConfigError
from rollgym.trainer.core.run_files import WriteError
from rollgym.trainer.records.checkpoint import CheckpointStore
from rollgym.trainer.run.resume import changed_settings, clear_records, find_checkpoint, keep_settings
from tests.support.kills import killed_at

TASKS = "tasks=[{env_id: FrozenLake-v0}]"


@pytest.mark.parametrize(
    "change",
    [
        "rollout.server_timeout_s=900",
        "rollout.episode_timeout_s=900",
        "rollout.max_failed_groups=50",
        "optimizer.max_skipped_steps=9",
        "env_url=http://127.0.0.1:9",
        "checkpoint.every=3",
        "model.device=cpu",
        "model.gradient_checkpointing=true",
        "optimizer={tokens_per_micro_batch: 512, shared_prefixes: 'off'}",
        "cluster={kind: ray, address: auto, roles: {actor_inference: {devices: 1-3}}}",
        "cluster.restarts=9",
        "threads=2",
        "tasks.0.url=http://127.0.0.1:9",
        "agents={host: 0.0.0.0, port: 9, public_url: 'http://127.0.0.1:9', grace_s: 3}",
        "agents={sandbox_memory_mb: 4096, sandbox_disk_mb: 1024, sandbox_read_only: [/opt/agent]}",
    ],
)
def test_patience_may_change_for_it_may_be_what_ended_the_run(tmp_path, change):
    keep_settings(load_settings(None, [TASKS]), tmp_path, resuming=False)
    assert changed_settings(load_settings(None, [TASKS, change]), tmp_path) == []


@pytest.mark.parametrize(
    "change",
    [
        "rollout.group_size=3",
        "optimizer.learning_rate=0.5",
        "seed=7",
        "model.dtype=bf16",
        "tasks.0.env_id=Sokoban-v0",
        "agents.sampling=refuse",
    ],
)
def test_what_touches_learning_may_not(tmp_path, change):
    keep_settings(load_settings(None, [TASKS]), tmp_path, resuming=False)
    assert changed_settings(load_settings(None, [TASKS, change]), tmp_path) == [change.partition("=")[0]]


def test_a_further_environment_is_another_run(tmp_path):
    keep_settings(load_settings(None, [TASKS]), tmp_path, resuming=False)
    two = "tasks=[{env_id: FrozenLake-v0}, {env_id: Sokoban-v0}]"
    assert changed_settings(load_settings(None, [two]), tmp_path) == ["tasks"]


@pytest.mark.parametrize(
    ("before", "now", "changed"),
    [("http://a:1", "http://b:2", []), ("http://a:1", "agent --of-mine", ["rollout.agent"])],
)
def test_an_agent_that_is_a_service_may_move(tmp_path, before, now, changed):
    keep_settings(load_settings(None, [TASKS, f"rollout.agent={before}"]), tmp_path, resuming=False)
    assert changed_settings(load_settings(None, [TASKS, f"rollout.agent={now}"]), tmp_path) == changed


SERVED = [TASKS, "inference={kind: vllm, urls: ['http://127.0.0.1:9']}"]


@pytest.mark.parametrize(
    "words",
    [
        [*SERVED, "inference.urls=['http://127.0.0.1:8', 'http://127.0.0.1:7']"],
        [TASKS, "inference={kind: vllm, launch: {count: 2, arguments: [--enforce-eager]}}"],
        [TASKS, "inference={kind: vllm, urls_file: servers}"],
        [*SERVED, "weights={transport: broadcast, attempts: 3}", "inference.patience_s=9"],
        [*SERVED, "inference.lost_after_s=3", "inference.stalled_after_s=9", "inference.update_timeout_s=9"],
    ],
)
def test_a_run_goes_on_with_other_servers_than_it_began_with(tmp_path, words):
    keep_settings(load_settings(None, SERVED), tmp_path, resuming=False)
    assert changed_settings(load_settings(None, words), tmp_path) == []


MIXED = [
    "datasets=[{path: sums.jsonl, verifier: Math-v0, rewards: [{verifier: Judge-v0, url: 'http://a:1'}]}]"
]
TAUGHT = [TASKS, "distill={estimate: sampled, teachers: {big: {url: 'http://a:1'}}}"]


@pytest.mark.parametrize(
    ("before", "change", "changed"),
    [
        (MIXED, "datasets.0.rewards.0.url=http://b:2", []),
        (MIXED, "datasets.0.rewards.0.weight=2.0", ["datasets.0.rewards.0.weight"]),
        (TAUGHT, "distill.teachers.big={url: 'http://b:2', timeout_s: 900, api_key_variable: KEY}", []),
        (TAUGHT, "distill.teachers.big.domains=[sums]", ["distill.teachers.big.domains"]),
    ],
)
def test_servers_that_score_and_teach_may_move_and_be_waited_for_longer(tmp_path, before, change, changed):
    keep_settings(load_settings(None, before), tmp_path, resuming=False)
    assert changed_settings(load_settings(None, [*before, change]), tmp_path) == changed


def test_a_run_does_not_go_on_with_servers_of_another_kind(tmp_path):
    keep_settings(load_settings(None, SERVED), tmp_path, resuming=False)
    words = [*SERVED, "inference.kind=sglang", "inference.dtype=bfloat16"]
    assert changed_settings(load_settings(None, words), tmp_path) == ["inference.dtype", "inference.kind"]


def test_a_kill_while_settings_are_written_leaves_those_that_were_there(tmp_path):
    settings = load_settings(None, [TASKS])
    keep_settings(settings, tmp_path, resuming=False)
    for point in range(20):
        if not killed_at(point, lambda: keep_settings(settings, tmp_path, resuming=True)):
            break
        assert changed_settings(settings, tmp_path) == []
    assert point > 2


def test_records_that_cannot_be_removed_are_named(tmp_path):
    (tmp_path / "ledger.jsonl").mkdir()
    with pytest.raises(WriteError, match=r"cannot write .*ledger\.jsonl"):
        clear_records(tmp_path)


@pytest.mark.parametrize("trained", ["model", "adapter"])
@pytest.mark.parametrize(
    ("resume", "said"), [("auto", "a finished run without checkpoints"), ("never", "a run already")]
)
def test_a_finished_run_is_never_begun_again(tmp_path, trained, resume, said):
    (tmp_path / trained).mkdir()
    settings = load_settings(None, [TASKS, f"output_dir={tmp_path}", f"checkpoint.resume={resume}"])
    with pytest.raises(ConfigError, match=f"holds {said}"):
        find_checkpoint(settings, CheckpointStore(tmp_path / "checkpoints", 2), print)


def test_of_many_settings_that_differ_some_are_named_and_where_all_are(tmp_path):
    words = [
        TASKS,
        "steps=5",
        "optimizer.schedule=linear",
        "algorithm=ppo",
        "model.layers=1",
        "rollout.max_turns=3",
    ]
    keep_settings(load_settings(None, words), tmp_path, resuming=False)
    with pytest.raises(CheckpointError) as refused:
        keep_settings(load_settings(None, [TASKS, "steps=6"]), tmp_path, resuming=True)
    said = str(refused.value)
    assert said.count(", ") < 12
    assert " more differ from the settings of the run" in said
    assert str(tmp_path / "config.yaml") in said
    assert "constant schedule" not in said
