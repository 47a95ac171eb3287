"""Reasoning-gym's generators and scorers; runs in a process of a `ProcessPool` only.

Some of them use the process's own generators: here those start equal for every call.
"""

import random
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import orjson
from reasoning_gym.factory import DATASETS, create_dataset


def call(request: Mapping[str, Any]) -> dict[str, Any]:
    """Draw a task or score an answer.

    Args:
        request: `dataset`, `config` and `seed` name a task; with an `answer` it is scored.

    Returns:
        `question` and `answer` of the task, or `score`; `refused` says why a task cannot be made, `raised` what the
        scorer raised over the answer.
    """
    name, seed = request["dataset"], request["seed"]
    if name not in DATASETS:
        return {"refused": f"reasoning-gym has no data set {name!r}; it has {', '.join(sorted(DATASETS))}"}
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        dataset, entry = _entry(name, orjson.dumps(request["config"], option=orjson.OPT_SORT_KEYS), seed)
    except Exception as error:  # noqa: BLE001 - the boundary to reasoning-gym: its checks are assertions of all kinds
        return {"refused": f"{name} with {request['config']}: {type(error).__name__}: {error}"}
    if "answer" not in request:
        answer = entry["answer"]
        return {"question": str(entry["question"]), "answer": None if answer is None else str(answer)}
    try:
        return {"score": float(dataset.score_answer(request["answer"], entry))}
    except Exception as error:  # noqa: BLE001 - the boundary to reasoning-gym: some scorers raise on odd answers
        return {"raised": f"{type(error).__name__}: {str(error)[:100]}"}


@lru_cache(maxsize=512)
def _entry(name: str, config: bytes, seed: int) -> tuple[Any, Any]:
    dataset = create_dataset(name, **{**orjson.loads(config), "seed": seed, "size": 1})
    return dataset, dataset[0]
