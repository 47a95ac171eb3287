"""Fixed panels: the same tasks at every evaluation, distinct by content."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clients.protocol.errors import ProblemError
from trainer.config.run import PanelSettings
from trainer.rollout.environments import EnvironmentPool
from trainer.tasks.task import Task

_SEARCH_FACTOR = 50
"""How many seeds per wanted task are tried before a panel is said to be impossible."""
_BATCH = 128


@dataclass(frozen=True, slots=True)
class Panel:
    """A named list of tasks."""

    name: str
    tasks: tuple[Task, ...]
    settings: PanelSettings


async def build_panel(name: str, settings: PanelSettings, pool: EnvironmentPool) -> Panel:
    """Choose a panel's tasks: seeds 0, 1, 2, ... that give first states not seen before.

    Raises:
        ValueError: If the environment does not have as many distinct first states.
    """
    template = Task(0, settings.env_id, 0, settings.kwargs, settings.options, name, settings.url)
    if not settings.distinct:
        return Panel(name, tuple(_task(template, seed, seed) for seed in range(settings.episodes)), settings)
    client = await pool.client(settings.url)
    sessions = await client.make_many(settings.env_id, _BATCH, settings.kwargs)
    try:
        seen: set[str] = set()
        tasks: list[Task] = []
        limit = settings.episodes * _SEARCH_FACTOR
        for start in range(0, limit, _BATCH):
            requests = [(session, start + place, settings.options) for place, session in enumerate(sessions)]
            for place, result in enumerate(await client.reset_many(requests)):
                if isinstance(result, ProblemError):
                    raise result
                key = content_key(result.observation, result.info)
                if key not in seen:
                    seen.add(key)
                    tasks.append(_task(template, len(tasks), start + place))
                    if len(tasks) == settings.episodes:
                        return Panel(name, tuple(tasks), settings)
    finally:
        await client.close_sessions(sessions)
    raise ValueError(
        f"panel '{name}': {settings.env_id} gave only {len(tasks)} distinct first states in {limit} seeds; "
        f"ask for fewer episodes, or set distinct: false"
    )


def content_key(observation: Any, info: Mapping[str, Any]) -> str:
    """Return a key of the first state: `info["state"]` where the environment gives it, else what is observed."""
    return json.dumps(info.get("state", observation), sort_keys=True, default=str)


def _task(template: Task, index: int, seed: int) -> Task:
    return Task(
        index, template.env_id, seed, template.kwargs, template.options, template.domain, template.url
    )
