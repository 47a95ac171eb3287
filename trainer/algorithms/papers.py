"""The presets: what each paper, or its code, sets, with the sources of its numbers; `presets.py` finds them by name."""

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


_MEAN_OF_SEQUENCES = {"mode": "seq-mean-token-mean"}
_SUM_OF_SEQUENCES = {"mode": "seq-mean-token-sum"}
_CENTRED = {"kind": "group", "scale": "none"}
_PLAIN = {"kind": "reinforce"}
_UNREADABLE = {"invalid_action_penalty": 0.1}
_REFERENCE = {"coefficient": 0.01, "estimator": "k3", "placement": "loss"}

# Without a critic: whole episodes, each relative to its group, to the batch, or to what its task was worth.
_OF_GROUPS = (
    Paper(
        "grpo",
        "mean and deviation of the group, clip 0.2",
        "DeepSeekMath 2402.03300",
        {"aggregation": _MEAN_OF_SEQUENCES},
        "One update per batch, mean over rows of token means, as in the paper. Its KL term (k3 in the loss, 0.04) is "
        "off, as in multi-turn practice (StarPO-S, DAPO, prime-rl): kl.coefficient=0.04 turns it on.",
    ),
    Paper(
        "dr_grpo",
        "group mean alone, sums over a constant length",
        "Dr. GRPO 2503.20783",
        {"advantage": _CENTRED, "aggregation": {"mode": "seq-mean-token-sum-norm", "horizon": 3000}},
        "A sequence's sum is divided by the longest generation of the authors' runs, 3000 tokens: set "
        "aggregation.horizon to the most tokens that an episode of yours may sample. With AdamW it scales nothing but "
        "the norm that is clipped.",
    ),
    Paper(
        "dapo",
        "clip 0.2 / 0.28, equal groups replaced, overlong penalty",
        "DAPO 2503.14476",
        {
            "surrogate": {"clip_high": 0.28},
            "filter": {"kind": "zero_variance"},
            "reward": {"overlong": {"max_tokens": 20480, "buffer_tokens": 4096}},
            "minibatches": 16,
        },
        "16 updates per batch (8192 episodes in minibatches of 512), mean over tokens, no KL. The penalty grows over "
        "the last 4096 of 20480 sampled tokens: set reward.overlong to the longest episode of your run.",
    ),
    Paper(
        "lite_ppo",
        "group mean, deviation of the batch, token-mean",
        "LitePPO 2508.08221",
        {"advantage": {"kind": "group", "scale": "batch_std"}},
        "No critic. ROLL draws with temperature 0.99 (rollout.temperature).",
    ),
    Paper(
        "reinforce",
        "discounted returns of tokens, no baseline",
        "Williams 1992",
        {
            "advantage": {"kind": "token_return", "whiten": False},
            "surrogate": _PLAIN,
            "aggregation": _SUM_OF_SEQUENCES,
        },
        "gamma 1; an episode's log-probabilities are summed.",
    ),
    Paper(
        "reinforce_pp",
        "whitened returns of tokens, KL at its token",
        "REINFORCE++ 2501.03262",
        {
            "advantage": {"kind": "token_return"},
            "kl": {"coefficient": 0.01, "estimator": "k1", "placement": "reward"},
        },
        "gamma 1 and the penalty's weight 0.01 are OpenRLHF's; PPO's clip, no critic.",
    ),
    Paper(
        "reinforce_pp_baseline",
        "group mean, whitened over all tokens",
        "REINFORCE++ 2501.03262",
        {"advantage": {"kind": "group", "scale": "none", "whiten": True}},
        "The paper's KL term is off, as in multi-turn practice: kl={coefficient: 0.01, estimator: k2} turns it on.",
    ),
    Paper(
        "rloo",
        "mean of the other members, no clip",
        "RLOO 2402.14740",
        {
            "advantage": {"kind": "group", "baseline": "leave_one_out", "scale": "none"},
            "surrogate": _PLAIN,
            "aggregation": _SUM_OF_SEQUENCES,
            "kl": {"coefficient": 0.03, "estimator": "k1", "placement": "reward"},
        },
        "KL in the reward with weight 0.03 (TRL), so an episode is one action: its tokens' losses are summed. TRL's "
        "trainer takes the clipped ratio of the sum: surrogate={kind: ppo} ratio.level=sequence_sum "
        "aggregation.mode=seq-mean-token-mean.",
    ),
    Paper(
        "remax",
        "return less that of a greedy episode",
        "ReMax 2310.10505",
        {
            "advantage": {"kind": "group", "baseline": "greedy", "scale": "none"},
            "surrogate": _PLAIN,
            "aggregation": _SUM_OF_SEQUENCES,
        },
        "One greedy episode is played beside each group. The paper's KL term in the reward is off (ours).",
    ),
    Paper(
        "opo",
        "group mean weighted by length, exactly on-policy",
        "OPO 2505.23585",
        {
            "advantage": {"kind": "group", "baseline": "length_weighted", "scale": "none"},
            "surrogate": _PLAIN,
            "aggregation": _SUM_OF_SEQUENCES,
        },
        "No KL, no entropy bonus, one update per batch, as in the paper. The baseline is the one of smallest variance "
        "for sums over an episode's tokens, hence the aggregation (ours).",
    ),
    Paper(
        "maxrl",
        "group mean, over that mean: rare successes weigh most",
        "MaxRL 2602.02710, prime-rl",
        {"advantage": {"kind": "group", "scale": "group_mean"}},
        "For returns of at least 0; a group without success has no gradient. Clip, mean over tokens and one update are "
        "ours.",
    ),
    Paper(
        "otb",
        "returns of tokens less the baseline of least variance",
        "verl optimal_token_baseline",
        {"advantage": {"kind": "optimal_token"}},
        "Members of a group are compared token by token, weighted by how much gradient lies before; one more forward "
        "pass computes it. Clip and mean over tokens as verl has them.",
    ),
    Paper(
        "rae",
        "return less its domain's moving average, no groups",
        "SPIRAL 2506.24119, prime-rl",
        {"advantage": {"kind": "moving_baseline"}, "surrogate": _PLAIN, "aggregation": _SUM_OF_SEQUENCES},
        "Decay 0.95. A role is a domain (domain of tasks and data sets); rollout.group_size=1 does. prime-rl clips "
        "ratios: surrogate={kind: ppo} with more updates.",
    ),
    Paper(
        "gpg",
        "group mean, scaled up by the groups that say nothing",
        "GPG 2504.02546",
        {"advantage": {**_CENTRED, "factor": "informative"}, "surrogate": _PLAIN},
        "Mean over all tokens, no ratio, no KL. verl counts episodes of return 0 in place of those in equal groups: "
        "advantage.factor=nonzero_scores.",
    ),
    Paper(
        "passk",
        "the best member alone, by its lead",
        "pass@k 2503.19595",
        {"advantage": {"kind": "group", "baseline": "second_best"}, "aggregation": _MEAN_OF_SEQUENCES},
        "As verl's grpo_passk: the lead over the second best by the group's deviation. Clip 0.2.",
    ),
    Paper(
        "raft_pp",
        "clip on good episodes alone",
        "RAFT++ 2504.11343",
        {
            "advantage": {"kind": "group", "baseline": "none", "scale": "none"},
            "aggregation": _MEAN_OF_SEQUENCES,
            "reward": {"turn_low": 0.0},
            "minibatches": 2,
        },
        "Each has its reward as the advantage; rewards below 0 count as 0, so that what failed gives no gradient. Two "
        "updates per batch (1024 prompts in minibatches of 512).",
    ),
    Paper(
        "reinforce_rej",
        "rewards of -1 and 1, equal groups dropped",
        "Reinforce-Rej 2504.11343",
        {
            "advantage": {"kind": "group", "baseline": "none", "scale": "none"},
            "aggregation": _MEAN_OF_SEQUENCES,
            "filter": {"kind": "zero_variance", "refill": False},
            "reward": {"scale": 2.0, "offset": -1.0},
            "minibatches": 2,
        },
        "The scale makes -1 and 1 of returns of 0 and 1: set reward.scale and reward.offset for others. Clip and "
        "updates as in raft_pp.",
    ),
    Paper(
        "gdpo",
        "several rewards, each relative to its group",
        "GDPO 2601.05242",
        {"advantage": {"kind": "gdpo"}, "aggregation": _MEAN_OF_SEQUENCES},
        "The environment gives them in info['reward_parts'], or a reward function returns them by name. Their sum is "
        "whitened over the batch's tokens (verl); weights of 1.",
    ),
    Paper(
        "spo",
        "return less what the task was worth so far, no groups",
        "SPO 2509.13232",
        {"advantage": {"kind": "spo"}, "surrogate": {"clip_high": 0.28}},
        "rho within [0.875, 0.96], D_half 0.06: the authors' recipe. How far the policy has moved is the sum of its "
        "updates' KL, where the recipe computes the old sample once more (ours). rollout.group_size=1 is its setting; "
        "tasks must come again, as rows of data sets do (advantage.tracks=domain otherwise).",
    ),
    Paper(
        "gfpo",
        "of more episodes, the shortest",
        "GFPO 2508.09726, TRL",
        {"surrogate": {"clip_high": 0.28}, "episodes": {"kind": "shortest", "size": 8}},
        "The paper keeps 8 of 16 or 24: set rollout.group_size. episodes.by=return_per_token is its token efficiency. "
        "Mean and deviation are those of what is kept; clip 0.2 / 0.28 is ours.",
    ),
    Paper(
        "grpo_roc",
        "of twice as many episodes, clean successes first",
        "rStar2-Agent 2508.20722",
        {
            "surrogate": {"clip_high": 0.28},
            "episodes": {"kind": "resample_on_correct", "size": 16},
        },
        "The paper plays 32 and keeps 16: set rollout.group_size=32. Clip 0.2 / 0.28, no KL, mean over tokens. What is "
        "clean is the share of readable replies (ours; theirs is tool errors and format).",
    ),
)

_GSPO = {
    "ratio": {"level": "sequence"},
    "surrogate": {"clip_low": 3e-4, "clip_high": 4e-4},
    "aggregation": _MEAN_OF_SEQUENCES,
    "minibatches": 4,
}

# Without a critic: another ratio, clip or weight, or another choice of tokens.
_OF_SURROGATES = (
    Paper(
        "gspo",
        "ratio of the episode, clip 3e-4 / 4e-4",
        "GSPO 2507.18071",
        _GSPO,
        "The mean of the tokens' log ratios; four updates per batch, mean over episodes of token means.",
    ),
    Paper(
        "gspo_token",
        "the same with an advantage per turn",
        "GSPO 2507.18071, 4.3",
        {
            **_GSPO,
            "advantage": {"kind": "turn"},
        },
        "GSPO is implemented in its token form, so the two differ in their advantages alone; which these are the paper "
        "leaves open (ours: discounted returns of turns, ROLL's).",
    ),
    Paper(
        "luspo",
        "GSPO with sums over episodes",
        "LUSPO, as in TRL",
        {**_GSPO, "aggregation": _SUM_OF_SEQUENCES},
        "A sequence's loss is multiplied by its length. Clip and updates are GSPO's (ours).",
    ),
    Paper(
        "gmpo",
        "geometric mean of clipped ratios",
        "GMPO 2507.20673",
        {
            "ratio": {"level": "sequence"},
            "surrogate": {"kind": "gmpo"},
            "aggregation": _MEAN_OF_SEQUENCES,
            "minibatches": 8,
        },
        "Ratios of tokens within [e^-0.4, e^0.4]; the paper's range. Eight updates per batch (ours).",
    ),
    Paper(
        "cispo",
        "every gradient, weighted by a ratio of at most 1.28",
        "MiniMax-M1 2506.13585",
        {"surrogate": {"kind": "weighted", "weight_high": 1.28}, "minibatches": 16},
        "No lower bound, mean over tokens, no KL, 16 updates per batch (section 3.1). The paper does not say its bound "
        "(ours); ScaleRL (2510.13786) takes surrogate.weight_high=5.",
    ),
    Paper(
        "sapo",
        "a smooth gate in place of a clip",
        "SAPO 2511.20347",
        {"surrogate": {"kind": "sapo"}, "aggregation": _MEAN_OF_SEQUENCES, "minibatches": 4},
        "tau 1.0 and 1.05 as in the paper, verl and TRL; four updates per batch, as GSPO.",
    ),
    Paper(
        "vespo",
        "weight w^k exp(l (1 - w)) of the episode's ratio",
        "VESPO, as in TRL",
        {
            "ratio": {"level": "sequence_sum"},
            "surrogate": {"kind": "vespo"},
            "minibatches": 4,
        },
        "k 2 and 3, l 3 and 2: TRL's defaults. Four updates per batch (ours).",
    ),
    Paper(
        "topr",
        "weights of at most 1 on what failed",
        "TOPR 2503.14286",
        {
            "advantage": _CENTRED,
            "surrogate": {"kind": "weighted", "weight_high": 1.0, "applies_to": "negative_scores"},
            "aggregation": _MEAN_OF_SEQUENCES,
            "proximal": "behaviour",
        },
        "Ratios start from the policy that sampled. They are those of tokens, as in ROLL; the paper's are those of "
        "sequences. The group's mean is the baseline: with rewards of 0 and 1 an episode that failed would have no "
        "gradient else.",
    ),
    Paper(
        "tis",
        "policy gradient, weighted by a ratio of at most 1",
        "ROLL pg_variant tis",
        {
            "surrogate": {"kind": "weighted", "weight_high": 1.0},
            "aggregation": _MEAN_OF_SEQUENCES,
            "proximal": "behaviour",
        },
        "Weights in [0, 1] are ROLL's; advantages as in grpo. The correction of that name is algorithm.correction=tis.",
    ),
    Paper(
        "kimi",
        "policy gradient that pays for every move",
        "Kimi 1.5 2501.12599",
        {
            "advantage": _CENTRED,
            "surrogate": {"kind": "quadratic"},
            "aggregation": _MEAN_OF_SEQUENCES,
            "minibatches": 2,
        },
        "tau 0.1 and squares of tokens' moves are ROLL's kimi15; the paper squares those of episodes. Two updates per "
        "batch (ours): without a second one nothing has moved.",
    ),
    Paper(
        "dro",
        "the same with GRPO's advantages, token-mean",
        "DRO 2405.19107, as in verl",
        {"surrogate": {"kind": "quadratic"}, "minibatches": 2},
        "verl's dro: beta 0.1, without the paper's value model. Two updates per batch (ours).",
    ),
    Paper(
        "dppo",
        "trust region of probabilities, 0.2",
        "DPPO 2602.04879",
        {
            "advantage": _CENTRED,
            "surrogate": {"kind": "dppo", "cap": None, "penalty": 1e-3},
            "proximal": "behaviour",
        },
        "prime-rl's default loss: total variation 0.2 / 0.2 against the policy that sampled, kl_tau 1e-3, group mean. "
        "verl's forms: surrogate={kind: dppo, divergence: kl, low: 0.05, high: 0.05}.",
    ),
    Paper(
        "decoupled_ppo",
        "for asynchronous runs: ratio and weight apart",
        "AReaL 2505.24298",
        {
            "advantage": {"kind": "group", "scale": "batch_std"},
            "correction": {"kind": "truncate", "cap": 5.0},
            "minibatches": 4,
        },
        "Ratios start where the update begins; how far that is from the policy that sampled is a weight of at most 5. "
        "No critic, no KL; return less the group's mean, by the batch's deviation.",
    ),
    Paper(
        "m2po",
        "for stale data: drop the tokens that moved most",
        "M2PO 2510.01161",
        {
            "surrogate": {"clip_low": None, "clip_high": None},
            "selection": {"kind": "second_moment"},
            "proximal": "behaviour",
            "minibatches": 4,
        },
        "Threshold 0.04, the paper's only one, and no clip: equation 5. Its released code clips the ratio instead. "
        "Four updates per batch (ours).",
    ),
    Paper(
        "clip_cov",
        "drop tokens of large covariance",
        "Entropy mechanism 2505.22617",
        {
            "surrogate": {"clip_low": 1.0, "clip_high": 1.0},
            "selection": {"kind": "clip_cov"},
            "minibatches": 8,
        },
        "2e-4 of the tokens, covariance within (1, 5), clip 1: the authors' recipe in verl. Eight updates per batch: "
        "256 prompts in minibatches of 32 there.",
    ),
    Paper(
        "kl_cov",
        "charge tokens of large covariance for moving",
        "Entropy mechanism 2505.22617",
        {
            "surrogate": {"clip_low": None, "clip_high": None},
            "selection": {"kind": "kl_cov"},
            "minibatches": 8,
        },
        "2e-4 of the tokens (2e-3 for 7B), weight 1, no clip; updates as in clip_cov.",
    ),
    Paper(
        "high_entropy",
        "the 20 % of tokens of highest entropy",
        "80/20 2506.01939",
        {
            "surrogate": {"clip_high": 0.28},
            "selection": {"kind": "high_entropy"},
            "filter": {"kind": "zero_variance"},
            "minibatches": 16,
        },
        "On DAPO's settings without its overlong penalty, as in the paper.",
    ),
)

_PPO = {
    "advantage": {"kind": "gae"},
    "critic": {"value_clip": 0.5},
    "entropy_coefficient": 0.001,
    "minibatches": 4,
}
_STARPO = {"kl": {"coefficient": 0.001}, "reward": _UNREADABLE}

# Credit of turns, with a critic or without one.
_OF_TURNS = (
    Paper(
        "ppo",
        "GAE with a critic, clip 0.2",
        "PPO 1707.06347 in RAGEN",
        _PPO,
        "As StarPO runs it over turns (2504.20073): gamma = lambda = 1, entropy 0.001, four updates per batch (128 "
        "episodes in batches of 32). Value clip 0.5, whitened advantages and GAE that skips observation tokens are "
        "verl's.",
    ),
    Paper(
        "vapo",
        "PPO with a trace by length, and likelihood of successes",
        "VAPO 2504.05118",
        {
            **_PPO,
            "advantage": {"kind": "gae", "length_adaptive": 0.05, "critic_gae_lambda": 1.0},
            "surrogate": {"clip_high": 0.28},
            "positive_nll": {"coefficient": 0.1},
            "entropy_coefficient": 0.0,
            "minibatches": 16,
        },
        "Clip 0.2 / 0.28, mean over tokens, 16 updates per batch (8192 episodes in minibatches of 512). The critic's "
        "own warm-up is not part of it: warm_start takes its place, or a first run whose learning_rate (1e-12) "
        "moves nothing beside its critic_learning_rate (ours). Value clip and whitening are verl's.",
    ),
    Paper(
        "starpo",
        "PPO with a KL term and a penalty for unreadable replies",
        "RAGEN 2504.20073",
        {**_PPO, **_STARPO},
        "ppo, 0.1 off an unreadable reply, k3 in the loss with verl's weight 0.001.",
    ),
    Paper(
        "starpo_grpo",
        "the same without a critic, relative to the group",
        "RAGEN 2504.20073",
        {"entropy_coefficient": 0.001, "minibatches": 4, **_STARPO},
    ),
    Paper(
        "starpo_s",
        "PPO on the most uncertain quarter of the groups",
        "RAGEN 2504.20073",
        {
            **_PPO,
            "surrogate": {"clip_high": 0.28},
            "filter": {"kind": "top_fraction", "fraction": 0.25},
            "reward": _UNREADABLE,
            "minibatches": 1,
        },
        "Without KL, clip 0.2 and 0.28. Of the groups, the 25 % whose returns differ most are trained on: of 128 "
        "episodes 32, which are one update. The critic stays.",
    ),
    Paper(
        "bi_level_gae",
        "GAE over turns, then over their tokens",
        "RAGEN, VAGEN",
        {**_PPO, "advantage": {"kind": "bi_level_gae"}},
        "gamma 0.95 over turns, else as ppo.",
    ),
    Paper(
        "gigpo",
        "episode in its group plus step among equal states",
        "GiGPO 2505.10978",
        {"advantage": {"kind": "gigpo"}, "kl": _REFERENCE, "reward": _UNREADABLE},
        "omega 1, gamma 0.95, k3 in the loss 0.01, 0.1 off an unreadable reply. Normalisation is mean_norm with "
        "statistics over steps, the defaults of the authors' code and of its Sokoban and WebShop scripts; ALFWorld and "
        "search use mean_std_norm (search with advantage.similarity=0.95).",
    ),
    Paper(
        "hgpo",
        "step among equal states and equal histories",
        "HGPO 2602.22817",
        {"advantage": {"kind": "hgpo"}, "kl": _REFERENCE, "reward": _UNREADABLE},
        "K 2, alpha 1, mean_std_norm: the authors' recipe; else as gigpo.",
    ),
    Paper(
        "agentic_reinforce",
        "discounted returns of turns, whitened",
        "ROLL agentic_reinforce",
        {
            "advantage": {
                "kind": "turn",
                "scale": "batch_std",
                "baseline": "batch_mean",
                "whiten": True,
                "clip": 0.2,
            },
            "aggregation": _MEAN_OF_SEQUENCES,
        },
        "Turn discount 0.95, whitened, advantages within 0.2: the values of ROLL's agentic examples; normalised over "
        "the batch. ratio.level=turn is its ratio_type segment.",
    ),
)

ALL_PAPERS = (*_OF_GROUPS, *_OF_SURROGATES, *_OF_TURNS)
"""All of them, in the order in which they are shown."""
