"""The four presets on FrozenLake, three seeds each: python benchmarks/learning/presets.py [--seeds 0 1 2] [--steps 60].

Finished runs are skipped and killed ones go on, so the script can be started again until it is done. The table is
printed and written to benchmarks/results/presets.json.
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMON = [
    "algorithm.entropy_coefficient=0.03",
    "algorithm.aggregation.mode=token-mean",
    "algorithm.minibatches=2",
]
PRESETS = {
    "grpo": [],
    "ppo": [],
    # The reference is the warm start, which knows little: staying near it would cost more than it gives.
    "gigpo": ["algorithm.kl.coefficient=0.0", "algorithm.entropy_coefficient=0.01"],
    "starpo_s": ["algorithm.filter.fraction=0.5"],
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--steps", type=int, default=60)
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
                    f"algorithm.preset={preset}",
                    *COMMON,
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
    summary = [sys.executable, "benchmarks/learning/summary.py", *map(str, runs), "--output", str(output)]
    subprocess.run(summary, check=True, cwd=ROOT)


if __name__ == "__main__":
    main()
