"""A backend's weights in the form that inference clients accept."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from rollgym.trainer.backends.base import TrainBackend
from rollgym.trainer.backends.ranked import RankedBackend
from rollgym.trainer.core.ending import to_its_end
from rollgym.trainer.core.errors import RunError
from rollgym.trainer.learn.weights.folders import WeightFolders
from rollgym.trainer.models.weights import hub_tensors, parameters_of


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
            RunError: If training has resumed, so that they are of another version.
        """
        self._require_held()
        return self._gathered.reader() if self._is_gathered else self._backend.export()

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield them by the names of the backend's modules.

        Raises:
            RunError: As `tensors` does.
        """
        self._require_held()
        return self._backend.parameters()

    async def folder(self) -> Path:
        """Return a directory with these weights, written once however many ask.

        Raises:
            WeightFolderError: If it cannot be written.
            RunError: If training has resumed before the first request, or the directory to write to is missing.
        """
        async with self._writing:
            if self._folder is None:
                self._require_held()
                await to_its_end(self._write_folder())  # shielded: concurrent callers need the folder, too
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
                self._require_held()
                await to_its_end(self._write_adapter_folder())
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

    def _require_held(self) -> None:
        if not self._held:
            raise RunError(f"the weights of version {self._version} are the trainer's no more")


Named = tuple[str, Tensor]


class SharedReading:
    """Reads weights once for all readers that read them at about the same time.

    Reading sharded weights gathers them from the ranks, at the same cost for each pass. The most recently read tensors
    are held, up to a bound. Readers never wait for each other: one that falls behind the held tensors continues in a
    pass of its own.

    Args:
        read: Begins a pass; each pass yields the same tensors in the same order.
        limit: Most bytes that are held; a single larger tensor is held nevertheless.
    """

    def __init__(self, read: Callable[[], Iterator[Named]], limit: int = 2**30) -> None:
        self._read = read
        self._limit = limit
        self._pass: Iterator[Named] | None = None
        self._held: deque[Named] = deque()
        self._first = 0
        self._bytes = 0
        self._failure: Exception | None = None
        self._lock = threading.Lock()

    def reader(self) -> Iterator[Named]:
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
        """Hold nothing any more: there are other weights."""
        with self._lock:
            self._first += len(self._held)
            self._held.clear()
            self._bytes, self._pass = 0, None


def _size(named: Named) -> int:
    return named[1].numel() * named[1].element_size()
