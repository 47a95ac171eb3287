"""The policy as a run began: the reference of the KL penalty."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollgym.trainer.backends.base import TrainRow
from rollgym.trainer.backends.forward_pass import ForwardPass
from rollgym.trainer.backends.sharded import ShardedModel
from rollgym.trainer.models.lora import adapter_tensors, adapters_as, adapters_off
from rollgym.trainer.models.weights import load_weights, parameters_of
from rollgym.trainer.records.pieces import SavedPieces, read_pieces, whole_state, write_pieces


class FrozenModel:
    """A model of its own that stays as it is.

    Args:
        forward_pass: Computes the model's outputs.
    """

    def __init__(self, forward_pass: ForwardPass) -> None:
        self._pass = forward_pass

    def forward(self, rows: Sequence[TrainRow]) -> list[Tensor]:
        """Return the outputs of each row, float32 `[tokens]`, zero outside its mask, without gradient."""
        return self._pass.outputs(rows)

    def state_dict(self) -> dict[str, Any]:
        """Return its weights: they may be those of a warm start, which nothing else holds."""
        return {"model": dict(parameters_of(self._pass.model))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state that `state_dict` returned.

        Raises:
            ValueError: If it is of another model.
        """
        state = whole_state(state)
        names = {name for name, _ in self._pass.model.named_parameters()}
        load_weights(
            self._pass.model, ((name, tensor) for name, tensor in state["model"].items() if name in names)
        )


class PolicyWithoutAdapters:
    """The policy itself, with its adapters off, or as they were when the run began: no second model.

    It must not be called while another caller computes with the policy.

    Args:
        forward_pass: Computes the policy's outputs.
        warm: Whether adapters were trained before the run began. They are kept then.
    """

    def __init__(self, forward_pass: ForwardPass, *, warm: bool) -> None:
        self._pass = forward_pass
        adapters = adapter_tensors(forward_pass.model)
        self._start = {name: tensor.clone() for name, tensor in adapters} if warm else None

    def forward(self, rows: Sequence[TrainRow]) -> list[Tensor]:
        """Return the outputs of each row, float32 `[tokens]`, zero outside its mask, without gradient."""
        model = self._pass.model
        with adapters_off(model) if self._start is None else adapters_as(model, self._start):
            return self._pass.outputs(rows)

    def state_dict(self) -> dict[str, Any]:
        """Return the adapters that the run began with, if they were not nothing."""
        return {"adapters": self._start or {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state that `state_dict` returned.

        Raises:
            ValueError: If it is of another model.
        """
        state = whole_state(state)
        own = self._start or {}
        saved = state["adapters"]
        if own.keys() != saved.keys() or any(own[name].shape != saved[name].shape for name in own):
            raise ValueError("it is of other adapters")
        for name, tensor in own.items():
            tensor.copy_(saved[name])


class ShardedPolicyWithoutAdapters:
    """The policy itself, with its adapters off, or as they were when the run began: no second model.

    Args:
        policy: The policy's part in this rank.
        warm: Whether adapters were trained before the run began. They are kept then.
    """

    def __init__(self, policy: ShardedModel, *, warm: bool) -> None:
        self._policy = policy
        self._start = policy.adapters() if warm else None
        self._loading: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}

    def forward(self, rows: Sequence[TrainRow]) -> list[Tensor]:
        """Return the outputs of this rank's rows."""
        model = self._policy.model
        with adapters_off(model) if self._start is None else self._policy.adapters_as(self._start):
            return self._policy.forward(rows)

    def state(self) -> Iterator[tuple[str, Any]]:
        """Yield the adapters that the run began with by paths, if they were not nothing."""
        if not self._start:
            yield "adapters", {}
        for name, tensor in (self._start or {}).items():
            yield f"adapters\t{name}", tensor

    def write_pieces(self, folder: Path) -> None:
        """Write this rank's pieces of the adapters that the run began with, if they were not nothing."""
        plain: dict[str, Any] = {} if self._start else {"adapters": {}}
        write_pieces(folder, self._named(), plain, first=self._policy.is_first)

    def read_pieces(self, folder: Path) -> None:
        """Take them up, of however many ranks that wrote them.

        Raises:
            ValueError: If it is of other adapters.
        """
        if {path: tuple(tensor.shape) for path, tensor in self._named().items()} != SavedPieces(
            folder
        ).shapes():
            raise ValueError("it is of other adapters")
        read_pieces(folder, self._named())

    def _named(self) -> dict[str, Tensor]:
        return {f"adapters\t{name}": tensor for name, tensor in (self._start or {}).items()}

    def begin_load(self, plain: Mapping[str, Any], shapes: Mapping[str, tuple[tuple[int, ...], Any]]) -> None:
        """Look at what is going to be loaded.

        Raises:
            ValueError: If it is of other adapters.
        """
        own = {path: tuple(tensor.shape) for path, tensor in self._named().items()}
        if own != {path: shape for path, (shape, _) in shapes.items()}:
            raise ValueError("it is of other adapters")
        self._loading = dict(shapes)

    def load(self, path: str, tensor: Tensor | None) -> None:
        """Take up a tensor, of which the first rank has the contents."""
        assert self._start is not None
        whole = self._policy.from_first(tensor, *self._loading[path])
        self._start[path.partition("\t")[2]].copy_(whole)

    def end_load(self) -> None:
        """All of it was given."""
        self._loading = {}
