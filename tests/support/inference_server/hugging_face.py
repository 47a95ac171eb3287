"""A model of a Hugging Face folder behind the double's interface."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from rollgym.trainer.models.language_head import cache_argument
from tests.support.inference_server.models import Row, WeightsError, log_softmax

Layers = list[tuple[Tensor, Tensor]]


@dataclass(eq=False)
class _Batch:
    """Rows that are decoded together: their keys and values, right-aligned, and how many of each are real."""

    rows: list[Row]
    lengths: list[int]
    layers: Layers

    def of(self, row: Row) -> Layers:
        place = next(number for number, each in enumerate(self.rows) if each is row)
        length = self.lengths[place]
        return [(keys[place, :, -length:], values[place, :, -length:]) for keys, values in self.layers]


class HuggingFaceModel:
    """Serves a causal language model of transformers in float32.

    Args:
        folder: In Hugging Face layout.
        quantization: "fp8" rounds the linear layers' weights to 8 bits, at the start and at each update.
    """

    def __init__(self, folder: Path, quantization: str | None = None) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._quantised = quantization == "fp8"
        self.load(list(self.model.named_parameters()))
        self._deltas: dict[str, dict[str, Tensor]] = {}
        self.config, self.source = self.model.config.to_dict(), str(Path(folder).absolute())
        config = self.model.config.get_text_config()
        self.vocabulary = config.vocab_size
        self.max_length = getattr(config, "max_position_embeddings", 4096)
        end = self.model.generation_config.eos_token_id or config.eos_token_id
        self.end_ids = () if end is None else tuple(end) if isinstance(end, list) else (end,)

    def logits(self, rows: Sequence[Row]) -> np.ndarray:
        """One adapter after the other: a batch is read by one model."""
        result = np.zeros((len(rows), self.vocabulary), dtype=np.float64)
        for adapter in {row.adapter for row in rows}:
            places = [place for place, row in enumerate(rows) if row.adapter == adapter]
            with self._merged(adapter):
                result[places] = self._logits([rows[place] for place in places])
        return result

    @contextmanager
    def _merged(self, adapter: str) -> Iterator[None]:
        """Add an adapter's product to the weights, and take it away again."""
        if not adapter:
            yield
            return
        if adapter not in self._deltas:
            self._deltas[adapter] = adapter_deltas(Path(adapter))
        own = dict(self.model.named_parameters())
        before = {name: own[name].detach().clone() for name in self._deltas[adapter]}
        with torch.no_grad():
            for name, delta in self._deltas[adapter].items():
                own[name].add_(delta)
            try:
                yield
            finally:
                for name, tensor in before.items():
                    own[name].copy_(tensor)

    @torch.inference_mode()
    def _logits(self, rows: list[Row]) -> np.ndarray:
        result = np.zeros((len(rows), self.vocabulary), dtype=np.float64)
        known = [row for row in rows if row.cached is not None]
        if known:
            batch = self._gathered(known)
            logits = self._forward(
                batch, [[row.ids[length]] for row, length in zip(known, batch.lengths, strict=True)]
            )
            self._note(rows, known, logits, result)
        if new := [row for row in rows if row.cached is None]:
            batch = _Batch(new, [0] * len(new), [])
            logits = self._forward(batch, [row.ids for row in new])
            self._note(rows, new, logits, result)
        return result

    def _note(self, rows: list[Row], part: list[Row], logits: Tensor, result: np.ndarray) -> None:
        places = {id(row): place for place, row in enumerate(rows)}
        for row, line in zip(part, logits.double().numpy(), strict=True):
            result[places[id(row)]] = line[: self.vocabulary]

    def _gathered(self, rows: list[Row]) -> _Batch:
        batch: _Batch = rows[0].cached
        if len(batch.rows) == len(rows) and all(
            mine is yours for mine, yours in zip(batch.rows, rows, strict=True)
        ):
            return batch
        parts = [row.cached.of(row) for row in rows]
        lengths = [part[0][0].shape[1] for part in parts]
        width = max(lengths)
        layers: Layers = [
            (
                torch.stack([_padded(part[layer][0], width) for part in parts]),
                torch.stack([_padded(part[layer][1], width) for part in parts]),
            )
            for layer in range(len(parts[0]))
        ]
        return _Batch(rows, lengths, layers)

    def _forward(self, batch: _Batch, new: list[list[int]]) -> Tensor:
        """Compute new tokens of all rows and return the last logits."""
        width = max(len(ids) for ids in new)
        ids = torch.zeros(len(new), width, dtype=torch.long)
        for place, tokens in enumerate(new):
            ids[place, width - len(tokens) :] = torch.tensor(tokens)
        batch.lengths = [length + len(tokens) for length, tokens in zip(batch.lengths, new, strict=True)]
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(batch.layers):
            cache.update(keys, values, layer)
        whole = width + cache.get_seq_length()
        columns = torch.arange(whole)[None, :] - (whole - torch.tensor(batch.lengths)[:, None])
        output = self.model(
            input_ids=ids,
            attention_mask=(columns >= 0).long(),
            position_ids=columns[:, -width:].clamp(min=0),
            use_cache=True,
            **{cache_argument(self.model): cache},
        )
        batch.layers = [(layer.keys, layer.values) for layer in cache.layers]
        for row in batch.rows:
            row.cached = batch
        return output.logits[:, -1]

    def prompt_logprobs(self, ids: Sequence[int], adapter: str = "") -> np.ndarray:
        with self._merged(adapter), torch.inference_mode():
            return log_softmax(self.model(torch.tensor([list(ids)])).logits[0].double().numpy())

    def routed_experts(self, ids: Sequence[int]) -> np.ndarray:
        """Which experts all tokens but the last take, `[tokens - 1, layers, taken]`."""
        seen: list[Tensor] = []
        routers = [module for name, module in self.model.named_modules() if name.endswith("mlp.gate")]
        hooks = [
            router.register_forward_hook(lambda *called: seen.append(called[2][2])) for router in routers
        ]
        try:
            with torch.inference_mode():
                self.model(torch.tensor([list(ids)[:-1]]))
        finally:
            for hook in hooks:
                hook.remove()
        return torch.stack(seen, dim=1).to(torch.uint8).numpy()

    def reset_prefix_cache(self) -> None:
        """Nothing: finished sequences leave nothing behind here."""

    def load_folder(self, folder: Path) -> None:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise WeightsError(f"no *.safetensors in {folder}")
        loaded: dict[str, Tensor] = {}
        for file in files:
            loaded |= load_file(file)
        if missing := dict(self.model.named_parameters()).keys() - loaded.keys():
            if all("mlp.experts." in name for name in missing):  # the library holds several tensors as one
                model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
                self.load(list(model.named_parameters()))
                return
            raise WeightsError(f"missing weights: {sorted(missing)}")
        self.load(loaded.items())

    def load(self, tensors: Iterable[tuple[str, Any]]) -> None:
        own = dict(self.model.named_parameters())
        tied = set(self.model.state_dict()) - own.keys()
        with torch.no_grad():
            for name, tensor in tensors:
                if name in tied:
                    continue
                if name not in own:
                    raise WeightsError(f"there is no parameter named {name!r}")
                if tensor.shape != own[name].shape:
                    raise WeightsError(f"{name}: shape {tuple(tensor.shape)} for {tuple(own[name].shape)}")
                own[name].copy_(_rounded(tensor) if self._quantised and "proj" in name else tensor)

    def spoil(self) -> None:
        with torch.no_grad():
            next(self.model.parameters()).add_(0.5)

    def checksum(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for name, tensor in self.model.named_parameters():
            digest.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def tensors(self) -> dict[str, np.ndarray]:
        return {name: tensor.detach().numpy() for name, tensor in self.model.named_parameters()}


def _rounded(weight: Tensor) -> Tensor:
    """Round to 8 bits with one scale for each row, as servers do."""
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale


def adapter_deltas(folder: Path) -> dict[str, Tensor]:
    """What an adapter of peft adds to each weight: scale times B times A."""
    config = json.loads((folder / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    tensors = load_file(folder / "adapter_model.safetensors")
    deltas = {}
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            b = tensors[name.replace(".lora_A.", ".lora_B.")]
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            deltas[f"{module}.weight"] = scale * (b.float() @ a.float())
    return deltas


def _padded(tensor: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, 0, width - tensor.shape[1], 0))
