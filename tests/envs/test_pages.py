"""The pages of the environments say what the code says."""

import json
from pathlib import Path

import pytest

from rollgym.envs.pages import EPISODES, FOLDER, example_episode, pages
from rollgym.envs.registry import builtin_environments

PAGES = Path(__file__).parents[2] / FOLDER
RECORDED = json.loads((PAGES / EPISODES).read_text())
REMAKE = "run `python -m rollgym.envs.pages`, and with `--play` where an example episode has changed"


def test_the_pages_are_those_that_the_classes_make() -> None:
    made = pages(builtin_environments(), RECORDED)
    there = {path.name: path.read_text() for path in PAGES.glob("*.md")}
    assert made.keys() == there.keys(), REMAKE
    for name, text in made.items():
        assert text == there[name], f"{name} is out of date: {REMAKE}"


@pytest.mark.parametrize("env_id", builtin_environments())
def test_a_page_has_all_of_its_parts(env_id: str) -> None:
    text = (PAGES / f"{env_id}.md").read_text()
    for part in (
        "| observation |",
        "| actions |",
        "| reward |",
        "## Kwargs",
        "## An episode",
        "## Baselines",
    ):
        assert part in text


@pytest.mark.parametrize("env_id", builtin_environments())
def test_example_episodes_are_played_so_again(env_id: str) -> None:
    env_class = builtin_environments()[env_id].load()
    if env_class.metadata["deterministic"] and "needs" not in env_class.metadata:
        assert example_episode(env_class) == RECORDED[env_id], REMAKE
