"""Replay of earlier expert choices by Megatron's routers (see `rollgym.trainer.backends.routing`)."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rollgym.trainer.backends.megatron.layout import Place, layers_of_stage
from rollgym.trainer.backends.rank_group import MeshShape
from rollgym.trainer.backends.routing import UNKNOWN, by_layer, no_experts, taken_again


class RoutedLayers:
    """The routers of a rank's layers.

    Args:
        body: This rank's part of the model.
        mesh: How ranks share the work.
    """

    def __init__(self, body: Any, mesh: MeshShape) -> None:
        config = body.config
        self._mesh = mesh
        self._there = config.num_moe_experts or 0
        self._layers = config.num_layers if self._there else 0
        self._taken = int(config.moe_router_topk)
        # Megatron sums activations of a layer up, or divides their tokens, over the ranks that hold its parts.
        self._divided = bool(config.sequence_parallel)
        again = config.recompute_granularity is not None
        self._routers = []
        for layer in body.decoder.layers if self._layers else ():
            layer.mlp.router.router_replay = router = _Router(again)
            self._routers.append(router)

    def keep(self, *, wanted: bool) -> None:
        """Have forwards keep what tokens take, or no longer.

        Raises:
            ConfigError: If the model has no experts.
        """
        if wanted and not self._layers:
            raise no_experts()
        for router in self._routers:
            router.keep(wanted=wanted)

    def kept(self, rows: int, tokens: int, pieces: Sequence[range], place: Place) -> Tensor:
        """Return what the last forward's tokens took, int16 `[rows, tokens, layers * taken]`.

        It has zeros where other ranks know it, or say it: that of all of them is their sum.

        Args:
            rows: Rows of that forward.
            tokens: Length that they were filled up to.
            pieces: Which of their tokens this rank computed.
            place: Where the rank is.
        """
        layers = list(layers_of_stage(self._layers, self._mesh, place.stage))
        own = torch.stack(
            [router.kept() for router in self._routers], dim=1
        )  # [tokens * rows, layers, taken]
        there = sum(len(piece) for piece in pieces)
        line = torch.zeros(there, rows, *own.shape[1:], dtype=torch.int16, device=own.device)
        if self._divided:
            line.chunk(self._mesh.tensor)[place.tensor].copy_(own.view(-1, rows, *own.shape[1:]))
        elif place.tensor == 0:
            line.copy_(own.view(there, rows, *own.shape[1:]))
        whole = torch.zeros(rows, tokens, self._layers, self._taken, dtype=torch.int16, device=own.device)
        before = 0
        for piece in pieces:
            part = line[before : before + len(piece)].transpose(0, 1)
            whole[:, piece.start : piece.stop, layers] = part
            before += len(piece)
        return whole.flatten(2)

    def take(self, experts: Tensor | None, tokens: int, pieces: Sequence[range], place: Place) -> None:
        """Have the next forward, and what is computed of it again for the gradient, take experts.

        Args:
            experts: `[rows, tokens, layers * taken]` of whole rows, -1 to let the router choose; None if they
                choose all.
            tokens: Length that rows are filled up to.
            pieces: Which of their tokens this rank computes.
            place: Where the rank is.

        Raises:
            ValueError: If it is of another number of layers.
        """
        if experts is None:
            for router in self._routers:
                router.take(None)
            return
        experts = pad(experts, (0, 0, 0, tokens - experts.shape[1]), value=UNKNOWN)
        experts = by_layer(experts, self._layers, self._there)
        own = torch.cat([experts[:, piece.start : piece.stop] for piece in pieces], dim=1).transpose(0, 1)
        if self._divided:
            own = own.chunk(self._mesh.tensor)[place.tensor]
        layers = layers_of_stage(self._layers, self._mesh, place.stage)
        for router, layer in zip(self._routers, layers, strict=True):
            router.take(own[:, :, layer].flatten(0, 1))


class _Router:
    """Stands where Megatron's routers ask what to take (`RouterReplay.get_replay_topk`).

    Args:
        again: Whether activations are computed once more for the gradient. Then a forward is computed without gradient
            first; with pipeline stages other micro-batches come in between.
    """

    def __init__(self, again: bool) -> None:
        self._again = again
        self._recorded: Tensor | None = None
        self._keeps = False
        self._kept: Tensor | None = None
        self._later: deque[Tensor | None] = deque()

    def take(self, recorded: Tensor | None) -> None:
        """Take up what is to be taken next, `[tokens, taken]`."""
        self._recorded = recorded
        if self._again and torch.is_grad_enabled():
            self._later.append(recorded)

    def keep(self, *, wanted: bool) -> None:
        """Keep what tokens take, or no longer."""
        self._keeps, self._kept = wanted, None

    def kept(self) -> Tensor:
        """Return what the tokens of the last forward took, int16 `[tokens, taken]`."""
        assert self._kept is not None
        return self._kept

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] = torch.topk,
    ) -> tuple[Tensor, Tensor]:
        """Return the scores of the experts to take, with gradient, and the experts, `[tokens, taken]` each."""
        recorded = self._recorded
        if self._again and torch.is_grad_enabled():
            recorded = self._later.popleft()
        own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        taken = own[1] if recorded is None else taken_again(own[1], recorded)
        if self._keeps:
            self._kept = taken.to(torch.int16)
        if recorded is None:
            return own
        return scores.gather(1, taken), taken
