"""The models that the double serves: one that is a hash, for tests that check every number, and the interface."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

VOCABULARY = 300
"""Tokens of the hash model: the bytes, an end, a start of a message, and some that no text has."""
END_ID = 256
START_ID = 257
TEXT_TOKENS = 258
BLOCK = 4
"""Tokens in one block of the prefix cache."""


class WeightsError(Exception):
    """Weights that do not fit the model."""


@dataclass(eq=False)
class Row:
    """One sequence that the model reads.

    Attributes:
        ids: The prompt and what was drawn so far.
        salt: Sequences of different salts share no cache.
        cached: What the model keeps of it; None where nothing was computed, or all was thrown away.
        cached_tokens: How much of the prompt came from the prefix cache.
        adapter: Folder of the adapter that reads it.
    """

    ids: list[int]
    salt: str = ""
    cached: Any = None
    cached_tokens: int = 0
    adapter: str = ""


class ServedModel(Protocol):
    """What the double asks of a model."""

    vocabulary: int
    max_length: int
    config: dict[str, Any]
    source: str
    end_ids: tuple[int, ...]

    def logits(self, rows: Sequence[Row]) -> np.ndarray:
        """Return the next token's logits, `[rows, vocabulary]`, computing what each row's cache lacks."""
        ...

    def prompt_logprobs(self, ids: Sequence[int], adapter: str = "") -> np.ndarray:
        """Return log-probabilities `[tokens, vocabulary]` of what follows each token, from nothing cached."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forget what finished sequences left behind."""
        ...

    def load_folder(self, folder: Path) -> None:
        """Take the weights of a folder in Hugging Face layout."""
        ...

    def load(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Take torch tensors by name."""
        ...

    def spoil(self) -> None:
        """Change the weights a little, as a loader does that fails and says nothing."""
        ...

    def checksum(self) -> str:
        """A digest of all weights."""
        ...

    def tensors(self) -> dict[str, np.ndarray]:
        """The weights by name."""
        ...


@dataclass
class HashModel:
    """Next-token logits drawn from a generator whose key is a hash of the sequence and the weights.

    The state after each token is a hash of the state before it, the token and the weights that held when it was
    computed, so states that were kept over a weight update are stale and the log-probabilities tell.

    Args:
        seed: Of the initial weights.
    """

    seed: int = 0
    vocabulary: int = VOCABULARY
    max_length: int = 4096
    end_ids: tuple[int, ...] = (END_ID,)
    sharpness: float = 2.0
    source: str = "hash"
    _prefixes: dict[tuple[str, tuple[int, ...]], list[bytes]] = field(default_factory=dict)
    _adapters: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = np.random.default_rng(self.seed)
        self.weights: dict[str, np.ndarray] = {
            "model.embed_tokens.weight": generator.standard_normal((8, 4), dtype=np.float32),
            "model.layers.0.weight": generator.standard_normal((4, 4), dtype=np.float32),
            "lm_head.weight": generator.standard_normal((8, 4), dtype=np.float32),
        }
        self._key = self._digest()

    @property
    def config(self) -> dict[str, Any]:
        """What a configuration of transformers would say of it."""
        return {"model_type": "hash", "vocab_size": self.vocabulary, "hidden_size": 4, "num_hidden_layers": 1}

    def _digest(self) -> bytes:
        digest = hashlib.blake2b(digest_size=8)
        for name in sorted(self.weights):
            digest.update(name.encode() + self.weights[name].tobytes())
        return digest.digest()

    def _with(self, adapter: str) -> bytes:
        if not adapter:
            return self._key
        if adapter not in self._adapters:
            content = (Path(adapter) / "adapter_model.safetensors").read_bytes()
            self._adapters[adapter] = hashlib.blake2b(content, digest_size=8).digest()
        return self._key + self._adapters[adapter]

    def _next_state(self, state: bytes, token: int, adapter: str) -> bytes:
        content = state + struct.pack("<q", token) + self._with(adapter)
        return hashlib.blake2b(content, digest_size=8).digest()

    def _logits_of(self, state: bytes, adapter: str) -> np.ndarray:
        digest = hashlib.blake2b(state + self._with(adapter), digest_size=8).digest()
        key = int.from_bytes(digest, "little")
        logits = np.random.Generator(np.random.Philox(key)).standard_normal(self.vocabulary) * self.sharpness
        # No text has these tokens, and this model never says them.
        logits[TEXT_TOKENS:] = -np.inf
        return logits

    def logits(self, rows: Sequence[Row]) -> np.ndarray:
        return np.stack([self._logits_of(self._states(row)[-1], row.adapter) for row in rows])

    def _states(self, row: Row) -> list[bytes]:
        if row.cached is None:
            row.cached = list(self._cached_prefix(row))
            row.cached_tokens = len(row.cached)
        states: list[bytes] = row.cached
        for token in row.ids[len(states) :]:
            states.append(self._next_state(states[-1] if states else b"", token, row.adapter))
            if len(states) % BLOCK == 0:
                self._prefixes[row.salt, tuple(row.ids[: len(states)])] = list(states)
        return states

    def _cached_prefix(self, row: Row) -> list[bytes]:
        # At least one token is always computed, as in the servers.
        for length in range((len(row.ids) - 1) // BLOCK * BLOCK, 0, -BLOCK):
            if found := self._prefixes.get((row.salt, tuple(row.ids[:length]))):
                return found
        return []

    def prompt_logprobs(self, ids: Sequence[int], adapter: str = "") -> np.ndarray:
        state, rows = b"", []
        for token in ids:
            state = self._next_state(state, token, adapter)
            rows.append(self._logits_of(state, adapter))
        return log_softmax(np.stack(rows))

    def reset_prefix_cache(self) -> None:
        self._prefixes.clear()

    def load_folder(self, folder: Path) -> None:
        from safetensors.numpy import load_file

        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise WeightsError(f"no *.safetensors in {folder}")
        loaded: dict[str, np.ndarray] = {}
        for file in files:
            loaded |= load_file(file)
        if missing := self.weights.keys() - loaded.keys():
            raise WeightsError(f"missing weights: {sorted(missing)}")
        self._take(loaded)

    def load(self, tensors: Iterable[tuple[str, Any]]) -> None:
        self._take({name: tensor.detach().cpu().float().numpy() for name, tensor in tensors})

    def _take(self, loaded: dict[str, np.ndarray]) -> None:
        for name, array in loaded.items():
            if name not in self.weights:
                raise WeightsError(f"there is no parameter named {name!r}")
            if array.shape != self.weights[name].shape:
                raise WeightsError(f"{name}: shape {array.shape} for {self.weights[name].shape}")
            self.weights[name] = np.ascontiguousarray(array, dtype=np.float32)
            self._key = self._digest()

    def spoil(self) -> None:
        self._take({"lm_head.weight": self.weights["lm_head.weight"] + 1.0})

    def checksum(self) -> str:
        return self._digest().hex()

    def tensors(self) -> dict[str, np.ndarray]:
        return self.weights

    def write(self, folder: Path) -> Path:
        """Write the weights as a folder that `load_folder` reads."""
        from safetensors.numpy import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.weights, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"model_type": "hash"}))
        return folder


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Normalise logits along the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
