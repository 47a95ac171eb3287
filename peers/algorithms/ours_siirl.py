"""Ours beside siiRL's functions, most of which are verl's of 2025."""

from peers.algorithms.ours import Case, Choice, Peer, algorithm, loss
from peers.algorithms.ours_verl import (
    ESTIMATORS,
    Found,
    adaptive_kl,
    compute_rewards,
    gae,
    group,
    kl_penalty,
    varies,
)
from peers.algorithms.ours_verl_losses import surrogate
from rollgym.trainer.algorithms.aggregation import Denominators, aggregate
from rollgym.trainer.algorithms.objective import critic_loss

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")


def all_rows(case: Case) -> Denominators:
    """Return counts of all rows, those without tokens too; of a constant's mode, of none."""
    rows = 1 if case.options.get("loss_agg_mode") == "seq-mean-token-sum-norm" else len(case.mask)
    return Denominators(int(case.mask.sum()), rows)


def agg_loss(case: Case) -> Found:
    """One number, the constant being the width."""
    mode = case.options["loss_agg_mode"]
    return {"loss": aggregate(case["values"], case.mask, mode, all_rows(case), horizon=case.mask.shape[1])}


def cpgd(case: Case) -> Found:
    """CPGD's advantages: GRPO's, or those without a deviation."""
    chosen = {
        **case.options,
        "norm_adv_by_std_in_grpo": case.options["weight_factor_in_cpgd"] == "STD_weight",
    }
    return group(Case("advantage/grpo", chosen, case.inputs))


def policy(case: Case) -> Found:
    """A policy loss."""
    mode = case.options["loss_agg_mode"]
    if case.function in ("loss/gspo", "loss/geo_mean"):
        mode = "seq-mean-token-mean"
    settings = algorithm(**surrogate(case), aggregation={"mode": mode})
    return {"loss": loss(settings, case, counts=all_rows(case))}


def value_loss(case: Case) -> Found:
    """The critic's loss."""
    settings = algorithm(
        advantage={"kind": "gae"},
        critic={"value_clip": case.options["cliprange_value"]},
        aggregation={"mode": case.options["loss_agg_mode"]},
    )
    found, _ = critic_loss(
        settings, case["values"], case["old_values"], case["returns"], case.mask, all_rows(case)
    )
    return {"loss": found}


def has_empty_row(case: Case) -> bool:
    """Whether some row has no token."""
    return not bool(case.mask.any(dim=1).all())


PEER = Peer(
    adapters={
        "advantage/grpo": group,
        "advantage/cpgd": cpgd,
        "advantage/gae": gae,
        **{f"agg_loss/{mode}": agg_loss for mode in MODES},
        **{
            f"loss/{name}": policy
            for name in ("vanilla", "cpgd", "gspo", "gpg", "geo_mean", "kl_cov", "clip_cov")
        },
        "loss/value": value_loss,
        **{f"kl_penalty/{name}": kl_penalty for name in ESTIMATORS},
        "compute_rewards": compute_rewards,
        "AdaptiveKLController": adaptive_kl,
    },
    choices=(
        Choice(
            ("loss/", "agg_loss/seq-mean-token-mean"),
            "an episode without tokens counts 0, not 0 / 0 (docs: row means)",
            lambda case: has_empty_row(case) and case.function != "loss/geo_mean",
        ),
        Choice(
            ("advantage/cpgd",),
            "CPGD's weight of rows over groups is not offered: above groups of three it is 3 (docs: CPGD's weight)",
            lambda case: case.options["weight_factor_in_cpgd"] == "clip_filter_like_weight",
        ),
        Choice(
            ("loss/geo_mean",),
            "each token's own advantage, not their mean in the row (docs: GMPO)",
            varies,
        ),
    ),
)
