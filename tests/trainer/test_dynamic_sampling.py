"""Over-sampling with an early end, in whole runs: what a step does not need is stopped at engine and environments.

Of short and long episodes, groups start beyond those that a step needs. When it is full the others are ended, named in
the ledger, and played anew in a later step, so that what is trained on has the lengths of what was started.
"""

import re
import time
import urllib.request
from collections import Counter
from contextlib import asynccontextmanager

import pytest

from rollgym.trainer.cli import main
from rollgym.trainer.run import train
from tests.support.processes import env_server, read_lines

STEPS, GROUPS, MEMBERS, LONG = 3, 2, 2, 10
RUN = (
    f"tasks=[{{env_id: Count, kwargs: {{length: 2}}, domain: short}}, "
    f"{{env_id: Count, kwargs: {{length: {LONG}}}, domain: long}}]",
    "interleave=step",
    f"steps={STEPS}",
    "prompt={context: single_turn, instruction: none}",
    "model={hidden_size: 16, layers: 1, heads: 2, max_length: 96}",
    "algorithm={preset: grpo, filter: {kind: zero_variance}}",
    f"rollout.reward={__name__}:sometimes_equal",
    "tracking={tensorboard: false}",
    "evaluation.every=0",
)
_opened = {}
_url = []


@pytest.fixture(scope="module")
def url():
    with env_server("--env", "Count=tests.support.served_envs:Count") as url:
        _url[:] = [url]
        yield url


def sometimes_equal(trajectory):
    """Rewards that differ in a group, but for every fifth task."""
    return [float(trajectory.member > 0 and trajectory.task.index % 5 != 0) for _ in trajectory.turns]


def sessions() -> int:
    with urllib.request.urlopen(f"{_url[0]}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return sum(
        int(float(number)) for number in re.findall(r"^rollgym_sessions\{[^}]*\} (\S+)", text, re.MULTILINE)
    )


def nothing_under_way(inputs):
    """The policy gradient; in a synchronous step, only once nobody plays any more."""
    deadline = time.monotonic() + 20
    pool, engine = _opened["open_environments"], _opened["open_players"].client
    while busy := sum(server.lent for server in pool._servers.values()) + engine.counters.running:
        assert time.monotonic() < deadline, f"{busy} episodes and replies go on while the policy is trained"
        time.sleep(0.01)
    return -inputs.advantages * inputs.logprobs


def noting(name, opening):
    """Note what a part of the run opens, so that it can be looked at while the run goes on."""

    @asynccontextmanager
    async def noted(*arguments, **named):
        async with opening(*arguments, **named) as opened:
            _opened[name] = opened
            yield opened

    return noted


@pytest.mark.parametrize("staleness", [0, 1])
def test_what_a_step_does_not_need_is_ended_named_and_played_later(staleness, url, tmp_path, monkeypatch):
    for name in ("open_environments", "open_players"):
        monkeypatch.setattr(train, name, noting(name, getattr(train, name)))
    rollout = (
        f"rollout={{groups_per_step: {GROUPS}, group_size: {MEMBERS}, extra_groups: {GROUPS}, max_turns: {LONG}, "
        f"max_new_tokens: 2, max_staleness: {staleness}, reward: '{__name__}:sometimes_equal'}}"
    )
    surrogate = f"algorithm.surrogate={{kind: custom, function: '{__name__}:nothing_under_way'}}"
    words = [*RUN, rollout, *([surrogate] if staleness == 0 else [])]
    assert main([*words, "--env-url", url, f"output_dir={tmp_path}"]) == 0
    assert sessions() == 0

    events = read_lines(tmp_path / "ledger.jsonl")
    fates = {event["task"]: (event["fate"], event.get("reason", "")) for event in events}
    counts = Counter(fates.values())
    assert counts["trained", ""] == STEPS * GROUPS
    assert set(counts) <= {
        ("trained", ""),
        ("dropped", "filter:zero_variance"),
        ("dropped", "the run ended"),
    }
    played = {task: fate for task, fate in fates.items() if fate != ("dropped", "the run ended")}
    assert {task for task, (fate, _) in played.items() if fate == "dropped"} == {
        task for task in played if task % 5 == 0
    }
    aside = [event["task"] for event in events if event["fate"] == "put_aside"]
    assert aside, "the long ones were never ready with the short ones"
    assert len(set(aside)) == len(aside), "nobody is put aside twice"

    trained = [
        each for each in read_lines(tmp_path / "episodes.jsonl") if each["group"]["decision"] == "kept"
    ]
    assert {len(each["turns"]) for each in trained} <= {2, LONG}, "nobody is trained who was stopped"
    if staleness == 0:  # where rollouts run ahead, the run may end before the long ones' turn has come
        assert {len(each["turns"]) for each in trained} == {2, LONG}
        assert {task for task in aside if fates[task][0] == "trained"}, "what was put aside is trained later"
    steps = read_lines(tmp_path / "metrics.jsonl")
    lags = [line["rollout/lag_max"] for line in steps if "rollout/lag_max" in line]
    assert not lags or max(lags) <= staleness
