"""The pages of the environments say what the code says."""

import json
from pathlib import Path

import pytest

from rollgym.envs.example_episodes import environment_class, example_episode
from rollgym.envs.pages import EPISODES, FOLDER, pages
from rollgym.envs.registry import builtin_environments

ROOT = Path(__file__).parents[2]
REMAKE = "run `python -m rollgym.envs.pages`, and with `--play` where an example episode has changed"


def test_the_pages_are_those_that_the_classes_make() -> None:
    made = pages(ROOT)
    there = {path.name: path.read_text() for path in (ROOT / FOLDER).glob("*.md")}
    assert made.keys() == there.keys(), REMAKE
    for name, text in made.items():
        assert text == there[name], f"{name} is out of date: {REMAKE}"


@pytest.mark.parametrize("env_id", builtin_environments())
def test_a_page_has_all_of_its_parts(env_id: str) -> None:
    text = (ROOT / FOLDER / f"{env_id}.md").read_text()
    for part in (
        "| observation |",
        "| actions |",
        "| reward |",
        "## Kwargs",
        "## An episode",
        "## Baselines",
    ):
        assert part in text


@pytest.mark.parametrize(
    "env_id",
    [
        spec.id
        for spec in builtin_environments().values()
        # Those that need neither a sandbox, nor an extra, nor a catalogue.
        if spec.entry_point.startswith(
            ("rollgym.envs.games", "rollgym.envs.games.sokoban", "rollgym.envs.tools.tool_use:")
        )
    ],
)
def test_example_episodes_are_played_so_again(env_id: str) -> None:
    recorded = json.loads((ROOT / EPISODES).read_text())[env_id]
    spec = builtin_environments()[env_id]
    assert environment_class(spec).metadata["deterministic"]
    assert example_episode(spec) == recorded, REMAKE
