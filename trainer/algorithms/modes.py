"""Names of ways to compute, which settings and formulas share: reading settings needs no tensors."""

from typing import Literal

AggregationMode = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"
]
KLEstimator = Literal["k1", "k2", "k3"]
RatioLevel = Literal["token", "turn", "sequence"]
