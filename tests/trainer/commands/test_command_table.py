"""The commands of `roll-train`: one object each, from which all that is said of them is made."""

from typing import get_args

import pytest

from rollgym.trainer.cli import main
from rollgym.trainer.commands.command import Command
from rollgym.trainer.commands.learning import LearningCommand
from rollgym.trainer.commands.table import COMMANDS, TRAIN, parser_of, split_command
from rollgym.trainer.config.pipelines import no_section
from rollgym.trainer.config.run import SECTIONS

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
