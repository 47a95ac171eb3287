"""Whole runs whose episodes are played by an agent's program, beside the built-in player."""

import asyncio
import json
import shlex
import sys
from pathlib import Path

import pytest

from rollgym.trainer.config.checks import check_settings
from rollgym.trainer.config.load import load_settings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.rollout.agent import play_episode
from rollgym.trainer.run.learning import learn

AGENT = Path(__file__).parents[3] / "support" / "black_box_agents.py"
JUST_PLAY = shlex.join([sys.executable, str(AGENT), "just-play"])
MAP = "{map: [SF, FG], max_episode_steps: 3}"


def settings(directory, *words):
    return load_settings(
        None,
        [
            f"output_dir={directory}",
            "steps=1",
            "seed=5",
            "deterministic=true",
            f"tasks=[{{env_id: FrozenLake-v0, kwargs: {MAP}}}]",
            "model={hidden_size: 16, layers: 1, heads: 2, max_length: 96}",
            "rollout={groups_per_step: 1, group_size: 2, max_turns: 3, max_new_tokens: 3}",
            "evaluation.every=0",
            "tracking={tensorboard: false, console: false, digests: true}",
            *words,
        ],
    )


def episodes(directory):
    return [json.loads(line) for line in (directory / "episodes.jsonl").read_text().splitlines()]


async def _trained(directory, *words):
    async with asyncio.timeout(120):
        assert await learn(settings(directory, *words), "train") == 0
    return episodes(directory)


PROMPTS = "prompt={context: single_turn, instruction: none}"
"""What the agent's program shows the policy."""
EVALUATION_SET = (
    "evaluation.sets={lake: {env_id: FrozenLake-v0, kwargs: %s, episodes: 3, distinct: false, "
    "baselines: false}}"
)


def evaluated(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in row.items() if name.startswith("evaluate/")}
        for row in map(json.loads, lines)
        if any(name.startswith("evaluate/") for name in row)
    ]


async def test_a_program_that_asks_the_same_trains_and_measures_the_same(tmp_path):
    together = [EVALUATION_SET % MAP, "rollout.max_concurrent_sequences=2"]
    built_in = await _trained(tmp_path / "built_in", PROMPTS, *together)
    # Its own temperature is passed over, in greedy evaluation sets, too.
    variables = f"agents.environment={{PLAYED: {tmp_path / 'played'}, ASK_MORE: '{{\"temperature\": 0.3}}'}}"
    program = f"rollout.agent={json.dumps(JUST_PLAY, ensure_ascii=False)}"
    agents = await _trained(tmp_path / "agents", program, "agents.concurrency=2", variables, *together)
    assert [each["segments"] for each in agents] == [each["segments"] for each in built_in]
    assert [each["reward"] for each in agents] == [each["reward"] for each in built_in]
    digests = [
        [json.loads(line) for line in (tmp_path / name / "digests.jsonl").read_text().splitlines()]
        for name in ("built_in", "agents")
    ]
    assert digests[0] == digests[1]
    assert evaluated(tmp_path / "agents") == evaluated(tmp_path / "built_in")
    assert len(evaluated(tmp_path / "agents")) == 2, "at the beginning and at the end"
    # A group of 2, and an evaluation set of 3 in two modes, twice.
    assert len((tmp_path / "played").read_text()) == 2 + 3 * 2 * 2


async def test_agents_that_wait_for_a_place_keep_no_batch_waiting(tmp_path):
    program = f"rollout.agent={json.dumps(JUST_PLAY, ensure_ascii=False)}"
    played = await _trained(tmp_path, program, "agents.concurrency=1")
    assert len(played) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rollout.agent=no-such-program-here --x"], "rollout.agent: 'no-such-program-here' is no program"),
        (["rollout.agent=python 'x"], "rollout.agent: No closing quotation"),
        (["rollout.agent=no_such_module:play"], "rollout.agent: cannot import"),
        (["agents.port=8000"], "agents: is read where rollout.agent is a command line"),
    ],
)
def test_agents_that_cannot_be_are_refused_before_the_run(tmp_path, words, message):
    with pytest.raises(ConfigError) as caught:
        check_settings(settings(tmp_path, *words))
    assert message in str(caught.value)


async def stranger(session, task, member, actor, max_turns, attempt):
    """Records at its first attempts an id that the model does not know."""
    trajectory = await play_episode(session, task, member, actor, max_turns, attempt)
    if attempt == 0:
        trajectory.segments[0].ids[0] = 5_000
    return trajectory


async def test_an_id_that_the_model_does_not_know_costs_the_episode_and_not_the_run(tmp_path):
    played = await _trained(tmp_path, PROMPTS, f"rollout.agent={__name__}:stranger")
    assert [(each["attempt"], each["outcome"] == "invalid_number") for each in played] == [(1, False)] * 2
