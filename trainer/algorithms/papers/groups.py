"""Without a critic: whole episodes, each relative to its group, to the batch, or to what its task was worth."""

from rollgym.trainer.algorithms.papers.paper import (
    CENTRED,
    MEAN_OF_SEQUENCES,
    PLAIN,
    SUM_OF_SEQUENCES,
    Paper,
)

PAPERS = (
    Paper(
        "grpo",
        "mean and deviation of the group, clip 0.2",
        "DeepSeekMath 2402.03300",
        {"aggregation": MEAN_OF_SEQUENCES},
        "One update per batch, mean over rows of token means, as in the paper. Its KL term (k3 in the loss, 0.04) is "
        "off, as in multi-turn practice (StarPO-S, DAPO, prime-rl): kl.coefficient=0.04 turns it on.",
    ),
    Paper(
        "dr_grpo",
        "group mean alone, sums over a constant length",
        "Dr. GRPO 2503.20783",
        {"advantage": CENTRED, "aggregation": {"mode": "seq-mean-token-sum-norm", "horizon": 3000}},
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
            "surrogate": PLAIN,
            "aggregation": SUM_OF_SEQUENCES,
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
            "surrogate": PLAIN,
            "aggregation": SUM_OF_SEQUENCES,
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
            "surrogate": PLAIN,
            "aggregation": SUM_OF_SEQUENCES,
        },
        "One greedy episode is played beside each group. The paper's KL term in the reward is off (ours).",
    ),
    Paper(
        "opo",
        "group mean weighted by length, exactly on-policy",
        "OPO 2505.23585",
        {
            "advantage": {"kind": "group", "baseline": "length_weighted", "scale": "none"},
            "surrogate": PLAIN,
            "aggregation": SUM_OF_SEQUENCES,
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
        {"advantage": {"kind": "moving_baseline"}, "surrogate": PLAIN, "aggregation": SUM_OF_SEQUENCES},
        "Decay 0.95. A role is a domain (domain of tasks and data sets); rollout.group_size=1 does. prime-rl clips "
        "ratios: surrogate={kind: ppo} with more updates.",
    ),
    Paper(
        "gpg",
        "group mean, scaled up by the groups that say nothing",
        "GPG 2504.02546",
        {"advantage": {**CENTRED, "factor": "informative"}, "surrogate": PLAIN},
        "Mean over all tokens, no ratio, no KL. verl counts episodes of return 0 in place of those in equal groups: "
        "advantage.factor=nonzero_scores.",
    ),
    Paper(
        "passk",
        "the best member alone, by its lead",
        "pass@k 2503.19595",
        {"advantage": {"kind": "group", "baseline": "second_best"}, "aggregation": MEAN_OF_SEQUENCES},
        "As verl's grpo_passk: the lead over the second best by the group's deviation. Clip 0.2.",
    ),
    Paper(
        "raft_pp",
        "clip on good episodes alone",
        "RAFT++ 2504.11343",
        {
            "advantage": {"kind": "group", "baseline": "none", "scale": "none"},
            "aggregation": MEAN_OF_SEQUENCES,
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
            "aggregation": MEAN_OF_SEQUENCES,
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
        {"advantage": {"kind": "gdpo"}, "aggregation": MEAN_OF_SEQUENCES},
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
