"""Record RLinf's functions, in an interpreter that has rlinf (0.3.0):

    PYTHONPATH=. PYTHON -m peers.algorithms.record_rlinf --out CASES

Its losses refuse all but float32.
"""

import argparse
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rlinf.algorithms import advantages as _advantages  # noqa: F401 - it registers them
from rlinf.algorithms import losses as rlinf_losses
from rlinf.algorithms import registry, utils
from rlinf.utils.utils import get_loss_agg_func
from torch import Tensor

from peers.algorithms.cases import Draw, Recorder

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")


def main() -> None:
    """Record all of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    recorder = Recorder("rlinf", version("rlinf"), parser.parse_args().out)
    for part in (advantages, aggregation, actors, scales, decoupled, critics, penalties):
        part(recorder)
    recorder.close()


def draws(function: str, cases: int = 30) -> list[Draw]:
    """Return the draws of a function's cases."""
    return [Draw(f"rlinf {function}", number, torch.float32) for number in range(cases)]


def grouped(draw: Draw, *, full: bool = False) -> tuple[dict[str, Any], int]:
    """Return episodes whose groups lie side by side, and the size of a group."""
    size, groups = draw.whole(2, 5), draw.whole(1, 3)
    rows, width = size * groups, draw.whole(5, 12)
    mask = draw.mask(rows, width, empty=0.0, holes=not full)
    if full:
        mask[:] = True
    batch = {"mask": mask, "groups": [place // size for place in range(rows)]}
    batch["scores"] = draw.scores(batch["groups"])
    return batch, size


def estimated(given: dict[str, Any], kind: str, options: dict[str, Any], **further: Any) -> dict[str, Tensor]:
    """Return what the trainer's entry point gives."""
    found = registry.calculate_adv_and_returns(
        adv_type=kind,
        task_type="reasoning",
        rewards=given["scores"],
        loss_mask=given["mask"],
        **options,
        **further,
    )
    return {"advantages": found[0], **({} if found[1] is None else {"returns": found[1]})}


def advantages(recorder: Recorder) -> None:
    """Advantages by their registered names."""
    for draw in draws("grpo"):
        batch, size = grouped(draw)
        options: dict[str, Any] = {"group_size": size}
        recorder.record(
            "advantage/grpo", options, batch, lambda given, options=options: estimated(given, "grpo", options)
        )
    for draw in draws("gae", 40):
        batch, _ = grouped(draw, full=draw.chance(0.3))
        if draw.chance(0.7):
            batch["mask"][:, -1] = True
        batch["values"] = draw.normal(*batch["mask"].shape)
        options = {
            "gamma": draw.choice((1.0, 0.99)),
            "gae_lambda": draw.choice((1.0, 0.95, 0.5)),
            "normalize_advantages": draw.chance(0.6),
        }
        recorder.record(
            "advantage/gae",
            options,
            batch,
            lambda given, options=options: estimated(given, "gae", options, values=given["values"]),
        )
    for draw in draws("reinpp", 40):
        batch, size = grouped(draw, full=draw.chance(0.5))
        # With its baseline the function fails: it makes a vector of what it then writes as a matrix.
        options = {"group_size": size, "kl_beta": draw.choice((0.0, 0.01, 0.1))}
        if options["kl_beta"]:
            options["kl_penalty_type"] = draw.choice(("k1", "k2", "k3"))
        batch["old"] = draw.logprobs(*batch["mask"].shape)
        batch["reference"] = draw.near(batch["old"])
        recorder.record(
            "advantage/reinpp",
            options,
            batch,
            lambda given, options=options: estimated(
                given, "reinpp", options, logprob=given["old"], ref_logprob=given["reference"]
            ),
        )
    for draw in draws("raw"):
        batch, _ = grouped(draw)
        options = {"normalize_advantages": draw.chance(0.6)}
        recorder.record(
            "advantage/raw", options, batch, lambda given, options=options: estimated(given, "raw", options)
        )
    for mode in ("trajectory", "turn"):
        for draw in draws(f"grpo_dynamic {mode}"):
            size, groups = draw.whole(2, 4), draw.whole(1, 3)
            turns = [draw.whole(1, 3) for _ in range(size * groups)]
            episode = [place for place, count in enumerate(turns) for _ in range(count)]
            scores = draw.scores([place // size for place in range(size * groups)])[episode]
            if mode == "turn" and draw.chance(0.6):
                scores = draw.normal(len(episode))
            mask = draw.mask(len(episode), 8, empty=0.0)
            options = {"group_size": size, "advantage_mode": mode}
            recorder.record(
                f"advantage/grpo_dynamic {mode}",
                options,
                {"mask": mask, "scores": scores, "episode": episode},
                lambda given, options=options: estimated(
                    given,
                    "grpo_dynamic",
                    options,
                    idx_to_traj=given["episode"],
                    num_sequence=len(given["episode"]),
                ),
            )


def aggregation(recorder: Recorder) -> None:
    """One number of token losses."""
    for mode in MODES:
        for draw in draws(mode, 20):
            mask = draw.mask(draw.whole(1, 8), draw.whole(4, 12))
            recorder.record(
                f"loss_agg/{mode}",
                {"loss_agg": mode},
                {"mask": mask, "values": draw.normal(*mask.shape)},
                lambda given, mode=mode: {"loss": get_loss_agg_func(mode)(given["values"], given["mask"])},
                differentiate=("values",),
            )


def updates(draw: Draw) -> dict[str, Any]:
    """Return what a policy loss reads."""
    mask = draw.mask(draw.whole(2, 8), draw.whole(4, 14), empty=0.03)
    old = draw.logprobs(*mask.shape)
    return {
        "mask": mask,
        "old": old,
        "logprobs": draw.near(old, draw.choice((0.02, 0.2))),
        "advantages": draw.advantages(mask),
    }


def clips(draw: Draw) -> dict[str, Any]:
    """Return bounds of ratios."""
    low, high = draw.choice(((0.2, 0.2), (0.2, 0.28), (0.1, 0.5)))
    return {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": draw.choice((None, 3.0, 1.5))}


def actors(recorder: Recorder) -> None:
    """The policy's loss."""
    for draw in draws("actor", 40):
        options = {**clips(draw), "loss_agg": draw.choice(MODES)}
        batch = updates(draw)
        if draw.chance(0.3):
            options |= draw.choice(
                ({"clip_log_ratio_min": -1.0, "clip_log_ratio_max": 1.0}, {"clip_log_ratio_max": 0.5})
            )
        elif draw.chance(0.3):
            # Embodied tasks: the mean over an episode of its own length.
            batch["mask"] = draw.mask(*batch["mask"].shape, empty=0.0)
            options["max_episode_steps"] = batch["mask"].shape[1]
        recorder.record(
            "loss/actor",
            options,
            batch,
            lambda given, options=options: actor(given, options),
            differentiate=("logprobs",),
        )


def actor(given: dict[str, Any], options: dict[str, Any], **further: Any) -> dict[str, Tensor]:
    """One of RLinf's policy losses."""
    own = {
        name: options[name] for name in options if name not in ("loss_agg", "loss_type", "max_episode_steps")
    }
    if "max_episode_steps" in options:
        further["max_episode_steps"] = options["max_episode_steps"]
        further["loss_mask_sum"] = given["mask"].sum(dim=1, keepdim=True).expand(given["mask"].shape)
    function = registry.get_policy_loss("actor")
    if options.get("loss_type") == "decoupled":
        function = rlinf_losses.compute_decoupled_ppo_actor_loss
    loss, _ = function(
        logprobs=given["logprobs"],
        old_logprobs=given["old"],
        advantages=given["advantages"],
        loss_mask=given["mask"],
        loss_agg_func=get_loss_agg_func(options["loss_agg"]),
        **own,
        **further,
    )
    return {"loss": loss}


def scales(recorder: Recorder) -> None:
    """Weights of the turns of an episode, each of which is a row and of one of several agents."""
    for last in ("agent_level", "turn_level"):
        for draw in draws(last):
            batch = updates(draw)
            rows = len(batch["mask"])
            batch["mask"] = draw.mask(*batch["mask"].shape, empty=0.0)
            turns = draw.choice((1, 2, 3))
            batch["episode"] = [place // turns for place in range(rows)]
            agents = draw.choice((1, 2))
            batch["agent"] = [place % agents for place in range(rows)]
            names = ["group_level", "agent_level", "turn_level"][: 2 + (last == "turn_level")]
            options = {"scales": names, **clips(draw), "loss_agg": "seq-mean-token-mean", "episodes": 32}
            recorder.record(
                f"loss_scale/{last}",
                options,
                batch,
                lambda given, options=options: scaled(given, options),
                differentiate=("logprobs",),
            )


def scaled(given: dict[str, Any], options: dict[str, Any]) -> dict[str, Tensor]:
    """The policy's loss with its advantages scaled as by the actor of several agents."""
    context = {"folding_scale": [], "actor_global_batch_size": options["episodes"]}
    batch = {
        "advantages": given["advantages"].clone(),
        "loss_scales": torch.ones_like(given["advantages"]),
        "response_mask": given["mask"],
        "idx_to_traj": given["episode"],
        "extra:idx_to_sub_traj": torch.tensor(given["agent"]),
    }
    for function in registry.get_loss_scales(options["scales"]):
        batch = function(context, batch)
    own = {name: value for name, value in options.items() if name not in ("scales", "episodes")}
    return actor({**given, "advantages": batch["advantages"] * batch["loss_scales"]}, own)


def decoupled(recorder: Recorder) -> None:
    """Decoupled PPO: `old` is the policy that sampled."""
    for draw in draws("decoupled", 40):
        options = {**clips(draw), "loss_agg": draw.choice(MODES), "loss_type": "decoupled"}
        batch = updates(draw)
        form = draw.choice(("proximal", "versions", "neither"))
        if form == "proximal":
            batch["proximal"] = draw.near(batch["old"], 0.1)
        if form == "versions":
            options["current_version"] = 7.0
            batch["versions"] = torch.randint(-1, 8, batch["mask"].shape, generator=draw.generator)
        if draw.chance(0.5):
            options["behave_weight_threshold"] = draw.choice((5.0, 1.2))
        recorder.record(
            "loss/decoupled actor",
            options,
            batch,
            lambda given, options=options: actor(
                given, options, proximal_logprobs=given.get("proximal"), versions=given.get("versions")
            ),
            differentiate=("logprobs",),
        )


def critics(recorder: Recorder) -> None:
    """The critic's loss."""
    for draw in draws("critic"):
        mask = draw.mask(draw.whole(2, 8), draw.whole(4, 14), empty=0.03)
        old = draw.normal(*mask.shape)
        batch = {
            "mask": mask,
            "old_values": old,
            "values": old + draw.normal(*mask.shape),
            "returns": 3 * draw.normal(*mask.shape),
        }
        options = {"value_clip": draw.choice((0.5, 0.1, 10.0)), "huber_delta": draw.choice((10.0, 1.0, 0.5))}
        recorder.record(
            "loss/critic",
            options,
            batch,
            lambda given, options=options: {
                "loss": rlinf_losses.compute_ppo_critic_loss(
                    given["values"], given["returns"], given["old_values"], loss_mask=given["mask"], **options
                )[0]
            },
            differentiate=("values",),
        )


def penalties(recorder: Recorder) -> None:
    """Estimates of the divergence."""
    for name in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"):
        for draw in draws(name, 20):
            mask = draw.mask(4, 10)
            reference = draw.logprobs(4, 10)
            recorder.record(
                "kl_penalty/" + name,
                {"kl_penalty": name},
                {
                    "mask": mask,
                    "logprobs": draw.near(reference, draw.choice((0.1, 1.0, 5.0))),
                    "reference": reference,
                },
                lambda given, name=name: {
                    "kl": utils.kl_penalty(given["logprobs"], given["reference"], name)
                },
                differentiate=("logprobs",),
                gradient_of="kl",
                everywhere=("kl",),
            )


if __name__ == "__main__":
    main()
