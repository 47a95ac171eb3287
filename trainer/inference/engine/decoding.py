"""The rows in decoding: one right-aligned key-value cache, which rows join and leave."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from rollgym.trainer.core.device import widest_float
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.inference.base import GenerationRequest, GenerationResult, SamplingParams
from rollgym.trainer.inference.engine.structured import Grammars, GrammarState
from rollgym.trainer.inference.errors import StructuredOutputError
from rollgym.trainer.models.language_head import UNLIKE, cache_argument, keeps_logits
from rollgym.trainer.models.pictures import ImageTensors, image_tensors, tokens_or_embeddings

Drawn = GenerationResult | StructuredOutputError
"""What came of a reply: it, or why what it must look like cannot be had."""
Layers = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, `[rows, heads, tokens, width]`."""


class RequestStream:
    """Uniform numbers of one request."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.Philox(seed))

    def draw(self) -> float:
        """Return the next number in [0, 1)."""
        return float(self._generator.random())


@dataclass(slots=True)
class ReplyRow:
    """The row of one reply in flight.

    Attributes:
        grammar: State of the grammar that it must follow; None if it is unconstrained.
        shift: How far its positions are from its number of tokens, behind pictures that have positions of their own.
        fault: Why no token could be drawn.
    """

    request: GenerationRequest
    stream: RequestStream
    grammar: GrammarState | None = None
    shift: int = 0
    fault: StructuredOutputError | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @classmethod
    def begun(cls, request: GenerationRequest, grammars: Grammars | None) -> Self:
        """Return the row of a request, at the beginning of what its reply must look like."""
        row = cls(request, RequestStream(request.seed))
        if grammars is not None and request.sampling.structured is not None:
            try:
                row.grammar = grammars.state(request.sampling)
            except StructuredOutputError as error:
                row.fault = error
        return row

    def allowed(self, vocabulary: int) -> Tensor | None:
        """Return which tokens may come next; None if all."""
        if self.grammar is None:
            return None
        try:
            return torch.from_numpy(self.grammar.allowed(vocabulary))
        except StructuredOutputError as error:
            self.fault = error
            return None

    def take(self, token: int, logprob: float, version: int) -> Drawn | None:
        """Note a token and return the reply if that was its last."""
        if self.fault is not None:
            return self.fault
        try:
            fits = self.grammar is not None and self.grammar.take(token)
        except StructuredOutputError as error:
            return error
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        stopped = fits or token in self.request.sampling.stop_token_ids
        if stopped or len(self.ids) == self.request.sampling.max_new_tokens:
            return GenerationResult(self.ids, self.logprobs, self.versions, "stop" if stopped else "length")
        return None


class ActiveBatch:
    """Decodes rows together. Not thread-safe: one thread at a time.

    Args:
        model: The policy.
        grammars: Compiled grammars of constrained replies; None if no reply is constrained.

    Attributes:
        drawn: The token that each row drew in the last step, those included that then left.

    Raises:
        ConfigError: If a layer of it remembers anything but keys and values.
    """

    def __init__(self, model: PreTrainedModel, grammars: Grammars | None = None) -> None:
        _require_keys_and_values(model)
        self._model = model
        self._grammars = grammars
        self._device = model.device
        self._cache_argument = cache_argument(model)
        self._last_logits = {"logits_to_keep": 1} if keeps_logits(model) else {}
        self.drawn: list[int] = []
        self._rows: list[ReplyRow] = []
        self._layers: Layers = []
        # How many of the cache's columns, counted from its right end, are real for each row.
        self._lengths: list[int] = []

    @torch.inference_mode()
    def advance(self, admitted: Sequence[GenerationRequest], version: int) -> list[tuple[int, Drawn]]:
        """Draw one token for every row, admitting new rows first.

        Args:
            admitted: Requests that join; their rows come after those that are there.
            version: Policy version that draws the tokens.

        Returns:
            Row and reply of those that are finished. They have left: the rows behind them move up.
        """
        parts = []
        if self._rows:
            parts.append(self._decode())
        if admitted:
            parts.append(self._prefill([ReplyRow.begun(request, self._grammars) for request in admitted]))
        logits = torch.cat(parts)
        mask_others(logits, self._rows)
        tokens, logprobs = draw_tokens(
            logits, [row.request.sampling for row in self._rows], [row.stream for row in self._rows]
        )
        self.drawn = tokens
        finished: list[tuple[int, Drawn]] = []
        for index, row in enumerate(self._rows):
            result = row.take(tokens[index], logprobs[index], version)
            if result is not None:
                finished.append((index, result))
        self.remove([index for index, _ in finished])
        return finished

    @torch.inference_mode()
    def remove(self, indices: Sequence[int]) -> None:
        """Remove rows from the batch, with their keys and values."""
        if not indices:
            return
        gone = set(indices)
        kept = [index for index in range(len(self._rows)) if index not in gone]
        self._rows = [self._rows[index] for index in kept]
        self._lengths = [self._lengths[index] for index in kept]
        if not kept:
            self._layers = []
            return
        width = max(self._lengths)
        index = torch.tensor(kept, device=self._device)
        self._layers = [(keys[index, :, -width:], values[index, :, -width:]) for keys, values in self._layers]

    def take(self, indices: Sequence[int]) -> list[GenerationResult]:
        """Let rows leave with what they have."""
        rows = [self._rows[index] for index in indices]
        self.remove(indices)
        return [GenerationResult(row.ids, row.logprobs, row.versions, "abort") for row in rows]

    @torch.inference_mode()
    def recompute(self) -> None:
        """Compute all keys and values again, after the weights have changed."""
        rows, self._rows, self._lengths, self._layers = self._rows, [], [], []
        if rows:
            # The last token of a row is not in the cache: it is what the next step reads.
            self._prefill(rows, upto=-1)

    def _prefill(self, rows: list[ReplyRow], upto: int | None = None) -> Tensor:
        """Run whole prompts (and what was drawn so far), add them to the cache, return the last logits."""
        sequences = [(row.request.prompt_ids + row.ids)[:upto] for row in rows]
        whole = [(tuple(ids), row.request.images) for ids, row in zip(sequences, rows, strict=True)]
        index_of = {each: index for index, each in enumerate(dict.fromkeys(whole))}
        # Members of a group often read the same prompt: it is computed once.
        where = torch.tensor([index_of[each] for each in whole], device=self._device)
        lengths = [len(sequence) for sequence, _ in index_of]
        width = max(lengths)
        ids = torch.zeros(len(index_of), width, dtype=torch.long)
        for index, (sequence, _) in enumerate(index_of):
            ids[index, width - len(sequence) :] = torch.tensor(sequence)
        shown = image_tensors(
            self._model, ids, [images for _, images in index_of], [width - length for length in lengths]
        )
        logits, cached = self._forward(ids, lengths, DynamicCache(), shown)
        if shown is not None:
            for row, each in zip(rows, whole, strict=True):
                row.shift = shown.shifts[index_of[each]]
        layers = [(keys[where], values[where]) for keys, values in cached]
        self._join(rows, layers, [len(sequence) for sequence in sequences])
        return logits[where]

    def _decode(self) -> Tensor:
        ids = torch.tensor([[row.ids[-1]] for row in self._rows])
        self._lengths = [length + 1 for length in self._lengths]
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(self._layers):
            cache.update(keys, values, layer)
        logits, self._layers = self._forward(
            ids, self._lengths, cache, shifts=[row.shift for row in self._rows]
        )
        return logits

    def _forward(
        self,
        ids: Tensor,
        lengths: list[int],
        cache: DynamicCache,
        images: ImageTensors | None = None,
        shifts: Sequence[int] = (),
    ) -> tuple[Tensor, Layers]:
        """Return the logits of the last column and all keys and values.

        Args:
            ids: New tokens, `[rows, new]`, right-aligned.
            lengths: Real columns of each row, the new ones included.
            cache: What was computed before.
            images: Pictures among the new tokens.
            shifts: What is added to the positions of each row, if anything.
        """
        new = ids.shape[1]
        width = new + cache.get_seq_length()
        real = torch.tensor(lengths)[:, None]
        columns = torch.arange(width)[None, :] - (width - real)
        mask = (columns >= 0).long()
        positions = columns[:, -new:].clamp(min=0)
        if any(shifts):
            positions = positions + torch.tensor(shifts)[:, None]
        given = {"position_ids": positions.to(self._device)}
        output = self._model(
            **given | tokens_or_embeddings(self._model, ids.to(self._device), images),
            attention_mask=None if bool(mask.all()) else mask.to(self._device),
            use_cache=True,
            **{self._cache_argument: cache},
            **self._last_logits,
        )
        return output.logits[:, -1], _layers_of(self._model, cache)

    def _join(self, rows: list[ReplyRow], layers: Layers, lengths: list[int]) -> None:
        self._rows = [*self._rows, *rows]
        self._lengths = [*self._lengths, *lengths]
        if not self._layers:
            self._layers = layers
            return
        width = max(self._layers[0][0].shape[2], layers[0][0].shape[2])
        self._layers = [
            (
                torch.cat([_left_padded(old_keys, width), _left_padded(keys, width)]),
                torch.cat([_left_padded(old_values, width), _left_padded(values, width)]),
            )
            for (old_keys, old_values), (keys, values) in zip(self._layers, layers, strict=True)
        ]


def try_decoding(model: PreTrainedModel) -> None:
    """Draw two tokens for two rows of unequal length, to see whether a model can be decoded here.

    Whether what it computes is right is not asked: that is for a look at its log-probabilities.

    Raises:
        ConfigError: If it cannot; the message says why.
    """
    size = model.config.get_text_config().vocab_size
    batch = ActiveBatch(model)
    requests = [
        GenerationRequest(
            f"trial-{length}", [number % size for number in range(length)], SamplingParams(2), 0
        )
        for length in (1, 3)
    ]
    try:
        batch.advance(requests, 0)
        batch.advance([], 0)
    except (ConfigError, torch.OutOfMemoryError):
        raise
    except UNLIKE as error:
        reason = " ".join(str(error).split())[:300]
        raise _undecodable(
            model, f"does not take one as others do ({type(error).__name__}: {reason})"
        ) from error


def _undecodable(model: PreTrainedModel, why: str) -> ConfigError:
    return ConfigError(
        f"the embedded engine needs a cache of keys and values in every layer, and {type(model).__name__} {why}: have "
        "an inference server sample that knows this family (inference.kind), or take another model"
    )


def _require_keys_and_values(model: PreTrainedModel) -> None:
    for layer in DynamicCache(config=model.config).layers:
        if not isinstance(layer, DynamicLayer):
            raise _undecodable(model, f"has a {type(layer).__name__}")


def _layers_of(model: PreTrainedModel, cache: DynamicCache) -> Layers:
    # Every layer keeps all keys and values, those with a sliding window too: rows of unequal length share its columns,
    # and the model's mask hides what is outside the window.
    layers = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not isinstance(keys, Tensor) or not isinstance(values, Tensor):
            raise _undecodable(model, f"leaves a {type(layer).__name__} without any")
        layers.append((keys, values))
    if not layers:
        raise _undecodable(model, "leaves the cache that it is given as it was")
    return layers


def _left_padded(tensor: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, 0, width - tensor.shape[2], 0))


def sampled_distribution(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Return the log-probabilities that tokens are drawn from, float32 `[rows, vocabulary]`.

    Temperature, top-k and top-p are applied and what is left is renormalised. With temperature 0 the distribution is
    that of temperature 1: greedy decoding reads it, and its log-probabilities say how likely the choice was.

    Args:
        logits: `[rows, vocabulary]`.
        sampling: How tokens are drawn.
    """
    logits = logits.float()
    if sampling.temperature > 0 and sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if sampling.top_p < 1.0:
        ordered, indices = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(dim=-1)
        # A token stays while the mass before it is below top_p, so the most likely one always stays.
        outside = probabilities.cumsum(dim=-1) - probabilities >= sampling.top_p
        logits = logits.masked_fill(outside.scatter(-1, indices, outside), -torch.inf)
    return logits.log_softmax(dim=-1)


def mask_others(logits: Tensor, rows: Sequence[ReplyRow]) -> None:
    """Mask the logits of tokens that a row's grammar does not allow next, in place.

    Args:
        logits: Of the next tokens, `[rows, vocabulary]`.
        rows: In that order.
    """
    for index, row in enumerate(rows):
        allowed = row.allowed(logits.shape[-1])
        if allowed is not None:
            logits[index].masked_fill_(~allowed.to(logits.device), -torch.inf)


def draw_tokens(
    logits: Tensor, samplings: Sequence[SamplingParams], streams: Sequence[RequestStream]
) -> tuple[list[int], list[float]]:
    """Draw one token per row, each from a random stream of its own; return the ids and their log-probabilities.

    One uniform number per token, read through the inverse of the cumulative distribution: the other rows of a batch
    never change what a request draws, only rounding in the logits could.

    Args:
        logits: `[rows, vocabulary]`.
        samplings: How each row's token is drawn.
        streams: Each row's random stream; a greedy row draws nothing from it.
    """
    ids = [0] * len(samplings)
    logprobs = [0.0] * len(samplings)
    rows_of: dict[SamplingParams, list[int]] = {}
    for index, sampling in enumerate(samplings):
        rows_of.setdefault(sampling, []).append(index)
    for sampling, rows in rows_of.items():
        distribution = sampled_distribution(logits[rows] if len(rows_of) > 1 else logits, sampling)
        if sampling.temperature == 0:
            chosen = distribution.argmax(dim=-1)
        else:
            uniforms = torch.tensor([streams[row].draw() for row in rows], dtype=torch.float64)
            chosen = inverse_transform(distribution, uniforms)
        picked = distribution.gather(-1, chosen[:, None])[:, 0]
        # One transfer from the device: ids are small enough to be exact in the type of the log-probabilities.
        tokens, values = torch.stack([chosen.to(picked.dtype), picked]).tolist()
        for row, token, logprob in zip(rows, tokens, values, strict=True):
            ids[row], logprobs[row] = int(token), logprob
    return ids, logprobs


def inverse_transform(log_probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Return, for each row, the first token whose cumulative probability exceeds the row's uniform number.

    Args:
        log_probabilities: `[rows, vocabulary]`; tokens of probability 0 are never chosen.
        uniforms: `[rows]`, in [0, 1).
    """
    wide = widest_float(log_probabilities.device)
    cumulative = log_probabilities.to(wide).exp().cumsum(dim=-1)
    # Rounding may leave the last sum a little below 1; scaling keeps every number inside the table.
    target = uniforms.to(device=cumulative.device, dtype=wide) * cumulative[:, -1]
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0].clamp(
        max=log_probabilities.shape[-1] - 1
    )
