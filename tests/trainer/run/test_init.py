"""`roll-train init` writes a folder whose run can be started as it stands."""

import re
import shlex
from pathlib import Path

import pytest

from rollgym.trainer.cli import main
from rollgym.trainer.config.load import load_settings, shipped_configs
from rollgym.trainer.run.catalogue import run_files
from tests.support.processes import ROOT, env_server, read_lines, running
from tests.support.roll_train import console_script

SMALL = (
    "steps=1",
    "warm_start={demonstrations: 8, epochs: 1}",
    "rollout.groups_per_step=2",
    "evaluation={every: 0, sets: {}}",
    "checkpoint={every: 0}",
    "tracking.tensorboard=false",
)


def written(folder: Path, name: str) -> Path:
    for path, text in run_files(shipped_configs()[name], folder.name).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", shipped_configs())
def test_a_folder_has_the_configuration_with_a_reward_of_its_own(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(written(tmp_path, name))
    mine = load_settings(Path("run.yaml")).model_dump()
    theirs = load_settings(Path(name)).model_dump()
    assert mine["rollout"].pop("reward") == "reward:rewards"
    assert theirs["rollout"].pop("reward") is None
    for settings in (mine, theirs):
        for dataset in [
            *settings["datasets"],
            *(each["dataset"] for each in settings["evaluation"]["sets"].values()),
        ]:
            if dataset is not None:
                dataset["path"] = Path(dataset["path"]).read_text()
    assert mine == theirs
    text = Path("run.yaml").read_text()
    assert "examples/" not in text.replace("examples/one_gpu/run.py", "")
    assert "examples." not in text
    # Pages are named by where they are read, and there is one at each address.
    assert "docs/" not in text
    for page in re.findall(r"rollgym\.github\.io/rollgym/([\w/-]+)\.html", text):
        assert (ROOT / "docs" / f"{page}.md").is_file()


@pytest.mark.parametrize("name", shipped_configs())
def test_the_readme_has_the_name_and_the_commands(name: str, tmp_path: Path) -> None:
    readme = run_files(shipped_configs()[name], "mein See ä\nx\x1b[2J")["README.md"]
    assert readme.startswith("# mein See ä x\\x1b[2J\n")
    assert f"`{name}`" in readme
    assert "Scaffold" not in readme
    assert len(readme.splitlines()) <= 12


def test_files_that_a_configuration_names_are_taken_along() -> None:
    files = run_files(shipped_configs()["verifiable_rewards"], "sums")
    assert {"data/questions_train.jsonl", "data/questions_test.jsonl"} < set(files)
    files = run_files(shipped_configs()["frozen_lake_image"], "lake")
    assert "def without_seeing" in files["black_pictures.py"]
    assert "prompt.custom_context=black_pictures:without_seeing" in files["run.yaml"]


def test_it_says_what_to_type_and_never_overwrites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0
    assert capsys.readouterr().out == (
        "wrote frozen_lake: run.yaml, README.md, reward.py\nnext: cd frozen_lake && roll-train --config run.yaml\n"
    )
    assert main(["init", "it's ä", "--from", "sokoban"]) == 0
    following = capsys.readouterr().out.splitlines()[1]
    assert shlex.split(following)[:3] == ["next:", "cd", "it's ä"]
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert main(["init", "frozen_lake", "--from", "sokoban"]) == 2
    assert "frozen_lake exists already, and nothing is overwritten" in capsys.readouterr().err
    assert main(["init", "other", "--from", "sokobn"]) == 2
    assert "did you mean sokoban" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_what_it_writes_trains_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "mein See ä"]) == 0
    reward = tmp_path / "mein See ä" / "reward.py"
    reward.write_text(reward.read_text().replace("COST_OF_A_TURN = 0.0", "COST_OF_A_TURN = 100.0"))
    with env_server("--allow-expert") as url:
        words = ("--config", "run.yaml", "--env-url", url, *SMALL)
        with running(console_script(reward.parent, *words)) as process:
            output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    episodes = read_lines(reward.parent / "runs/frozen_lake/episodes.jsonl")
    assert len(episodes) == 8
    assert all(turn["reward"] < -90 for each in episodes for turn in each["turns"])
