"""Publishes the trained weights to inference engines, and records which engine has which version."""

import asyncio
import time
from collections.abc import Sequence

from rollgym.trainer.backends.base import TrainBackend
from rollgym.trainer.core.errors import RunError
from rollgym.trainer.inference.base import InferenceClient
from rollgym.trainer.learn.weights.folders import WeightFolders
from rollgym.trainer.learn.weights.source import BackendWeights
from rollgym.trainer.learn.weights.verification import WeightCheck


class PublishError(RunError):
    """A client did not take the weights: what it would answer with is undefined."""


class WeightPublisher:
    """Sends weights and their version to inference clients.

    Args:
        clients: Who samples from the policy.
        folders: Where weights are written for servers that read them from disk.
        check: What clients on servers verify with that they took them.
    """

    def __init__(
        self,
        clients: Sequence[InferenceClient],
        folders: WeightFolders | None = None,
        check: WeightCheck | None = None,
    ) -> None:
        self._clients = list(clients)
        self._folders = folders
        self._check = check

    async def publish(self, backend: TrainBackend, version: int) -> dict[str, float]:
        """Bring all clients to `version`, and return how that went as metrics.

        Raises:
            PublishError: If a weight is not finite: then none is sent. Or if a client answers with another version
                afterwards.
            WrongWeightsError: If a server answers with other weights than it was sent.
        """
        started = time.monotonic()
        written = 0 if self._folders is None else self._folders.bytes_written
        source = BackendWeights(backend, version, self._folders)
        if broken := await asyncio.to_thread(backend.not_finite):
            raise PublishError(
                f"the weights of version {version} are not finite ({broken[0]}, {len(broken)} in all): they are "
                "neither published nor saved; lower optimizer.learning_rate"
            )
        if self._check is not None:
            self._check.begin(version, backend)
        try:
            for client in self._clients:
                await client.sync(source, version)
                if client.version != version:
                    raise PublishError(f"an inference client is at version {client.version}, not {version}")
        finally:
            source.release()
            if self._check is not None:
                self._check.end()
        metrics = {"sync/seconds": time.monotonic() - started}
        if self._folders is not None:
            self._folders.keep_only(version)
            metrics["sync/bytes"] = float(self._folders.bytes_written - written)
        if self._check is not None:
            metrics["sync/probe_difference"] = self._check.largest
            if self._check.tensors_compared is not None:
                metrics["sync/checksums_equal"] = float(self._check.tensors_compared)
        return metrics
