"""Settings and options are understood by the names that they had before, with a warning that names the new one."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import yaml

from rollgym.trainer.config.data import EvaluationSettings
from rollgym.trainer.config.load import load_settings, settings_from
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.run_files import CONFIG_FILE
from rollgym.trainer.run.resume import changed_settings, keep_settings
from rollgym.trainer.run.table import parser_of, split_command

LAKE = {"env_id": "FrozenLake-v0", "episodes": 7}
BASE = {"tasks": [{"env_id": "FrozenLake-v0"}]}
RENAMED = r"^evaluation\.panels is called evaluation\.sets now$"
TWICE = "evaluation: 'panels' is the former name of 'sets', which is given, too"


def written(folder: Path, **evaluation: object) -> Path:
    """Return a file of settings."""
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(BASE | {"evaluation": evaluation}))
    return file


def loaded_silently(file: Path, *words: str) -> RunSettings:
    """Return settings that nothing is to be warned of in."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load_settings(file, words)


@pytest.mark.parametrize(
    ("former", "current"),
    [
        ("evaluation.panels.held_out.episodes=5", "evaluation.sets.held_out.episodes=5"),
        ("evaluation.panels.other={env_id: Other-v0}", "evaluation.sets.other={env_id: Other-v0}"),
        ("evaluation.panels={}", "evaluation.sets={}"),
        ("evaluation={panels: {a: {env_id: A}}}", "evaluation={sets: {a: {env_id: A}}}"),
    ],
)
@pytest.mark.parametrize("key", ["panels", "sets"])
def test_words_by_the_former_name_are_laid_over_either(tmp_path, key, former, current):
    wanted = loaded_silently(written(tmp_path, sets={"held_out": LAKE}), current)
    file = written(tmp_path, **{key: {"held_out": LAKE}})
    with pytest.warns(FutureWarning, match=RENAMED):
        assert load_settings(file, [former]) == wanted


def test_a_file_by_the_former_name_takes_words_by_the_present_one(tmp_path):
    file = written(tmp_path, panels={"held_out": LAKE}, every=3)
    with pytest.warns(FutureWarning, match=RENAMED):
        settings = load_settings(file, ["evaluation.sets.held_out.episodes=5"])
    assert (settings.evaluation.every, settings.evaluation.sets["held_out"].episodes) == (3, 5)


def test_words_go_on_from_a_section_that_a_word_before_them_named_by_its_former_name(tmp_path):
    words = ["evaluation={panels: {a: {env_id: A}}}", "evaluation.sets.a.episodes=3"]
    with pytest.warns(FutureWarning, match=RENAMED):
        assert load_settings(written(tmp_path), words).evaluation.sets["a"].episodes == 3


@pytest.mark.parametrize(
    "laid",
    [{"evaluation": {"panels": {"held_out": {"episodes": 5}}}}, {"evaluation.panels.held_out.episodes": 5}],
)
def test_a_program_may_use_the_former_name(laid):
    with pytest.warns(FutureWarning, match=RENAMED):
        settings = settings_from(BASE | {"evaluation": {"sets": {"held_out": dict(LAKE)}}}, laid)
    assert settings.evaluation.sets["held_out"].episodes == 5
    with pytest.warns(FutureWarning, match=RENAMED):
        assert (
            EvaluationSettings.model_validate({"panels": {"held_out": LAKE}}).sets["held_out"].episodes == 7
        )


def test_both_names_at_once_are_refused(tmp_path):
    both = {"panels": {}, "sets": {"held_out": LAKE}}
    with pytest.raises(ConfigError, match=TWICE):
        load_settings(written(tmp_path, **both))
    with pytest.raises(ConfigError, match=TWICE):
        load_settings(written(tmp_path), ["evaluation={panels: {}, sets: {}}"])
    with pytest.raises(ConfigError, match=TWICE):
        settings_from(dict(BASE), {"evaluation": both})
    with pytest.raises(ValueError, match="'panels' is the former name of 'sets'"):
        EvaluationSettings.model_validate(both)


def test_a_run_that_was_begun_by_the_former_name_goes_on_without_a_word(tmp_path):
    settings = loaded_silently(written(tmp_path, sets={"held_out": LAKE}))
    kept = settings.model_dump(mode="json")
    kept["evaluation"]["panels"] = kept["evaluation"].pop("sets")
    (tmp_path / CONFIG_FILE).write_text(yaml.safe_dump(kept))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert changed_settings(settings, tmp_path) == []
        other = loaded_silently(tmp_path / "run.yaml", "seed=5")
        assert changed_settings(other, tmp_path) == ["seed"]
        keep_settings(settings, tmp_path, resuming=True)
    assert loaded_silently(tmp_path / CONFIG_FILE) == settings


def test_a_run_that_names_a_module_of_ours_as_it_was_before_goes_on(tmp_path):
    current = loaded_silently(written(tmp_path), "serve=[Lake=rollgym.envs.games.frozen_lake:FrozenLakeEnv]")
    kept = current.model_dump(mode="json") | {"serve": ["Lake=envs.games.frozen_lake:FrozenLakeEnv"]}
    (tmp_path / CONFIG_FILE).write_text(yaml.safe_dump(kept))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert changed_settings(current, tmp_path) == []
    with pytest.warns(FutureWarning, match="^Lake=envs.* is called Lake=rollgym.envs.* now$"):
        same = load_settings(written(tmp_path), ["serve=[Lake=envs.games.frozen_lake:FrozenLakeEnv]"])
    assert changed_settings(same, tmp_path) == []


def test_the_option_is_understood_by_its_former_name_and_shown_by_the_present_one(capsys):
    parser = parser_of(split_command(["rollout"])[0])
    with pytest.warns(FutureWarning, match="^--panel is called --evaluation-set now$"):
        former = parser.parse_intermixed_args(["--panel", "lake", "steps=1"])
    assert former == parser.parse_intermixed_args(["--evaluation-set", "lake", "steps=1"])
    assert former.evaluation_set == "lake"
    assert "--panel" not in parser.format_help()
    with pytest.raises(SystemExit):
        parser.parse_intermixed_args(["--panel", "lake", "--evaluation-set", "lake"])
    assert "not allowed with argument --panel" in capsys.readouterr().err


def test_the_format_of_calls_is_understood_by_its_former_name() -> None:
    with pytest.warns(FutureWarning, match="^agents.tool_format: 'qwen_xml' is called 'qwen-xml' now$"):
        former = settings_from(BASE | {"agents": {"tool_format": "qwen_xml"}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        current = settings_from(BASE | {"agents": {"tool_format": "qwen-xml"}})
    assert former == current


def test_a_command_tells_a_former_name_in_a_line(tmp_path) -> None:
    words = ["--config", "frozen_lake", "evaluation.panels.held_out.episodes=5", "--dry-run"]
    command = [sys.executable, "-m", "rollgym.trainer.cli", *words]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert told.stderr == "roll-train: evaluation.panels is called evaluation.sets now\n"
