"""Runs of a policy that sees pictures, as a user starts them: over the wire, recorded, replayed, loaded again."""

import json
from pathlib import Path

import pytest

from rollgym.trainer.config.checks import check_settings
from rollgym.trainer.config.load import load_settings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.models.load import load_model, load_tokenizer
from rollgym.trainer.models.picture_processor import PictureProcessor
from rollgym.trainer.models.pictures import load_pictures
from tests.support.processes import env_server, read_lines, refused, train

CONFIG = """
seed: 3
steps: 2
threads: 1
deterministic: true
tasks:
  - env_id: Sokoban-v0
    kwargs: {observation: image, size: [5, 5], boxes: 1, max_moves: 4, max_episode_steps: 4, profile: roll}
    domain: sokoban
  - env_id: FrozenLake-v0
    kwargs: {observation: image, size: 3, max_episode_steps: 4}
    domain: pictures
  - {env_id: FrozenLake-v0, kwargs: {size: 3, max_episode_steps: 4}, domain: text}
model: {device: cpu, hidden_size: 16, layers: 1, heads: 2, max_length: 320, vision: {image_size: 24, patch_size: 8}}
warm_start: {demonstrations: 6, epochs: 1, batch_rows: 32, learning_rate: 5.0e-3}
rollout: {groups_per_step: 3, group_size: 2, max_turns: 4, max_new_tokens: 3}
algorithm: {preset: ppo, kl: {coefficient: 0.05, estimator: k3, placement: loss}}
evaluation: {every: 0}
checkpoint: {every: 1}
tracking: {tensorboard: false, digests: true, episodes: true}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("image_run") / "run.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def played(config) -> Path:
    """A run over the embedded server, in MessagePack."""
    directory = config.parent / "embedded"
    train("--config", str(config), f"output_dir={directory}")
    return directory


def test_pictures_and_text_are_trained_together_and_recorded(played):
    episodes = read_lines(played / "episodes.jsonl")
    images = {
        domain: [
            image
            for episode in episodes
            if episode["task"]["domain"] == domain
            for segment in episode["segments"]
            for image in segment.get("images", [])
        ]
        for domain in ("sokoban", "pictures", "text")
    }
    assert images["sokoban"]
    assert images["pictures"]
    assert not images["text"]
    # With the whole history in one segment, a turn adds a picture of nine patches.
    episode = next(each for each in episodes if each["task"]["domain"] == "pictures")
    assert [len(segment["images"]) for segment in episode["segments"]] == [len(episode["turns"])]
    assert all(image["end"] - image["start"] == 9 for image in images["pictures"])


@pytest.mark.slow
def test_the_run_is_the_same_over_json_and_replayed(played, config):
    with env_server("--allow-expert") as url:
        directory = config.parent / "json"
        train("--config", str(config), f"output_dir={directory}", f"env_url={url}", "rollout.encoding=json")
    expected = read_lines(played / "digests.jsonl")
    assert [line["weights"] for line in read_lines(directory / "digests.jsonl")] == [
        line["weights"] for line in expected
    ]
    output = train("replay", str(played), "--step", "1")
    assert f"weights {expected[1]['weights']}, as recorded" in output


def test_what_was_trained_is_a_model_of_the_librarys(played):
    folder = played / "model"
    assert json.loads((folder / "config.json").read_text())["architectures"] == [
        "LlavaForConditionalGeneration"
    ]
    assert load_model(folder).num_parameters() > 0
    assert isinstance(load_pictures(folder, load_tokenizer(folder)), PictureProcessor)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["backend={kind: fsdp2, ranks: 2}"], "backend.kind fsdp2 divides rows of text only"),
        (
            ["inference={kind: vllm, urls: ['http://127.0.0.1:9']}", "deterministic=false"],
            "inference.kind vllm is asked with token ids alone",
        ),
        (["rollout.agent=/bin/true"], "the agents' endpoint takes text only"),
    ],
    ids=["fsdp2", "vllm", "agent"],
)
def test_what_cannot_see_says_so_before_anything_begins(config, changes, message):
    with pytest.raises(ConfigError, match=message):
        check_settings(load_settings(config, changes))


def test_a_policy_that_reads_text_says_so_at_the_first_picture(config):
    output = refused("--config", str(config), f"output_dir={config.parent}/refused", "model.vision=null")
    assert "the policy sees none (the model reads text only)" in output
