"""Judges have servers and queues of their own: what is asked of one waits for no other."""

import asyncio
import sys
from contextlib import AsyncExitStack
from functools import partial

import pytest

from rollgym.clients.client.client import EnvClient
from rollgym.trainer.cluster.placement import place_roles
from rollgym.trainer.cluster.roles import LocalRoles
from rollgym.trainer.config.load import load_settings
from rollgym.trainer.core.embedded_server import embedded_server
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.run.judges import apart_from_judges, brought_to_judges, open_judges

PATIENCE_S = 120


def settings_of(*words):
    judges = "{A: {devices: 1, model: a, command: [a]}, B: {devices: 2, model: b, command: [b]}}"
    return load_settings(None, [f"cluster.roles.judges={judges}", *words])


def test_what_names_a_judge_is_played_on_its_server():
    settings = settings_of(
        "tasks=[{env_id: A}, {env_id: FrozenLake-v0}, {env_id: A, url: 'http://c:1'}]",
        "datasets=[{path: x, verifier: B}, {path: y, route: {column: k, verifiers: {m: Math-v0, b: B}}}]",
        "evaluation.sets={p: {env_id: A}, q: {dataset: {path: z, verifier: B}}}",
    )
    brought = brought_to_judges(settings, {"A": "http://a:1", "B": "http://b:1"})
    assert [task.url for task in brought.tasks] == ["http://a:1", None, "http://c:1"]
    assert [dataset.url for dataset in brought.datasets] == ["http://b:1", "http://b:1"]
    p, q = brought.evaluation.sets["p"], brought.evaluation.sets["q"]
    assert (p.url, q.url, q.dataset.url) == ("http://a:1", None, "http://b:1")


def test_a_probe_asks_only_what_runs_without_judges():
    settings = settings_of(
        "tasks=[{env_id: A}, {env_id: FrozenLake-v0}]",
        "datasets=[{path: x, verifier: B}, {path: y, verifier: Math-v0}]",
        "evaluation.sets={p: {env_id: A}, q: {dataset: {path: z, verifier: B}}, r: {env_id: FrozenLake-v0}}",
    )
    left = apart_from_judges(settings)
    assert [task.env_id for task in left.tasks] == ["FrozenLake-v0"]
    assert [dataset.path for dataset in left.datasets] == ["y"]
    assert list(left.evaluation.sets) == ["r"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tasks=[{env_id: A}]"], "judges.B: no task, data set or evaluation set names the environment B"),
        (
            ["datasets=[{path: y, route: {column: k, verifiers: {m: A, b: B}}}]"],
            "datasets.0 asks judges A and B, each of which has a queue of its own: make it one data set for each",
        ),
    ],
)
def test_judges_that_cannot_be_asked_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        brought_to_judges(settings_of(*words), {"A": "http://a:1", "B": "http://b:1"})


async def test_a_judge_that_is_busy_slows_no_other(tmp_path):
    busy, idle = tmp_path / "busy", tmp_path / "idle"
    idle.touch()
    words = ["tasks=[{env_id: Busy}, {env_id: Idle}]", f"output_dir={tmp_path}/run"]
    for name, device, gate in (("Busy", 1, busy), ("Idle", 2, idle)):
        command = [sys.executable, "-m", "tests.support.judge_program", "{host}", "{port}", str(gate)]
        words.append(f"cluster.roles.judges.{name}={{devices: {device}, model: m, command: {command}}}")
    settings = load_settings(None, words)
    task = {"question": "What is the capital of Peru?", "reference": "Lima", "response": "Lima"}
    async with asyncio.timeout(PATIENCE_S), AsyncExitStack() as stack:
        cluster = LocalRoles(settings, place_roles(settings), lambda _: None)
        stack.push_async_callback(cluster.close)
        serve = lambda served, words: partial(embedded_server, words=words)(served)  # noqa: E731
        brought = await open_judges(settings, cluster, serve, stack, lambda _: None)
        clients = [await stack.enter_async_context(EnvClient(task.url)) for task in brought.tasks]
        # More than one server has threads for: all of them wait for the judge that is busy.
        waiting = asyncio.ensure_future(clients[0].verify("Busy", [task] * 40))
        while not (tmp_path / "busy.asked").exists():
            await asyncio.sleep(0.01)
        verdicts = await clients[1].verify("Idle", [task])
        assert [verdict.score for verdict in verdicts] == [1.0]
        assert not waiting.done()
        busy.touch()
        assert {verdict.score for verdict in await waiting} == {1.0}


async def test_verdicts_that_wait_are_many_and_one_that_is_given_up_takes_no_other_along(tmp_path):
    gate = tmp_path / "gate"
    command = [sys.executable, "-m", "tests.support.judge_program", "{host}", "{port}", str(gate)]
    judge = f"{{devices: 1, model: m, command: {command}}}"
    words = ["tasks=[{env_id: Rubric}]", f"output_dir={tmp_path}/run", f"cluster.roles.judges.Rubric={judge}"]
    settings = load_settings(None, words)
    task = {"question": "What is the capital of Peru?", "reference": "Lima"}
    async with asyncio.timeout(PATIENCE_S), AsyncExitStack() as stack:
        cluster = LocalRoles(settings, place_roles(settings), lambda _: None)
        stack.push_async_callback(cluster.close)
        serve = lambda served, words: partial(embedded_server, words=words)(served)  # noqa: E731
        brought = await open_judges(settings, cluster, serve, stack, lambda _: None)
        client = await stack.enter_async_context(EnvClient(brought.tasks[0].url))
        sessions = [await client.make("Rubric") for _ in range(6)]
        for session in sessions:
            await session.reset(seed=0, options=task)
        # Each says something else: what was judged before is remembered.
        steps = [
            asyncio.ensure_future(session.step(f"Lima {number}")) for number, session in enumerate(sessions)
        ]
        asked = tmp_path / "gate.asked"
        while not asked.exists() or len(asked.read_text()) < len(steps):
            await asyncio.sleep(0.01)
        given_up, *others = steps
        given_up.cancel()
        await sessions[0].close()
        gate.touch()
        assert {(await step).info["outcome"] for step in others} == {"wrong"}
