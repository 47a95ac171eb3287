"""The numbers of a run: all that is recorded of a step, each declared once, in the order in which it is shown."""

from rollgym.trainer.core.run_metric import Column, Curve, RunMetric

# Of episodes and their replies.
_EPISODES = (
    RunMetric(
        "rollout/success",
        "share of the step's episodes that were solved",
        console=Column("success", "{:.3f}"),
        curve=Curve("Success and reward while training", "success"),
        plot="success, training episodes",
        of_domains="success",
    ),
    RunMetric(
        "rollout/reward",
        "reward of an episode",
        console=Column("reward", "{:.3f}"),
        curve=Curve("Success and reward while training", "reward"),
        plot="reward per training episode",
        of_domains="reward",
    ),
    RunMetric("rollout/turns", "turns of an episode", curve=Curve("Turns in an episode", "turns")),
    RunMetric("rollout/action_tokens", "sampled tokens of an episode", "tokens"),
    RunMetric(
        "rollout/prefix_breaks",
        "how often a prompt of an episode did not continue the recorded ids",
    ),
    RunMetric("rollout/prefix_breaks_{kind}", "the same by what the prompt changed"),
    RunMetric(
        "rollout/valid_replies",
        "each episode's share of readable replies",
        curve=Curve("Replies", "readable"),
    ),
    RunMetric("rollout/groups_kept", "groups that were trained on, after the filter"),
    RunMetric(
        "response/tokens_mean",
        "sampled tokens of a reply; every reply counts once",
        "tokens",
        curve=Curve("Response length (tokens)", "mean"),
        of_domains="response tokens",
    ),
    RunMetric(
        "response/tokens_p95",
        "what 95 % of the replies do not exceed",
        "tokens",
        curve=Curve("Response length (tokens)", "95 % within"),
        of_domains="95 % within",
    ),
    RunMetric(
        "response/clipped",
        "share of replies that were cut off at `rollout.max_new_tokens`",
        curve=Curve("Replies", "cut at the longest length"),
        of_domains="cut",
    ),
    RunMetric(
        "outcome/{outcome}",
        "share of each outcome among all attempts at episodes; they sum to 1. Attempts are those of the step's groups, "
        "replaced ones included, and of groups that failed and were dropped since the last step",
    ),
)

# Of imitation.
_SUPERVISED = (
    RunMetric(
        "supervised/loss", "negative log-likelihood of a token", "nats", console=Column("loss", "{:.4f}")
    ),
    RunMetric("supervised/tokens", "tokens that were learnt from", "tokens"),
)

# Of preferences and of reward models.
_PREFERENCES = (
    RunMetric(
        "preference/loss", "the loss of `dpo.loss`, of a pair or a reply", console=Column("loss", "{:.4f}")
    ),
    RunMetric(
        "preference/accuracy",
        "share of pairs whose better reply has the larger implicit reward",
        console=Column("accuracy", "{:.3f}"),
    ),
    RunMetric("preference/{number}", "implicit rewards: `margin`, `reward_chosen`, `reward_rejected`"),
    RunMetric("reward/loss", "the reward model's loss of a pair", console=Column("loss", "{:.4f}")),
    RunMetric(
        "reward/accuracy",
        "share of pairs whose better reply has the larger reward",
        console=Column("accuracy", "{:.3f}"),
    ),
    RunMetric("reward/{number}", "`margin` between the replies of a pair, and `mean` of all rewards"),
)

# Of distillation.
_DISTILLATION = (
    RunMetric(
        "distill/loss",
        "divergence from the teacher, of a token",
        "nats",
        console=Column("loss", "{:.4f}"),
    ),
    RunMetric(
        "distill/reverse_kl",
        "the same by sampled tokens alone",
        "nats",
        console=Column("reverse KL", "{:.4f}"),
    ),
    RunMetric("distill/tokens", "tokens that were learnt from", "tokens"),
)

# Of the loss.
_OBJECTIVE = (
    RunMetric(
        "policy/entropy",
        "entropy of a token's distribution",
        "nats",
        console=Column("entropy", "{:.3f}"),
        curve=Curve("Entropy per token (nats)", "entropy"),
        plot="entropy per token (nats)",
    ),
    RunMetric(
        "policy/kl_reference",
        "divergence from the reference policy, by `algorithm.kl.estimator`",
        "nats",
        curve=Curve("Divergence", "from the reference"),
    ),
    RunMetric(
        "policy/kl_old",
        "divergence from the policy at the start of the update (k3)",
        "nats",
        curve=Curve("Divergence", "of an update"),
    ),
    RunMetric(
        "policy/clip_fraction",
        "share of tokens whose ratio the surrogate clips",
        curve=Curve("Clipped part", "policy"),
    ),
    RunMetric(
        "critic/clip_fraction",
        "share of tokens whose value is clipped",
        curve=Curve("Clipped part", "critic"),
    ),
    RunMetric("policy/ratio", "ratio of the trained policy to the one at the start of the update"),
    RunMetric("policy/correction_weight", "weight of a token by `algorithm.correction`"),
    RunMetric(
        "loss/policy", "the policy's loss, with its penalties and bonuses", curve=Curve("Loss", "policy")
    ),
    RunMetric("loss/critic", "the critic's loss", curve=Curve("Loss", "critic")),
    RunMetric("loss/surrogate", "the policy's loss without them"),
    RunMetric(
        "loss/positive_nll", "negative log-likelihood of good replies, where `algorithm.positive_nll` has it"
    ),
    RunMetric("critic/value", "value of a token"),
    RunMetric("critic/squared_error", "its squared distance from the return"),
)

# Of optimizer steps.
_OPTIMIZER = (
    RunMetric(
        "policy/gradient_norm",
        "norm of the gradient before it is clipped, of the steps that were taken",
        curve=Curve("Gradient norm", "policy"),
    ),
    RunMetric("critic/gradient_norm", "the critic's", curve=Curve("Gradient norm", "critic")),
    RunMetric("{model}/optimizer_steps", "optimizer steps that were taken, of the policy and of the critic"),
    RunMetric("{model}/skipped_steps", "those that were left out, since loss or gradient was not finite"),
    RunMetric(
        "{model}/shared_prefixes",
        "share of the tokens that were not computed, since rows begin with the same ones",
    ),
    RunMetric(
        "policy/learning_rate", "of the step's first optimizer step", curve=Curve("Learning rate", "policy")
    ),
)

# Of advantages.
_CREDIT = (
    RunMetric("batch/return", "return of an episode that is trained on"),
    RunMetric("batch/return_std_in_group", "standard deviation of the returns in a group"),
    RunMetric("batch/advantage_mean", "advantage of a token"),
    RunMetric("batch/advantage_max", "the largest, whatever its sign"),
)

# Of an update.
_UPDATE = (
    RunMetric("batch/rows", "rows that were trained on"),
    RunMetric("batch/bootstrapped", "episodes that were cut off, and whose rest the critic is asked for"),
    RunMetric(
        "batch/episodes_left_out", "episodes of groups that were kept that are not trained on themselves"
    ),
    RunMetric("policy/kl_coefficient", "weight of the KL penalty, where it adapts (`algorithm.kl.target`)"),
    RunMetric(
        "policy/moved",
        "by how much the log-probability of a token has changed in the update, where what tasks were worth is "
        "remembered (`spo`)",
        "nats",
    ),
)

# Of what the tokens of a step weigh.
_WEIGHTS = (
    RunMetric("correction/kept", "share of tokens that `algorithm.correction` does not reject"),
    RunMetric("selection/kept", "share of tokens that `algorithm.selection` keeps"),
    RunMetric("selection/charged", "share of tokens that pay for each nat that they move (`kl_cov`)"),
)

# How fast it goes.
_RATES = (
    RunMetric(
        "time/tokens_per_s",
        "sampled tokens a second of the whole step",
        "tokens/s",
        console=Column("tokens/s", "{:.0f}"),
        curve=Curve("Tokens by second", "generated"),
    ),
    RunMetric(
        "time/trained_tokens_per_s",
        "sampled tokens of trained rows a second of `train_s`",
        "tokens/s",
        curve=Curve("Tokens by second", "trained"),
    ),
)

# How much is computed.
_UTILISATION = (
    RunMetric(
        "time/model_tflops_per_s", "operations of the model's mathematics in a second of `train_s`", "10^12/s"
    ),
    RunMetric("time/mfu", "the part of the devices' peak that this is, where the peak is known"),
)

# How old what is trained on is.
_STALENESS = (
    RunMetric(
        "rollout/lag_mean",
        "policy versions between the oldest token of an episode and the update",
        "versions",
        console=Column("staleness", "{:.2f}"),
        curve=Curve("Staleness (versions)", "mean"),
        plot="staleness (versions)",
    ),
    RunMetric("rollout/lag_max", "the largest", "versions", curve=Curve("Staleness (versions)", "largest")),
)

# How far the policy that sampled is from the one that is trained.
_MISMATCH = (
    RunMetric(
        "mismatch/weight_mean",
        "mean of `exp(old - behaviour)` over the step's tokens: the trainer's "
        "probability of a token over the engine's",
    ),
    RunMetric("mismatch/weight_max", "its maximum"),
    RunMetric("mismatch/weight_ess", "its effective sample size, as a share of the tokens"),
    RunMetric(
        "mismatch/k1",
        "the estimate k1 of the divergence of the engine's policy from the trainer's",
        "nats",
        curve=Curve("Engine and trainer apart (KL)", "k1"),
    ),
    RunMetric(
        "mismatch/k3",
        "the estimate k3 of it",
        "nats",
        curve=Curve("Engine and trainer apart (KL)", "k3"),
        of_domains="mismatch k3",
    ),
)

# Of tokens by their age.
_LAGS = (
    RunMetric(
        "lag_{versions}/mismatch/{number}",
        "`mismatch/` for tokens of the trained version (`lag_0`), of the one before it (`lag_1`), and of older ones "
        "(`lag_2_up`), if a step has tokens of older versions",
    ),
)

# Whether the run learns.
_HEALTH = (
    RunMetric(
        "health/equal_groups",
        "share of the groups of two or more whose episodes were all paid alike: the same rewards at the same turns",
        curve=Curve("Groups that teach nothing (share)", "paid alike", of_learning=True),
    ),
    RunMetric(
        "health/alike_groups",
        "share of the groups of two or more whose episodes all have the same replies, token by token",
        curve=Curve("Groups that teach nothing (share)", "same replies", of_learning=True),
    ),
    RunMetric(
        "health/distinct_rewards",
        "in how many ways the step's episodes were paid; 1 where all were paid alike",
        curve=Curve("Ways in which episodes were paid", "in a step", of_learning=True),
    ),
    RunMetric(
        "health/steps_without_learning",
        "how many steps in a row, this one the last, had nothing to learn from "
        "([why](seeing.md#runs-that-learn-nothing))",
        "steps",
        curve=Curve("Steps in a row without learning", "steps", of_learning=True),
    ),
)

# Of what is played, counted since the process began.
_COUNTERS = (
    RunMetric("rollout/episodes_finished", "since this process began: episodes that ended with a result"),
    RunMetric("rollout/episodes_{outcome}", "the same of attempts that ended otherwise, by their outcome"),
    RunMetric("rollout/episodes_surplus", "episodes that were stopped, since their group had enough"),
    RunMetric(
        "rollout/episodes_left_behind",
        "episodes that were cancelled and did not end, such as an agent that catches everything",
    ),
    RunMetric("rollout/groups_failed", "groups that were dropped, since all attempts at an episode failed"),
    RunMetric("rollout/groups_left_out", "groups that a filter left out as they ended"),
    RunMetric("rollout/groups_put_aside", "groups that were not ready in time and start again later"),
    RunMetric("rollout/steps_short", "steps that trained on fewer groups than `rollout.groups_per_step`"),
)

# Metrics of overloaded environment servers.
_BACKPRESSURE = (
    RunMetric(
        "rollout/overloaded",
        "since the run began: how often environment servers answered "
        "[`overloaded`](../fleet_operation.md#overload); not there while that was never so",
    ),
    RunMetric(
        "rollout/overload_wait_s",
        "how long operations have waited then before they asked again, all together; not there while that was never so",
        "s",
    ),
)

# Of episodes that an earlier process began.
_TAKEN_UP = (
    RunMetric("rollout_log/replies", "replies that were taken from the rollout log and not sampled again"),
    RunMetric("rollout_log/tokens", "their tokens", "tokens"),
    RunMetric("rollout_log/episodes", "episodes that could not continue, and started over"),
    RunMetric("rollout_log/unasked_replies", "replies of the log that were not asked for again"),
    RunMetric("rollout_log/unasked_tokens", "their tokens", "tokens"),
)

# Of the way of the weights.
_SYNC = (
    RunMetric("sync/seconds", "time that the new weights took to reach all who sample", "s"),
    RunMetric("sync/bytes", "what was written for servers that read weights from disk", "bytes"),
    RunMetric(
        "sync/probe_difference", "largest difference of a log-probability in the check of the weights", "nats"
    ),
    RunMetric("sync/checksums_equal", "tensors whose checksums were compared, and were equal"),
)

# Data of the commands that learn from examples.
_EXAMPLES = (RunMetric("data/epoch", "the pass through the examples, counted from 0"),)

# Where the time of a step goes.
_TIMES = (
    RunMetric(
        "time/generate_s", "of the wait for groups: the step's episodes sampled tokens", "s", is_part=True
    ),
    RunMetric(
        "time/environment_s", "of the wait for groups: they were in their environment", "s", is_part=True
    ),
    RunMetric("time/verify_s", "of the wait for groups: they were scored", "s", is_part=True),
    RunMetric(
        "time/wait_s",
        "the rest of that wait: episodes wait for a session or run the agent's own code, or none plays",
        "s",
        is_part=True,
    ),
    RunMetric(
        "time/train_s",
        "training: filter, rows, log-probabilities, advantages, optimizer steps",
        "s",
        is_part=True,
    ),
    RunMetric("time/sync_s", "sending the new weights to the engine or the servers", "s", is_part=True),
    RunMetric("time/record_s", "writing the step's episodes, ledger and numbers", "s", is_part=True),
    RunMetric("time/rollout_s", "the wait for groups: the sum of the first four", "s"),
    RunMetric(
        "time/step_s", "the whole step: the sum of the first seven", "s", console=Column("s/step", "{:.2f}")
    ),
    RunMetric(
        "time/outside_s",
        "the time between the last step and this one: evaluation sets, checkpoints, writing metrics",
        "s",
    ),
)

# Where the time of an episode goes.
_EPISODE_TIMES = (
    RunMetric(
        "episode/seconds_mean",
        "the whole episode",
        "s",
        curve=Curve("Seconds of an episode", "mean"),
        of_domains="seconds",
    ),
    RunMetric(
        "episode/seconds_p95",
        "what 95 % of the episodes do not exceed",
        "s",
        curve=Curve("Seconds of an episode", "95 % within"),
    ),
    RunMetric(
        "episode/generate_s",
        "waits for a reply: in the engine, and in line before it",
        "s",
        of_domains="generate",
    ),
    RunMetric(
        "episode/environment_s",
        "waits for its environment: `reset` and `step`, and the way there",
        "s",
        of_domains="environment",
    ),
    RunMetric(
        "episode/verify_s",
        "waits for a verifier's verdict (environments of kind `stateless`), or `rollout.reward`",
        "s",
        of_domains="verify",
    ),
    RunMetric(
        "episode/queue_s",
        "waits for a session, because the server makes a new one or allows fewer than there are episodes",
        "s",
        of_domains="queue",
    ),
    RunMetric(
        "episode/agent_s",
        "waits for nothing: the agent's own code runs, prompts, and the trainer's loop",
        "s",
    ),
)

# What it takes.
_MEMORY = (
    RunMetric(
        "memory/rss_gib",
        "resident memory of the trainer's process (on Linux)",
        "GiB",
        curve=Curve("Memory (GiB)", "process"),
    ),
    RunMetric("memory/rss_peak_gib", "its maximum", "GiB", curve=Curve("Memory (GiB)", "its peak")),
    RunMetric(
        "memory/accelerator_gib",
        "memory that torch holds on the accelerator, if torch reports it (`torch.accelerator.memory_allocated`)",
        "GiB",
        curve=Curve("Memory (GiB)", "accelerator"),
    ),
    RunMetric("memory/accelerator_peak_gib", "its maximum", "GiB", curve=Curve("Memory (GiB)", "its peak")),
)

# The same of parts.
_DOMAINS = (
    RunMetric(
        "domain/{domain}/{number}",
        "the same for each domain: success, reward, `response/`, `outcome/`, `episode/`, `mismatch/`, and the "
        "environment's own numbers",
    ),
)

# Of evaluation sets.
_EVALUATION = (
    RunMetric(
        "evaluate/{set}/{mode}/{number}",
        "of each evaluation set and way to play (`sampled`, `greedy`, the baselines `random` and `blind`): `success` "
        "with its 95 % interval (`success_low`, `success_high`), `reward`, `turns`, `episodes`, and `failures`, which "
        "are in none of the means",
    ),
    RunMetric(
        "evaluate/held_out/{number}", "of held-out examples: `loss`, and what else is measured of them"
    ),
)

RUN_METRICS = (
    *_EPISODES,
    *_SUPERVISED,
    *_PREFERENCES,
    *_DISTILLATION,
    *_OBJECTIVE,
    *_OPTIMIZER,
    *_CREDIT,
    *_UPDATE,
    *_WEIGHTS,
    *_RATES,
    *_UTILISATION,
    *_STALENESS,
    *_MISMATCH,
    *_LAGS,
    *_HEALTH,
    *_COUNTERS,
    *_BACKPRESSURE,
    *_TAKEN_UP,
    *_SYNC,
    *_EXAMPLES,
    *_TIMES,
    *_EPISODE_TIMES,
    *_MEMORY,
    *_DOMAINS,
    *_EVALUATION,
)
"""All of them; functions that compute them name them by `name`."""
