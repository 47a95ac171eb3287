"""Named algorithms: the composition and the numbers of a paper. Learning rates belong to the run, not here."""

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from trainer.algorithms.advantage_settings import GaeAdvantage, GigpoAdvantage, GroupAdvantage
from trainer.algorithms.settings import (
    AggregationSettings,
    AlgorithmSettings,
    CriticSettings,
    KLSettings,
    PpoSurrogate,
    RewardSettings,
    TopFractionFilter,
)


def _grpo() -> AlgorithmSettings:
    """GRPO (DeepSeekMath, arXiv:2402.03300): group mean and deviation, clip 0.2, mean over rows of token means.

    One update per batch, as in the paper. The paper's KL term (k3 in the loss, 0.04) is off, as in multi-turn
    practice (StarPO-S, DAPO, prime-rl): `kl.coefficient=0.04` turns it on.
    """
    return AlgorithmSettings(
        advantage=GroupAdvantage(),
        surrogate=PpoSurrogate(clip_low=0.2, clip_high=0.2),
        aggregation=AggregationSettings(mode="seq-mean-token-mean"),
    )


def _ppo() -> AlgorithmSettings:
    """PPO (arXiv:1707.06347) as StarPO runs it over turns (RAGEN, arXiv:2504.20073).

    gamma = lambda = 1, entropy 0.001, clip 0.2; four updates per batch (128 episodes in batches of 32). Value clip
    0.5, whitened advantages and GAE that skips observation tokens are verl's.
    """
    return AlgorithmSettings(
        advantage=GaeAdvantage(kind="gae", token_discount=1.0, trace=1.0),
        surrogate=PpoSurrogate(clip_low=0.2, clip_high=0.2),
        critic=CriticSettings(value_clip=0.5),
        entropy_coefficient=0.001,
        minibatches=4,
    )


def _gigpo() -> AlgorithmSettings:
    """GiGPO (arXiv:2505.10978): omega 1, gamma 0.95, KL in the loss (k3, 0.01), 0.1 off an unreadable reply.

    Normalisation is mean_norm with statistics over steps, the defaults of the authors' code and of its Sokoban and
    WebShop scripts; ALFWorld and search use mean_std_norm (search with `advantage.similarity=0.95`).
    """
    return AlgorithmSettings(
        advantage=GigpoAdvantage(kind="gigpo"),
        surrogate=PpoSurrogate(clip_low=0.2, clip_high=0.2),
        kl=KLSettings(coefficient=0.01, estimator="k3", placement="loss"),
        reward=RewardSettings(invalid_action_penalty=0.1),
    )


def _starpo_s() -> AlgorithmSettings:
    """StarPO-S (RAGEN, arXiv:2504.20073): PPO as above, without KL, clip 0.2 and 0.28, the most uncertain quarter.

    Of the groups, the 25 % whose returns differ most are trained on: of 128 episodes 32, which are one update. The
    critic stays; 0.1 off an unreadable reply.
    """
    return _ppo().model_copy(
        update={
            "surrogate": PpoSurrogate(clip_low=0.2, clip_high=0.28),
            "filter": TopFractionFilter(kind="top_fraction", fraction=0.25),
            "reward": RewardSettings(invalid_action_penalty=0.1),
            "minibatches": 1,
        }
    )


PRESETS: Mapping[str, AlgorithmSettings] = MappingProxyType(
    {"grpo": _grpo(), "ppo": _ppo(), "gigpo": _gigpo(), "starpo_s": _starpo_s()}
)


def resolve_preset(name: str, overrides: Mapping[str, Any]) -> AlgorithmSettings:
    """Return a preset with settings laid over it.

    Parts are merged key by key. A part whose `kind` changes is replaced as a whole: the keys of another kind mean
    nothing to it.

    Args:
        name: A key of `PRESETS`.
        overrides: Nested settings, such as `{"kl": {"coefficient": 0.0}}`.

    Raises:
        ValueError: If there is no such preset, or the result contradicts itself.
    """
    return AlgorithmSettings.model_validate(lay_over_preset(name, overrides))


def lay_over_preset(name: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `resolve_preset` makes settings of, unchecked.

    Raises:
        ValueError: If there is no such preset.
    """
    if not isinstance(name, str) or name not in PRESETS:
        near = difflib.get_close_matches(str(name), PRESETS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known presets: {', '.join(PRESETS)}"
        raise ValueError(f"unknown preset '{name}'; {hint}")
    return _merged(PRESETS[name].model_dump(), overrides)


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
