"""Runs on a server that allows fewer sessions than the run has episodes."""

from pathlib import Path

import pytest

from tests.support.processes import env_server, read_lines, train
from tests.trainer.test_runs import CONFIG

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
