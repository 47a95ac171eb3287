"""Brings the trained weights to whoever samples from them, and keeps account of who has which."""

import asyncio
from collections.abc import Sequence

from trainer.backends.base import TrainBackend
from trainer.core.errors import RunError
from trainer.inference.base import InferenceClient
from trainer.weights.source import BackendWeights


class PublishError(RunError):
    """A client did not take the weights: what it would answer with is undefined."""


class WeightPublisher:
    """Sends weights and their version to inference clients.

    Args:
        clients: Who samples from the policy.
    """

    def __init__(self, clients: Sequence[InferenceClient]) -> None:
        self._clients = list(clients)

    async def publish(self, backend: TrainBackend, version: int) -> None:
        """Bring all clients to `version`.

        Raises:
            PublishError: If a weight is not finite: then none is sent. Or if a client answers with another version
                afterwards.
        """
        source = BackendWeights(backend)
        if broken := await asyncio.to_thread(_not_finite, source):
            raise PublishError(
                f"the weights of version {version} are not finite ({broken[0]}, {len(broken)} in all): they are "
                "neither published nor saved; lower optimizer.learning_rate"
            )
        for client in self._clients:
            await client.sync(source, version)
            if client.version != version:
                raise PublishError(f"an inference client is at version {client.version}, not {version}")


def _not_finite(source: BackendWeights) -> list[str]:
    return [name for name, tensor in source.tensors() if not bool(tensor.isfinite().all())]
