"""Named algorithms: the composition and the numbers of a paper. Learning rates belong to the run, not here."""

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from trainer.algorithms.advantage_settings import (
    BiLevelGaeAdvantage,
    GaeAdvantage,
    GigpoAdvantage,
    GroupAdvantage,
    TokenReturnAdvantage,
)
from trainer.algorithms.settings import (
    AggregationSettings,
    AlgorithmSettings,
    CriticSettings,
    KLSettings,
    OverlongSettings,
    PpoSurrogate,
    RatioSettings,
    ReinforceSurrogate,
    RewardSettings,
    TopFractionFilter,
    TruncateCorrection,
    WeightedSurrogate,
    ZeroVarianceFilter,
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


def _dr_grpo() -> AlgorithmSettings:
    """Dr. GRPO (arXiv:2503.20783): no division by the group's deviation nor by a row's length, no KL.

    A sequence's sum is divided by the longest generation of the paper's runs, 3000 tokens: set `aggregation.horizon`
    to the most tokens that an episode of yours may sample. With AdamW it scales nothing but the norm that is clipped.
    """
    return AlgorithmSettings(
        advantage=GroupAdvantage(scale="none"),
        aggregation=AggregationSettings(mode="seq-mean-token-sum-norm", horizon=3000),
    )


def _dapo() -> AlgorithmSettings:
    """DAPO (arXiv:2503.14476): clip 0.2 and 0.28, mean over tokens, dynamic sampling, soft overlong penalty, no KL.

    16 updates per batch (8192 episodes in minibatches of 512). The penalty grows over the last 4096 of 20480 sampled
    tokens: set `reward.overlong` to the longest episode of your run.
    """
    return AlgorithmSettings(
        surrogate=PpoSurrogate(clip_low=0.2, clip_high=0.28),
        filter=ZeroVarianceFilter(kind="zero_variance"),
        reward=RewardSettings(overlong=OverlongSettings(max_tokens=20480, buffer_tokens=4096)),
        minibatches=16,
    )


def _gspo() -> AlgorithmSettings:
    """GSPO (arXiv:2507.18071): the ratio of an episode, the mean of its tokens' log ratios; clip 3e-4 and 4e-4.

    Four updates per batch, mean over episodes of token means.
    """
    return AlgorithmSettings(
        ratio=RatioSettings(level="sequence"),
        surrogate=PpoSurrogate(clip_low=3e-4, clip_high=4e-4),
        aggregation=AggregationSettings(mode="seq-mean-token-mean"),
        minibatches=4,
    )


def _cispo() -> AlgorithmSettings:
    """CISPO (MiniMax-M1, arXiv:2506.13585): every token has its gradient, weighted by a ratio of at most 1.28.

    No lower bound, mean over tokens, no KL, 16 updates per batch. The paper does not say its bound; ScaleRL
    (arXiv:2510.13786) takes `surrogate.weight_high=5`.
    """
    return AlgorithmSettings(
        surrogate=WeightedSurrogate(kind="weighted", weight_low=0.0, weight_high=1.28), minibatches=16
    )


def _reinforce_pp() -> AlgorithmSettings:
    """REINFORCE++ (arXiv:2501.03262): whitened returns of tokens, k1 in the reward of each, PPO's clip; no critic.

    gamma 1 and the penalty's weight 0.01 are OpenRLHF's.
    """
    return AlgorithmSettings(
        advantage=TokenReturnAdvantage(kind="token_return"),
        kl=KLSettings(coefficient=0.01, estimator="k1", placement="reward"),
    )


def _reinforce_pp_baseline() -> AlgorithmSettings:
    """REINFORCE++-baseline (arXiv:2501.03262): return less the group's mean, whitened over all tokens of the batch.

    The paper's KL term is off, as in multi-turn practice: `kl={coefficient: 0.01, estimator: k2}` turns it on.
    """
    return AlgorithmSettings(advantage=GroupAdvantage(scale="none", whiten=True))


def _rloo() -> AlgorithmSettings:
    """RLOO (arXiv:2402.14740): plain policy gradient of whole episodes against the mean of the other members.

    KL in the reward with weight 0.03 (TRL), so an episode is one action: its tokens' losses are summed.
    """
    return AlgorithmSettings(
        advantage=GroupAdvantage(baseline="leave_one_out", scale="none"),
        surrogate=ReinforceSurrogate(kind="reinforce"),
        aggregation=AggregationSettings(mode="seq-mean-token-sum"),
        kl=KLSettings(coefficient=0.03, estimator="k1", placement="reward"),
    )


def _raft_pp() -> AlgorithmSettings:
    """RAFT++ (arXiv:2504.11343): PPO's clip on good episodes alone, each with its reward as the advantage.

    Rewards below 0 count as 0, so that what failed gives no gradient. Two updates per batch (1024 prompts in
    minibatches of 512).
    """
    return AlgorithmSettings(
        advantage=GroupAdvantage(baseline="none", scale="none"),
        aggregation=AggregationSettings(mode="seq-mean-token-mean"),
        reward=RewardSettings(turn_low=0.0),
        minibatches=2,
    )


def _topr() -> AlgorithmSettings:
    """TOPR (arXiv:2503.14286): plain policy gradient on good episodes, weights of at most 1 on those that failed.

    Ratios start from the policy that sampled. They are those of tokens, as in ROLL; the paper's are those of sequences.
    The group's mean is the baseline: with rewards of 0 and 1 an episode that failed would have no gradient else.
    """
    return AlgorithmSettings(
        advantage=GroupAdvantage(scale="none"),
        surrogate=WeightedSurrogate(
            kind="weighted", weight_low=0.0, weight_high=1.0, applies_to="negative_scores"
        ),
        aggregation=AggregationSettings(mode="seq-mean-token-mean"),
        proximal="behaviour",
    )


def _liteppo() -> AlgorithmSettings:
    """LitePPO (arXiv:2508.08221): return less the group's mean, by the batch's deviation, mean over tokens; no critic.

    ROLL draws with temperature 0.99 (`rollout.temperature`).
    """
    return AlgorithmSettings(advantage=GroupAdvantage(scale="batch_std"))


def _areal_decoupled() -> AlgorithmSettings:
    """Decoupled PPO (AReaL, arXiv:2505.24298), for asynchronous runs: ratios start where the update begins.

    How far that is from the policy that sampled is a weight of at most 5. No critic, no KL, four updates per batch;
    return less the group's mean, by the batch's deviation.
    """
    return AlgorithmSettings(
        advantage=GroupAdvantage(scale="batch_std"),
        correction=TruncateCorrection(kind="truncate", cap=5.0),
        minibatches=4,
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


def _starpo() -> AlgorithmSettings:
    """StarPO by PPO (RAGEN, arXiv:2504.20073): `ppo`, 0.1 off an unreadable reply, a KL term (verl's k3, 0.001)."""
    return _ppo().model_copy(
        update={
            "kl": KLSettings(coefficient=0.001, estimator="k3", placement="loss"),
            "reward": RewardSettings(invalid_action_penalty=0.1),
        }
    )


def _starpo_grpo() -> AlgorithmSettings:
    """StarPO by GRPO: the same without a critic, each episode relative to its group."""
    return _starpo().model_copy(update={"advantage": GroupAdvantage(), "critic": None})


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


def _bi_level_gae() -> AlgorithmSettings:
    """Bi-level GAE (RAGEN, VAGEN): GAE over turns with gamma 0.95, then over the tokens of each; else `ppo`."""
    return _ppo().model_copy(update={"advantage": BiLevelGaeAdvantage(kind="bi_level_gae")})


PRESETS: Mapping[str, AlgorithmSettings] = MappingProxyType(
    {
        "grpo": _grpo(),
        "dr_grpo": _dr_grpo(),
        "dapo": _dapo(),
        "gspo": _gspo(),
        "cispo": _cispo(),
        "liteppo": _liteppo(),
        "reinforce_pp": _reinforce_pp(),
        "reinforce_pp_baseline": _reinforce_pp_baseline(),
        "rloo": _rloo(),
        "raft_pp": _raft_pp(),
        "topr": _topr(),
        "gigpo": _gigpo(),
        "ppo": _ppo(),
        "starpo": _starpo(),
        "starpo_grpo": _starpo_grpo(),
        "starpo_s": _starpo_s(),
        "bi_level_gae": _bi_level_gae(),
        "areal_decoupled": _areal_decoupled(),
    }
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
