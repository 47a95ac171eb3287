"""Credit of turns, with a critic or without one."""

from rollgym.trainer.algorithms.papers.paper import REFERENCE, UNREADABLE, Paper

_PPO = {
    "advantage": {"kind": "gae"},
    "critic": {"value_clip": 0.5},
    "entropy_coefficient": 0.001,
    "minibatches": 4,
}
_STARPO = {"kl": {"coefficient": 0.001}, "reward": UNREADABLE}

PAPERS = (
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
            "reward": UNREADABLE,
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
        {"advantage": {"kind": "gigpo"}, "kl": REFERENCE, "reward": UNREADABLE},
        "omega 1, gamma 0.95, k3 in the loss 0.01, 0.1 off an unreadable reply. Normalisation is mean_norm with "
        "statistics over steps, the defaults of the authors' code and of its Sokoban and WebShop scripts; ALFWorld and "
        "search use mean_std_norm (search with advantage.similarity=0.95).",
    ),
    Paper(
        "hgpo",
        "step among equal states and equal histories",
        "HGPO 2602.22817",
        {"advantage": {"kind": "hgpo"}, "kl": REFERENCE, "reward": UNREADABLE},
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
            "aggregation": {"mode": "seq-mean-token-mean"},
        },
        "Turn discount 0.95, whitened, advantages within 0.2: the values of ROLL's agentic examples; normalised over "
        "the batch. ratio.level=turn is its ratio_type segment.",
    ),
)
