"""Names of ways to compute, which settings and formulas share: reading settings needs no tensors."""

from typing import Literal

AggregationMode = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"
]
KLEstimator = Literal["k1", "k2", "k3", "abs"]
RatioLevel = Literal["token", "turn", "sequence", "sequence_sum"]
WeightLevel = Literal["token", "turn", "geometric", "sequence"]
Measure = Literal["ratio", "k1", "k2", "k3", "probability", "variation", "binary_kl", "behaviour_kl"]
Statistic = Literal["mean", "sum", "max", "all"]
GaeMask = Literal["skip", "none"]
ReturnMask = Literal["skip", "none", "reset"]
Baseline = Literal["mean", "leave_one_out", "length_weighted", "greedy", "second_best", "batch_mean", "none"]
Scale = Literal["group_std", "batch_std", "rest_std", "centred_std", "group_mean", "none"]
Singleton = Literal["zero", "raw"]
WhitenForm = Literal["variance", "deviation", "floor", "mean"]
Divergence = Literal["forward_kl", "reverse_kl", "jsd", "skewed_forward_kl", "skewed_reverse_kl"]
"""How far a student's distribution is from the teacher's."""
