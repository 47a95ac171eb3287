"""A paper's settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Paper:
    """An algorithm by name.

    Attributes:
        name: Name of the preset.
        line: What it is, in a few words.
        source: Where it is from.
        settings: What it sets; all else is as in `AlgorithmSettings`.
        notes: Where a number is from, and where it is ours.
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
