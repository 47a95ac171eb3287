"""A package of somebody else's adds one of each kind, and it works as ours do: in settings, commands and runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rollgym.trainer.algorithms.advantage_settings import ADVANTAGES
from rollgym.trainer.algorithms.group_filters import FILTERS
from rollgym.trainer.algorithms.surrogates import SURROGATES
from rollgym.trainer.config.load import load_settings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.kinds import kind_of
from tests.support.other_package import install

ALGORITHMS = '''
from typing import ClassVar, Literal

from rollgym.trainer.algorithms.advantage import Advantage
from rollgym.trainer.algorithms.group_filters import Filter
from rollgym.trainer.algorithms.surrogates import Surrogate


class Signs(Advantage):
    """Whether an episode scored anything."""

    kind: Literal["signs"]
    unit_of_credit: ClassVar[str] = "trajectory"
    formula: ClassVar[str] = "`height` or `-height`"
    height: float = 1.0

    def of_turns(self, credit):
        return [[self.height if sum(turns) > 0 else -self.height for _ in turns] for turns in credit.rewards]


class Plain(Surrogate):
    """The policy gradient, scaled."""

    kind: Literal["plain"]
    formula: ClassVar[str] = "`-s A lp`"
    has_ratio: ClassVar[bool] = False
    scale: float = 1.0

    def loss(self, inputs):
        from rollgym.trainer.algorithms.losses import reinforce_surrogate

        return reinforce_surrogate(self.scale * inputs.logprobs, inputs.advantages)


class First(Filter):
    """The first groups."""

    kind: Literal["first"]
    keeps: ClassVar[str] = "the first `count` groups"
    count: int = 1

    def kept(self, groups):
        return set([*groups.sizes][: self.count])
'''
ENTRIES = {
    "rollgym.advantages": {"signs": "others:Signs"},
    "rollgym.surrogates": {"plain": "others:Plain"},
    "rollgym.filters": {"first": "others:First"},
}
CHOSEN = (
    "algorithm.advantage={kind: signs, height: 2}",
    "algorithm.surrogate={kind: plain, scale: 0.5}",
    "algorithm.filter={kind: first}",
)
RUN = (
    "tasks=[{env_id: FrozenLake-v0, kwargs: {size: 4, split: train, max_episode_steps: 4}}]",
    "prompt={context: single_turn, instruction: none}",
    "rollout={groups_per_step: 2, group_size: 2, max_turns: 4, max_new_tokens: 3}",
    "model={hidden_size: 16, layers: 1, heads: 2, max_length: 96}",
    "tracking={tensorboard: false}",
    "evaluation.every=0",
    "steps=1",
)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder that the commands below find modules and packages in."""
    site = tmp_path / "site"
    site.mkdir()
    install(site, "others", ALGORITHMS, ENTRIES)
    return site


def roll_train(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rollgym.trainer.cli", *words],
        env=os.environ | {"PYTHONPATH": str(site)},
        cwd=site.parent,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_a_run_is_made_of_parts_of_another_package(site: Path) -> None:
    done = roll_train(site, *RUN, *CHOSEN, "output_dir=run")
    assert done.returncode == 0, done.stderr
    written = yaml.safe_load((site.parent / "run" / "config.yaml").read_text())["algorithm"]
    assert (written["advantage"]["kind"], written["advantage"]["height"]) == ("signs", 2.0)
    assert written["surrogate"] == {"kind": "plain", "scale": 0.5}
    assert written["filter"] == {"kind": "first", "count": 1}
    numbers = (site.parent / "run" / "metrics.jsonl").read_text()
    assert '"batch/advantage_max": 2.0' in numbers
    assert '"rollout/groups_kept": 1' in numbers
    # The settings that it wrote are understood again.
    again = roll_train(site, "--config", "run/config.yaml", "--dry-run")
    assert again.returncode == 0, again.stderr
    assert yaml.safe_load(again.stdout)["algorithm"] == written


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("algorithm.advantage={kind: sings}", "there is no kind 'sings'; did you mean signs?"),
        (
            "algorithm.advantage={kind: signs, heigth: 2}",
            "algorithm.advantage: unknown key 'heigth'; did you mean 'height'?",
        ),
        ("algorithm.advantage={kind: signs, height: no}", "algorithm.advantage.height"),
        ("algorithm={advantage: {kind: signs}, critic: {}}", "advantage 'signs' never reads a critic"),
        ("algorithm={surrogate: {kind: plain}, epochs: 2}", "surrogate 'plain' has no ratio"),
    ],
)
def test_settings_of_its_kinds_are_checked_as_ours_are(
    word: str, said: str, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(site))
    with pytest.raises(ConfigError) as refused:
        load_settings(None, [*RUN, word])
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("code", "path", "said"),
    [
        ("import nowhere", "broken:Kind", "it imports 'nowhere', which is not installed"),
        ("x = 1", "broken:Kind", "module 'broken' has no attribute 'Kind'"),
        ("Kind = dict", "broken:Kind", "broken:Kind is no subclass of rollgym.trainer.algorithms.advantage"),
        (
            "from rollgym.trainer.algorithms.advantage_settings import HgpoAdvantage as Kind",
            "broken:Kind",
            "says `kind: Literal['hgpo']`; the entry point must have the same name",
        ),
    ],
)
def test_a_broken_package_is_named_where_it_is_asked_for_and_nowhere_else(
    code: str, path: str, said: str, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, "broken", code, {"rollgym.advantages": {"torn": path}})
    monkeypatch.syspath_prepend(str(site))
    assert load_settings(None, [*RUN, "algorithm.advantage={kind: hgpo}"]).algorithm.advantage.kind == "hgpo"
    with pytest.raises(ConfigError) as refused:
        load_settings(None, [*RUN, "algorithm.advantage={kind: torn}"])
    assert "kind 'torn' of the package broken is broken" in str(refused.value)
    assert said in str(refused.value)
    sys.modules.pop("broken", None)


def test_two_packages_of_one_name_are_told_apart(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "more", ALGORITHMS, {"rollgym.advantages": {"signs": "more:Signs"}})
    monkeypatch.syspath_prepend(str(site))
    with pytest.raises(ConfigError, match="kind 'signs' is in several packages, more and others: uninstall"):
        load_settings(None, [*RUN, "algorithm.advantage={kind: signs}"])


@pytest.mark.parametrize("kinds", [ADVANTAGES, SURROGATES, FILTERS], ids=["advantage", "surrogate", "filter"])
def test_each_kind_of_ours_has_a_name_of_its_own(kinds: tuple[type, ...]) -> None:
    names = [kind_of(each) for each in kinds]
    assert all(names)
    assert len(set(names)) == len(names)
