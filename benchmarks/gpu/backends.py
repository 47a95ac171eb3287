"""Three optimizer steps of a model by a rank of each backend, through the device's own collectives.

python benchmarks/gpu/backends.py --seconds 180 --model FOLDER --work runs/backends --output backends.json
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from side_by_side import WITHOUT_BOARDS, last_line, records, start, tiny, wait

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "examples/one_gpu/frozen_lake.yaml"
BACKENDS = {
    "torch": (),
    "fsdp2": ("backend={kind: fsdp2, ranks: 1}",),
    "ZeRO 2": ("backend={kind: deepspeed, ranks: 1, zero_stage: 2}",),
    "Megatron": ("backend={kind: megatron, ranks: 1}",),
    "ZeRO 3, offloaded": ("backend={kind: deepspeed, ranks: 1, zero_stage: 3, cpu_offload: true}",),
    "fsdp2, compiled": (
        "backend={kind: fsdp2, ranks: 1}",
        "model.compile=inductor",
        "optimizer.fused=true",
    ),
}
ON_A_PROCESSOR = ("torch", "fsdp2")
"""Those that are run where there is no accelerator."""
AT_ONCE = 3


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds - 10
    waiting = list(ON_A_PROCESSOR if options.tiny else BACKENDS)
    found: dict[str, Any] = {}
    while waiting and time.monotonic() < until:
        together, waiting = waiting[:AT_ONCE], waiting[AT_ONCE:]
        rounds = -(-len(waiting) // AT_ONCE) + 1
        end = time.monotonic() + (until - time.monotonic()) / rounds
        folders = {name: options.work / name.replace(" ", "_").replace(",", "") for name in together}
        begun = time.monotonic()
        codes = wait(
            {
                name: start(folder, "train", words_of(name, folder, options))
                for name, folder in folders.items()
            },
            end,
            5.0,
        )
        for name, folder in folders.items():
            steps = [line["time/step_s"] for line in records(folder) if "time/step_s" in line]
            found[name] = {"exit_code": codes[name], "steps": len(steps), "step_s": steps}
            if len(steps) < 3:
                found[name]["last_words"] = last_line(folder.with_suffix(".train.log"))
        found[together[0]]["together_s"] = round(time.monotonic() - begun, 1)
        options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(json.dumps({name: found[name] for name in together}), flush=True)
    return 0 if found and all(each["steps"] == 3 for each in found.values()) and not waiting else 1


def words_of(name: str, folder: Path, options: argparse.Namespace) -> list[str]:
    """Return what follows `roll-train` for a backend."""
    words = ["--config", str(CONFIG), *([f"model.path={options.model}"] if options.model else [])]
    words += [
        f"output_dir={folder}",
        "steps=3",
        "evaluation.sets={}",
        "checkpoint.resume=auto",
        *WITHOUT_BOARDS,
    ]
    words += [
        "rollout.groups_per_step=8",
        "rollout.group_size=4",
        "rollout.max_turns=4",
        "rollout.max_new_tokens=8",
    ]
    return [*(tiny(words) if options.tiny else words), *BACKENDS[name]]


if __name__ == "__main__":
    raise SystemExit(main())
