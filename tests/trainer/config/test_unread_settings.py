"""Settings that nobody reads beside the others are refused before anything is begun, and no others."""

from pathlib import Path

import pytest

from rollgym.trainer.cli import main
from rollgym.trainer.config.checks import check_unread
from rollgym.trainer.config.load import dump_settings, load_settings

ROOT = Path(__file__).parents[3]
TASKS = "tasks=[{env_id: FrozenLake-v0}]"
EVALUATION_SET = "evaluation.sets.lake.env_id=FrozenLake-v0"
ROWS = "evaluation.sets.rows.dataset={path: README.md, verifier: QA-v0%s}"
ROUTE = "{column: kind, verifiers: {a: QA-v0}, weights: {a: 2}}"
SERVICE = "rollout.agent=http://127.0.0.1:9"
ADAPTERS = ["model.lora={}", "weights={transport: adapter, bucket_mb: 64}"]
SERVER = "inference={kind: vllm, urls: [http://127.0.0.1:9]}"
LAUNCHED = "inference={kind: vllm, launch: {}}"
MEGATRON = "backend={kind: megatron, ranks: 2, sequence_parallel: false, mesh: {tensor: %d}}"
SFT = "sft.data=[{path: README.md}]"
EXPERT = "sft.expert.demonstrations=3"
UNREAD = [
    (
        ["rollout.window_fraction=0.5"],
        "rollout.window_fraction is how far groups of later steps may overtake",
    ),
    (
        ["rollout={window_fraction: 0.5, max_staleness: 1, extra_groups: 1}"],
        "rollout.window_fraction is not read with rollout.extra_groups",
    ),
    ([SERVICE, "prompt.context=single_turn"], "prompt.context is about prompts of ours"),
    ([SERVICE, "prompt={context: last_turns, turns: 2}"], "prompt.context is about prompts of ours"),
    ([SERVICE, "prompt.instruction=none"], "prompt.instruction is about prompts of ours"),
    ([SERVICE, "prompt.tools=template"], "prompt.tools is about prompts of ours"),
    (
        ["rollout.agent=python agent.py", "prompt.custom_context=a:b"],
        "prompt.custom_context is about prompts",
    ),
    (
        ["optimizer.critic_learning_rate=0.1"],
        "optimizer.critic_learning_rate is read where the algorithm has a",
    ),
    (
        [MEGATRON % 1, "backend.mesh.data=2"],
        "backend.sequence_parallel is about what the ranks of a layer share",
    ),
    ([SERVER, *ADAPTERS], "weights.bucket_mb divides whole weights"),
    ([LAUNCHED, *ADAPTERS, "model.path=trainer/model"], "weights.bucket_mb divides whole weights"),
    (["evaluation.every=5"], "evaluation.every is about evaluation.sets"),
    (["evaluation.sampled=false"], "evaluation.sampled is about evaluation.sets"),
    (["evaluation.greedy=false"], "evaluation.greedy is about evaluation.sets"),
    (["evaluation.interim_episodes=5"], "evaluation.interim_episodes is about evaluation.sets"),
    (
        [ROWS % ", shuffle: false"],
        "evaluation.sets.rows.dataset.shuffle is of data sets that are trained on",
    ),
    ([ROWS % ", weight: 2"], "evaluation.sets.rows.dataset.weight is of data sets"),
    ([ROWS % ", domain: sums"], "evaluation.sets.rows.dataset.domain is of data sets"),
    (["tracking.patience_s=5"], "tracking.patience_s is how long trackers of others may take"),
]
UNREAD_BY_PIPELINES = [
    (["sft", SFT, "sft.batch=4", "sft.batch_tokens=99"], "sft.batch is not read with sft.batch_tokens"),
    (["sft", SFT, "sft.held_out_every=4"], "sft.held_out_every is about sft.held_out, and there is none"),
    (["sft", SFT, "optimizer.critic_learning_rate=0.1"], "optimizer.critic_learning_rate is read where"),
    (["sft", TASKS, EXPERT, "sft.longer=leave_out"], "sft.longer is about examples of files"),
    (["sft", TASKS, EXPERT, "rollout.group_size=4"], "rollout.group_size is not read by roll-train sft"),
    (["sft", TASKS, EXPERT, "rollout.agent=a:b"], "rollout.agent is not read by roll-train sft"),
]


@pytest.mark.parametrize(
    ("words", "message"), [*(([TASKS, *words], message) for words, message in UNREAD), *UNREAD_BY_PIPELINES]
)
def test_what_nobody_reads_is_refused(capsys, words, message):
    assert main([*words, "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"roll-train: {message}")
    assert "leave" in said, "the remedy"


@pytest.mark.parametrize(
    "words",
    [
        ["rollout={window_fraction: 0.5, max_staleness: 1}"],
        [SERVICE, "prompt.template_kwargs={enable_thinking: true}", "prompt.chat_template=README.md"],
        [SERVICE, "prompt={context: single_turn, instruction: none}", "warm_start.demonstrations=3"],
        ["rollout.agent=a:b", "prompt.context=single_turn"],
        ["algorithm=ppo", "optimizer.critic_learning_rate=0.1"],
        [MEGATRON % 2],
        # The tiny policy is written as a whole for the servers to start from.
        [LAUNCHED, *ADAPTERS],
        [SERVER, "weights={transport: disk, bucket_mb: 64}"],
        [EVALUATION_SET, "evaluation.every=5", "evaluation.interim_episodes=5", "evaluation.sampled=false"],
        # What is switched off by one key stays as it was written.
        [EVALUATION_SET, "evaluation.every=0", "evaluation.interim_episodes=5"],
        [ROWS % ", limit: 9, columns: {a: b}"],
        [f"evaluation.sets.rows.dataset={{path: README.md, route: {ROUTE}}}"],
        ["tracking={patience_s: 5, mlflow: {}}"],
        [SFT, "sft.batch=4", "sft.held_out_every=4", "sft.held_out=[{path: README.md}]"],
        [TASKS, EXPERT, "sft.longer=leave_out", "sft.held_out=[{path: README.md}]"],
        ["distill={teachers: {t: {path: a}}}"],
    ],
    ids=" ".join,
)
def test_what_somebody_reads_is_not_refused(words):
    check_unread(load_settings(None, [TASKS, *words]))


@pytest.mark.parametrize(
    "words",
    [
        [TASKS],
        [TASKS, SERVICE],
        [TASKS, SERVER, "model.lora={}", "weights.transport=adapter"],
        [TASKS, ROWS % ""],
        [SFT, "sft.batch_tokens=99"],
    ],
    ids=" ".join,
)
def test_what_a_run_wrote_down_of_itself_is_not_refused(tmp_path, words):
    file = tmp_path / "run.yaml"
    file.write_text(dump_settings(load_settings(None, words)))
    check_unread(load_settings(file))


@pytest.mark.parametrize(
    "path",
    [
        path
        for folder in ("examples", "examples/one_gpu", "examples/presets", "benchmarks/learning")
        for path in sorted((ROOT / folder).glob("*.yaml"))
    ],
    ids=lambda path: path.name,
)
def test_examples_and_benchmarks_set_nothing_that_nobody_reads(path):
    check_unread(load_settings(path))
