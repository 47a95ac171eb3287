"""Updates of real runs, with shared prefixes and without: WebShop by GiGPO, Retail by GRPO and with a row per turn.

    python benchmarks/training/shared_prefixes_in_runs.py [--rounds 3] [--out FILE]

Each run plays one training step (`roll-train` in this process, environments in a server beside it). Then its update,
whole, with all passes that it takes, is computed again on the same episodes from the same weights, in turns with
`optimizer.shared_prefixes` auto and off. Processor time of this process, one thread, medians.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from rollgym.clients.measuring.revision import revision
from rollgym.trainer.config.load import load_settings
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.learn.batches import EpisodeBatch
from rollgym.trainer.learn.learner import Learner
from rollgym.trainer.run.learning import learn
from rollgym.trainer.run.models import OwnModels
from rollgym.trainer.run.policy import build_policy

ROOT = Path(__file__).parents[2]
_SHORT = [
    "steps=1",
    "warm_start=null",
    "evaluation={every: 0}",
    "checkpoint={every: 0}",
    "tracking={tensorboard: false, console: false}",
    "threads=1",
]
_RETAIL = [
    "tasks=[{env_id: Retail-v0, kwargs: {max_episode_steps: 6}}]",
    "model={device: cpu, hidden_size: 64, layers: 3, heads: 4, max_length: 8192}",
    "prompt={instruction: system}",
    "rollout={groups_per_step: 2, group_size: 4, max_turns: 6, max_new_tokens: 24, episode_timeout_s: 1800}",
    # No policy of this size solves a task of Retail's: what its gradients come from is the bonus.
    "algorithm={preset: grpo, filter: {kind: none}, entropy_coefficient: 0.001}",
]
RUNS: dict[str, tuple[str | None, list[str]]] = {
    "WebShop, GiGPO": ("webshop.yaml", ["rollout.groups_per_step=12"]),
    "Retail, GRPO": (None, _RETAIL),
    "Retail, GRPO, row per turn": (None, [*_RETAIL, "rows=step"]),
}


def played(settings: RunSettings) -> list[EpisodeBatch]:
    """Run, and return the batches that were trained on."""
    seen: list[EpisodeBatch] = []
    update = Learner.update

    async def watched(learner: Learner, batch: EpisodeBatch, *step: int) -> dict[str, float]:
        seen.append(batch)
        return await update(learner, batch, *step)

    Learner.update = watched  # type: ignore[method-assign]
    try:
        asyncio.run(learn(settings, "train"))
    finally:
        Learner.update = update  # type: ignore[method-assign]
    return seen


def update_s(settings: RunSettings, batch: EpisodeBatch, mode: str) -> tuple[float, dict[str, float]]:
    """Return the processor seconds of an update from the run's first weights, and its metrics."""
    optimizer = settings.optimizer.model_copy(update={"shared_prefixes": mode})
    settings = settings.model_copy(update={"optimizer": optimizer})
    models = OwnModels(settings, build_policy(settings, trained=True)).models()
    learner = Learner(settings.algorithm, models, settings.seed)
    begun = time.process_time()
    metrics = asyncio.run(learner.update(batch, 0))
    return time.process_time() - begun, metrics


def compared(name: str, rounds: int) -> dict[str, object]:
    config, words = RUNS[name]
    with tempfile.TemporaryDirectory() as folder:
        path = None if config is None else ROOT / "examples" / config
        settings = load_settings(path, [*words, *_SHORT, f"output_dir={folder}/run"])
        batch = played(settings)[0]
    times: dict[str, list[float]] = {"off": [], "auto": []}
    metrics = {}
    for number in range(rounds):
        for mode in ("off", "auto") if number % 2 else ("auto", "off"):
            seconds, metrics[mode] = update_s(settings, batch, mode)
            times[mode].append(seconds)
    medians = {mode: statistics.median(each) for mode, each in times.items()}
    lengths = [len(row.ids) for row in batch.rows]
    return {
        "rows": len(lengths),
        "tokens": sum(lengths),
        "longest": max(lengths),
        "tokens_saved": round(metrics["auto"].get("policy/shared_prefixes", 0.0), 3),
        "update_s": {mode: round(seconds, 3) for mode, seconds in medians.items()},
        "speedup": round(medians["off"] / medians["auto"], 3),
        "gradient_norm": {mode: each.get("policy/gradient_norm") for mode, each in metrics.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", nargs="*", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = os.getloadavg()[0]
    results = {}
    for name in options.runs:
        results[name] = compared(name, options.rounds)
        print(name, json.dumps(results[name]), flush=True)
    commit = revision()
    document = {
        "command": "python benchmarks/training/shared_prefixes_in_runs.py",
        "commit": commit,
        "load_average": {"begun": round(began, 2), "ended": round(os.getloadavg()[0], 2)},
        "threads": 1,
        "rounds": options.rounds,
        "results": results,
    }
    if options.out is not None:
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
