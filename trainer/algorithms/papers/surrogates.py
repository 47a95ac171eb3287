"""Without a critic: another ratio, clip or weight, or another choice of tokens."""

from rollgym.trainer.algorithms.papers.paper import CENTRED, MEAN_OF_SEQUENCES, SUM_OF_SEQUENCES, Paper

_GSPO = {
    "ratio": {"level": "sequence"},
    "surrogate": {"clip_low": 3e-4, "clip_high": 4e-4},
    "aggregation": MEAN_OF_SEQUENCES,
    "minibatches": 4,
}

PAPERS = (
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
        {**_GSPO, "aggregation": SUM_OF_SEQUENCES},
        "A sequence's loss is multiplied by its length. Clip and updates are GSPO's (ours).",
    ),
    Paper(
        "gmpo",
        "geometric mean of clipped ratios",
        "GMPO 2507.20673",
        {
            "ratio": {"level": "sequence"},
            "surrogate": {"kind": "gmpo"},
            "aggregation": MEAN_OF_SEQUENCES,
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
        {"surrogate": {"kind": "sapo"}, "aggregation": MEAN_OF_SEQUENCES, "minibatches": 4},
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
            "advantage": CENTRED,
            "surrogate": {"kind": "weighted", "weight_high": 1.0, "applies_to": "negative_scores"},
            "aggregation": MEAN_OF_SEQUENCES,
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
            "aggregation": MEAN_OF_SEQUENCES,
            "proximal": "behaviour",
        },
        "Weights in [0, 1] are ROLL's; advantages as in grpo. The correction of that name is algorithm.correction=tis.",
    ),
    Paper(
        "kimi",
        "policy gradient that pays for every move",
        "Kimi 1.5 2501.12599",
        {
            "advantage": CENTRED,
            "surrogate": {"kind": "quadratic"},
            "aggregation": MEAN_OF_SEQUENCES,
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
            "advantage": CENTRED,
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
