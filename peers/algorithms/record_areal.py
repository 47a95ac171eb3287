"""Record AReaL's functions, in an interpreter that has AReaL (1.0.4):

PYTHONPATH=. PYTHON -m peers.algorithms.record_areal --out CASES
"""

import itertools
from types import SimpleNamespace

import torch

from peers.algorithms.absent import AbsentPackages
from peers.algorithms.batches import drawn_double, drawn_single, recorder_of
from peers.algorithms.cases import Draw, Recorder

AbsentPackages(
    *("aiofiles", "colorlog", "flash_attn", "flask", "hydra", "lark", "numba", "pybase64", "swanlab"),
    *("tenacity", "tensorboardX", "trackio", "wandb"),
).install()

# The module of the trainer first: its imports go round in a circle that can be entered here only.
from areal.trainer.ppo import actor
from areal.trainer.ppo.actor import PPOActor, compute_prox_logp_approximations
from areal.utils.data import KLEstimator, Normalization
from areal.utils.functional import functional

CASES = 30


def surrogates(to: Recorder) -> None:
    """ppo_actor_loss_fn without rejection, and sapo_loss_fn."""
    kinds = (
        {"eps_clip": 0.2, "eps_clip_higher": None, "c_clip": None},
        {"eps_clip": 0.2, "eps_clip_higher": 0.28, "c_clip": None},
        {"eps_clip": 0.2, "eps_clip_higher": None, "c_clip": 3.0},
        {
            "eps_clip": 0.003,
            "eps_clip_higher": 0.004,
            "c_clip": None,
            "importance_sampling_level": "sequence",
        },
    )
    for number, options in itertools.product(range(12), kinds):
        _, batch = drawn_double(f"loss/ppo {options}", number)

        def clipped(given, options=options):
            loss, _ = functional.ppo_actor_loss_fn(
                logprobs=given["logprobs"],
                proximal_logprobs=given["old"],
                old_logprobs=given["behaviour"],
                advantages=given["advantages"],
                loss_mask=given["mask"],
                **options,
            )
            return {"loss": loss}

        level = options.get("importance_sampling_level", "token")
        inputs = batch.of("logprobs", "old", "behaviour")
        inputs["advantages"] = (
            batch.token_advantages if level == "token" or number % 4 == 3 else batch.advantages
        )
        to.record(f"loss/ppo_actor {level}", options, inputs, clipped, differentiate=["logprobs"])
    for number, (low, high), level in itertools.product(
        range(10), ((1.0, 1.05), (0.5, 2.0)), ("token", "sequence")
    ):
        _, batch = drawn_double(f"loss/sapo {level}", number)
        options = {"tau_pos": low, "tau_neg": high, "importance_sampling_level": level}

        def gated(given, options=options):
            names = {"old_logprobs": given["old"], "loss_mask": given["mask"]}
            loss, _ = functional.sapo_loss_fn(
                logprobs=given["logprobs"], advantages=given["advantages"], **names, **options
            )
            return {"loss": loss}

        to.record(
            f"loss/sapo {level}",
            options,
            batch.of("logprobs", "old", "advantages"),
            gated,
            differentiate=["logprobs"],
        )


def rejections(to: Recorder) -> None:
    """apply_rejection_sampling, alone and inside the loss: all levels, actions, metrics and aggregations."""
    bounds = {
        "ratio": ((None, 1.5), (0.8, 1.25)),
        "kl_k1": ((None, 0.1), (-0.2, 0.2)),
        "kl_k2": ((None, 0.05),),
        "kl_k3": ((None, 0.05),),
    }
    forms = [("token", "mean"), ("sequence", "mean"), ("sequence", "sum"), ("sequence", "max")]
    for metric, (level, aggregation), action in itertools.product(bounds, forms, ("mask", "clamp")):
        if action == "clamp" and metric != "ratio":
            continue
        for (lower, upper), number in itertools.product(bounds[metric], range(4)):
            options = {
                "level": level,
                "action": action,
                "metric": metric,
                "agg": aggregation,
                "lower": lower,
                "upper": upper,
            }
            config = SimpleNamespace(**options)
            _, batch = drawn_single(f"correction {options}", number)
            name = f"{action} {level}"

            def sampled(given, config=config):
                result = functional.apply_rejection_sampling(
                    given["old"], given["behaviour"], given["mask"], None, config
                )
                return {"kept": result.loss_mask.float(), "weights": result.behave_imp_weight}

            to.record(f"correction/{name}", options, batch.of("old", "behaviour"), sampled)

            def lost(given, config=config):
                loss, _ = functional.ppo_actor_loss_fn(
                    logprobs=given["logprobs"],
                    proximal_logprobs=given["old"],
                    old_logprobs=given["behaviour"],
                    advantages=given["advantages"],
                    eps_clip=0.2,
                    loss_mask=given["mask"],
                    rejection_sampling=config,
                )
                return {"loss": loss}

            inputs = batch.of("logprobs", "old", "behaviour", "advantages")
            to.record(f"loss/rejection {name}", options, inputs, lost, differentiate=["logprobs"])


def approximations(to: Recorder) -> None:
    """Proximal log-probabilities without a forward pass, M2PO's mask, and the losses that a teacher adds."""
    for number, method in itertools.product(range(15), ("loglinear", "rollout")):
        draw, batch = drawn_single("proximal", number)
        versions = torch.randint(-1, 8, batch.mask.shape, generator=draw.generator)

        def approximated(given, method=method):
            made = compute_prox_logp_approximations(
                given["behaviour"], given["logprobs"], given["versions"], 8, method=method
            )
            return {"proximal": made[method]}

        inputs = {**batch.of("logprobs", "behaviour"), "versions": versions}
        to.record(f"proximal/{method}", {"current_version": 8}, inputs, approximated)
    for number, threshold in itertools.product(range(15), (0.04, 0.2)):
        _, batch = drawn_double("selection/m2po", number)

        def kept(given, threshold=threshold):
            return {
                "kept": actor._apply_m2po_masking(
                    given["behaviour"], given["old"], given["mask"], threshold
                ).double()
            }

        to.record("selection/m2po", {"m2_threshold": threshold}, batch.of("old", "behaviour"), kept)


def divergences(to: Recorder) -> None:
    """KLEstimator, in float32 as AReaL casts."""
    for number, estimator, clamped in itertools.product(range(10), ("k1", "k2", "k3"), (True, False)):
        _, batch = drawn_single("kl/estimator", number)

        def estimated(given, estimator=estimator, clamped=clamped):
            value = KLEstimator(estimator, clamped)(given["logprobs"], given["reference"])
            return {"kl": value, "loss": (value * given["mask"]).sum()}

        options = {"kl_estimator": estimator, "apply_clamp": clamped}
        inputs = batch.of("logprobs", "reference")
        to.record("kl/estimator", options, inputs, estimated, differentiate=["logprobs"])


def critics(to: Recorder) -> None:
    """ppo_critic_loss_fn, which wants float32."""
    for number, kind, clip in itertools.product(range(15), ("mse", "huber"), (0.2, 0.5)):
        draw, batch = drawn_single("loss/critic", number)
        scale = draw.choice((1.0, 12.0))
        shape = batch.mask.shape
        values = scale * draw.normal(*shape)
        inputs = {
            "values": values,
            "old_values": values + 0.5 * draw.normal(*shape),
            "returns": scale * draw.normal(*shape),
            "mask": batch.mask,
        }

        def fitted(given, kind=kind, clip=clip):
            loss, _ = functional.ppo_critic_loss_fn(
                given["values"], given["old_values"], given["returns"], clip, given["mask"], kind
            )
            return {"loss": loss}

        options = {"loss_fn_type": kind, "value_eps_clip": clip}
        to.record("loss/critic", options, inputs, fitted, differentiate=["values"])


def normalisations(to: Recorder) -> None:
    """Normalization at all levels, of tokens and of scores, and masked_normalization."""
    for number, unbiased in itertools.product(range(15), (True, False)):
        draw, batch = drawn_double("advantage/masked_normalization", number)

        def whitened(given, unbiased=unbiased):
            made = functional.masked_normalization(given["values"], given["mask"], unbiased=unbiased)
            return {"normalised": made}

        inputs = {"values": draw.normal(*batch.mask.shape), "mask": batch.mask}
        to.record("advantage/masked_normalization", {"unbiased": unbiased, "eps": 1e-5}, inputs, whitened)


def advantages(to: Recorder) -> None:
    """PPOActor._compute_advantages: scaled rewards, KL in them, GAE and its normalisation."""
    for number, (discount, trace), kl, normalised in itertools.product(
        range(8), ((1.0, 1.0), (0.99, 0.95)), (0.0, 0.1), (False, True)
    ):
        draw = Draw(f"advantage/gae {discount} {kl} {normalised}", number, torch.float32)
        rows, width = 6, 14
        # A prompt comes first, and each row ends at its last token.
        mask = torch.zeros(rows, width, dtype=torch.bool)
        mask[:, 3:-1] = draw.mask(rows, width - 4, empty=0.0)
        lengths = [int(row.nonzero().max()) + 1 for row in mask]
        attention = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
        group = SimpleNamespace(
            mean_level="batch",
            std_level="batch",
            mean_leave1out=False,
            std_unbiased=True,
            group_size=1,
            eps=1e-5,
        )
        settings = {
            "reward_scaling": draw.choice((1.0, 10.0)),
            "reward_bias": draw.choice((0.0, -0.5)),
            "reward_clip": draw.choice((20.0, 1.0)),
            "discount": discount,
            "gae_lambda": trace,
            "kl_ctl": kl,
            "kl_estimator": "k1",
            "adv_norm": normalised,
        }
        made = PPOActor.__new__(PPOActor)
        for name, value in settings.items():
            setattr(made, name, value)
        made.kl_estimator, made.reward_norm = KLEstimator("k1"), None
        made.adv_norm = Normalization(group) if normalised else None
        made.mask_no_eos_with_zero = False
        made.config = SimpleNamespace(
            overlong_reward_penalty=False, use_decoupled_loss=True, recompute_logprob=True
        )
        logprobs = draw.logprobs(rows, width)
        inputs = {
            "scores": draw.normal(rows),
            "logprobs": logprobs,
            "reference": draw.near(logprobs),
            "values": draw.normal(rows, width),
            "attention": attention,
            # AReaL puts what is about a token where the token before it is.
            "mask": torch.roll(mask, shifts=-1, dims=-1),
        }

        def computed(given, made=made):
            data = {
                "input_ids": torch.zeros(given["mask"].shape, dtype=torch.int64),
                "rewards": given["scores"],
                "loss_mask": torch.roll(given["mask"], shifts=1, dims=-1),
                "logprobs": torch.roll(given["logprobs"], shifts=1, dims=-1),
                "ref_logp": given["reference"],
                "values": given["values"],
                "attention_mask": given["attention"],
            }
            result = made._compute_advantages(data)
            return {"advantages": result["advantages"], "returns": result["returns"]}

        to.record("advantage/gae", settings, inputs, computed)


def penalties(to: Recorder) -> None:
    """reward_overlong_penalty, and the losses of preferences."""
    for number in range(CASES):
        draw = Draw("reward/overlong", number)
        mask = draw.mask(6, 40, holes=False)
        factor = draw.choice((1.0, 0.5))
        options = {"overlong_tokens": 12, "overlong_penalty_factor": factor, "max_response_length": 32}

        def penalised(given, options=options):
            data = {"rewards": given["scores"], "input_ids": given["mask"], "loss_mask": given["mask"]}
            return {"rewards": functional.reward_overlong_penalty(data, **options)["rewards"]}

        to.record("reward/overlong_penalty", options, {"scores": draw.normal(6), "mask": mask}, penalised)
    for number, (kind, beta) in itertools.product(
        range(10), (("sigmoid", 0.1), ("sigmoid", 0.5), ("ipo", 0.1))
    ):
        draw = Draw("loss/dpo", number, torch.float32)

        def preferred(given, kind=kind, beta=beta):
            return {"loss": functional.dpo_preference_loss(given["logits"], beta=beta, loss_type=kind).mean()}

        options = {"loss_type": kind, "beta": beta}
        to.record("loss/dpo", options, {"logits": draw.normal(6)}, preferred, differentiate=["logits"])


if __name__ == "__main__":
    recorder_of(
        "areal",
        __doc__,
        (surrogates, rejections, approximations, divergences, critics, normalisations, advantages, penalties),
    )
