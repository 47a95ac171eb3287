"""A training step beside TRL's GRPO, in one process: equal loss and gradients first, then samples a second.

Both train the same tiny model, from equal weights, on the same rollouts with the same advantages, in fp32, with AdamW,
on as many threads. TRL's steps are those of `GRPOTrainer.train()`, whose generation is replaced by the fixed rollouts,
and are timed from `on_step_begin` to `on_step_end`; after each of them comes one of ours, so both see the machine's
load alike. Ours is all of `Learner.update`: rows, advantages, micro-batches, optimizer, metrics. TRL has the advantages
for nothing.

Cases: `equal`, all rows of one length; `padded`, lengths drawn from a log-normal, as in practice: TRL pads them to the
longest of the batch, we sort them into micro-batches. The share of padding in TRL's batch is stated with the result.

TRL lives in an environment of its own:

    python -m venv trl-venv
    trl-venv/bin/pip install torch transformers trl -e .
    trl-venv/bin/python benchmarks/training/beside_trl.py --output benchmarks/results/beside_trl.json
    python benchmarks/training/tables.py     # writes docs/results_speed.md anew from what was measured

On an accelerator (`--device auto --dtype bf16`) both compute in bfloat16 from float32 weights, TRL by autocast. Then
the gradients of both are compared with those of the same update in float32.
"""

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch
from datasets import Dataset
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from fixed_rollouts import (  # noqa: E402
    ALGORITHM,
    GROUPS,
    MEMBERS,
    advantages_of,
    draw,
    our_batch,
    trl_inputs,
)

from rollgym.clients.measuring.revision import revision  # noqa: E402
from rollgym.trainer.backends.heads import PolicyHead  # noqa: E402
from rollgym.trainer.backends.optimizer import Schedule  # noqa: E402
from rollgym.trainer.backends.torch_backend import TorchBackend  # noqa: E402
from rollgym.trainer.config.optimizer import OptimizerSettings  # noqa: E402
from rollgym.trainer.core.device import DTYPES, torch_device  # noqa: E402
from rollgym.trainer.learn.batches import EpisodeBatch  # noqa: E402
from rollgym.trainer.learn.learner import Learner, Models  # noqa: E402
from rollgym.trainer.learn.utilisation import device_name, training_flops  # noqa: E402
from rollgym.trainer.models.shape import ModelShape  # noqa: E402
from rollgym.trainer.models.tiny import (  # noqa: E402
    TinyPolicySettings,
    build_tiny_model,
    build_tiny_tokenizer,
)

_RECORDED = ("rounds", "micro", "prompt", "completion", "vocabulary", "hidden", "layers", "heads", "dtype")
_WIDE = 512
"""From here on weights start as the library draws them: with the tiny policy's larger ones what bfloat16 rounds off
grows from layer to layer, until it decides which tokens are clipped."""
_FURTHER = 1.25
"""How much further from the gradients in fp32 ours may be than TRL's, in bfloat16. Autocast leaves what layers add up
in fp32; a model in bfloat16 rounds that too, here as under FSDP2."""
RATE, BETAS, FREE = 1e-4, (0.9, 0.95), 1e9


class Fixed(GRPOTrainer):
    """TRL's trainer with rollouts that are there already."""

    rollouts: dict[str, torch.Tensor]
    losses: list[float]

    def _generate_and_score_completions(self, inputs):
        return {name: tensor.clone() for name, tensor in self.rollouts.items()}

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        self.losses.append(loss.item())
        return loss


@dataclass
class Beside(TrainerCallback):
    """Times TRL's steps, and takes one of ours after each, without and with shared prefixes."""

    learner: Learner
    sharing: Learner
    batch: EpisodeBatch
    trl: Fixed
    ours: list[tuple[float, float]] = field(default_factory=list)
    shared: list[tuple[float, float]] = field(default_factory=list)
    theirs: list[tuple[float, float]] = field(default_factory=list)
    our_loss: float = 0.0
    clipped: float = 0.0
    their_gradients: dict[str, torch.Tensor] = field(default_factory=dict)

    def on_step_begin(self, args, state, control, **_):
        self.begun = now()

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        if not self.their_gradients:
            self.their_gradients = {
                name: parameter.grad.clone() for name, parameter in model.named_parameters()
            }

    def on_step_end(self, args, state, control, **_):
        self.theirs.append(since(self.begun))
        begun = now()
        metrics = self.learner._update(self.batch, len(self.ours), 0)
        self.ours.append(since(begun))
        begun = now()
        self.sharing._update(self.batch, len(self.ours), 0)
        self.shared.append(since(begun))
        if len(self.ours) == 1:
            self.our_loss = metrics["loss/policy"]
            self.clipped = metrics["policy/clip_fraction"]


def now() -> tuple[float, float]:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter(), time.process_time()


def since(begun: tuple[float, float]) -> tuple[float, float]:
    return tuple(end - start for start, end in zip(begun, now(), strict=True))


def our_backend(
    start: torch.nn.Module, micro_batch_tokens: int, shared_prefixes: str, dtype: str
) -> TorchBackend:
    settings = OptimizerSettings(
        learning_rate=RATE,
        betas=BETAS,
        gradient_clip=FREE,
        tokens_per_micro_batch=micro_batch_tokens,
        shared_prefixes=shared_prefixes,
    )
    head, schedule = PolicyHead(copy.deepcopy(start), 1.0), Schedule(RATE, 0, 1, "constant")
    # What a run chooses by itself: on an accelerator, packed rows, fused steps and compiled layers.
    compiled = "auto" if dtype == "bf16" else None
    return TorchBackend(head, settings, schedule, dtype=DTYPES[dtype], compiled=compiled)


def keep_gradients(backend: TorchBackend, kept: dict[str, torch.Tensor]) -> RemovableHandle:
    """Keep the gradients of a backend's first step by the names of its weights."""

    def keep(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if optimizer is backend._optimizer and not kept:
            names = [name for name, _ in backend._head.model.named_parameters()]
            pairs = zip(names, backend._masters.trained, strict=True)
            kept.update({name: parameter.grad.clone() for name, parameter in pairs})

    return register_optimizer_step_pre_hook(keep)


def exact_gradients(
    start: torch.nn.Module, micro_batch_tokens: int, batch: EpisodeBatch
) -> dict[str, torch.Tensor]:
    """Return the gradients of the same update in fp32."""
    backend = our_backend(start, micro_batch_tokens, "off", "fp32")
    kept: dict[str, torch.Tensor] = {}
    handle = keep_gradients(backend, kept)
    Learner(ALGORITHM, Models(backend), seed=0)._update(batch, 0, 0)
    handle.remove()
    return kept


def measure(case: str, options: argparse.Namespace) -> dict[str, object]:
    """Take steps of both, and return what they took."""
    torch.manual_seed(0)
    device = torch_device(options.device)
    shape = TinyPolicySettings(
        options.vocabulary, options.hidden, options.layers, heads=options.heads, max_length=4096
    )
    start = build_tiny_model(shape, 0).to(device)
    if options.hidden >= _WIDE:
        with torch.no_grad():
            for weights in start.parameters():
                if weights.dim() > 1:
                    weights.mul_(0.25)
    load = [os.getloadavg()[0]]
    rollouts = draw(case, options.vocabulary, options.prompt, options.completion)
    longest = max(len(prompt) + len(completion) for prompt, completion in rollouts.rows)
    backend = our_backend(start, options.micro * longest, "off", options.dtype)
    batch = our_batch(rollouts, backend)
    learner = Learner(ALGORITHM, Models(backend), seed=0)
    other = our_backend(start, options.micro * longest, "auto", options.dtype)
    sharing = Learner(ALGORITHM, Models(other), seed=0)
    our_gradients: dict[str, torch.Tensor] = {}
    handle = keep_gradients(backend, our_gradients)
    tokenizer = build_tiny_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        trl = Fixed(
            model=copy.deepcopy(start),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=options.micro,
                gradient_accumulation_steps=GROUPS * MEMBERS // options.micro,
                num_generations=MEMBERS,
                max_completion_length=options.completion,
                max_steps=options.rounds + 1,
                learning_rate=RATE,
                lr_scheduler_type="constant",
                adam_beta1=BETAS[0],
                adam_beta2=BETAS[1],
                weight_decay=0.0,
                max_grad_norm=FREE,
                beta=0.0,
                loss_type="grpo",
                gradient_checkpointing=False,
                bf16=options.dtype == "bf16",
                use_cpu=device.type == "cpu",
                report_to="none",
                logging_strategy="no",
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list([{"prompt": "go"}] * GROUPS),
            processing_class=tokenizer,
        )
        inputs = trl_inputs(rollouts, batch, advantages_of(batch), tokenizer.pad_token_id)
        trl.rollouts = {name: tensor.to(device) for name, tensor in inputs.items()}
        trl.losses = []
        beside = Beside(learner, sharing, batch, trl)
        trl.add_callback(beside)
        trl.train()
    handle.remove()
    accumulated = GROUPS * MEMBERS // options.micro
    difference = relative_difference(our_gradients, beside.their_gradients)
    exact = our_gradients
    if options.dtype != "fp32":
        exact = exact_gradients(start, options.micro * longest, batch)
    from_exact = {
        "ours": relative_difference(our_gradients, exact),
        "trl": relative_difference(beside.their_gradients, exact),
    }
    their_loss = sum(trl.losses[:accumulated])
    real = sum(len(prompt) + len(completion) for prompt, completion in rollouts.rows)
    padded = sum(trl.rollouts[name].numel() for name in ("prompt_ids", "completion_ids"))
    ours, shared, theirs = (
        [statistics.median(step[kind] for step in steps[1:]) for kind in (0, 1)]
        for steps in (beside.ours, beside.shared, beside.theirs)
    )
    rows = len(rollouts.rows)
    load.append(os.getloadavg()[0])
    lengths = [(len(prompt) + len(completion), len(completion)) for prompt, completion in rollouts.rows]
    flops = training_flops(ModelShape.from_config(start.config.to_dict()), lengths)
    result = {
        "rows": rows,
        "load_average": [round(each, 2) for each in load],
        "model_tflops_per_s_ours": round(flops / ours[0] / 1e12, 4),
        "model_tflops_per_s_trl": round(flops / theirs[0] / 1e12, 4),
        "tokens_per_s_ours": round(real / ours[0], 1),
        "tokens_per_s_trl": round(real / theirs[0], 1),
        "tokens": real,
        "padding_share_of_trl": round(1 - real / padded, 3),
        "clipped_share_ours": round(beside.clipped, 3),
        "loss_ours": beside.our_loss,
        "loss_trl": their_loss,
        "gradients_relative_l2": difference,
        "gradients_from_fp32": from_exact,
        "samples_per_s_ours": round(rows / ours[0], 2),
        "samples_per_s_trl": round(rows / theirs[0], 2),
        "cpu_s_a_step_ours": round(ours[1], 3),
        "cpu_s_a_step_trl": round(theirs[1], 3),
        "cpu_s_a_step_with_shared_prefixes": round(shared[1], 3),
        "speed_up": round(theirs[0] / ours[0], 3),
        "speed_up_in_cpu_time": round(theirs[1] / ours[1], 3),
        "speed_up_with_shared_prefixes": round(theirs[0] / shared[0], 3),
        "speed_up_in_cpu_time_with_shared_prefixes": round(theirs[1] / shared[1], 3),
    }
    print(case, json.dumps(result, indent=1), flush=True)
    if options.dtype == "fp32":
        same = difference <= 1e-5 and abs(beside.our_loss - their_loss) <= 1e-5
    else:
        # Eight bits decide which tokens are clipped, so the two are as far apart as each is from the exact gradients.
        same = (
            from_exact["ours"] <= _FURTHER * from_exact["trl"] and abs(beside.our_loss - their_loss) <= 5e-2
        )
    if not same:
        raise SystemExit("the two do not compute the same update: no comparison")
    return result


def relative_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    if ours.keys() != theirs.keys():
        raise SystemExit("the two do not train the same weights")
    both = [
        torch.cat([gradients[name].flatten().double() for name in sorted(ours)])
        for gradients in (ours, theirs)
    ]
    return float((both[0] - both[1]).norm() / both[1].norm())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="*", default=["equal", "padded"], choices=["equal", "padded"])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--micro", type=int, default=8, help="rows of TRL's micro-batch; ours holds as many tokens"
    )
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--completion", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    results: dict[str, object] = {}
    for case in options.cases:
        results[case] = measure(case, options)
        write(results, options)


def write(results: dict[str, object], options: argparse.Namespace) -> None:
    """Write down what there is; a run that is ended early leaves the cases that it has measured."""
    if options.output is not None:
        commit = revision()
        record = {
            "command": " ".join(["python", *sys.argv]),
            "commit": commit,
            "trl": version("trl"),
            "torch": version("torch"),
            "transformers": version("transformers"),
            "threads": options.threads,
            "load": os.getloadavg(),
            "device": device_name(torch_device(options.device)) or options.device,
            "settings": {name: getattr(options, name) for name in _RECORDED},
            "results": results,
        }
        options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
