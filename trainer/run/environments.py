"""A run's stream of tasks, and the environments that play them."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from rollgym.clients.protocol.addresses import server_token
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.console import RunConsole
from rollgym.trainer.core.embedded_server import embedded_server
from rollgym.trainer.core.plugins import load_plugin
from rollgym.trainer.rollout.environments import OPERATION_TIMEOUT_S, EnvironmentPool, OutageReport
from rollgym.trainer.tasks.curriculum import CurriculumTaskSource
from rollgym.trainer.tasks.dataset import load_streams
from rollgym.trainer.tasks.task import (
    EnvironmentStream,
    InterleavedTaskSource,
    MixtureTaskSource,
    OwnTaskSource,
    TaskSource,
    TaskStream,
)

_STREAM_BLOCK = 1000

Serve = Callable[[Sequence[str]], AbstractAsyncContextManager[str]]
"""Serves the built-in environments and those named while its context is open, and gives the server's URL."""


def task_source(settings: RunSettings) -> TaskSource:
    """Return the run's stream of tasks; data sets are read for it.

    Raises:
        ConfigError: If a data set cannot be read.
    """
    if settings.rollout.task_source is not None:
        plugin = load_plugin(settings.rollout.task_source, "rollout.task_source")
        return OwnTaskSource(plugin, plugin(settings, settings.seed))
    if not settings.datasets and settings.interleave == "stream":
        return MixtureTaskSource(settings.tasks, settings.seed)
    streams: list[TaskStream] = [EnvironmentStream(entry) for entry in settings.tasks]
    for dataset in settings.datasets:
        streams += load_streams(dataset)
    block = settings.rollout.groups_per_step if settings.interleave == "step" else _STREAM_BLOCK
    if settings.curriculum is not None:
        return CurriculumTaskSource(streams, block, settings.seed, settings.curriculum)
    return InterleavedTaskSource(streams, block, settings.seed)


def server_urls(settings: RunSettings) -> list[str | None]:
    """Return the servers that the settings name; None is the run's default."""
    urls = [entry.url for entry in settings.tasks] + [dataset.url for dataset in settings.datasets]
    for each in settings.evaluation.sets.values():
        urls.append(each.url if each.dataset is None else each.dataset.url)
    # The servers for a user's task source are known only once its tasks are drawn.
    return [*urls, None] if settings.rollout.task_source is not None else urls


@asynccontextmanager
async def open_environments(
    settings: RunSettings,
    console: RunConsole,
    serve: Serve = embedded_server,
    timeout_s: float = OPERATION_TIMEOUT_S,
    connect_s: float = 15.0,
) -> AsyncIterator[EnvironmentPool]:
    """Connect to the run's environments; start a server on loopback if none is named.

    Args:
        settings: The run.
        console: Shows the address of such a server.
        serve: Starts the server.
        timeout_s: Time limit of one operation of an environment.
        connect_s: How long to wait for a server at the beginning.
    """
    async with AsyncExitStack() as stack:
        url = settings.env_url
        if url is None and None in server_urls(settings):
            url = await stack.enter_async_context(serve(settings.serve))
            console.say(f"no --env-url: started an embedded environment server on {url}")
        # In the settings it would be written to the run's directory with all the others.
        token = server_token(settings.env_token)
        patience_s = settings.rollout.server_timeout_s
        outages = OutageReport(console, patience_s)
        pool = EnvironmentPool(
            url, token, settings.rollout.encoding, timeout_s, outages, patience_s, connect_s
        )
        yield await stack.enter_async_context(pool)
