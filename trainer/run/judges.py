"""Judges on their own devices: each has an inference server, and an environment server that holds its queue.

So a busy judge slows no other: verdicts of other judges, and steps of other environments, have other queues.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TYPE_CHECKING

from rollgym.trainer.cluster.placement import place_roles
from rollgym.trainer.config.cluster import JudgeSettings
from rollgym.trainer.config.data import DatasetSettings
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.embedded_server import embedded_server
from rollgym.trainer.core.errors import ConfigError

if TYPE_CHECKING:
    from rollgym.trainer.cluster.cluster import Cluster

Serve = Callable[[Sequence[str], Sequence[str]], AbstractAsyncContextManager[str]]
"""Serves environments, with further arguments, while its context is open, and gives the server's URL."""


_BUILT_IN = "Judge-v0"
"""The judge that every server has."""


async def open_judges(
    settings: RunSettings,
    cluster: "Cluster",
    serve: Serve,
    stack: AsyncExitStack,
    say: Callable[[str], None],
) -> RunSettings:
    """Start the run's judges, and return its settings with the tasks that they judge routed to them.

    Args:
        settings: The run.
        cluster: Starts the judges.
        serve: Starts each judge's environment server.
        stack: Ends the judges and their servers.
        say: Called with a message for each judge that is ready.

    Raises:
        ConfigError: If a judge is unused, or a data set uses several.
        RunError: If a judge does not start.
    """
    judges = settings.cluster.roles.judges
    brought_to_judges(settings, dict.fromkeys(judges, ""))  # before anything is started for nothing
    urls: dict[str, str] = {}
    for name, judge in judges.items():
        address = await cluster.judge(name)
        known = {"url": f"{address}/v1", "model": judge.model}
        words = ["--operator-kwargs", f"{name}={json.dumps(known)}"]
        served = [] if name == _BUILT_IN else [f"{name}={judge.verifier}"]
        if judge.verifier == JudgeSettings.model_fields["verifier"].default:
            # It waits for a network. Under a name of its own it would be taken for an author's, and run in worker
            # processes, which wait for one verdict after the other; and a session that is closed while it waits
            # would take all others of its process along.
            words += ["--isolation", f"{name}=thread"]
        urls[name] = await stack.enter_async_context(serve(served, words))
        say(f"judge {name} answers on {address}")
    return brought_to_judges(settings, urls)


async def open_judges_alone(
    settings: RunSettings, stack: AsyncExitStack, say: Callable[[str], None]
) -> RunSettings:
    """Start the judges of settings that nothing is trained by, and return the settings with what they judge."""
    if not settings.cluster.roles.judges:
        return settings
    from rollgym.trainer.cluster.cluster import open_cluster  # Imported late: it needs torch, as judges do.

    opening = open_cluster(settings, place_roles(settings), lambda died: say(str(died)), say)
    cluster = await stack.enter_async_context(opening)
    return await open_judges(
        settings, cluster, lambda served, words: embedded_server(served, words=words), stack, say
    )


def apart_from_judges(settings: RunSettings) -> RunSettings:
    """Return the settings without the tasks, data sets and evaluation sets that use judges. Pure."""
    judges = set(settings.cluster.roles.judges)

    def asks(each: DatasetSettings) -> bool:
        verifiers = [*(each.route.verifiers.values() if each.route else []), each.verifier or ""]
        return bool(judges & {*verifiers, *(part.verifier for part in each.rewards)})

    evaluation_sets = {
        name: each
        for name, each in settings.evaluation.sets.items()
        if each.env_id not in judges and not (each.dataset is not None and asks(each.dataset))
    }
    return settings.model_copy(
        update={
            "tasks": [task for task in settings.tasks if task.env_id not in judges],
            "datasets": [each for each in settings.datasets if not asks(each)],
            "evaluation": settings.evaluation.model_copy(update={"sets": evaluation_sets}),
        }
    )


def brought_to_judges(settings: RunSettings, urls: Mapping[str, str]) -> RunSettings:
    """Return the settings with the judges' servers in the tasks, data sets and evaluation sets that name them. Pure.

    Args:
        settings: The run.
        urls: The judges' environment servers, by their names.

    Raises:
        ConfigError: If a judge is unused, or a data set uses several.
    """
    asked: set[str] = set()

    def url_of(env_ids: Sequence[str], url: str | None, where: str) -> str | None:
        named = sorted(set(env_ids) & set(urls))
        asked.update(named)
        if len(named) > 1:
            raise ConfigError(
                f"{where} asks judges {named[0]} and {named[1]}, each of which has a queue of its own: make it one "
                "data set for each"
            )
        return urls[named[0]] if named and url is None else url

    def dataset(each: DatasetSettings, where: str) -> DatasetSettings:
        env_ids = [*(each.route.verifiers.values() if each.route else []), each.verifier or ""]
        rewards = [
            part.model_copy(update={"url": url_of([part.verifier], part.url, f"{where}.rewards.{number}")})
            for number, part in enumerate(each.rewards)
        ]
        return each.model_copy(update={"url": url_of(env_ids, each.url, where), "rewards": rewards})

    tasks = [
        each.model_copy(update={"url": url_of([each.env_id], each.url, f"tasks.{number}")})
        for number, each in enumerate(settings.tasks)
    ]
    datasets = [dataset(each, f"datasets.{number}") for number, each in enumerate(settings.datasets)]
    evaluation_sets = {}
    for name, each in settings.evaluation.sets.items():
        where = f"evaluation.sets.{name}"
        inner = None if each.dataset is None else dataset(each.dataset, f"{where}.dataset")
        url = url_of([each.env_id], each.url, where)
        evaluation_sets[name] = each.model_copy(update={"url": url, "dataset": inner})
    if idle := sorted(set(urls) - asked):
        raise ConfigError(
            f"cluster.roles.judges.{idle[0]}: no task, data set or evaluation set names the environment {idle[0]}: "
            "name it there, or leave the judge out"
        )
    evaluation = settings.evaluation.model_copy(update={"sets": evaluation_sets})
    return settings.model_copy(update={"tasks": tasks, "datasets": datasets, "evaluation": evaluation})
