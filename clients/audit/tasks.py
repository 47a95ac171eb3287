"""Tasks that a verifier is audited with: drawn, scored, and the answers that it pays in full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollgym.clients.audit.arena import Arena, Game
from rollgym.clients.audit.policies import WORDINGS, GiveUp, Player, Policy
from rollgym.clients.audit.subject import Subject
from rollgym.clients.audit.watch import Watch
from rollgym.clients.protocol.messages import Verdict as Score

FULL = 1.0 - 1e-6
"""A score from here on is one in full."""
_MOST_TASKS = 60
_ANSWER_NAMES = frozenset({"answer", "solution", "target", "reference", "expected", "label", "ground_truth"})


@dataclass(frozen=True)
class Task:
    """A task with its prompt and instruction; the answer is a text that earns the full score, if one is known.

    `told` is the info of a reset to the same task without the option `expert`, if there was one.
    """

    fields: Mapping[str, Any]
    prompt: str = ""
    instruction: str = ""
    answer: str | None = None
    field: str | None = None
    told: Mapping[str, Any] | None = None
    seed: int | None = None


async def draw_tasks(subject: Subject) -> list[Task]:
    """Return the given tasks, or those that resets draw and show if asked for the expert."""
    if subject.settings.items:
        return [Task(dict(fields)) for fields in subject.settings.items[:_MOST_TASKS]]
    seeds = subject.seeds("tasks", min(_MOST_TASKS, max(20, subject.settings.episodes)))
    told = await _resets(seeds, subject.arena(), None)
    # A server that shows no tasks, or a verifier without that option, is not at fault.
    unwatched = Arena(subject.client, subject.env.env_id, subject.kwargs, Watch(), 1)
    asked = await _resets(seeds, unwatched, {"expert": True})
    tasks = []
    for seed, (observation, info) in (asked or told).items():
        state = info.get("state")
        fields = state.get("task") if isinstance(state, Mapping) else None
        if isinstance(fields, Mapping) and fields:
            instruction = str(info.get("instruction", ""))
            before = told.get(seed, ("", {}))[1]
            tasks.append(Task(dict(fields), observation, instruction, told=before, seed=seed))
    return tasks


async def _resets(
    seeds: Sequence[int], arena: Arena, options: Mapping[str, Any] | None
) -> dict[int, tuple[str, Mapping[str, Any]]]:
    """Return observation and info of resets, by seed."""
    seen: dict[int, tuple[str, Mapping[str, Any]]] = {}

    def begin(seed: int) -> Player:
        def see(observation: Any, info: Mapping[str, Any]) -> Any:
            seen[seed] = str(observation), info
            raise GiveUp

        return see

    policy = Policy("tasks", begin, options)
    await arena.play([Game(policy, seed) for seed in seeds])
    return {seed: seen[seed] for seed in seeds if seed in seen}


async def score_all(subject: Subject, items: Sequence[tuple[Task, str]]) -> list[Score]:
    """Score responses, each to its task."""
    return await subject.client.verify(
        subject.env.env_id, [{**task.fields, "response": response} for task, response in items]
    )


async def with_answers(subject: Subject, tasks: Sequence[Task]) -> list[Task]:
    """Find the field that, said as the response, is paid in full: the reference answer."""
    best: tuple[int, str] | None = None
    for name in sorted(fields_to_say(tasks[0]), key=lambda name: name not in _ANSWER_NAMES):
        for wording in WORDINGS[:3]:
            said = [(task, str(wording.write(str(task.fields.get(name, ""))))) for task in tasks]
            paid = sum(score.score >= FULL for score in await score_all(subject, said))
            if best is None or paid > best[0]:
                best = paid, name
    if best is None or best[0] < 0.8 * len(tasks):
        return list(tasks)
    _, name = best
    return [replace(task, answer=str(task.fields[name]), field=name) for task in tasks if name in task.fields]


def fields_to_say(task: Task) -> list[str]:
    """Return the fields that can be said."""
    return [
        name
        for name, value in task.fields.items()
        if isinstance(value, (str, int, float)) and not isinstance(value, bool)
    ]


def fields_said(tasks: Sequence[Task]) -> list[list[tuple[Task, str]]]:
    """Say back each field of the task that is not its answer."""
    names = [
        name for name, value in tasks[0].fields.items() if isinstance(value, str) and name != tasks[0].field
    ]
    return [[(task, str(task.fields.get(name, ""))) for task in tasks] for name in names]
