"""The workers of one I/O process, by isolation."""

from collections.abc import Iterable

from rollgym.env_server.catalog.entry import CatalogEntry
from rollgym.env_server.common.setting_sections import Isolation
from rollgym.env_server.common.settings import ConfigurationError, Settings
from rollgym.env_server.workers.base import Worker
from rollgym.env_server.workers.inline import InlineWorker
from rollgym.env_server.workers.process import ProcessWorker
from rollgym.env_server.workers.thread import ThreadWorker
from rollgym.extras import install_line


class WorkerPools:
    """Provides the worker of each isolation. Workers that no environment needs are not started.

    Args:
        settings: The numbers of threads and child processes, and where they run.
        remote: Runs the environments of registered servers.

    Attributes:
        threads: The worker of environments isolated by thread.
        processes: The worker of those isolated by process.
    """

    def __init__(self, settings: Settings, remote: Worker) -> None:
        self._remote = remote
        self.threads = ThreadWorker(settings.threads)
        # With Ray, there are none here.
        count = 0 if settings.workers == "ray" else settings.workers
        self.processes = ProcessWorker(count, settings.log_format)
        self._most_threads = settings.threads
        self._workers: dict[Isolation, Worker] = {
            "inline": InlineWorker(),
            "thread": self.threads,
            "process": _process_worker(settings, self.processes),
        }
        self._started: list[Worker] = []

    def get(self, isolation: Isolation) -> Worker:
        """The worker of an isolation."""
        return self._workers[isolation]

    def of(self, entry: CatalogEntry) -> Worker:
        """The worker that runs an environment."""
        return self._remote if entry.source.kind == "registered" else self._workers[entry.isolation]

    @property
    def trouble(self) -> str | None:
        """Why environments isolated by process cannot be made at present; None if they can."""
        return self._workers["process"].trouble

    @property
    def threads_stuck(self) -> bool:
        """Whether every thread is left to a call that took too long."""
        return self.threads.stuck >= self._most_threads

    async def start(self, isolations: Iterable[Isolation]) -> None:
        """Start the workers that are needed."""
        for isolation in isolations:
            worker = self._workers[isolation]
            self._started.append(worker)
            await worker.start()

    async def shutdown(self) -> None:
        """End the workers and their environments."""
        for worker in self._started:
            await worker.shutdown()
        self._started.clear()
        await self._remote.shutdown()


def _process_worker(settings: Settings, here: ProcessWorker) -> Worker:
    if settings.workers != "ray":
        return here
    try:
        # Ray is not part of the base install.
        from rollgym.env_server.workers.ray.worker import ray_worker
    except ImportError as error:
        raise ConfigurationError(
            f"`workers: ray` needs Ray, which cannot be imported ({error}): {install_line('ray')}"
        ) from error
    return ray_worker(settings)
