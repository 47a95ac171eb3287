"""Replay of earlier expert choices: in training those of the rollout (R3), or of its recomputation (R2).

Two forwards of the same tokens with the same weights choose other experts for many of them, because sums differ in
their last bits; ratios of log-probabilities then compare two networks (Ma et al. 2025, arXiv 2510.11370). Only the
choice is replayed: the experts' weights come from the router in its present state, and its gradient with them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollgym.trainer.backends.base import TrainRow
from rollgym.trainer.core.errors import ConfigError

UNKNOWN = -1
"""Stands for each expert of a token whose experts were not recorded: it takes those that its router chooses."""

_ROUTERS = ("Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter")
"""Modules of transformers that weigh experts by a softmax over all of them."""


def packed_experts(rows: Sequence[TrainRow], tokens: int, device: torch.device) -> Tensor | None:
    """Return the recorded experts of a micro-batch's rows, int64 `[rows, tokens, layers * taken]`.

    Args:
        rows: The rows.
        tokens: Length that they are filled up to.
        device: The device to put them on.

    Returns:
        The experts, -1 for those that were not recorded; None if no row has recorded ones.

    Raises:
        ValueError: If rows were recorded with other numbers of layers or experts.
    """
    recorded = [row.experts for row in rows if row.experts is not None]
    if not recorded:
        return None
    numbers = {each.shape[1] for each in recorded}
    if len(numbers) > 1:
        raise ValueError(
            f"experts were recorded for models of several shapes: {sorted(numbers)} for each token"
        )
    packed = torch.full((len(rows), tokens, numbers.pop()), UNKNOWN, dtype=torch.int64)
    for line, row in zip(packed, rows, strict=True):
        if row.experts is not None:
            line[: len(row.experts)] = row.experts
    return packed.to(device)


def by_layer(experts: Tensor, layers: int, there: int) -> Tensor:
    """Return packed experts as `[rows, tokens, layers, taken]`.

    Args:
        experts: `[rows, tokens, layers * taken]`.
        layers: Layers of the model that have experts.
        there: How many experts each of them has.

    Raises:
        ValueError: If it is of another number of layers or experts, or a token takes one twice.
    """
    numbers = experts.shape[2]
    if not layers or numbers % layers:
        raise ValueError(
            f"{numbers} experts were recorded for each token, and the model has {layers} layers whose experts can be "
            "taken again: is the inference server's model another one?"
        )
    apart = experts.unflatten(2, (layers, -1))
    ordered = apart.sort(dim=-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != UNKNOWN)
    # Looked at together: each look waits for the device.
    if bool(twice.any() | (ordered >= there).any() | (ordered < UNKNOWN).any()):
        raise ValueError(f"recorded experts are not of {there}, or a token took one of them twice")
    return apart


def no_experts() -> ConfigError:
    """Return the error of a model that has no experts whose choice could be kept."""
    return ConfigError(
        "optimizer.router_replay: the model has no experts whose choice can be taken again (mixtures of Qwen2's and "
        "Qwen3's have): leave it out"
    )


def taken_again(chosen: Tensor, recorded: Tensor | None) -> Tensor:
    """Return the experts of each token, int64 `[tokens, taken]`: those recorded, else the router's.

    Args:
        chosen: What the router chooses now.
        recorded: The experts taken before, -1 if unknown; None if all are unknown.

    Raises:
        ValueError: If `recorded` is of other tokens, or of a model that takes another number of experts.
    """
    if recorded is None:
        return chosen
    if recorded.shape != chosen.shape:
        raise ValueError(
            f"experts were recorded for {tuple(recorded.shape)} (tokens, experts of each), and the router chooses for "
            f"{tuple(chosen.shape)}: is the inference server's model another one?"
        )
    return torch.where(recorded >= 0, recorded, chosen)


class RoutedModel:
    """A model of transformers whose routers can be given the experts to take.

    Args:
        body: The model.
    """

    def __init__(self, body: PreTrainedModel) -> None:
        self._routers = [module for module in body.modules() if type(module).__name__ in _ROUTERS]
        self._there = int(self._routers[0].num_experts) if self._routers else 0  # type: ignore[arg-type]
        self._recorded: list[Tensor] | None = None
        self._kept: dict[int, Tensor] | None = None
        for layer, router in enumerate(self._routers):
            router.register_forward_hook(_Hook(self, layer))

    @property
    def layers(self) -> int:
        """Number of layers that have experts whose choice can be taken again."""
        return len(self._routers)

    def take(self, experts: Tensor | None) -> None:
        """Have the next forward, and what is computed of it again for the gradient, take experts.

        Args:
            experts: `[rows, tokens, layers * taken]`, -1 to let the router choose; None if they choose all.

        Raises:
            ValueError: If it is of another number of layers.
        """
        if experts is None:
            self._recorded = None
            return
        self._recorded = list(by_layer(experts, self.layers, self._there).flatten(0, 1).unbind(dim=1))

    def keep(self, *, wanted: bool) -> None:
        """Have forwards keep what tokens take, or no longer.

        Raises:
            ConfigError: If the model has no experts whose choice is known.
        """
        if wanted and not self._routers:
            raise no_experts()
        self._kept = {} if wanted else None

    def kept(self, rows: int, tokens: int) -> Tensor:
        """Return what the last forward's tokens took, int16 `[rows, tokens, layers * taken]`."""
        assert self._kept is not None
        layers = torch.stack([self._kept[layer] for layer in range(self.layers)], dim=1)
        return layers.flatten(1).view(rows, tokens, -1).to(torch.int16)

    def chosen(self, layer: int, own: Tensor) -> Tensor | None:
        """Return what a layer is to take in place of its router's own choice, `[rows * tokens, taken]`; None: that.

        Args:
            layer: Which layer.
            own: What its router chooses.
        """
        taken = None if self._recorded is None else taken_again(own, self._recorded[layer])
        if self._kept is not None:
            self._kept[layer] = (own if taken is None else taken).detach()
        return taken


class _Hook:
    """Forward hook that replaces one router's choice and recomputes the weights of the experts."""

    def __init__(self, model: RoutedModel, layer: int) -> None:
        self._model = model
        self._layer = layer

    def __call__(
        self, router: nn.Module, _: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, chosen = output
        taken = self._model.chosen(self._layer, chosen)
        if taken is None:
            return output
        scores = logits.float().softmax(dim=-1).gather(-1, taken)
        if router.norm_topk_prob:
            scores = scores / scores.sum(dim=-1, keepdim=True)
        return logits, scores.to(weights.dtype), taken
