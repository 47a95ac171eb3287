"""The commands of `roll-train`: one object each, from which all that is said of them is made."""

from typing import get_args

import pytest
import yaml

from rollgym.trainer.algorithms.presets import FORMER_NAMES, PAPERS, PRESETS
from rollgym.trainer.algorithms.settings import AlgorithmSettings
from rollgym.trainer.algorithms.token_settings import CORRECTIONS
from rollgym.trainer.cli import main
from rollgym.trainer.config.load import no_section
from rollgym.trainer.config.run import SECTIONS
from rollgym.trainer.run.command import Command
from rollgym.trainer.run.learning import LearningCommand
from rollgym.trainer.run.table import COMMANDS, TRAIN, parser_of, split_command

NAMES = [command.name for command in COMMANDS]


def test_each_has_a_name_of_its_own():
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("command", COMMANDS, ids=NAMES)
def test_it_is_found_by_its_name_and_says_what_it_does(command: Command):
    assert split_command([command.name, "a=1"]) == (command, ["a=1"])
    told = " ".join(parser_of(command).format_help().split())
    assert " ".join(command.description.split()) in told
    assert " ".join(command.summary.split()) in " ".join(parser_of(TRAIN).format_help().split())


def test_what_a_program_may_have_learnt_is_what_commands_learn():
    assert get_args(LearningCommand) == tuple(name for name in NAMES if name in ("train", *SECTIONS))
    assert {*get_args(LearningCommand)} == {"train", *SECTIONS}


@pytest.mark.parametrize("section", SECTIONS)
def test_a_pipeline_without_its_section_is_shown_one(section):
    assert f"roll-train {section} reads the section '{section}': {section}." in str(no_section(section, None))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rollout", "--policy", "recorded"], "--policy recorded and --recorded FILE belong together"),
        (["eval", "--probe"], "--probe belongs to --dry-run"),
        (["train", "--device-memory", "80"], "--device-memory belongs to --dry-run"),
    ],
)
def test_words_that_do_not_go_together_are_told_before_settings_are_read(words, message, capsys):
    assert main([*words, "--config", "there_is_none.yaml"]) == 2
    assert message in capsys.readouterr().err


def test_all_are_listed_within_eighty_columns(capsys):
    assert main(["algorithms"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    listed = [line.split()[0] for line in lines if line and not line.startswith(" ")]
    assert set(PRESETS) | set(CORRECTIONS) <= set(listed)
    text = "\n".join(lines)
    assert all(paper.source in text for paper in PAPERS.values())


@pytest.mark.parametrize("name", PRESETS)
def test_one_is_shown_as_settings_that_read_back(name, capsys):
    assert main(["algorithms", name]) == 0
    text = capsys.readouterr().out
    assert AlgorithmSettings.model_validate(yaml.safe_load(text)["algorithm"]) == PRESETS[name]
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert PAPERS[name].source in "\n".join(comments)
    assert max(map(len, text.splitlines())) <= 80


def test_corrections_and_former_names_are_shown_too(capsys):
    assert main(["algorithms", "icepop"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)["algorithm"]["correction"]
    assert (shown["kind"], shown["low"], shown["high"]) == ("band", 0.5, 5.0)
    for former, name in FORMER_NAMES.items():
        assert main(["algorithms", former]) == 0
        assert capsys.readouterr().out.startswith(f"# {name}:")


def test_a_name_that_is_none_is_refused_with_a_hint(capsys):
    assert main(["algorithms", "grppo"]) == 2
    assert "did you mean 'grpo'" in capsys.readouterr().err


FORMS = {
    "pass@k": ["algorithm=passk"],
    "SPO without groups": ["algorithm=spo", "rollout.group_size=1"],
    "GRPO-RoC of twice as many": ["algorithm=grpo_roc", "rollout.group_size=32"],
    "GFPO of twice as many": ["algorithm=gfpo", "rollout.group_size=16"],
    "RAE without groups": ["algorithm=rae", "rollout.group_size=1"],
    "ratios of replies": ["algorithm={preset: gspo_token, ratio: {level: turn}}"],
    "IPO": ["algorithm={preset: dppo, surrogate: {two_sided: true}}"],
    "KL in the advantages": [
        "algorithm={preset: grpo, kl: {coefficient: 0.1, estimator: k1, placement: advantage}}"
    ],
    "weight and rejection at once": [
        "algorithm={preset: grpo, correction: {kind: truncate, reject: [{measure: k3, high: 0.1}]}}"
    ],
    "RAGEN v2 by softmax": ["algorithm={preset: starpo_s, filter: {kind: top_p, shares: softmax}}"],
    "RAGEN v2 by length": ["algorithm={preset: grpo, filter: {kind: top_count, count: 4, by: length}}"],
    "RAGEN v2 min_p": ["algorithm={preset: grpo, filter: {kind: min_p}}"],
    "difficulty": ["algorithm={preset: grpo, filter: {kind: score_range, above: 0.1, below: 0.95}}"],
    "overlong masking": ["algorithm={preset: dapo, episodes: {kind: finished}}"],
    "adaptive KL": ["algorithm={preset: gigpo, kl: {target: 0.1}}"],
    "Huber critic": ["algorithm={preset: ppo, critic: {loss: huber}}"],
    "proximal policy without a pass": ["algorithm={preset: grpo, proximal: interpolated, minibatches: 2}"],
}
"""What papers and trainers call an algorithm beyond the presets' names, and the words that name it here."""
NAMED = {
    **{name: [f"algorithm={name}"] for name in PRESETS},
    **{f"correction {name}": [f"algorithm.correction={name}"] for name in CORRECTIONS},
    **FORMS,
}


@pytest.mark.parametrize("words", NAMED.values(), ids=NAMED)
def test_every_name_is_a_configuration_that_starts(words, capsys):
    assert main(["--dry-run", "tasks=[{env_id: FrozenLake-v0, kwargs: {size: 4}}]", *words]) == 0
    told = capsys.readouterr().out
    assert yaml.safe_load(told)["algorithm"]
    assert "# memory plan" in told
