"""Optimizer steps in which tokens of rows that begin alike go through the model once, beside the same steps without.

    python benchmarks/training/shared_prefixes.py [--rounds 5] [--out benchmarks/results/shared_prefixes.json]

Tiny models of Qwen3's, Llama's and Gemma-2's shape (4 layers, 128 wide, fp32), 8 episodes of 5 turns. First the
gradients of both forms are compared, in every preset; then they take turns on one model and optimizer, as two copies
of a model differ by some per cent in time, from where they lie in memory. Processor time of whole optimizer steps,
forward, backward and AdamW: medians over the rounds, their ratio, and the quartiles of the rounds' own ratios. Where
nothing is shared both make the same calls, and there are three times as many rounds. `held_mib` is what a micro-batch's
forward pass holds for its backward pass, at most.
"""

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PretrainedConfig, Qwen3Config

from rollgym.clients.measuring.revision import revision
from rollgym.trainer.algorithms.aggregation import collect
from rollgym.trainer.algorithms.presets import PRESETS, resolve_preset
from rollgym.trainer.algorithms.settings import AlgorithmSettings
from rollgym.trainer.backends.base import MicroBatch, TrainRow
from rollgym.trainer.backends.forward_pass import ForwardPass
from rollgym.trainer.backends.heads import PolicyHead, ValueHead
from rollgym.trainer.backends.optimizer import Schedule
from rollgym.trainer.backends.torch_backend import TorchBackend
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.learn.batches import episode_batch, row_builder
from rollgym.trainer.learn.learner import Learner, Models
from rollgym.trainer.models.value_head import ValueModel
from rollgym.trainer.models.weights import without_chance
from rollgym.trainer.records.group import Group
from rollgym.trainer.records.trajectory import Segment, Trajectory, TrajectoryOutcome, Turn
from rollgym.trainer.tasks.task import Task

VOCABULARY = 512
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
}
MODELS: dict[str, PretrainedConfig] = {
    "qwen3": Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "llama": LlamaConfig(**SHAPE),
    "gemma2": Gemma2Config(**SHAPE, sliding_window=64, query_pre_attn_scalar=32),
}
SCHEDULE = Schedule(1e-4, 0, 10, "constant")


def model_of(config: PretrainedConfig, dtype: torch.dtype = torch.float32, seed: int = 0):
    torch.manual_seed(seed)
    return without_chance(AutoModelForCausalLM.from_config(config, dtype=dtype))


def optimizer(mode: str, budget: int = 16384) -> OptimizerSettings:
    return OptimizerSettings(tokens_per_micro_batch=budget, gradient_clip=1e9, shared_prefixes=mode)


# Batches


def episodes(
    prompts: list[int], *, group_size: int, turns: int, seed: int = 0, instruction: int = 0
) -> list[Group]:
    """Groups of episodes of random tokens: prompts of `prompts` tokens, then turns of 20 read and 20 sampled ones.

    Args:
        prompts: Length of each group's prompt.
        group_size: Episodes of a group.
        turns: Turns of an episode.
        seed: Of the tokens.
        instruction: Tokens that all prompts begin with.
    """
    draws = np.random.default_rng(seed)

    def tokens(count: int) -> list[int]:
        return draws.integers(2, VOCABULARY, count).tolist()

    def episode(task: Task, member: int, prompt: list[int]) -> Trajectory:
        trajectory, segment = Trajectory(task, member, outcome=TrajectoryOutcome.FAILED), Segment()
        for turn in range(turns):
            segment.append_context(prompt if turn == 0 else tokens(20))
            start = len(segment.ids)
            segment.append_action(tokens(20), (-6.0 - draws.random(20)).tolist(), [0] * 20, turn)
            # No two members score alike: a tie leaves some presets nothing to train.
            reward = float(draws.integers(2)) + 0.1 * member
            # Some presets read several rewards a turn.
            parts = {"first": member / group_size, "second": reward - member / group_size}
            anchor = str(draws.integers(2))
            trajectory.turns.append(
                Turn(0, start, len(segment.ids), "", "", reward=reward, reward_parts=parts, anchor=anchor)
            )
        trajectory.segments.append(segment)
        return trajectory

    groups = []
    common = tokens(instruction)
    for index, length in enumerate(prompts):
        task = Task(index, "Any-v0", seed=index)
        prompt = [*common, *tokens(length)]
        members = [episode(task, member, prompt) for member in range(group_size)]
        # Some presets read what the most likely tokens would have scored; it is not trained.
        greedy = episode(task, group_size, prompt)
        groups.append(Group(index, task, 0, members, greedy=greedy))
    return groups


def batches() -> dict[str, list[TrainRow]]:
    """The batches of the benchmark, as rows."""
    grouped, apart = episodes([300], group_size=8, turns=5), episodes([300] * 8, group_size=1, turns=5)
    lengths = np.random.default_rng(1).lognormal(4.6, 0.9, 32)
    uneven = episodes([16 + int(min(length, 900)) for length in lengths], group_size=1, turns=1)
    instructed = episodes([20] * 4, group_size=8, turns=2, instruction=200)
    return {
        "row per turn": rows_of(grouped, "step"),
        "row per episode": rows_of(grouped, "trajectory"),
        "4 groups of 8 behind one instruction": rows_of(instructed, "trajectory"),
        "nothing shared": rows_of(apart, "trajectory"),
        "nothing shared, uneven": rows_of(uneven, "trajectory"),
        "a little shared": rows_of(episodes([12] * 4, group_size=8, turns=5), "trajectory"),
    }


_OF_EVERY_MODEL = ("row per turn", "row per episode", "nothing shared")


def rows_of(groups: list[Group], layout: str) -> list[TrainRow]:
    draws = np.random.default_rng(3)
    rows = []
    for row in episode_batch(groups, row_builder(layout)).rows:
        weight = torch.from_numpy(draws.normal(size=len(row.ids)).astype("float32"))
        rows.append(row.tensors().with_fields({"weight": weight}))
    return rows


def weighted(micro: MicroBatch):
    """A loss that every wanted token has a weight of its own in."""
    loss = -(micro.outputs * micro.fields["weight"] * micro.mask).sum() / 1000
    return loss, collect({"loss": (loss, torch.ones(()))})


# What is compared


def gradients(backends: list[TorchBackend], run: Callable[[], object]) -> list[torch.Tensor]:
    """Return the gradient of the first optimizer step of each backend in what is run."""
    found: dict[torch.optim.Optimizer, torch.Tensor] = {}

    def take(optimizer: torch.optim.Optimizer, *_: object) -> None:
        each = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
        # Later steps of an update start from other weights.
        found.setdefault(optimizer, torch.cat([grad.flatten().clone() for grad in each if grad is not None]))

    handles = [backend._optimizer.register_step_pre_hook(take) for backend in backends]
    run()
    for handle in handles:
        handle.remove()
    return [found[backend._optimizer] for backend in backends]


def error(one: torch.Tensor, two: torch.Tensor) -> float:
    if not two.norm():
        raise ValueError("these gradients are zero: comparing them shows nothing")
    return float((one - two).norm() / two.norm())


def preset_errors(name: str) -> dict[str, float]:
    """Return the relative L2 error of the gradients of policy and critic, the larger, by preset and layout."""
    errors = {}
    for preset in sorted(PRESETS):
        settings = resolve_preset(preset, {"minibatches": 1})
        for layout in ("step", "trajectory") if name == "qwen3" else ("step",):
            batch = episode_batch(episodes([60], group_size=4, turns=2), row_builder(layout))
            found = {}
            for mode in ("auto", "off"):
                models = models_of(name, settings, mode)
                backends = [each for each in (models.policy, models.critic) if each is not None]
                learner = Learner(settings, models, seed=0)
                found[mode] = gradients(backends, lambda: asyncio.run(learner.update(batch, 0)))  # noqa: B023
            errors[f"{preset}, {layout} rows"] = max(
                error(one, two) for one, two in zip(found["auto"], found["off"], strict=True)
            )
    return errors


def models_of(name: str, settings: AlgorithmSettings, mode: str) -> Models:
    model, other = model_of(MODELS[name]), model_of(MODELS[name], seed=1)
    critic = None
    if settings.critic is not None:
        values = ValueModel(model)
        torch.nn.init.normal_(values.head.weight, generator=torch.Generator().manual_seed(1))
        critic = TorchBackend(ValueHead(values), optimizer(mode), SCHEDULE)
    reference = TorchBackend(PolicyHead(other, 1.0), optimizer(mode), SCHEDULE)
    return Models(TorchBackend(PolicyHead(model, 1.0), optimizer(mode), SCHEDULE), critic, reference)


def held_mib(backend: TorchBackend, rows: list[TrainRow]) -> float:
    """Return what a micro-batch's forward pass holds for its backward pass, at most."""
    forward: ForwardPass = backend._pass
    weights = {parameter.untyped_storage().data_ptr() for parameter in forward.model.parameters()}
    most = 0
    for bucket in forward.buckets(rows):
        storages: dict[int, int] = {}

        def note(tensor: torch.Tensor, storages=storages) -> torch.Tensor:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            micro = forward.run(rows, bucket, "metric")
        most = max(most, sum(size for place, size in storages.items() if place not in weights))
        del micro
    return most / 2**20


def compared(name: str, rows: list[TrainRow], rounds: int) -> dict[str, object]:
    """Return how much faster steps and forward passes on rows are, and whether they are the same."""
    backends = {
        mode: TorchBackend(PolicyHead(model_of(MODELS[name]), 1.0), optimizer(mode), SCHEDULE)
        for mode in ("off", "auto")
    }
    found = {
        mode: gradients([backend], lambda backend=backend: backend.step(rows, weighted))
        for mode, backend in backends.items()
    }
    head = PolicyHead(model_of(MODELS[name]), 1.0)
    passes = {mode: TorchBackend(head, optimizer(mode), SCHEDULE)._pass for mode in ("off", "auto")}
    backend = TorchBackend(head, optimizer("off"), SCHEDULE)
    times: dict[str, list[float]] = {"off": [], "auto": [], "off forward": [], "auto forward": []}
    for number in range(rounds + 1):
        for mode, forward in list(passes.items())[:: 1 if number % 2 else -1]:
            backend._pass = forward
            begun = time.process_time()
            backend.step(rows, weighted, entropy="metric")
            stepped = time.process_time()
            backend.forward(rows)
            if number:  # the first round warms up
                times[mode].append(stepped - begun)
                times[f"{mode} forward"].append(time.process_time() - stepped)
    medians = {mode: statistics.median(each) for mode, each in times.items()}
    ratios = [off / auto for off, auto in zip(times["off"], times["auto"], strict=True)]
    buckets = backends["auto"]._pass.buckets(rows)
    trees = [bucket.shared.tree for bucket in buckets if bucket.shared is not None]
    return {
        "rows": len(rows),
        "tokens": sum(len(row.ids) for row in rows),
        "computed": sum(tree.tokens for tree in trees) if trees else sum(len(row.ids) for row in rows),
        "calls": sum(len(tree.calls) for tree in trees) if trees else len(buckets),
        "gradient_error": error(*found["auto"], *found["off"]),
        "step_s": {mode: round(medians[mode], 4) for mode in ("off", "auto")},
        "speedup": round(medians["off"] / medians["auto"], 3),
        "speedup_quartiles": [round(each, 3) for each in statistics.quantiles(ratios)[::2]],
        "forward_speedup": round(medians["off forward"] / medians["auto forward"], 3),
        "held_mib": {mode: round(held_mib(backend, rows), 1) for mode, backend in backends.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = os.getloadavg()[0]
    commit = revision()
    results: dict[str, dict[str, object]] = {}

    def note(name: str, kind: str, result: object) -> None:
        print(name, kind, json.dumps(result), flush=True)
        results.setdefault(name, {})[kind] = result
        document = {
            "command": "python benchmarks/training/shared_prefixes.py",
            "commit": commit,
            "load_average": {"begun": round(began, 2), "ended": round(os.getloadavg()[0], 2)},
            "threads": 1,
            "rounds": options.rounds,
            "results": results,
        }
        if options.out is not None:  # after each, so that one that is stopped has measured something
            options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    for name in options.models:
        for kind, rows in batches().items():
            if name == "qwen3" or kind in _OF_EVERY_MODEL:
                more = 3 if kind.startswith("nothing shared") else 1
                note(name, kind, compared(name, rows, options.rounds * more))
    for name in options.models:
        note(name, "gradient_error_by_preset", preset_errors(name))


if __name__ == "__main__":
    main()
