"""A run of a mixture of experts whose server tells which experts tokens took: trained with them, and replayed."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rollgym.trainer.cli import main
from rollgym.trainer.models.load import save_model
from rollgym.trainer.models.tiny import build_tiny_tokenizer
from rollgym.trainer.records.trajectory import Trajectory
from tests.support.inference_server.running import InferenceServer
from tests.support.processes import read_lines

pytestmark = pytest.mark.slow
STEPS = 3


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    tokenizer = build_tiny_tokenizer()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    save_model(model, tokenizer, folder)
    return folder


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def played(mixture, tmp_path_factory, request) -> Path:
    """An asynchronous run, so that other weights than those in training chose the experts."""
    run = tmp_path_factory.mktemp("routed") / "run"
    inference = {"kind": request.param, "routed_experts": True}
    if request.param == "vllm":
        launch = {"command": [sys.executable, "-m", "tests.support.vllm_program"]}
        assert train(mixture, run, inference | {"dtype": "float32", "launch": launch}) == 0
        return run
    with InferenceServer("sglang", model=mixture, routed_experts=True) as server:
        assert train(mixture, run, inference | {"urls": [server.url]}) == 0
    return run


def train(mixture, run, inference) -> int:
    words = [
        "tasks=[{env_id: FrozenLake-v0, kwargs: {size: 4, split: train, max_episode_steps: 6, format_penalty: -0.1}}]",
        "prompt={instruction: none}",
        "rollout={groups_per_step: 3, group_size: 4, max_turns: 6, max_new_tokens: 3, max_staleness: 1}",
        f"model={{path: {mixture}, max_length: 256}}",
        f"inference={json.dumps(inference)}",
        "algorithm={preset: grpo, minibatches: 2, correction: {kind: truncate}}",
        "optimizer={learning_rate: 0.02, router_replay: true}",
        "tracking={tensorboard: false, digests: true}",
        "rollout.reward=tests.support.token_rewards:even_tokens",
        "evaluation={every: 0, sets: {}}",
        "checkpoint={every: 1, keep: 9}",
        f"steps={STEPS}",
    ]
    return main([*words, f"output_dir={run}"])


def test_records_hold_the_experts_of_every_token_that_was_computed(played):
    segments = [
        segment
        for line in read_lines(played / "episodes.jsonl")
        for segment in Trajectory.from_record(line).segments
        if segment.ids
    ]
    assert segments
    for segment in segments:
        assert segment.experts.shape == (len(segment.ids) - 1, 2 * 2)
        assert (np.sort(segment.experts.reshape(-1, 2, 2))[..., 1] < 4).all()


def test_a_replay_takes_the_recorded_experts_to_equal_weights(played, tmp_path, capsys):
    weights = [line["weights"] for line in read_lines(played / "digests.jsonl")]
    assert len(set(weights)) == STEPS, "nothing was learnt"
    everything = [word for step in range(STEPS) for word in ("--step", str(step))]
    assert main(["replay", str(played), *everything, "--from-start"]) == 0
    assert capsys.readouterr().out.count("as recorded") == STEPS
    copy = tmp_path / "run"
    shutil.copytree(played, copy)
    lines = read_lines(copy / "episodes.jsonl")
    for line in lines:
        for segment in line["segments"]:
            segment.pop("experts", None)
    (copy / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["replay", str(copy), *everything, "--from-start"]) == 1, "they made no difference"
