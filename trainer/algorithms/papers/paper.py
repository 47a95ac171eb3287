"""The record of a preset: a paper's algorithm, its source and its settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Paper:
    """An algorithm by name.

    Attributes:
        name: Name of the preset.
        line: What it is, in a few words.
        source: The paper, or the code, that it is from.
        settings: What it sets; all else is as in `AlgorithmSettings`.
        notes: The origin of its numbers, and which of them are ours.
    """

    name: str
    line: str
    source: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: str = ""


MEAN_OF_SEQUENCES = {"mode": "seq-mean-token-mean"}
SUM_OF_SEQUENCES = {"mode": "seq-mean-token-sum"}
CENTRED = {"kind": "group", "scale": "none"}
PLAIN = {"kind": "reinforce"}
UNREADABLE = {"invalid_action_penalty": 0.1}
REFERENCE = {"coefficient": 0.01, "estimator": "k3", "placement": "loss"}
