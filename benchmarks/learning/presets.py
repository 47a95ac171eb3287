"""The four presets on FrozenLake, three seeds each: python benchmarks/learning/presets.py [--seeds 0 1 2] [--steps 80].

Finished runs are skipped and killed ones go on, so the script can be started again until it is done. The table is
printed and written to benchmarks/results/presets.json.
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
GROUPS = ["rollout.groups_per_step=64", "rollout.group_size=4"]
STAY = (
    "kl: {coefficient: %s, estimator: k3, placement: loss}, aggregation: {mode: token-mean}, minibatches: 4"
)
# Every preset plays 256 episodes a step; those that compare episodes of one map play four on each of 64 maps.
PRESETS = {
    "ppo": [
        "rollout.groups_per_step=256",
        "rollout.group_size=1",
        "algorithm={preset: ppo, advantage: {token_discount: 0.95, trace: 0.9}, entropy_coefficient: 0.01, %s}"
        % (STAY % 0.02),
    ],
    "grpo": [
        *GROUPS,
        "algorithm={preset: grpo, advantage: {turn_discount: 0.95}, %s}" % (STAY % 0.05),
    ],
    "gigpo": [
        *GROUPS,
        "algorithm={preset: gigpo, %s}" % (STAY % 0.02),
    ],
    "starpo_s": [
        *GROUPS,
        "algorithm={preset: starpo_s, advantage: {token_discount: 0.95, trace: 0.9}, entropy_coefficient: 0.01, "
        "filter: {fraction: 0.5}, %s}" % (STAY % 0.02),
    ],
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--directory", type=Path, default=ROOT / "runs" / "presets")
    options = parser.parse_args()
    runs = []
    for preset in options.presets:
        for seed in options.seeds:
            run = options.directory / f"{preset}_seed{seed}"
            runs.append(run)
            if (run / "curves.png").exists():
                continue
            print(f"--- {run.name}", flush=True)
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "trainer.cli",
                    "--config",
                    "examples/frozen_lake.yaml",
                    *PRESETS[preset],
                    f"seed={seed}",
                    f"steps={options.steps}",
                    f"output_dir={run}",
                    "checkpoint.resume=auto",
                ],
                check=True,
                cwd=ROOT,
            )
    output = ROOT / "benchmarks" / "results" / "presets.json"
    command = "python benchmarks/learning/presets.py"
    summary = [sys.executable, "benchmarks/learning/summary.py", *map(str, runs)]
    summary += ["--command", command, "--output", str(output)]
    subprocess.run(summary, check=True, cwd=ROOT)


if __name__ == "__main__":
    main()
