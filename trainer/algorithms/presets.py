"""Named algorithms: the composition and the numbers of a paper. Learning rates belong to the run, not here."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from rollgym.suggestions import near_names
from rollgym.trainer.algorithms.advantage import by_current_keys
from rollgym.trainer.algorithms.papers import ALL_PAPERS, Paper
from rollgym.trainer.algorithms.settings import AlgorithmSettings

PAPERS: Mapping[str, Paper] = MappingProxyType({paper.name: paper for paper in ALL_PAPERS})
"""The presets with their sources."""


def _merged(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in overrides.items():
        before = merged.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            other_kind = "kind" in value and value["kind"] != before.get("kind")
            merged[key] = dict(value) if other_kind else _merged(before, value)
        else:
            merged[key] = value
    return merged


_DEFAULTS = AlgorithmSettings().model_dump()

PRESETS: Mapping[str, AlgorithmSettings] = MappingProxyType(
    {
        name: AlgorithmSettings.model_validate(_merged(_DEFAULTS, paper.settings))
        for name, paper in PAPERS.items()
    }
)
"""The settings of each preset, by its name."""

FORMER_NAMES: Mapping[str, str] = MappingProxyType(
    {"liteppo": "lite_ppo", "areal_decoupled": "decoupled_ppo"}
)
"""Names that presets had before; they are still understood."""


def resolve_preset(name: str, overrides: Mapping[str, Any]) -> AlgorithmSettings:
    """Return a preset with settings laid over it.

    Parts are merged key by key. A part whose `kind` changes is replaced as a whole: the keys of another kind mean
    nothing to it.

    Args:
        name: A key of `PRESETS`, or a former name of one.
        overrides: Nested settings, such as `{"kl": {"coefficient": 0.0}}`.

    Raises:
        ValueError: If the name is unknown, or the result contradicts itself.
    """
    return AlgorithmSettings.model_validate(lay_over_preset(name, overrides))


def lay_over_preset(name: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `resolve_preset` makes settings of, unchecked.

    Raises:
        ValueError: If the name is unknown, or a setting is given by a former name and the present one.
    """
    if "advantage" in overrides:
        # By their present names: the preset's own are laid under them.
        overrides = {**overrides, "advantage": by_current_keys(overrides["advantage"])}
    return _merged(PRESETS[known_name(name)].model_dump(), overrides)


def known_name(name: str) -> str:
    """Return the name of a preset, given that or a former one.

    Raises:
        ValueError: If the name is unknown.
    """
    known = FORMER_NAMES.get(name, name) if isinstance(name, str) else ""
    if known not in PRESETS:
        near = near_names(str(name), [*PRESETS, *FORMER_NAMES])
        hint = f"did you mean '{near[0]}'?" if near else f"known presets: {', '.join(PRESETS)}"
        raise ValueError(f"unknown preset '{name}'; {hint}")
    return known
