"""Corrections of the mismatch between sampling and training by name: `correction: icepop`."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rollgym.suggestions import near_names
from rollgym.trainer.algorithms.token_settings import (
    BandCorrection,
    CorrectionSettings,
    NoCorrection,
    RejectCorrection,
    Rejection,
    TruncateCorrection,
)


@dataclass(frozen=True, slots=True)
class NamedCorrection:
    """A correction with the numbers of its authors.

    Attributes:
        settings: The correction.
        line: What it does, in a few words.
        source: Where its numbers are from.
    """

    settings: CorrectionSettings
    line: str
    source: str


CORRECTIONS: Mapping[str, NamedCorrection] = MappingProxyType(
    {
        "off": NamedCorrection(NoCorrection(), "no correction", "-"),
        "tis": NamedCorrection(
            TruncateCorrection(kind="truncate", cap=2.0),
            "weight of each token, at most 2",
            "Yao et al. 2025; verl token_tis",
        ),
        "seq_tis": NamedCorrection(
            TruncateCorrection(kind="truncate", cap=2.0, level="sequence"),
            "weight of the episode, at most 2",
            "verl seq_is",
        ),
        "seq_truncate": NamedCorrection(
            TruncateCorrection(kind="truncate", cap=3.0, level="sequence"),
            "weight of the episode, at most 3",
            "TRL sequence_truncate",
        ),
        "clamped_tis": NamedCorrection(
            TruncateCorrection(kind="truncate", cap=5.0, floor=0.5),
            "weight of each token within [0.5, 5]",
            "OpenRLHF",
        ),
        "mis": NamedCorrection(
            BandCorrection(kind="band", low=0.0, high=2.0, level="sequence"),
            "episodes of weight above 2 are dropped",
            "Li et al. 2025 (seq-MIS); verl",
        ),
        "token_mis": NamedCorrection(
            BandCorrection(kind="band", low=0.0, high=2.0),
            "tokens of weight above 2 are dropped",
            "Li et al. 2025 (token-MIS)",
        ),
        "icepop": NamedCorrection(
            BandCorrection(kind="band", low=0.5, high=5.0),
            "tokens of weight outside [0.5, 5] are dropped",
            "IcePop, ring-moe 2025",
        ),
        "sequence_mask": NamedCorrection(
            BandCorrection(kind="band", low=0.0, high=3.0, level="sequence"),
            "episodes of weight above 3 are dropped",
            "TRL's default",
        ),
        "seq_mask_tis": NamedCorrection(
            TruncateCorrection(
                kind="truncate",
                cap=None,
                reject=[Rejection(level="sequence", measure="ratio", low=0.999, high=1.002)],
            ),
            "token weights of episodes whose mean ratio is near 1",
            "NeMo-RL seq-mask-tis",
        ),
        "geometric_rejection": NamedCorrection(
            RejectCorrection(
                kind="reject",
                reject=[Rejection(level="sequence", measure="ratio", low=0.999, high=1.001)],
            ),
            "episodes whose mean ratio is not near 1 are dropped",
            "verl geo_rs",
        ),
        "k3_rejection": NamedCorrection(
            RejectCorrection(kind="reject", reject=[Rejection(level="sequence", measure="k3", high=0.01)]),
            "episodes of mean k3 above 0.01 are dropped",
            "verl seq_mean_k3",
        ),
        "veto": NamedCorrection(
            RejectCorrection(
                kind="reject",
                reject=[Rejection(level="sequence", measure="ratio", statistic="all", low=1e-4, high=100.0)],
            ),
            "drops episodes with a token ratio outside [1e-4, 100]",
            "SkyRL outlier mask",
        ),
        "opsm": NamedCorrection(
            RejectCorrection(
                kind="reject",
                reject=[
                    Rejection(
                        level="sequence",
                        measure="k1",
                        high=1e-4,
                        only_negative=True,
                        policy="current",
                    )
                ],
            ),
            "failed episodes that the policy has left are dropped",
            "slime --use-opsm",
        ),
        "deepseek_mask": NamedCorrection(
            RejectCorrection(
                kind="reject",
                reject=[
                    Rejection(level="sequence", measure="k1", high=0.5, only_negative=True, policy="current")
                ],
            ),
            "the same from a distance of 0.5 on",
            "DeepSeek-V3.2, as in TRL",
        ),
    }
)


def correction_named(value: Any) -> Any:
    """Return what a setting means that may name a correction; a value that is not a string is returned unchanged.

    Raises:
        ValueError: If the name is unknown.
    """
    if not isinstance(value, str):
        return value
    if value not in CORRECTIONS:
        near = near_names(value, CORRECTIONS)
        hint = f"did you mean '{near[0]}'?" if near else f"known corrections: {', '.join(CORRECTIONS)}"
        raise ValueError(f"unknown correction '{value}'; {hint}")
    return CORRECTIONS[value].settings
