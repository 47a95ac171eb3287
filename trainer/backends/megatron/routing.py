"""Experts that were taken before, taken again by Megatron's routers (see `trainer.backends.routing`)."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from trainer.backends.megatron.layout import Place, layers_of
from trainer.backends.rank_group import MeshShape
from trainer.backends.routing import UNKNOWN, by_layer, taken_again


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
        # Megatron sums activations of a layer up, or divides their tokens, over the ranks that hold its parts.
        self._divided = bool(config.sequence_parallel)
        again = config.recompute_granularity is not None
        self._routers = []
        for layer in body.decoder.layers if self._layers else ():
            layer.mlp.router.router_replay = router = _Router(again)
            self._routers.append(router)

    def take(self, experts: Tensor | None, tokens: int, pieces: Sequence[range], place: Place) -> None:
        """Have the next forward, and what is computed of it again for the gradient, take experts.

        Args:
            experts: `[rows, tokens, layers * taken]` of whole rows, -1 where the routers choose; None where they
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
        layers = layers_of(self._layers, self._mesh, place.stage)
        for router, layer in zip(self._routers, layers, strict=True):
            router.take(own[:, :, layer].flatten(0, 1))


class _Router:
    """Stands where Megatron's routers ask what to take (`RouterReplay.get_replay_topk`).

    Args:
        again: Whether activations are computed once more for the gradient. Then a forward is computed without gradient
            first; where there are stages, others come in between.
    """

    def __init__(self, again: bool) -> None:
        self._again = again
        self._recorded: Tensor | None = None
        self._later: deque[Tensor | None] = deque()

    def take(self, recorded: Tensor | None) -> None:
        """Take up what is to be taken next, `[tokens, taken]`."""
        self._recorded = recorded
        if self._again and torch.is_grad_enabled():
            self._later.append(recorded)

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
        if recorded is None:
            return own
        taken = taken_again(own[1], recorded)
        return scores.gather(1, taken), taken
