"""Steps of a run whose baseline is a greedy episode, taken again: the records hold that episode, too."""

import json
import shutil
from pathlib import Path

import pytest

from rollgym.trainer.cli import main
from rollgym.trainer.core.run_files import run_lock
from tests.support.processes import env_server, read_lines

STEPS = 2


@pytest.fixture(scope="module")
def played(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("remax") / "run"
    words = [
        "tasks=[{env_id: FrozenLake-v0, kwargs: {size: 4, split: train, max_episode_steps: 6}}]",
        "prompt={context: single_turn, instruction: none}",
        "rollout={groups_per_step: 2, group_size: 2, max_turns: 6, max_new_tokens: 3}",
        "rollout.reward=tests.support.token_rewards:even_tokens",
        "model={hidden_size: 16, layers: 1, heads: 2, max_length: 96}",
        "algorithm=remax",
        "optimizer.learning_rate=0.02",
        "tracking={tensorboard: false, digests: true}",
        "evaluation={every: 0, sets: {}}",
        f"steps={STEPS}",
    ]
    with env_server() as url:
        assert main([*words, "--env-url", url, f"output_dir={run}"]) == 0
    assert len({line["weights"] for line in read_lines(run / "digests.jsonl")}) == STEPS, "nothing was learnt"
    return run


def test_a_replay_compares_with_the_recorded_greedy_episodes(played, tmp_path, capsys):
    everything = [word for step in range(STEPS) for word in ("--step", str(step))]
    assert main(["replay", str(played), *everything, "--from-start"]) == 0
    assert capsys.readouterr().out.count("as recorded") == STEPS
    copy = tmp_path / "run"
    shutil.copytree(played, copy)
    lines = read_lines(copy / "episodes.jsonl")
    assert sum("greedy" in line["group"] for line in lines) == STEPS * 2, "once for each group"
    for line in lines:
        if "greedy" in line["group"]:
            line["group"]["greedy"]["turns"][0]["reward"] += 3.0
    (copy / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["replay", str(copy), *everything, "--from-start"]) == 1, "they made no difference"


def test_a_record_of_ids_that_the_model_does_not_know_is_named(played, tmp_path, capsys):
    copy = tmp_path / "run"
    shutil.copytree(played, copy)
    lines = read_lines(copy / "episodes.jsonl")
    lines[0]["segments"][0]["ids"][0] = 10**9
    (copy / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["replay", str(copy), "--step", "0", "--from-start"]) == 2
    said = capsys.readouterr().err
    assert (
        "roll-train: episodes.jsonl: an episode of step 0 has the token id 1000000000, and the model knows"
        in said
    )


def test_a_replay_does_not_write_where_another_process_does(played, tmp_path, capsys):
    words = ["replay", str(played), "--step", "0", "--from-start", "--output", str(tmp_path)]
    with run_lock(tmp_path):
        assert main(words) == 2
        assert f"roll-train: --output {tmp_path} is in use by process" in capsys.readouterr().err
        assert [each.name for each in tmp_path.iterdir()] == ["run.lock"]
