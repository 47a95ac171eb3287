"""The preset for one GPU of 80 GB as it is, with a model of Qwen2.5's shape of 0.5B, of random weights.

    python benchmarks/gpu/preset.py --seconds 240 --model FOLDER --work runs/preset --output preset.json

The tokenizer is that of the model which is named: it knows fewer words than the shape has. The preset samples with
vLLM; where there is none, or with `--tiny`, the embedded engine samples, and the results say so.
"""

import argparse
import json
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from side_by_side import WITHOUT_BOARDS, last_line, records, start, tiny, wait
from transformers import Qwen2Config, Qwen2ForCausalLM

from rollgym.trainer.models.load import load_tokenizer, model_folder

ROOT = Path(__file__).resolve().parents[2]
PRESET = ROOT / "examples/presets/qwen2.5-0.5b-1gpu.yaml"
STEPS = 3
_SHAPE = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
_TOLD = (
    "time/step_s",
    "time/rollout_s",
    "time/train_s",
    "time/sync_s",
    "time/tokens_per_s",
    "time/trained_tokens_per_s",
    "time/mfu",
    "memory/accelerator_peak_gib",
    "mismatch/k3",
)


def write_model(folder: Path, tokenizer_of: Path) -> None:
    """Write a model of the shape, with random weights, and the tokenizer of another one."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer(model_folder(str(tokenizer_of)))
    config = Qwen2Config(
        **_SHAPE, eos_token_id=tokenizer.eos_token_id, bos_token_id=None, pad_token_id=tokenizer.pad_token_id
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--model", type=Path, help="whose tokenizer the model has")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    until = time.monotonic() + 0.85 * options.seconds
    run = options.work / "run"
    embedded = options.tiny or shutil.which("vllm") is None
    if not options.tiny:
        if options.model is None:
            raise SystemExit("--model: whose tokenizer is the model to have?")
        write_model(options.work / "model", options.model)
    codes = wait({"preset": start(run, "train", words_of(run, embedded, options))}, until, 20.0)
    options.output.write_text(
        json.dumps(_figures(run, codes["preset"], embedded), indent=1) + "\n", encoding="utf-8"
    )
    print(options.output.read_text(encoding="utf-8"))
    return 0 if codes["preset"] == 0 else 1


def words_of(run: Path, embedded: bool, options: argparse.Namespace) -> list[str]:
    """Return what follows `roll-train`: the preset, fewer steps, and no evaluation of what has not learnt."""
    words = ["--config", str(PRESET), f"output_dir={run}", f"steps={STEPS}", *WITHOUT_BOARDS]
    words += ["evaluation={sets: {}, every: 0}", "checkpoint={every: 1000, keep: 1, resume: never}"]
    words += ["inference={kind: embedded}"] if embedded else []
    return tiny(words) if options.tiny else [*words, f"model.path={options.work / 'model'}"]


def _figures(run: Path, code: int, embedded: bool) -> dict[str, Any]:
    steps = [line for line in records(run) if "time/step_s" in line]
    # The first one compiles.
    later = steps[1:] or steps
    choices = run / "device.json"
    return {
        "exit_code": code,
        "sampled_by": "the embedded engine" if embedded else "vLLM",
        "steps": len(steps),
        "first_step_s": steps[0]["time/step_s"] if steps else None,
        "later": {
            name: statistics.median(line[name] for line in later)
            for name in _TOLD
            if later and all(name in line for line in later)
        },
        "device": json.loads(choices.read_text(encoding="utf-8")) if choices.exists() else None,
        "last_words": last_line(run.with_suffix(".train.log")),
    }


if __name__ == "__main__":
    raise SystemExit(main())
