"""Publishes the trained weights to inference engines, as each accepts them, and records which has which version."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from rollgym.trainer.backends.base import TrainBackend
from rollgym.trainer.backends.ranked import RankedBackend
from rollgym.trainer.core.errors import RunError
from rollgym.trainer.core.shutdown import run_shielded
from rollgym.trainer.inference.base import InferenceClient
from rollgym.trainer.inference.errors import WeightsReleasedError
from rollgym.trainer.learn.weights.folders import WeightFolders
from rollgym.trainer.learn.weights.verification import WeightCheck
from rollgym.trainer.models.weights import hub_tensors, parameters_of

NamedTensor = tuple[str, Tensor]


class ModelWeights:
    """The weights of a model of this process that is not being trained, for a client that has such a model.

    Args:
        model: Whose they are.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's own tensors by their names on the Hugging Face hub."""
        return hub_tensors(self._model)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield them by the names of the model's modules."""
        return parameters_of(self._model)

    def require_held(self) -> None:
        """Do nothing: the model is not being trained."""

    async def folder(self) -> Path:
        """Raise `RunError`: these weights are never written to disk."""
        raise RunError("a server asks for a folder of weights, and nothing writes one")


class BackendWeights:
    """The weights of one version, which a backend holds until training resumes.

    Args:
        backend: The backend that holds them.
        version: Their version.
        folders: Writes them for servers that read them from disk; None if no server does.
    """

    def __init__(self, backend: TrainBackend, version: int = 0, folders: WeightFolders | None = None) -> None:
        self._backend = backend
        self._version = version
        self._folders = folders
        self._writing = asyncio.Lock()
        self._folder: Path | None = None
        self._adapter_folder: Path | None = None
        self._held = True
        # What is in this process is read as it is.
        self._is_gathered = isinstance(backend, RankedBackend)
        self._gathered = SharedReading(backend.export)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the backend's own tensors by name.

        Raises:
            WeightsReleasedError: If training has resumed, so that they are of another version; also while they are
                read.
        """
        self.require_held()
        return self._while_held(self._gathered.reader() if self._is_gathered else self._backend.export())

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield them by the names of the backend's modules.

        Raises:
            WeightsReleasedError: As `tensors` does.
        """
        self.require_held()
        return self._while_held(self._backend.parameters())

    def require_held(self) -> None:
        """Make sure that what was read is of this version, once it has been copied or sent.

        Raises:
            WeightsReleasedError: If training has resumed since.
        """
        if not self._held:
            raise WeightsReleasedError(f"the weights of version {self._version} are the trainer's no more")

    async def folder(self) -> Path:
        """Return a directory with these weights, written once however many ask.

        Raises:
            WeightFolderError: If it cannot be written.
            WeightsReleasedError: If training has resumed before the first request.
            RunError: If the directory to write to is missing.
        """
        async with self._writing:
            if self._folder is None:
                self.require_held()
                await run_shielded(self._write_folder())  # shielded: concurrent callers need the folder, too
            assert self._folder is not None
        return self._folder

    async def adapter_folder(self) -> Path:
        """Return a directory with the adapters alone, in peft's layout, written once however many ask.

        Raises:
            WeightFolderError: If it cannot be written.
            RunError: As `folder` does.
        """
        async with self._writing:
            if self._adapter_folder is None:
                self.require_held()
                await run_shielded(self._write_adapter_folder())
            assert self._adapter_folder is not None
        return self._adapter_folder

    def release(self) -> None:
        """Training resumes: a folder that was written stays, and the tensors no longer are of this version."""
        self._held = False
        self._gathered.drop()

    async def _write_folder(self) -> None:
        write = self._required_folders().write
        self._folder = await asyncio.to_thread(write, self._version, self._backend.export())

    async def _write_adapter_folder(self) -> None:
        write = self._required_folders().write_adapter
        self._adapter_folder = await asyncio.to_thread(write, self._version, self._backend.save_adapter)

    def _required_folders(self) -> WeightFolders:
        if self._folders is None:
            raise RunError("a server asks for a folder of weights, and nothing writes one")
        return self._folders

    def _while_held(self, tensors: Iterator[NamedTensor]) -> Iterator[NamedTensor]:
        """Yield tensors until training resumes: a server that is brought up to date alone may take them still."""
        for named in tensors:
            yield named
            self.require_held()


class SharedReading:
    """Reads weights once for all readers that read them at about the same time.

    Reading sharded weights gathers them from the ranks, at the same cost for each pass. The most recently read tensors
    are held, up to a bound. Readers never wait for each other: one that falls behind the held tensors continues in a
    pass of its own.

    Args:
        read: Begins a pass; each pass yields the same tensors in the same order.
        limit: Most bytes that are held; a single larger tensor is held nevertheless.
    """

    def __init__(self, read: Callable[[], Iterator[NamedTensor]], limit: int = 2**30) -> None:
        self._read = read
        self._limit = limit
        self._pass: Iterator[NamedTensor] | None = None
        self._held: deque[NamedTensor] = deque()
        self._first = 0
        self._bytes = 0
        self._failure: Exception | None = None
        self._lock = threading.Lock()

    def reader(self) -> Iterator[NamedTensor]:
        """Yield all weights in order, from the shared pass as long as this reader keeps up with it."""
        index = 0
        while True:
            with self._lock:
                behind = index < self._first
                if not behind and index - self._first == len(self._held) and not self._advance():
                    return
                named = None if behind else self._held[index - self._first]
            if named is None:
                yield from islice(self._read(), index, None)
                return
            yield named
            index += 1

    def _advance(self) -> bool:
        """Read one tensor more; return whether there was one. The lock is held."""
        if self._pass is None:
            self._pass = self._read()
        if self._failure is not None:
            raise self._failure
        try:
            named = next(self._pass, None)
        except Exception as error:
            # A pass that broke off gives no more to the others either, and that is not its end.
            self._failure = error
            raise
        if named is None:
            return False
        self._held.append(named)
        self._bytes += _size(named)
        while self._bytes > self._limit and len(self._held) > 1:
            self._bytes -= _size(self._held.popleft())
            self._first += 1
        return True

    def drop(self) -> None:
        """Hold nothing any more: there are other weights, and readers that are not done get none of those."""
        with self._lock:
            self._first += len(self._held)
            self._held.clear()
            self._bytes, self._pass = 0, None
            self._failure = WeightsReleasedError("the weights that were read are the trainer's no more")


def _size(named: NamedTensor) -> int:
    return named[1].numel() * named[1].element_size()


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
                await self._check.end()
        metrics = {"sync/seconds": time.monotonic() - started}
        if self._folders is not None:
            self._folders.keep_only(version)
            metrics["sync/bytes"] = float(self._folders.bytes_written - written)
        if self._check is not None:
            metrics["sync/probe_difference"] = self._check.largest
            if self._check.tensors_compared is not None:
                metrics["sync/checksums_equal"] = float(self._check.tensors_compared)
        return metrics
