"""SGLang's `/weights_checker`: checksums of the tensors of one rank, and their comparison with a snapshot."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.support.inference_server.models import ServedModel

_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


class CheckError(Exception):
    """What the server answers with `success: false`."""


class WeightsChecker:
    """Does what an action of `/weights_checker` says.

    Args:
        model: Whose weights they are.
    """

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._snapshot: dict[str, np.ndarray] | None = None

    def handle(self, action: str, skip: list[str]) -> list[dict[str, Any]] | None:
        """Return what each rank says; None where the action says nothing."""
        held = {
            name: array
            for name, array in fused(self._model.tensors()).items()
            if not any(each in name for each in skip)
        }
        if action == "checksum":
            return [_rank({name: _hash(array) for name, array in held.items()})]
        if action == "snapshot":
            self._snapshot = {name: array.copy() for name, array in held.items()}
        elif action == "compare":
            self._compare(held)
        elif action == "reset_tensors":
            self._model.spoil()
        else:
            raise CheckError(f"Unsupported {action=}")
        return None

    def _compare(self, held: Mapping[str, np.ndarray]) -> None:
        if self._snapshot is None:
            raise CheckError("")
        wrong = [name for name, array in held.items() if not np.array_equal(array, self._snapshot[name])]
        if wrong:
            raise CheckError("check tensor equality failed:\n" + "\n".join(f"name={name}" for name in wrong))
        self._snapshot = None


def fused(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return tensors as the server's layers hold them: projections that are computed together as one."""
    held = dict(tensors)
    for whole, parts in _FUSED.items():
        for name in [name for name in held if f".{parts[0]}." in name]:
            names = [name.replace(f".{parts[0]}.", f".{part}.") for part in parts]
            held[name.replace(f".{parts[0]}.", f".{whole}.")] = np.concatenate(
                [held.pop(each) for each in names]
            )
    return held


def _hash(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def _overall(checksums: Mapping[str, str]) -> str:
    return hashlib.sha256("".join(name + checksums[name] for name in sorted(checksums)).encode()).hexdigest()


def _rank(checksums: dict[str, str]) -> dict[str, Any]:
    alone = {
        f"{kind}_{what}": number for kind in ("tp", "dp", "pp") for what, number in (("rank", 0), ("size", 1))
    }
    return {
        "checksums": checksums,
        "per_gpu_checksum": _overall(checksums),
        "parallelism_info": [{"role": "target", **alone, "rank": 0, "size": 1}],
    }


def per_engine(ranks: list[dict[str, Any]]) -> str:
    """Return the digest of the digests of all ranks."""
    return hashlib.sha256("".join(rank["per_gpu_checksum"] for rank in ranks).encode()).hexdigest()
