"""A package of somebody else's adds one of each kind, and it works as ours do: in settings, commands and runs."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rollgym.trainer.algorithms.advantage_settings import ADVANTAGES
from rollgym.trainer.algorithms.group_filters import FILTERS
from rollgym.trainer.algorithms.surrogates import SURROGATES
from rollgym.trainer.assembly.layout import check_combinations
from rollgym.trainer.commands.agent_proxy import main as agent_proxy
from rollgym.trainer.config.load import load_settings
from rollgym.trainer.config.output import TrackingSettings
from rollgym.trainer.config.trackers import TRACKERS
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.kinds import kind_of
from rollgym.trainer.inference.base import GenerationRequest, SamplingParams
from rollgym.trainer.inference.server_client import ServerClient
from rollgym.trainer.learn.boards import RunIdentity, open_boards
from tests.support.inference_server.running import InferenceServer
from tests.support.other_package import GROUPS_OF_RUNS, install

ROOT = Path(__file__).parents[1]
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
RUNS = '''
import json
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from rollgym.trainer.assembly.rank_makers import Fsdp2Maker
from rollgym.trainer.config.backend_kinds import BACKENDS
from rollgym.trainer.config.server_kinds import INFERENCE_SERVERS
from rollgym.trainer.config.trackers import TrackerSettings


class MirrorMaker(Fsdp2Maker):
    """Torch's own sharding, and a word about it."""

    def trained(self, settings, head, group, schedule):
        Path(settings.output_dir, "mirrored").touch()
        return super().trained(settings, head, group, schedule)


MAKER = MirrorMaker()


def refusals(settings):
    if settings.model.lora is not None:
        yield "model.lora: backend.kind mirror trains no adapters: leave it out"


MIRROR = replace(BACKENDS[1], name="mirror", maker="others_of_runs:MAKER", refusals=refusals)
SAMPLER = replace(INFERENCE_SERVERS[0], name="sampler", title="Sampler", group="", inexact="it rounds")


class Notes(TrackerSettings):
    """A file of notes."""

    name: ClassVar[str] = "notes"
    board: ClassVar[str] = "others_of_runs:NotesBoard"
    file: str = "notes.jsonl"


class NotesBoard:
    """The file."""

    def __init__(self, settings, run):
        self._path = run.directory / settings.file

    def log(self, step, values):
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\\n")

    def close(self):
        pass
'''
OF_RUNS = {
    "rollgym.backends": {"mirror": "others_of_runs:MIRROR"},
    "rollgym.inference": {"sampler": "others_of_runs:SAMPLER"},
    "rollgym.trackers": {"notes": "others_of_runs:Notes"},
}
ENTRIES = {
    "rollgym.advantages": {"signs": "others:Signs"},
    "rollgym.surrogates": {"plain": "others:Plain"},
    "rollgym.filters": {"first": "others:First"},
}
CHOSEN = (
    "algorithm.advantage={kind: signs, height: 2}",
    "algorithm.surrogate={kind: plain, scale: 0.5}",
    "algorithm.filter={kind: first}",
    "backend.kind=mirror",
    "tracking.others.notes={file: told.jsonl}",
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
def site(tmp_path: Path) -> Iterator[Path]:
    """A folder that the commands below find modules and packages in."""
    site = tmp_path / "site"
    site.mkdir()
    install(site, "others", ALGORITHMS, ENTRIES)
    install(site, "others_of_runs", RUNS, OF_RUNS)
    yield site
    for name in ("others", "others_of_runs", "more", "broken"):
        sys.modules.pop(name, None)


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
    assert (site.parent / "run" / "mirrored").exists(), "a rank found the package, too"
    told = json.loads((site.parent / "run" / "told.jsonl").read_text().splitlines()[0])
    assert (told["step"], told["batch/advantage_max"]) == (1, 2.0)
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
        ("backend.kind=miror", "backend.kind: there is no kind 'miror'; did you mean mirror?"),
        ("backend={kind: mirror, zero_stage: 2}", "not by 'mirror': leave it out"),
        ("inference.kind=samplr", "inference.kind: there is no kind 'samplr'; did you mean sampler?"),
        ("inference.kind=sampler", "kind 'sampler' needs either urls of servers that run, or launch"),
        ("tracking.others={note: {}}", "there is no tracker 'note' of another package; did you mean notes?"),
        ("tracking.others={wandb: {}}", "it is tracking.wandb"),
        ("tracking.others={notes: {fil: a}}", "unknown key 'fil'; did you mean 'file'?"),
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


def test_what_its_back_end_refuses_is_said_before_anything_is_begun(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(site))
    settings = load_settings(None, [*RUN, "backend.kind=mirror", "model.lora={}"])
    with pytest.raises(ConfigError, match=r"model\.lora: backend\.kind mirror trains no adapters"):
        check_combinations(settings)


async def test_its_inference_servers_are_asked_and_chosen_by_name(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(site))
    with InferenceServer("vllm") as server:
        async with ServerClient(server.url, "sampler") as client:
            result = await client.generate(GenerationRequest("r", [72, 101], SamplingParams(3), 1))
    assert len(result.token_ids) == 3
    with pytest.raises(SystemExit):
        agent_proxy(["--help"])
    assert "{vllm,sglang,sampler}" in capsys.readouterr().out


def test_two_packages_of_one_name_are_told_apart(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "more", ALGORITHMS, {"rollgym.advantages": {"signs": "more:Signs"}})
    monkeypatch.syspath_prepend(str(site))
    with pytest.raises(ConfigError, match="kind 'signs' is in several packages, more and others: uninstall"):
        load_settings(None, [*RUN, "algorithm.advantage={kind: signs}"])


def test_a_package_adds_one_of_each_kind_here_and_a_page_says_how() -> None:
    assert {*ENTRIES, *OF_RUNS} == GROUPS_OF_RUNS
    page = (ROOT / "docs" / "packages.md").read_text()
    assert [group for group in GROUPS_OF_RUNS if f"| `{group}` |" not in page] == []


@pytest.mark.parametrize("name", [each.name for each in TRACKERS])
def test_a_tracker_of_ours_is_opened_by_its_name(name: str, tmp_path: Path) -> None:
    settings = TrackingSettings.model_validate({name: {}})
    assert [each.name for each in settings.chosen] == [name]
    boards = open_boards(settings, RunIdentity(tmp_path, "run", {}, 0), lambda _: None)
    assert [each.name for each in boards] == [name]
    for each in boards:
        each.close(30.0)


@pytest.mark.parametrize("kinds", [ADVANTAGES, SURROGATES, FILTERS], ids=["advantage", "surrogate", "filter"])
def test_each_kind_of_ours_has_a_name_of_its_own(kinds: tuple[type, ...]) -> None:
    names = [kind_of(each) for each in kinds]
    assert all(names)
    assert len(set(names)) == len(names)
