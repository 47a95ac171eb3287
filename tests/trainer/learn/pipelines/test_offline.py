"""`roll-train sft`, `dpo`, `reward` and `distill` on examples, as a user starts them."""

import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rollgym.trainer.cli import main
from rollgym.trainer.learn.pipelines.offline import ExampleBatches
from rollgym.trainer.models.load import load_model
from rollgym.trainer.records.checkpoint import CheckpointStore, load_checkpoint
from tests.support.processes import ROOT, env_server, read_lines, running, train, train_until
from tests.support.recorded_numbers import undeclared_numbers

OPPOSITE = {"Left": "Right", "Right": "Left", "Up": "Down", "Down": "Up"}
SMALL = (
    "model={hidden_size: 32, layers: 1, heads: 2, max_length: 96}",
    "tracking={tensorboard: false, digests: true}",
    "optimizer.learning_rate=5e-3",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Chats whose answers are opposites, and pairs of right and wrong ones."""
    folder = tmp_path_factory.mktemp("data")
    drawn = random.Random(0)
    for name, count in (("train", 120), ("test", 24)):
        asked = [[drawn.choice(list(OPPOSITE)) for _ in range(drawn.randint(1, 2))] for _ in range(count)]
        rows = [(" ".join(words), " ".join(OPPOSITE[word] for word in words)) for words in asked]
        chats = [
            {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
            for q, a in rows
        ]
        pairs = [{"prompt": q, "chosen": a, "rejected": q} for q, a in rows]
        for kind, lines in (("chats", chats), ("pairs", pairs)):
            (folder / f"{kind}_{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def imitated(data, tmp_path_factory) -> Path:
    """A finished run of sft."""
    directory = tmp_path_factory.mktemp("sft")
    assert main(["sft", *sft(data), "sft.epochs=5", *SMALL, f"output_dir={directory}"]) == 0
    return directory


def sft(data: Path, **more: object) -> list[str]:
    return [
        f"sft.data=[{{path: {data}/chats_train.jsonl}}]",
        f"sft.held_out=[{{path: {data}/chats_test.jsonl}}]",
        *(f"sft.{key}={value}" for key, value in more.items()),
    ]


def held_out(directory: Path, name: str) -> list[float]:
    key = f"evaluate/held_out/{name}"
    return [line[key] for line in read_lines(directory / "metrics.jsonl") if key in line]


def weights(directory: Path) -> list[str]:
    return [line["weights"] for line in read_lines(directory / "digests.jsonl")]


def test_replies_are_imitated_and_the_loss_of_others_falls(imitated):
    losses = held_out(imitated, "loss")
    assert losses[-1] < 0.5 * losses[0]
    assert (imitated / "curves.png").exists()
    steps = [line for line in read_lines(imitated / "metrics.jsonl") if "supervised/loss" in line]
    assert len(steps) == 20, "5 passes of 120 examples, 32 a step"
    assert undeclared_numbers(imitated) == set()


@pytest.mark.slow
def test_a_killed_run_ends_with_the_weights_of_one_that_was_not(data, tmp_path):
    common = ["sft", *sft(data, epochs=3, batch_tokens=300), *SMALL, "checkpoint={every: 2, resume: auto}"]
    train(*common, f"output_dir={tmp_path}/whole")
    train_until("step 5:", *common, f"output_dir={tmp_path}/killed")
    assert "resuming at step 4" in train(*common, f"output_dir={tmp_path}/killed")
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")
    assert held_out(tmp_path / "killed", "loss") == held_out(tmp_path / "whole", "loss")


@pytest.mark.slow
def test_a_run_that_went_on_is_exported_as_it_stands_and_not_as_it_once_ended(data, tmp_path, capsys):
    run = [*sft(data), *SMALL, "checkpoint={every: 2, resume: auto}", f"output_dir={tmp_path}/run"]
    train("sft", *run, "steps=2")
    assert main(["export", *run, "--output", f"{tmp_path}/ended"]) == 0
    train_until("step 5:", "sft", *run, "steps=500")
    newest = CheckpointStore(tmp_path / "run" / "checkpoints", keep=2).latest()
    saved = load_checkpoint(newest).parts["policy"]["model"]
    assert main(["export", *run, "--output", f"{tmp_path}/stands"]) == 0
    ended, stands = (dict(load_model(tmp_path / name).named_parameters()) for name in ("ended", "stands"))
    assert all(torch.equal(stands[name], saved[name]) for name in saved)
    assert not all(torch.equal(ended[name], saved[name]) for name in saved)
    # A copy has the times at which its files were copied.
    for file in (tmp_path / "run" / "model").iterdir():
        os.utime(file)
    assert main(["export", *run, "--output", f"{tmp_path}/copied"]) == 0
    copied = dict(load_model(tmp_path / "copied").named_parameters())
    assert all(torch.equal(copied[name], saved[name]) for name in saved)
    said = f"{tmp_path}/run/model is of another checkpoint than the newest, {newest}"
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_resumed_run_has_the_same_data_and_settings(data, tmp_path, capsys):
    rows = (data / "chats_train.jsonl").read_text().splitlines(keepends=True)
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(rows[:40]))
    common = ["sft", f"sft.data=[{{path: {path}}}]", *SMALL, f"output_dir={tmp_path}/run"]
    assert main([*common, "steps=2"]) == 0
    capsys.readouterr()
    assert main([*common, "steps=3"]) == 2
    assert "holds a run already" in capsys.readouterr().err
    path.write_text("".join(rows[1:41]))
    assert main([*common, "steps=3", "checkpoint.resume=auto"]) == 2
    assert "the rows of data are not those that the run" in capsys.readouterr().err
    path.write_text("".join(rows[:40]))
    assert main([*common, "steps=3", "checkpoint.resume=auto", "sft.batch=8"]) == 2
    assert "sft.batch differ from the settings of the run" in capsys.readouterr().err
    assert main([*common, "steps=3", "checkpoint.resume=auto"]) == 0


def test_a_run_that_begins_at_anothers_checkpoint_holds_it_from_its_start(data, imitated, tmp_path):
    begun = CheckpointStore(imitated / "checkpoints", keep=2).latest()
    step = load_checkpoint(begun).state.step
    words = ["sft", *sft(data), *SMALL, f"output_dir={tmp_path}", f"steps={step}"]
    assert main([*words, f"checkpoint.resume={begun}"]) == 0
    held = load_checkpoint(tmp_path / "checkpoints" / begun.name)
    expected = load_checkpoint(begun)
    assert held.state == expected.state
    weights, saved = (each.parts["policy"]["model"] for each in (held, expected))
    assert all(torch.equal(weights[name], saved[name]) for name in saved)


@pytest.mark.parametrize("loss", ["dpo", "robust", "hinge", "ipo", "orpo", "simpo"])
def test_the_better_reply_becomes_likelier(data, imitated, tmp_path, loss):
    words = ["dpo", f"dpo.data=[{{path: {data}/pairs_train.jsonl}}]", f"dpo.loss.kind={loss}"]
    words += [f"dpo.held_out=[{{path: {data}/pairs_test.jsonl}}]", "dpo.held_out_every=0", "steps=4"]
    words += [f"model.path={imitated}/model", "model.max_length=96", SMALL[1], "optimizer.learning_rate=1e-3"]
    assert main([*words, f"output_dir={tmp_path}"]) == 0
    losses = held_out(tmp_path, "loss")
    margins = held_out(tmp_path, "margin")
    assert losses[-1] < losses[0]
    assert margins[-1] > margins[0]
    if loss in ("dpo", "robust", "hinge", "ipo"):
        assert margins[0] == pytest.approx(0.0, abs=1e-5), "the policy begins as its own reference"


def test_good_replies_become_likelier_than_bad_ones(data, imitated, tmp_path):
    words = ["dpo", f"dpo.data=[{{path: {data}/pairs_train.jsonl}}]", "dpo.loss={kind: kto}"]
    words += [f"dpo.held_out=[{{path: {data}/pairs_test.jsonl}}]", "steps=4", "dpo.held_out_every=0"]
    words += [f"model.path={imitated}/model", "model.max_length=96", SMALL[1], "optimizer.learning_rate=1e-3"]
    assert main([*words, f"output_dir={tmp_path}"]) == 0
    good, bad = held_out(tmp_path, "reward_chosen"), held_out(tmp_path, "reward_rejected")
    assert good[-1] - bad[-1] > good[0] - bad[0]


def test_another_reference_is_read_once_and_adapters_are_their_own(data, imitated, tmp_path, capsys):
    pytest.importorskip("peft")
    words = ["dpo", f"dpo.data=[{{path: {data}/pairs_train.jsonl, limit: 16}}]", "steps=2", SMALL[1]]
    words += [f"dpo.held_out=[{{path: {data}/pairs_test.jsonl, limit: 8}}]"]
    words += [f"model.path={imitated}/model", "model.max_length=96", "optimizer.learning_rate=1e-3"]
    same = [*words, f"dpo.reference={imitated}/model"]
    assert main([*words, f"output_dir={tmp_path}/start"]) == 0
    assert main([*same, f"output_dir={tmp_path}/named"]) == 0
    assert weights(tmp_path / "start") == weights(tmp_path / "named"), "the same model, by its name"
    assert main([*words, "model.lora={rank: 2}", f"output_dir={tmp_path}/adapted"]) == 0
    assert (tmp_path / "adapted" / "adapter").is_dir()
    assert held_out(tmp_path / "adapted", "margin")[0] == pytest.approx(0.0, abs=1e-5)
    capsys.readouterr()
    assert main([*words, "dpo.reference=/nowhere/at/all", f"output_dir={tmp_path}/missing"]) == 2
    assert "dpo.reference: there is no folder /nowhere/at/all" in capsys.readouterr().err


def test_a_reference_that_reads_other_tokens_is_refused(data, imitated, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(imitated / "model", other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["Left"], vocabulary["Up"] = vocabulary["Up"], vocabulary["Left"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    words = ["dpo", f"dpo.data=[{{path: {data}/pairs_train.jsonl, limit: 16}}]", "steps=1", SMALL[1]]
    words += [f"model.path={imitated}/model", "model.max_length=96", f"dpo.reference={other}"]
    assert main([*words, f"output_dir={tmp_path}/refused"]) == 2
    assert re.search(
        r"dpo.reference: token \d+ is '(Left|Up)' for the policy and '(Left|Up)' for", capsys.readouterr().err
    )


@pytest.mark.parametrize("left", ["tokenizer_config.json", "nothing"])
def test_a_reference_without_a_tokenizer_is_refused_with_the_remedy(data, imitated, tmp_path, capsys, left):
    other = tmp_path / "other"
    shutil.copytree(imitated / "model", other)
    for file in other.glob("*token*"):
        if file.name != left:
            file.unlink()
    words = ["dpo", f"dpo.data=[{{path: {data}/pairs_train.jsonl, limit: 16}}]", "steps=1", SMALL[1]]
    words += [f"model.path={imitated}/model", "model.max_length=96", f"dpo.reference={other}"]
    assert main([*words, f"output_dir={tmp_path}/refused"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"dpo.reference: {other} holds no tokenizer that can be loaded" in said
    assert "put its files beside the model (tokenizer.json, tokenizer_config.json)" in said


def test_a_best_metric_that_nothing_measures_is_told_of(data, tmp_path, capsys):
    words = ["sft", *sft(data), *SMALL, "steps=2", f"output_dir={tmp_path}"]
    assert main([*words, "checkpoint={keep_best: 1, best_metric: evaluate/held_out/los}"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("this run does not measure 'evaluate/held_out/los'") == 1
    assert "did you mean evaluate/held_out/loss" in printed


@pytest.mark.parametrize("preset", [["dpo.reference=none"], ["dpo.loss.label_smoothing=0.1"]])
def test_no_reference_and_smoothed_labels_change_what_is_learnt(data, imitated, tmp_path, preset):
    words = ["dpo", f"dpo.data=[{{path: {data}/pairs_train.jsonl, limit: 16}}]", "steps=2", SMALL[1]]
    words += [f"model.path={imitated}/model", "model.max_length=96", "optimizer.learning_rate=1e-3"]
    assert main([*words, f"output_dir={tmp_path}/plain"]) == 0
    assert main([*words, *preset, f"output_dir={tmp_path}/other"]) == 0
    assert weights(tmp_path / "plain") != weights(tmp_path / "other")


def test_a_reward_model_ranks_and_is_loaded_by_others(data, tmp_path):
    words = ["reward", f"reward.data=[{{path: {data}/pairs_train.jsonl}}]", "reward.epochs=10", *SMALL]
    words += [f"reward.held_out=[{{path: {data}/pairs_test.jsonl}}]", "reward.centre=0.01"]
    assert main([*words, f"output_dir={tmp_path}"]) == 0
    accuracy = held_out(tmp_path, "accuracy")
    assert accuracy[-1] > 0.9
    folder = tmp_path / "model"
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def reward(question: str, answer: str) -> float:
        talk = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        text = tokenizer.apply_chat_template(talk, tokenize=False)
        ids = tokenizer.encode(text.rstrip("\n"), add_special_tokens=False, return_tensors="pt")
        with torch.no_grad():
            return float(model(ids).logits[0, 0])

    assert reward("Left Up", "Right Down") > reward("Left Up", "Left Up")


@pytest.mark.parametrize("estimate", ["full", "top_k"])
def test_a_student_learns_a_teachers_distributions(data, imitated, tmp_path, estimate):
    words = ["distill", f"distill.data=[{{path: {data}/chats_train.jsonl}}]", "distill.divergence=forward_kl"]
    words += [f"distill.held_out=[{{path: {data}/chats_test.jsonl}}]", f"distill.estimate={estimate}"]
    words += [f"distill.teachers={{main: {{path: {imitated}/model}}}}", "distill.epochs=5", *SMALL]
    words += ["distill.top_k=4"] if estimate == "top_k" else ["distill.likelihood=0.2"]
    assert main([*words, f"output_dir={tmp_path}"]) == 0
    losses = held_out(tmp_path, "loss")
    assert losses[-1] < 0.5 * losses[0]


def test_teachers_are_routed_by_domain(data, imitated, tmp_path, capsys):
    rows = [json.loads(line) for line in (data / "chats_train.jsonl").read_text().splitlines()[:12]]
    path = tmp_path / "chats.jsonl"
    path.write_text(
        "".join(json.dumps(row | {"domain": "ab"[place % 2]}) + "\n" for place, row in enumerate(rows))
    )
    random_model = tmp_path / "random"
    assert main(["sft", *sft(data), "steps=1", *SMALL, "seed=5", f"output_dir={random_model}"]) == 0
    two = f"{{a: {{path: {imitated}/model, domains: [a]}}, b: {{path: {random_model}/model, domains: [b]}}}}"
    words = ["distill", f"distill.data=[{{path: {path}}}]", "steps=2", *SMALL]
    assert main([*words, f"distill.teachers={two}", f"output_dir={tmp_path}/two"]) == 0
    assert (
        main([*words, f"distill.teachers={{a: {{path: {imitated}/model}}}}", f"output_dir={tmp_path}/one"])
        == 0
    )
    assert weights(tmp_path / "one") != weights(tmp_path / "two")
    capsys.readouterr()
    only_a = f"distill.teachers={{a: {{path: {imitated}/model, domains: [a]}}}}"
    assert main([*words, only_a, f"output_dir={tmp_path}/none"]) == 2
    assert "nobody teaches the domain 'b'" in capsys.readouterr().err


LAKE = "{size: 4, split: train, max_episode_steps: 6, format_penalty: -0.1}"
EXPERTS = [
    *("sft", f"tasks=[{{env_id: FrozenLake-v0, kwargs: {LAKE}}}]", "rollout.max_turns=6"),
    "sft={expert: {demonstrations: 12}, epochs: 3}",
]


@pytest.mark.parametrize(
    ("longest", "code", "told"),
    [
        (
            12,
            2,
            r"the expert's demonstrations take \d+ tokens a row and more, and model.max_length is 12: raise",
        ),
        (144, 0, r"\d+ of 12 rows of demonstrations are longer than model.max_length and are left out"),
    ],
)
def test_demonstrations_that_are_longer_than_a_row_are_told_of(tmp_path, capfd, longest, code, told):
    larger = "{env_id: FrozenLake-v0, kwargs: {size: 5, split: train, max_episode_steps: 8}}"
    words = [f"tasks=[{{env_id: FrozenLake-v0, kwargs: {LAKE}}}, {larger}]", "rollout.max_turns=8", *SMALL]
    words += ["prompt={context: full_history, instruction: none}", f"output_dir={tmp_path}"]
    assert main([*EXPERTS, *words, f"model.max_length={longest}"]) == code
    assert re.search(told, " ".join("".join(capfd.readouterr()).split()))


def test_the_environments_experts_are_imitated(tmp_path):
    words = [*EXPERTS, "prompt={context: single_turn, instruction: none}"]
    assert main([*words, *SMALL, f"output_dir={tmp_path}"]) == 0
    losses = [
        line["supervised/loss"]
        for line in read_lines(tmp_path / "metrics.jsonl")
        if "supervised/loss" in line
    ]
    assert losses[-1] < losses[0]
    assert load_model(tmp_path / "model").config.hidden_size == 32


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sft"], "roll-train sft reads the section 'sft': sft.data="),
        (["dpo", "sft.data=[{path: x.jsonl}]"], "reads the section 'dpo', and not sft: dpo.data="),
        (["sft.data=[{path: x.jsonl}]"], "sft: is read by `roll-train sft`: use that command"),
        (["sft", "sft.data=[{path: nowhere.jsonl}]"], "sft.data.0.path: there is no nowhere.jsonl here"),
        (
            ["sft", "sft.data=[{path: README.md}]", "algorithm=gigpo"],
            "is not read by roll-train sft: leave it out",
        ),
        (["sft", "sft.data=[{path: README.md}]", "evaluation.every=3"], "evaluation.every is not read by"),
        (["sft", "sft={}"], "sft learns either from 'data' or from an 'expert'"),
        (["sft", "sft={expert: {demonstrations: 3}, roles: [user]}"], "nothing else of them is learnt"),
        (["sft", "sft={expert: {demonstrations: 3}}"], "'tasks' is empty: sft.expert plays them"),
        (["distill", "distill={data: [{path: README.md}]}"], "needs either 'teachers' or 'feedback'"),
        (
            ["distill", "distill={data: [{path: README.md}], teachers: {t: {path: docs}}}"],
            "distill.teachers.t.path: docs holds no model",
        ),
        (
            ["dpo", "dpo={data: [{path: README.md}], reference: none, loss: {kind: kto}}"],
            "leave reference out",
        ),
        (
            ["sft", "sft={data: [{path: a}]}", "dpo={data: [{path: a}]}"],
            "sft and dpo: a run is for one command",
        ),
    ],
)
def test_mistakes_are_told_before_anything_is_begun(words, message, capsys):
    assert main([*words, "output_dir=/tmp/never-made-by-this-test", "--dry-run"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["stf", "steps=1"], "there is no command 'stf': did you mean sft?"),
        (["run.yaml"], "a file of settings is given as --config run.yaml"),
        (
            ["frozen_lake"],
            "there is no command 'frozen_lake': a configuration is given as --config frozen_lake",
        ),
        (["sft", "--dry-rum"], "unrecognized arguments: --dry-rum: did you mean --dry-run?"),
        (["replay", "x", "--stpe", "3"], "--step"),
    ],
)
def test_the_nearest_word_is_named(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_every_command_is_named_within_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    for command in ("sft", "dpo", "distill", "reward", "replay", "rollout", "eval", "export", "report"):
        assert f"\n  {command} " in text
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_a_dry_run_shows_settings_and_plan_of_a_pipeline(data, capsys):
    assert main(["dpo", f"dpo.data=[{{path: {data}/pairs_train.jsonl}}]", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "kind: dpo" in shown
    assert "engine" not in shown, "nothing is sampled"


@pytest.mark.parametrize(
    ("pipeline", "long", "short"),
    [
        ("sft", {"completion": "Down " * 60}, {"completion": "Down"}),
        ("dpo", {"chosen": "Down " * 60, "rejected": "Up"}, {"chosen": "Down", "rejected": "Up"}),
        ("dpo", {"chosen": "Down", "rejected": "Up " * 60}, {"chosen": "Down", "rejected": "Up"}),
    ],
)
def test_a_row_that_is_too_long_is_named_or_left_out(tmp_path, capsys, pipeline, long, short):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "Up"} | row) + "\n" for row in (long, short)))
    words = [
        *(pipeline, f"{pipeline}.data=[{{path: {path}}}]", "steps=1", *SMALL),
        f"output_dir={tmp_path}/run",
    ]
    assert main(words) == 2
    message = capsys.readouterr().err
    assert f"{path}, line 1: " in message
    assert "model.max_length is 96: raise it, or set longer to leave_out" in message
    assert main([*words, f"{pipeline}.longer=leave_out"]) == 0
    assert "1 of 2 examples are longer than model.max_length and are left out" in capsys.readouterr().out


def test_batches_need_examples():
    with pytest.raises(ValueError, match="nothing to make batches of"):
        ExampleBatches([], seed=0, size=1)


@pytest.mark.slow
def test_a_reward_model_is_a_verifier_that_is_registered_over_http(data, tmp_path):
    words = ["reward", f"reward.data=[{{path: {data}/pairs_train.jsonl, limit: 8}}]", "steps=1", *SMALL]
    assert main([*words, f"output_dir={tmp_path}/reward"]) == 0
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"prompt": word}) + "\n" for word in OPPOSITE))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = [
        sys.executable,
        str(ROOT / "examples" / "reward_model.py"),
        f"{tmp_path}/reward/model",
        str(port),
    ]
    with (
        running(subprocess.Popen(script)),
        env_server("--gateway", "--allow-network", "loopback") as gateway,
    ):
        registration = {"env_id": "Preferred", "url": f"http://127.0.0.1:{port}", "protocol": "http"}
        deadline = time.monotonic() + 90
        while httpx.post(f"{gateway}/v1/envs", json=registration).status_code >= 400:
            assert time.monotonic() < deadline
            time.sleep(0.25)
        words = [f"datasets=[{{path: {rows}, verifier: Preferred}}]", "steps=1", *SMALL, "evaluation.every=0"]
        words += ["rollout={groups_per_step: 2, group_size: 2, max_new_tokens: 3}"]
        assert main([*words, "--env-url", gateway, f"output_dir={tmp_path}/run"]) == 0
    (line,) = [each for each in read_lines(tmp_path / "run" / "metrics.jsonl") if "rollout/reward" in each]
    assert line["rollout/reward"] == pytest.approx(0.5, abs=0.2), (
        "a model of one step hardly tells replies apart"
    )


def test_a_probe_reads_the_examples(data, tmp_path, capsys):
    words = ["dpo", "--dry-run", "--probe", f"dpo.held_out=[{{path: {data}/pairs_test.jsonl}}]"]
    assert main([*words, f"dpo.data=[{{path: {data}/pairs_train.jsonl}}]"]) == 0
    assert "probe: examples: 120 to learn from, 24 held out" in capsys.readouterr().out
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "q", "chosen": "a"}\n')
    assert main([*words, f"dpo.data=[{{path: {bad}}}]"]) == 2
    assert f"probe: examples: data set {bad}, line 1: the row has no 'rejected'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["rollout", "sft.data=[{path: README.md}]"],
            "roll-train rollout plays episodes, and 'tasks' is empty",
        ),
        (
            ["export", "--output", "x", "reward.data=[{path: README.md}]"],
            "what was trained is a reward model",
        ),
    ],
)
def test_commands_for_policies_say_what_they_need(words, message, capsys):
    assert main(words) == 2
    assert message in capsys.readouterr().err
