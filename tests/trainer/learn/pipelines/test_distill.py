"""Distillation on the student's own episodes, and steps of recorded runs taken again."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from rollgym.trainer.algorithms.aggregation import Denominators
from rollgym.trainer.backends.base import TrainRow
from rollgym.trainer.backends.distillation_head import Distance, DistillationHead
from rollgym.trainer.backends.forward_pass import ForwardPass
from rollgym.trainer.backends.heads import PolicyHead
from rollgym.trainer.backends.optimizer import Schedule
from rollgym.trainer.backends.reference import FrozenModel
from rollgym.trainer.backends.torch_backend import TorchBackend
from rollgym.trainer.cli import main
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.inference.server_client.client import ServerClient
from rollgym.trainer.learn.distilling import mean_loss, with_teacher
from rollgym.trainer.run.learners import ServedTeacher
from tests.support.inference_server.running import InferenceServer
from tests.support.processes import read_lines
from tests.support.recorded_numbers import undeclared_numbers
from tests.support.tiny_models import sharp_model

LAKE = (
    "tasks=[{env_id: FrozenLake-v0, kwargs: {size: 4, split: train, max_episode_steps: 6, format_penalty: -0.1}}]",
    "prompt={context: single_turn, instruction: none}",
    "rollout={groups_per_step: 2, group_size: 2, max_turns: 6, max_new_tokens: 3, max_staleness: 2}",
    "model={hidden_size: 32, layers: 1, heads: 2, max_length: 96}",
    "tracking={tensorboard: false, digests: true}",
    "optimizer.learning_rate=3e-3",
    "evaluation.every=0",
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """An asynchronous run of a few steps."""
    directory = tmp_path_factory.mktemp("async")
    warm = "warm_start={demonstrations: 20, epochs: 4, learning_rate: 5.0e-3}"
    words = [*LAKE, warm, "steps=8", "checkpoint={every: 3, keep: 9}", "rollout.groups_per_step=4"]
    assert main([*words, f"output_dir={directory}"]) == 0
    assert len({line["weights"] for line in read_lines(directory / "digests.jsonl")}) > 4, (
        "something is learnt"
    )
    return directory


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("teacher")
    words = [*LAKE[:2], "rollout.max_turns=6", *LAKE[3:6], "sft={expert: {demonstrations: 20}, epochs: 4}"]
    assert main(["sft", *words, f"output_dir={directory}"]) == 0
    return directory / "model"


def test_steps_of_an_asynchronous_run_give_their_weights_again(recorded, capsys):
    assert any(
        line["group"]["admitted_version"] < line["step"] for line in read_lines(recorded / "episodes.jsonl")
    )
    everything = [word for step in range(8) for word in ("--step", str(step))]
    assert main(["replay", str(recorded), *everything, "--from-start"]) == 0
    assert capsys.readouterr().out.count("as recorded") == 8
    assert main(["replay", str(recorded), "--step", "7", "--output", f"{recorded}/again"]) == 0
    shown = capsys.readouterr().out
    assert "step_000006" in shown
    assert shown.count("as recorded") == 1
    assert f"model: {recorded}/again/model" in shown


def test_a_record_that_was_changed_gives_other_weights(recorded, tmp_path, capsys):
    copy = tmp_path / "run"
    shutil.copytree(recorded, copy)
    lines = read_lines(copy / "episodes.jsonl")
    lines[0]["turns"][0]["reward"] += 1.0
    (copy / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["replay", str(copy), "--step", "0", "--from-start"]) == 1
    told = capsys.readouterr()
    assert "DIFFER: the run recorded" in told.out
    assert "the weights of 1 of 1 steps differ" in told.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{run}", "--step", "99"], "has no digest of step 99, but those from 0 to 7"),
        (["{run}/again", "--step", "0"], "holds no run: it has no config.yaml"),
        (["{run}/checkpoints", "--step", "0"], "holds no run: it has no config.yaml"),
    ],
)
def test_what_cannot_be_replayed_is_said(recorded, words, message, capsys):
    assert main(["replay", *(word.format(run=recorded) for word in words)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("estimate", ["full", "sampled"])
def test_a_student_comes_nearer_to_its_teacher_on_its_own_episodes(teacher, tmp_path, estimate, capsys):
    words = ["distill", *LAKE, "steps=12", f"distill.teachers={{main: {{path: {teacher}}}}}"]
    words += [f"distill.estimate={estimate}", "rollout.groups_per_step=4", f"output_dir={tmp_path}"]
    assert main(words) == 0
    name = "distill/loss" if estimate == "full" else "distill/reverse_kl"
    found = [line[name] for line in read_lines(tmp_path / "metrics.jsonl") if name in line]
    assert sum(found[-3:]) < 0.8 * sum(found[:3])
    assert undeclared_numbers(tmp_path) == set()
    assert main(["replay", str(tmp_path), "--step", "11"]) == 0
    assert "as recorded" in capsys.readouterr().out


def test_a_student_teaches_itself_what_became_of_its_replies(tmp_path):
    words = ["distill", *LAKE, "steps=2", "distill={estimate: sampled, feedback: {}}", "model.max_length=512"]
    assert main([*words, f"output_dir={tmp_path}"]) == 0
    lines = [line for line in read_lines(tmp_path / "metrics.jsonl") if "distill/reverse_kl" in line]
    assert len(lines) == 2
    assert all(line["distill/tokens"] > 0 for line in lines)


async def test_a_server_scores_tokens_as_the_model_does(tmp_path):
    model = sharp_model(3)
    model.save_pretrained(tmp_path)
    rows = [
        TrainRow(torch.tensor([5, 9, 3, 7]), torch.tensor([False, False, True, True])),
        TrainRow(torch.tensor([2, 8]), torch.tensor([False, True])),
    ]
    expected = FrozenModel(ForwardPass(PolicyHead(model, 1.0), 64)).forward(rows)
    for dialect in ("vllm", "sglang"):
        with InferenceServer(dialect, model=tmp_path) as server:
            async with ServerClient(server.url, dialect, way=None) as client:
                found = await ServedTeacher(client).logprobs(rows)
        for one, other in zip(found, expected, strict=True):
            assert torch.allclose(one, other, atol=1e-5)


def test_the_cut_into_micro_batches_and_shared_tokens_change_no_gradient():
    start = [7, 3, 9, 4, 6]
    rows = [
        with_teacher(
            TrainRow(torch.tensor([*start, *tail]), torch.tensor([False] * 5 + [True] * len(tail))), number
        )
        for number, tail in enumerate(([5, 6, 2], [5, 8], [1], [2, 3, 4, 5]))
    ]
    rows = [TrainRow(row.ids, row.mask, {"teacher": row.fields["teacher"] % 2}) for row in rows]
    counts = Denominators.from_lengths(int(row.mask.sum()) for row in rows)
    found = []
    for tokens, shared, at_once in (
        (1000, "off", 2**20),
        (9, "off", 2**20),
        (1000, "auto", 2**20),
        (1000, "off", 41),
    ):
        head = DistillationHead(
            sharp_model(0),
            [sharp_model(1), sharp_model(2)],
            Distance("jsd", 0.3, 1.5),
            logits_at_once=at_once,
        )
        settings = OptimizerSettings(
            kind="sgd",
            learning_rate=1.0,
            gradient_clip=1e9,
            tokens_per_micro_batch=tokens,
            shared_prefixes=shared,
        )
        backend = TorchBackend(head, settings, Schedule(1.0, 0, 1, "constant"))

        def loss(micro):
            return mean_loss(micro, counts)

        report = backend.step(rows, loss, entropy="metric")
        found.append((report.metrics["distill/loss"][0], report.gradient_norm))
    assert all(each == pytest.approx(found[0], rel=1e-4) for each in found)


def test_each_token_learns_from_the_teacher_that_its_row_names():
    """A student that is the first teacher has nothing to learn from it, and much from the other."""
    ids, mask = torch.tensor([5, 9, 3, 7]), torch.tensor([False, True, True, True])
    teachers = [sharp_model(1), sharp_model(2)]
    head = DistillationHead(sharp_model(1), teachers, Distance("forward_kl"))
    rows = [with_teacher(TrainRow(ids, mask), number) for number in (0, 1)]
    same, other = FrozenModel(ForwardPass(head, 64)).forward(rows)
    assert float(same.abs().max()) < 1e-5
    assert float(other.sum()) > 0.1
