"""The examples of parts of one's own: short, and each of them runs."""

from pathlib import Path

import pytest

from rollgym.trainer.cli import main
from tests.support.processes import env_server, read_lines

EXAMPLES = Path(__file__).parents[2] / "examples"
EXTENSIONS = EXAMPLES / "extensions"
NAMED = {
    "coroutine_reward": ["rollout.reward=examples.extensions.coroutine_reward:judged"],
    "group_reward": ["rollout.group_reward=examples.extensions.group_reward:shortest_wins"],
    "coroutine_group_reward": ["rollout.group_reward=examples.extensions.coroutine_group_reward:ranked"],
    "reward": ["rollout.reward=examples.reward:sooner_is_better"],
    "context": ["prompt={custom_context: 'examples.extensions.context:last_two', instruction: none}"],
    "episodes": ["algorithm.episodes={kind: custom, function: 'examples.extensions.episodes:readable'}"],
    "selection": ["algorithm.selection={kind: custom, function: 'examples.extensions.selection:surprising'}"],
    "filter": ["algorithm.filter={kind: custom, function: 'examples.extensions.filter:mixed'}"],
    "agent": ["rollout.agent=examples.extensions.agent:two_tries"],
    "advantage": ["algorithm.advantage={kind: custom, function: 'examples.extensions.advantage:later'}"],
    "surrogate": ["algorithm.surrogate={kind: custom, function: 'examples.extensions.surrogate:smooth'}"],
    "task_source": ["tasks=[]", "rollout.task_source=examples.extensions.task_source:Growing"],
}
RUN = (
    "tasks=[{env_id: FrozenLake-v0, kwargs: {size: 4, split: train, max_episode_steps: 6}}]",
    "prompt={context: single_turn, instruction: none}",
    "rollout={groups_per_step: 2, group_size: 2, max_turns: 6, max_new_tokens: 3}",
    "model={hidden_size: 16, layers: 1, heads: 2, max_length: 96}",
    "tracking={tensorboard: false}",
    "evaluation.every=0",
    "steps=1",
)


@pytest.fixture(scope="module")
def url():
    with env_server() as url:
        yield url


def test_every_example_is_short_and_is_run_here():
    paths = [*EXTENSIONS.glob("*.py"), EXAMPLES / "reward.py"]
    assert {path.stem for path in paths} == set(NAMED)
    for path in paths:
        assert len(path.read_text().splitlines()) <= 30, path


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NAMED))
def test_an_example_of_a_part_of_ones_own_trains(name, url, tmp_path):
    assert main([*RUN, *NAMED[name], "--env-url", url, f"output_dir={tmp_path}"]) == 0
    episodes = read_lines(tmp_path / "episodes.jsonl")
    assert len(episodes) == 4
    if name == "coroutine_reward":
        turns = [turn for each in episodes for turn in each["turns"]]
        assert {round(turn["reward"] % 1, 6) for turn in turns} <= {0.0, 0.1}
        assert any(turn["reward"] > 0 for turn in turns)
    if name == "agent":
        assert all(len(each["turns"]) <= 3 for each in episodes)
    if name == "task_source":
        assert {each["task"]["domain"] for each in episodes} == {"lake of 4"}


def strange(group):
    return [[float("nan") for _ in each.turns] for each in group]


def short(group):
    return []


@pytest.mark.parametrize(
    ("function", "code", "said"),
    [
        (
            "short",
            2,
            f"rollout.group_reward '{__name__}:short' returned rewards of 0 episodes for 2",
        ),
        ("strange", 2, "invalid_number"),
    ],
)
def test_a_group_reward_that_is_wrong_is_named(function, code, said, url, tmp_path, capsys):
    named = f"rollout.group_reward={__name__}:{function}"
    words = [*RUN, named, "rollout.max_failed_groups=1", "--env-url", url, f"output_dir={tmp_path}"]
    assert main(words) == code
    told = capsys.readouterr()
    assert said in told.err + told.out
