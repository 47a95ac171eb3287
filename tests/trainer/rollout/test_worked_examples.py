"""`prompt.examples`: worked turns before every episode, in training, evaluation and demonstrations alike."""

import json
from pathlib import Path

import pytest

from rollgym.trainer.cli import main
from rollgym.trainer.config.checks import check_settings
from rollgym.trainer.config.load import dump_settings, load_settings, settings_from
from rollgym.trainer.config.rollout import PromptSettings, read_examples
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.inference.base import GenerationResult
from rollgym.trainer.models.tiny import build_tiny_tokenizer
from rollgym.trainer.records.trajectory import Trajectory
from rollgym.trainer.rollout.prompts import ChatRenderer, prompt_maker
from rollgym.trainer.rollout.recorder import Recorder
from rollgym.trainer.run.policy import build_policy
from rollgym.trainer.tasks.task import Task

TOKENIZER = build_tiny_tokenizer()
RENDERER = ChatRenderer(TOKENIZER)
LAKE = "tasks=[{env_id: FrozenLake-v0, kwargs: {size: 3}}]"
WORKED = [{"role": "user", "content": "P_G"}, {"role": "assistant", "content": "Right"}]
SHOWN = "<|user|>P_G<|end|><|assistant|>Right<|end|>"


def prompts_of(observations, settings, info=None):
    """Play observations with one reply each, and return the prompts as text and the record."""
    builder = prompt_maker(RENDERER, settings)()
    builder.begin(info or {"instruction": "Play."})
    trajectory, prompts = Trajectory(Task(0, "Any-v0", 0), 0), []
    recorder = Recorder(trajectory)
    for turn, observation in enumerate(observations):
        messages = (
            ({"role": "user", "content": observation},) if isinstance(observation, str) else observation
        )
        ids = builder.prompt(trajectory, messages).ids
        prompts.append(TOKENIZER.decode(ids))
        reply = RENDERER.reply_ids("Up")
        segment = recorder.place(ids)
        recorder.record(segment, GenerationResult(reply, [0.0] * len(reply), [0] * len(reply)), turn)
        builder.replied(messages, "Up", segment)
    return prompts, trajectory


@pytest.mark.parametrize("context", ["single_turn", "full_history"])
def test_they_stand_between_the_instruction_and_the_episode(context):
    settings = PromptSettings(context=context, examples=WORKED)
    prompts, trajectory = prompts_of(["P__", "_P_"], settings)
    assert prompts[0] == f"<|system|>Play.<|end|>{SHOWN}<|user|>P__<|end|><|assistant|>"
    earlier = "" if context == "single_turn" else "<|user|>P__<|end|><|assistant|>Up<|end|>"
    assert prompts[1] == f"<|system|>Play.<|end|>{SHOWN}{earlier}<|user|>_P_<|end|><|assistant|>"
    assert len(trajectory.segments) == (2 if context == "single_turn" else 1)
    # What is shown was not said by the policy: only its own replies are trained on.
    trained = [
        TOKENIZER.decode([token for token, learnt in zip(each.ids, each.action_mask, strict=True) if learnt])
        for each in trajectory.segments
    ]
    assert "".join(trained) == "Up<|end|>" * 2


def test_an_instruction_for_the_first_user_message_stands_before_them():
    settings = PromptSettings(instruction="first_user", examples=WORKED)
    assert prompts_of(["P__"], settings)[0][0].startswith(
        "<|user|>Play.\n\nP_G<|end|><|assistant|>Right<|end|>"
    )


def test_a_system_message_of_theirs_stands_first():
    settings = PromptSettings(instruction="none", examples=[{"role": "system", "content": "Go."}, *WORKED])
    assert prompts_of(["P__"], settings)[0][0].startswith(f"<|system|>Go.<|end|>{SHOWN}")


def test_a_system_message_of_the_environment_stays_in_front():
    messages = ({"role": "system", "content": "Rules."}, {"role": "user", "content": "P__"})
    settings = PromptSettings(instruction="none", examples=WORKED)
    assert prompts_of([messages], settings)[0][0] == (
        f"<|system|>Rules.<|end|>{SHOWN}<|user|>P__<|end|><|assistant|>"
    )
    two = PromptSettings(instruction="none", examples=[{"role": "system", "content": "Go."}, *WORKED])
    with pytest.raises(ConfigError, match="leave it out of the examples"):
        prompts_of([messages], two)


def test_what_spells_a_control_token_in_them_is_text():
    worked = [WORKED[0], {"role": "assistant", "content": "Up<|end|><|user|>x"}]
    builder = prompt_maker(RENDERER, PromptSettings(instruction="none", examples=worked))()
    builder.begin({})
    ids = builder.prompt(Trajectory(Task(0, "Any-v0", 0), 0), ({"role": "user", "content": "P"},)).ids
    assert ids.count(TOKENIZER.convert_tokens_to_ids("<|end|>")) == 3
    assert ids.count(TOKENIZER.convert_tokens_to_ids("<|user|>")) == 2


@pytest.mark.parametrize("name", ["worked.json", "worked.yaml"])
def test_a_file_says_the_same_as_the_settings(tmp_path, name):
    file = tmp_path / name
    file.write_text(
        json.dumps(WORKED)
        if name.endswith("json")
        else "- {role: user, content: P_G}\n- role: assistant\n  content: Right\n"
    )
    settings = load_settings(None, [LAKE, f"prompt.examples={file}"])
    check_settings(settings)
    assert prompts_of(["P__"], settings.prompt)[0] == prompts_of(["P__"], PromptSettings(examples=WORKED))[0]


def test_settings_that_are_written_are_read_again():
    settings = settings_from({"tasks": [{"env_id": "FrozenLake-v0"}], "prompt": {"examples": WORKED}})
    import yaml

    assert settings_from(yaml.safe_load(dump_settings(settings))) == settings


@pytest.mark.parametrize(
    ("examples", "said"),
    [
        ([WORKED[0]], "begin with a message of the user, and end with one of the assistant"),
        ([WORKED[1]], "begin with a message of the user, and end with one of the assistant"),
        ([*WORKED, {"role": "system", "content": "x"}], "a system message can only be the first"),
        ([{"role": "system", "content": "x"}, *WORKED], "set prompt.instruction to none or first_user"),
        ([WORKED[0], {"role": "assistant"}], "message 1 says nothing"),
        ([{"role": "usr", "content": "x"}], r"prompt\.examples\.0\.role: Input should be 'system', "),
        (
            [{"role": "user", "contnt": "x"}],
            r"prompt\.examples\.0: unknown key 'contnt'; did you mean 'content'",
        ),
        ([], r"prompt\.examples: List should have at least 1 item"),
        (3, r"prompt\.examples: Input should be a valid list"),
        ("no_such_file.yaml", "there is no file no_such_file.yaml"),
    ],
)
def test_what_are_no_whole_turns_is_said(examples, said):
    with pytest.raises(ConfigError, match=said):
        check_settings(
            settings_from({"tasks": [{"env_id": "FrozenLake-v0"}], "prompt": {"examples": examples}})
        )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe", "is not text in UTF-8"),
        (b"- [", "is neither YAML nor JSON"),
        (b"[" * 10_000, "is neither YAML nor JSON"),
        (b"x" * (2**20 + 1), "is larger than the examples of a prompt can be"),
        (b"", r"worked\.yaml: Input should be a valid list"),
        (b"- {role: user, content: 3}", r"worked\.yaml: 0\.content: Input should be a valid string"),
        (b"- {role: user, content: x}", "end with one of the assistant"),
    ],
)
def test_a_file_that_cannot_be_read_is_said(tmp_path, content, said):
    file = tmp_path / "worked.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read_examples(str(file), "system")


def test_they_are_refused_where_nobody_reads_them():
    shown = "prompt.examples=[{role: user, content: a}, {role: assistant, content: b}]"
    with pytest.raises(ConfigError, match=r"prompt\.examples is about prompts of ours"):
        check_settings(load_settings(None, [LAKE, shown, "rollout.agent=python agent.py"]))
    with pytest.raises(ConfigError, match="sft learns from conversations as they are written"):
        check_settings(load_settings(None, [shown, "sft.data=[{path: x.jsonl}]"], "sft"))


def small_run(folder: Path, *words: str) -> list[str]:
    return [
        LAKE,
        "model={hidden_size: 32, layers: 1, heads: 2, max_length: 256}",
        "prompt={instruction: none, examples: [{role: user, content: P_G}, {role: assistant, content: Right}]}",
        "rollout={groups_per_step: 1, group_size: 2, max_turns: 2, max_new_tokens: 4}",
        "algorithm=grpo",
        f"output_dir={folder}",
        "tracking={tensorboard: false}",
        *words,
    ]


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["model.max_length=14"], "model.max_length"),
        (
            ["prompt.context=compaction", "prompt.compact_above=8", "prompt.summary_tokens=8"],
            "prompt.compact_above",
        ),
    ],
)
def test_they_are_counted_in_the_length_of_prompts(tmp_path, words, key):
    settings = load_settings(None, [*small_run(tmp_path), *words])
    with pytest.raises(ConfigError, match=rf"prompt\.examples take \d+ tokens of every prompt, and {key}"):
        build_policy(settings)


@pytest.mark.slow
def test_training_warm_start_and_evaluation_show_them(tmp_path):
    words = small_run(
        tmp_path / "run",
        "warm_start={demonstrations: 4, epochs: 1, batch_rows: 4}",
        "rollout.max_turns=8",
        "evaluation.sets={lakes: {env_id: FrozenLake-v0, kwargs: {size: 3}, episodes: 2}}",
    )
    assert main([*words, "steps=1"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "episodes.jsonl").read_text().splitlines()]
    worked = RENDERER.prompt(WORKED)[:-1]
    assert {str(segment["ids"][: len(worked)]) for line in lines for segment in line["segments"]} == {
        str(worked)
    }
