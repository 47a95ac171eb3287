"""Memory and processor time of whole runs of a policy of about 100 million random weights.

Each run is a process of its own: PPO with a critic and a reference on FrozenLake, sampled by the embedded engine. The
processor time of an update, its rollouts included, is the difference of two runs of unequal length.

    python benchmarks/training/memory.py --output benchmarks/results/training_memory.json
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

_RUN = [
    "tasks=[{env_id: FrozenLake-v0, kwargs: {size: 4, split: train, max_episode_steps: 2}}]",
    "model.hidden_size=768",
    "model.layers=12",
    "model.heads=12",
    "model.max_length=128",
    "prompt={context: single_turn, instruction: none}",
    "rollout={groups_per_step: 1, group_size: 4, max_turns: 2, max_new_tokens: 2}",
    "algorithm={preset: ppo, filter: {kind: none}, minibatches: 1}",
    "algorithm.kl={coefficient: 0.02, estimator: k3, placement: loss}",
    "evaluation.every=0",
    "checkpoint.every=0",
    "tracking={tensorboard: false, console: false}",
    "threads=1",
]
_CASES = {
    "fp32, on-policy": [],
    "fp32, staleness 1": ["rollout.max_staleness=1"],
    "bf16, on-policy": ["model.dtype=bf16"],
    "fp32, gradient checkpointing": ["model.gradient_checkpointing=true"],
    "fp32, LoRA rank 16": ["model.lora={rank: 16, alpha: 32}"],
    "bf16, LoRA rank 16": ["model.dtype=bf16", "model.lora={rank: 16, alpha: 32}"],
}


def measure(overrides: list[str], steps: int) -> tuple[float, float]:
    """Return peak memory in MiB and processor seconds of a run of so many steps."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*_RUN, *overrides, f"steps={steps}", f"output_dir={folder}/run"]
        child = os.posix_spawn(
            sys.executable, [sys.executable, "-m", "rollgym.trainer.cli", *words], dict(os.environ)
        )
        _, status, usage = os.wait4(child, 0)
    if status:
        raise SystemExit(f"a run failed: {words}")
    return usage.ru_maxrss / 1024, usage.ru_utime + usage.ru_stime


def main() -> None:
    """Measure the cases and write them down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--cases", nargs="*", default=list(_CASES), choices=list(_CASES))
    options = parser.parse_args()
    results = {}
    for case in options.cases:
        _, short = measure(_CASES[case], 1)
        peak, long = measure(_CASES[case], 3)
        results[case] = {"peak_mib": round(peak), "cpu_s_per_step": round((long - short) / 2, 1)}
        print(f"{case}: {peak:,.0f} MiB, {(long - short) / 2:.1f} processor seconds per step", flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
