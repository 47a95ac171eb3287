"""Paths of our modules in old settings lead to where the modules are now, unless the user has such a module."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from rollgym.clients.checks.target import CheckTarget
from rollgym.clients.process.modules import current_path, with_current_paths
from rollgym.env_server.catalog.catalog import Catalog
from rollgym.env_server.common.settings import ServerSettings
from rollgym.envs.games.frozen_lake import FrozenLakeEnv
from rollgym.trainer.core.plugins import load_plugin

ROOT = Path(__file__).parents[3]
FORMER = "envs.games.frozen_lake:FrozenLakeEnv"
CURRENT = f"rollgym.{FORMER}"


@pytest.mark.parametrize(
    ("former", "current"),
    [
        (FORMER, CURRENT),
        (f"Lake-v1={FORMER}", f"Lake-v1={CURRENT}"),
        ("envs.registry:Sokoban-v0", "rollgym.envs.registry:Sokoban-v0"),
        ("trainer.core.seeding:derive_seed", "rollgym.trainer.core.seeding:derive_seed"),
    ],
)
def test_former_paths_are_understood_with_one_warning(former: str, current: str) -> None:
    with pytest.warns(FutureWarning, match=f"^{former} is called {current} now$"):
        assert current_path(former) == current


@pytest.mark.parametrize(
    "path",
    [
        CURRENT,
        "envs.mine:Lake",
        "mine:Lake",
        "envs",
        "envs.registry",
        "http://envs:80",
        "envs.x:",
        "",
        "a" * 10**6,
    ],
)
def test_other_texts_are_left_as_they_are(path: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert current_path(path) == path


def test_every_loader_understands_former_paths() -> None:
    with pytest.warns(FutureWarning, match="is called"):
        assert isinstance(CheckTarget(FORMER).build(), FrozenLakeEnv)
    with pytest.warns(FutureWarning, match="is called"):
        assert load_plugin(FORMER, "rollout.reward").function is FrozenLakeEnv
    with pytest.warns(FutureWarning, match="is called"):
        catalog = Catalog.load(ServerSettings(builtin=False, env=[f"Lake-v1={FORMER}"]))
    assert catalog.get("Lake-v1").source.target == CURRENT


def test_texts_anywhere_in_settings_are_understood() -> None:
    settings = {"serve": [f"Lake-v1={FORMER}"], "rollout": {"reward": "mine:reward"}, "steps": 3}
    with pytest.warns(FutureWarning, match="is called"):
        read = with_current_paths(settings)
    assert read == {"serve": [f"Lake-v1={CURRENT}"], "rollout": {"reward": "mine:reward"}, "steps": 3}


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ((), CURRENT),
        (("envs/__init__.py",), FORMER),
        (("envs.py",), FORMER),
        (("envs/results.json",), CURRENT),
        (("envs/games/frozen_lake.py",), FORMER),
    ],
    ids=["nothing", "a package", "a module", "a folder of data", "the same module in folders"],
)
def test_a_package_of_the_user_wins(files: tuple[str, ...], found: str, tmp_path: Path, monkeypatch) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    # `python -m pytest` has the checkout on the path, whose packages come before folders without an `__init__.py`.
    elsewhere = [each for each in sys.path if Path(each).resolve() != ROOT]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *elsewhere])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        assert current_path(FORMER) == found


def test_a_checkout_of_ours_as_working_directory_is_not_the_users_package(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    with pytest.warns(FutureWarning, match="is called"):
        assert current_path(FORMER) == CURRENT
    assert "envs" not in sys.modules


def test_former_names_are_no_modules(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import envs.registry"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.stderr.rstrip().endswith("ModuleNotFoundError: No module named 'envs'")
