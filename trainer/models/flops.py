"""Floating-point operations that training needs by the model's mathematics (PaLM, arXiv:2204.02311, appendix B).

A product with a matrix of N numbers is 2 N operations a token forwards, and twice as many backwards: once for what
came in, once for the weights. Attention of a token to t tokens is 4 t operations for each number of a query:
scores, and the weighted sum. Unlike PaLM's, the count is of causal attention: a token attends to those before it
and itself, not to the whole row. Logits are counted where they are computed, at sampled tokens. What is computed
again to save memory, padding, norms and the optimizer are not the model's, and are not counted.
"""

from collections.abc import Iterable

from trainer.models.shape import ModelShape


def forward_flops(shape: ModelShape, rows: Iterable[tuple[int, int]]) -> int:
    """Return the operations of one forward pass.

    Args:
        shape: The model.
        rows: Tokens of each row, and how many of them were sampled.
    """
    layers, logits, per_pair = (
        2 * shape.matrices_per_token,
        2 * shape.hidden * shape.vocabulary,
        4 * shape.layers * shape.query_width,
    )
    return sum(
        layers * tokens + logits * sampled + per_pair * (tokens * (tokens + 1) // 2)
        for tokens, sampled in rows
    )


def training_flops(
    shape: ModelShape,
    rows: Iterable[tuple[int, int]],
    *,
    scored: int = 0,
    epochs: int = 1,
    frozen: bool = False,
) -> int:
    """Return the operations of an update of the policy.

    Args:
        shape: The model.
        rows: Tokens of each row, and how many of them were sampled.
        scored: Forward passes over all rows without gradient, such as that of a reference model.
        epochs: Passes over the rows with gradient.
        frozen: Whether the model's own weights are frozen, as beside LoRA's adapters: they need no gradient.
    """
    return forward_flops(shape, rows) * (scored + epochs * (2 if frozen else 3))


def utilisation(flops: float, seconds: float, peak_tflops: float, devices: int = 1) -> float:
    """Return which part of the devices' peak was used (model FLOPs utilisation), between 0 and 1."""
    return flops / (seconds * peak_tflops * 1e12 * devices) if seconds > 0 else 0.0
