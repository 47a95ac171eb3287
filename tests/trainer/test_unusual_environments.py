"""Whole runs in environments of third parties, in ones that forge turns, and on servers with few sessions."""

from pathlib import Path

import httpx
import pytest

from rollgym.trainer.models.tiny import build_tiny_tokenizer
from tests.support.client_server import ServerProcess
from tests.support.foreign_servers import ForeignServer
from tests.support.forging_env import FORGED
from tests.support.processes import ROOT, env_server, read_lines, train
from tests.trainer.test_runs import CONFIG

VOWELS = """
seed: 1
steps: 13
tasks: [{env_id: Vowels}]
model: {hidden_size: 32, layers: 1, heads: 2, max_length: 128}
prompt: {instruction: none}
optimizer: {learning_rate: 5.0e-2}
rollout: {groups_per_step: 4, group_size: 16, max_turns: 1, max_new_tokens: 2}
evaluation: {every: 0}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "language", ["python, twenty lines", pytest.param("javascript, twenty lines", marks=pytest.mark.slow)]
)
def test_a_policy_learns_in_an_environment_that_was_registered_over_http(
    language: str, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(VOWELS)
    arguments = ("--gateway", "--allow-network", "loopback", "--log-level", "error")
    with ForeignServer(language) as server, ServerProcess(arguments) as gateway:
        body = {"env_id": "Vowels", "url": server.url, "protocol": "http", "ttl_s": 600}
        answer = httpx.post(f"{gateway.url}/v1/envs", json=body, timeout=60)
        assert answer.status_code == 201, answer.text
        train("--config", str(config), "--env-url", gateway.url, f"output_dir={tmp_path}/run")
    rows = read_lines(tmp_path / "run" / "metrics.jsonl")
    rewards = [row["rollout/reward"] for row in rows if "rollout/reward" in row]
    assert len(rewards) == 13
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2, rewards


def test_the_environments_have_about_twenty_lines() -> None:
    for name in ("twenty_lines.py", "twenty_lines.mjs"):
        lines = (ROOT / "examples" / name).read_text().splitlines()
        code = [line for line in lines if line.strip() and not line.strip().startswith(('"""', "//"))]
        assert len(code) <= 20, name


LIMIT = 10


@pytest.fixture(scope="module")
def url():
    with env_server("--allow-expert", "--max-sessions", str(LIMIT)) as address:
        yield address


@pytest.mark.slow
def test_deterministic_runs_and_their_evaluation_sets_fit_into_ten_sessions(tmp_path: Path, url):
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG)
    digests = []
    for name in ("first", "second"):
        output = train(
            *(
                "--config",
                str(config),
                "--env-url",
                url,
                f"output_dir={tmp_path}/{name}",
                "deterministic=true",
            ),
            *("steps=2", "rollout.groups_per_step=4", "rollout.group_size=4", "warm_start=null"),
            *(
                "evaluation.every=1",
                "evaluation.sets.held_out={env_id: FrozenLake-v0, baselines: false, episodes: 24}",
            ),
        )
        assert "held_out/greedy" in output
        digests.append(read_lines(tmp_path / name / "digests.jsonl"))
        episodes = read_lines(tmp_path / name / "episodes.jsonl")
        assert len(episodes) == 2 * 4 * 4
    assert digests[0] == digests[1]


FORGING = """
seed: 1
steps: 2
serve: ["Forging=tests.support.forging_env:Forging"]
tasks: [{env_id: Forging}]
model: {hidden_size: 32, layers: 1, heads: 2, max_length: 2048}
rollout: {groups_per_step: 2, group_size: 2, max_turns: 3, max_new_tokens: 3}
tracking: {tensorboard: false}
"""


@pytest.mark.parametrize("context", ["full_history", pytest.param("single_turn", marks=pytest.mark.slow)])
def test_records_hold_no_forged_turn_and_training_goes_on(tmp_path, context):
    config = tmp_path / "run.yaml"
    config.write_text(FORGING)
    train("--config", str(config), f"prompt.context={context}", f"output_dir={tmp_path}/out")
    tokenizer = build_tiny_tokenizer()
    control, end = set(tokenizer.all_special_ids), tokenizer.eos_token_id
    turns = 0
    for episode in read_lines(tmp_path / "out" / "episodes.jsonl"):
        for turn in episode["turns"]:
            number, start, _ = turn["tokens"]
            segment = episode["segments"][number]
            ids = segment["ids"][:start]
            # What the policy drew may be anything.
            shown = [each for each, drawn in zip(ids, segment["action_mask"], strict=False) if not drawn]
            roles = [tokenizer.decode([each]) for each in shown if each in control and each != end]
            assert roles.count("<|system|>") <= 1
            assert roles[-1] == "<|assistant|>"
            assert roles.count("<|assistant|>") == roles.count("<|user|>")
            assert set(roles) <= {"<|system|>", "<|user|>", "<|assistant|>"}
            assert FORGED in tokenizer.decode(ids)
            turns += 1
    assert turns >= 24
