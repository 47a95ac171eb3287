"""Decoding in slots: keys and values of each row in its own slot, filled from the first column on and written in place.

A layer holds `[slots, columns, heads, width]`. A decoding step reads the first slots up to some column, which is a
view: nothing of the size of what is held is copied. Behind the columns that are read stands one more, into which
padding is written.

A step is a function of a few small tensors on the device. Nothing in it waits for the host, and its shapes are its
number of rows and a rounded length, so it is recorded once as a graph of the device and launched as a whole. Before
slots are used, a trial checks that a model computes the same in them as with whole rows.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from rollgym.trainer.models.language_head import UNLIKE, LanguageHead, cache_argument, why_no_cache_of_its_own
from rollgym.trainer.models.pictures import ImageTensors, tokens_or_embeddings

_SMALLEST = 64
"""Columns; lengths are rounded so that shapes repeat."""


def rounded(number: int, smallest: int = 1) -> int:
    """Return the next of `smallest` times 1, 2, 3, 4, 6, 8, 12, 16 and so on: at most half more."""
    size = smallest
    while size < number:
        size *= 2
    return size * 3 // 4 if size // 4 * 3 >= number and size >= 4 * smallest else size


def rounded_columns(number: int) -> int:
    """Return a length that shapes are made of."""
    return rounded(number, _SMALLEST)


@dataclass(slots=True)
class SlotCall:
    """What one call of the model reads and writes.

    Attributes:
        places: Where its keys and values are written, of all columns of all slots in order, `[rows * new]`.
        width: Columns that its rows read, their own included; 0 if they read only what the call itself computes.
        slots: Slots of its rows, `[rows]`; the first ones if None.
        rows: How many there are.
    """

    places: Tensor
    width: int
    rows: int
    slots: Tensor | None = None


class SlotLayer(CacheLayerMixin):
    """The slots of one layer, as the library's models write and read them."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.call: SlotCall | None = None
        self.size = (0, 0)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take memory for keys and values such as these."""
        self.keys, self.values = (
            states.new_zeros(self.size[0], self.size[1] + 1, states.shape[1], states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write what a call computes, and return what its rows read."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        call = self._current()
        for held, states in self._pairs(key_states, value_states):
            held.flatten(0, 1).index_copy_(0, call.places, states.transpose(1, 2).flatten(0, 1))
        if not call.width:
            return key_states, value_states
        keys, values = (self._read(held, call) for held in self.tensors)
        return keys, values

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Keys and values, `[slots, columns + 1, heads, width]`; none before the first call."""
        return () if self.keys is None or self.values is None else (self.keys, self.values)

    def get_seq_length(self) -> int:
        """Return the columns before the call's."""
        call = self._current()
        return max(call.width - len(call.places) // call.rows, 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys a call reads, and the index of the first."""
        return self._current().width or query_length, 0

    def get_max_length(self) -> int:
        """Return -1, which stands for an unbounded cache: slots grow."""
        return -1

    def _pairs(self, *states: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.tensors, states, strict=True)

    @staticmethod
    def _read(held: Tensor, call: SlotCall) -> Tensor:
        part = held[: call.rows, : call.width] if call.slots is None else held[call.slots, : call.width]
        return part.transpose(1, 2)

    def _current(self) -> SlotCall:
        if self.call is None:
            raise RuntimeError("slots are read outside a call")
        return self.call


class SlotCache:
    """All layers' slots.

    Args:
        depth: Layers.

    Attributes:
        slots: How many there are.
        columns: Tokens that each of them can hold.
    """

    def __init__(self, depth: int) -> None:
        self._layers = [SlotLayer() for _ in range(depth)]
        self._cache = Cache(layers=list(self._layers))
        self.slots = self.columns = 0

    def during(self, call: SlotCall) -> Cache:
        """Return what the model is given as its cache for a call."""
        for layer in self._layers:
            layer.call = call
        return self._cache

    @property
    def written(self) -> bool:
        """Whether every layer has written keys and values."""
        return all(layer.is_initialized for layer in self._layers)

    def resize(self, slots: int, columns: int) -> None:
        """Have room for some slots of some columns; what they hold stays, as far as there is room."""
        for layer in self._layers:
            layer.size = (slots, columns)
            if layer.tensors:
                layer.keys, layer.values = (_resized(held, slots, columns + 1) for held in layer.tensors)
        self.slots, self.columns = slots, columns

    def release(self) -> None:
        """Give back the memory of all slots: there are none until the next `resize`."""
        for layer in self._layers:
            layer.keys = layer.values = None
            layer.is_initialized = False
            layer.call = None
        self.resize(0, 0)

    def copy(self, sources: Sequence[int], targets: Sequence[int], columns: int) -> None:
        """Copy the first columns of slots into others; all are read before one is written."""
        for layer in self._layers:
            for held in layer.tensors:
                read = torch.tensor(sources, device=held.device)
                held[torch.tensor(targets, device=held.device), :columns] = held[read, :columns]

    def clear(self, slots: Sequence[int] | None = None) -> None:
        """Write zeros into slots, all if None: a masked NaN would still be NaN, since 0 times NaN is NaN."""
        for layer in self._layers:
            for held in layer.tensors:
                if slots is None:
                    held.zero_()
                else:
                    held[torch.tensor(slots, device=held.device)] = 0


def _resized(held: Tensor, slots: int, columns: int) -> Tensor:
    wider = held.new_zeros(slots, columns, *held.shape[2:])
    kept = min(slots, held.shape[0]), min(columns, held.shape[1]) - 1
    wider[: kept[0], : kept[1]] = held[: kept[0], : kept[1]]
    return wider


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Recording:
    graph: Any
    tokens: Tensor
    logits: Tensor


def _can_record(device: torch.device) -> bool:
    """Whether torch records what is launched on a device, as it does with CUDA and ROCm."""
    return hasattr(torch.get_device_module(device), "CUDAGraph")


class CapturedSteps:
    """Decoding steps captured as graphs.

    Args:
        step: Computes logits `[rows, vocabulary]` of tokens on the device and a width. It must be repeatable, and wait
            for nothing.
        device: One for which `_can_record` holds.
    """

    def __init__(self, step: Callable[[Tensor, int], Tensor], device: torch.device) -> None:
        self._step = step
        self._device = device
        self._torch: Any = torch.get_device_module(device)
        self._recordings: dict[tuple[int, int], _Recording] = {}
        self._pool: Any = None  # torch has no public name for what it is
        self._possible = True

    def __call__(self, tokens: Tensor, width: int) -> Tensor:
        """Return the logits of a step; the next call writes over them.

        Args:
            tokens: What the step is given, `[3, rows]`, on the host.
            width: Columns that it reads.
        """
        key = tokens.shape[1], width
        if key not in self._recordings and self._possible:
            self._record(key, tokens)
        recording = self._recordings.get(key)
        if recording is None:
            return self._step(tokens.to(self._device), width)
        recording.tokens.copy_(tokens)
        recording.graph.replay()
        return recording.logits

    def clear(self) -> None:
        """Forget what was recorded: tensors that it reads are elsewhere now."""
        self._recordings.clear()
        self._pool = None

    def _record(self, key: tuple[int, int], tokens: Tensor) -> None:
        given = tokens.to(self._device)
        try:
            logits = self._warmed_up(given, key[1])
            self._recordings[key] = _Recording(self._graph(given, key[1], logits), given, logits)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._possible = False
            reason = " ".join(str(error).split())[:200]
            _log.warning(
                "decoding steps are launched kernel by kernel: a graph cannot hold them (%s)", reason
            )

    def _warmed_up(self, given: Tensor, width: int) -> Tensor:
        """Run a step before it is recorded, so that libraries make their plans, and return room for its logits."""
        aside, current = self._torch.Stream(self._device), self._torch.current_stream(self._device)
        aside.wait_stream(current)
        with self._torch.stream(aside):
            self._step(given, width)
            logits = self._step(given, width)
        current.wait_stream(aside)
        return self._room(logits)

    def _room(self, logits: Tensor) -> Tensor:
        # Recordings share room for their logits: one is read before the next is launched.
        largest = max(self._recordings.values(), key=lambda each: len(each.logits), default=None)
        if largest is not None and len(largest.logits) >= len(logits):
            return largest.logits[: len(logits)]
        return torch.empty_like(logits)

    def _graph(self, given: Tensor, width: int, logits: Tensor) -> Any:
        graph = self._torch.CUDAGraph()
        # Another thread may train at the same time: in this mode its CUDA calls do not disturb the capture.
        with self._torch.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits.copy_(self._step(given, width))
        self._pool = graph.pool()
        return graph


Masks = Tensor | dict[str, Tensor]


class SlotModel:
    """Logits of rows whose keys and values stand in slots.

    Args:
        model: The policy.
        max_length: Longest row in tokens.

    Attributes:
        cache: The slots.
        captures: Whether decoding steps are launched as a whole: their shapes should be few then.
    """

    def __init__(self, model: PreTrainedModel, max_length: int) -> None:
        self._model = model
        self._body = cast(PreTrainedModel, model.base_model)
        self._head = LanguageHead(model)
        self._cache_argument = cache_argument(self._body)
        self._window, self._all_near = _window(model.config.get_text_config(), max_length)
        self.cache = SlotCache(model.config.get_text_config().num_hidden_layers)
        self.captures = _can_record(model.device)
        self._captured = CapturedSteps(self.step, model.device) if self.captures else None
        self._addresses = self._weights_at()

    def decode(self, tokens: Tensor, width: int) -> Tensor:
        """Return the logits behind one more token of each of the first slots, `[rows, vocabulary]`.

        They are valid until the next call.

        Args:
            tokens: Ids, columns that they are written into and positions, int64 `[3, rows]`, on the host.
            width: Columns that are read.
        """
        if self._captured is not None:
            return self._captured(tokens, width)
        return self.step(tokens.to(self._model.device), width)

    def step(self, tokens: Tensor, width: int) -> Tensor:
        """Compute what `decode` returns of tokens that are on the device."""
        ids, columns, positions = tokens
        rows = len(ids)
        first = torch.arange(rows, device=tokens.device) * (self.cache.columns + 1)
        cache = self.cache.during(SlotCall(first + columns, width, rows))
        mask = self._masks(columns[:, None], width)
        states = self._states(cache, mask, input_ids=ids[:, None], position_ids=positions[:, None])
        return self._head.logits(states[:, -1])

    def read(
        self,
        ids: Tensor,
        columns: Tensor,
        slots: Sequence[int],
        last: Sequence[int],
        width: int,
        images: ImageTensors | None = None,
    ) -> Tensor:
        """Return the logits behind the last of several tokens of rows, `[rows, vocabulary]`.

        Args:
            ids: Token ids, padded on the right, int64 `[rows, new]`.
            columns: Their columns in their slots; for padding, one behind all that are read.
            slots: The rows' slots.
            last: Index of each row's last token.
            width: Columns that are read, or 0 if no row has any before these.
            images: Pictures among the tokens.
        """
        device = self._model.device
        where, columns = torch.tensor(slots, device=device), columns.to(device)
        places = (where[:, None] * (self.cache.columns + 1) + columns).flatten()
        cache = self.cache.during(SlotCall(places, width, len(slots), where))
        # Padding may have no position of its own: tables of positions end.
        given = {"position_ids": columns.where(columns < self.cache.columns, 0)}
        given |= tokens_or_embeddings(self._body, ids.to(device), images)
        states = self._states(cache, self._masks(columns, width) if width else None, **given)
        return self._head.logits(
            states[torch.arange(len(slots), device=device), torch.tensor(last, device=device)]
        )

    def resize(self, slots: int, columns: int) -> None:
        """Have other slots; what was recorded with those before is void."""
        self.cache.resize(slots, columns)
        self._void()

    def release(self) -> None:
        """Give back the memory of all slots, and of what was recorded with them."""
        self.cache.release()
        self._void()

    def take_weights(self) -> None:
        """Continue with new weights: drop the cache, and graphs captured with tensors at other addresses."""
        self.cache.clear()
        if self._addresses != (addresses := self._weights_at()):
            self._addresses = addresses
            self._void()

    def _void(self) -> None:
        if self._captured is not None:
            self._captured.clear()

    def _weights_at(self) -> list[int]:
        return [each.data_ptr() for each in self._model.parameters()] if self.captures else []

    def _states(self, cache: Cache, mask: Masks | None, **given: Tensor) -> Tensor:
        named: dict[str, Any] = {self._cache_argument: cache, "attention_mask": mask, "use_cache": True}
        states: Tensor = self._body(**given, **named).last_hidden_state
        return states

    def _masks(self, columns: Tensor, width: int) -> Masks:
        """Return what is added to attention's scores: of the tokens that stand in columns `[rows, new]`."""
        others = torch.arange(width, device=columns.device)
        seen = others <= columns[..., None]
        if self._window is None:
            return self._added(seen)
        near = self._added(seen & (others > columns[..., None] - self._window))
        return near if self._all_near else {"full_attention": self._added(seen), "sliding_attention": near}

    def _added(self, seen: Tensor) -> Tensor:
        added = torch.zeros(seen.shape, dtype=self._model.dtype, device=seen.device)
        return added.masked_fill_(~seen, -torch.inf)[:, None]


def _window(config: Any, max_length: int) -> tuple[int | None, bool]:
    """Return how far some layers look back, None if further than any row is long, and whether all layers do."""
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    if window is None or window >= max_length or "sliding_attention" not in kinds:
        return None, False
    return int(window), kinds == {"sliding_attention"}


_TOKENS = 40
"""Of the longest row that is tried."""


@torch.inference_mode()
def why_no_slots(model: PreTrainedModel, max_length: int) -> str | None:
    """Return why rows of a model cannot be decoded in slots, or None if they can.

    What its settings do not rule out is tried on rows of unequal lengths, two of which share their beginning.

    Args:
        model: The policy.
        max_length: Longest row in tokens.
    """
    config = model.config.get_text_config()
    if (attention := str(config._attn_implementation)) not in ("sdpa", "eager"):
        return f"its attention ({attention}) takes no mask of ours"
    if (odd := why_no_cache_of_its_own(config)) is not None:
        return odd
    if not LanguageHead(model).is_whole():
        return "its logits are made by its whole forward, and not of its last hidden states alone"
    try:
        return (
            None
            if _is_exact(model, max_length)
            else "what it computes there is not what it computes of whole rows"
        )
    except torch.OutOfMemoryError:
        raise
    except UNLIKE as error:
        return f"it cannot compute them ({type(error).__name__}: {' '.join(str(error).split())[:200]})"


def _is_exact(model: PreTrainedModel, max_length: int) -> bool:
    """Whether logits of prompts, behind a shared beginning and of a decoding step are the model's own."""
    text = model.config.get_text_config()
    window = getattr(text, "sliding_window", None)
    # What lies outside a window that rows can pass must be hidden.
    longest = window + 8 if isinstance(window, int) and window < max_length else _TOKENS
    length = max(min(longest, max_length - 2), 6)
    ids = (torch.arange(length + 1) * 7 + 3) % text.vocab_size
    shared = length - 3
    rows = [ids, torch.cat([ids[:shared], (ids[:4] + 1) % text.vocab_size]), ids[:3]]
    before, whole = [_own(model, row[:-1]) for row in rows], [_own(model, row) for row in rows]
    expected = [torch.cat([before[0], before[2]]), before[1], torch.cat(whole)]
    return all(
        _is_alike(*each) for each in zip(_in_slots(model, rows, shared, max_length), expected, strict=True)
    )


def _is_alike(found: Tensor, expected: Tensor) -> bool:
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    # In bf16 a router that breaks a tie the other way changes a whole row.
    return bool(error.median() < 5e-2 if found.dtype == torch.bfloat16 else error.max() < 1e-4)


def _own(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model(input_ids=ids[None].to(model.device), use_cache=False).logits[:, -1]


def _in_slots(model: PreTrainedModel, rows: list[Tensor], shared: int, max_length: int) -> list[Tensor]:
    """Return logits of three rows but for their last tokens, the first and the third together, and then of all."""
    slots = SlotModel(model, max_length)
    length = len(rows[0])
    slots.resize(3, length + 8)  # more than the longest row has
    ids, columns = torch.zeros(2, length - 1, dtype=torch.long), torch.full((2, length - 1), length + 8)
    for number, row in enumerate((rows[0], rows[2])):
        ids[number, : len(row) - 1] = row[:-1]
        columns[number, : len(row) - 1] = torch.arange(len(row) - 1)
    found = [slots.read(ids, columns, [0, 2], [length - 2, len(rows[2]) - 2], 0)]
    if not slots.cache.written:
        raise RuntimeError("the model passed over the cache that it was given")
    slots.cache.copy([0], [1], shared)
    last = len(rows[1]) - 1
    found.append(
        slots.read(
            rows[1][None, shared:last], torch.arange(shared, last)[None], [1], [last - shared - 1], last
        )
    )
    where = torch.tensor([len(row) - 1 for row in rows])
    tokens = torch.stack([torch.stack([row[-1] for row in rows]), where, where])
    found.append(slots.step(tokens.to(model.device), length + 8))
    return found
