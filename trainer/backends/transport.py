"""Starts ranks and carries calls to them. A rank is a process that computes one part of a sharded model.

`LocalRanks` starts child processes of this one; a cluster's actors carry the same calls.
"""

import pickle
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Any, Protocol

import torch
from torch import Tensor

from rollgym.trainer.core.errors import RoleDiedError, RunError


class RankDiedError(RoleDiedError):
    """A rank ended without being asked to; the message names it and has its last words.

    Attributes:
        rank: Which one.
    """

    def __init__(self, message: str, rank: int, role: str = "actor_train", **circumstances: Any) -> None:
        super().__init__(role, message, **circumstances)
        self.rank = rank

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self.circumstances()), (str(self), self.rank, self.role)


class RankFailedError(RunError):
    """A call failed in a rank; the message names it and says why."""


class RankWaitedError(RankFailedError):
    """A rank waited for another one in vain."""


@dataclass(frozen=True, slots=True)
class CallFailure:
    """What a call came to that raised.

    Attributes:
        error: The error that it raised, or a substitute if that cannot be pickled.
        of_the_group: Whether it may be the consequence of another rank's end.
    """

    error: Exception
    of_the_group: bool


class RankTransport(Protocol):
    """Starts ranks and carries calls to them.

    In each rank a `rollgym.trainer.backends.rank.RankServer` answers: what it returns or raises is the answer. A rank
    answers its calls one after another, in the order in which they were made.
    """

    def start(self, world_size: int) -> None:
        """Start so many ranks, and return once all of them take calls.

        Raises:
            RankDiedError: If one of them does not start.
        """
        ...

    def call(self, rank: int, method: str, *arguments: Any) -> Future[Any]:
        """Have a rank's server call one of its methods.

        The future fails with `RankDiedError` as soon as *any* rank is gone, because the others may wait for it for
        ever, and with what the method raised otherwise.

        Args:
            rank: Which rank.
            method: Name of the server's method.
            arguments: Its arguments; they can be packed (see `pack`).
        """
        ...

    def close(self) -> None:
        """End all ranks, whatever they are doing, and return once they are gone. A second call does nothing."""
        ...


def pack(content: Any) -> bytes:
    """Return a call or an answer as bytes. Tensors come from the processor; of a view no more than itself is packed."""
    buffer = BytesIO()
    _Packer(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(content)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """Return what `pack` was given. The bytes must be those of our own processes: reading them runs code."""
    return pickle.loads(data)


class _Packer(pickle.Pickler):
    def reducer_override(self, content: Any) -> Any:
        # Left to itself, torch packs the whole storage that a tensor is a view of.
        if type(content) in (Tensor, torch.nn.Parameter) and content.device.type == "cpu":
            plain = content.detach().contiguous()
            raw = plain.view(-1).view(torch.uint8).numpy().tobytes()
            return _tensor, (raw, plain.dtype, tuple(plain.shape))
        return NotImplemented


def _tensor(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).view(shape)


MakeBackend = Callable[..., Any]
"""A recipe that can be packed: given a rank's `RankGroup`, it makes the backend that the rank holds."""
