"""Rows padded in length buckets beside rows packed behind each other.

    python benchmarks/training/packing.py [--rounds 5] [--out benchmarks/results/packing.json]

Both forms compute the same gradients (checked before anything is timed). Packed rows need a block-diagonal mask, so
that attention never crosses rows, and positions that start anew. CPU seconds per million real tokens of a forward and
a backward pass; the forms take turns, medians over the rounds.
"""

import argparse
import json
import os
import random
import statistics
import time
from functools import partial
from pathlib import Path

import torch

from rollgym.clients.measuring.revision import revision
from rollgym.trainer.backends.batching import length_buckets, pad_rows
from rollgym.trainer.models.tiny import TinyPolicySettings, build_tiny_model

VOCABULARY = 897


def row_lengths(kind):
    draw = random.Random(0)
    if kind == "turns":  # one row a turn, as the FrozenLake example has them
        return [draw.randint(22, 26) for _ in range(1280)]
    return [min(1024, 16 + int(draw.lognormvariate(4.6, 0.9))) for _ in range(256)]  # whole episodes


def bucketed(model, rows, budget):
    total = 0
    for bucket in length_buckets([len(row) for row in rows], budget):
        chosen = [rows[place] for place in bucket]
        hidden = model.model(pad_rows(chosen)).last_hidden_state
        mask = pad_rows([torch.ones(len(row)) for row in chosen])
        loss = (hidden.square().mean(-1) * mask).sum()
        loss.backward()
        total += loss.item()
    return total


def packed(model, rows, width):
    """First-fit-decreasing bins of `width` tokens, one bin a sequence, `width` tokens at a time."""
    bins = []
    for row in sorted(rows, key=len, reverse=True):
        place = next((each for each in bins if sum(map(len, each)) + len(row) <= width), None)
        if place is None:
            bins.append([row])
        else:
            place.append(row)
    total = 0
    for each in bins:
        ids = torch.cat(each)[None]
        positions = torch.cat([torch.arange(len(row)) for row in each])[None]
        owner = torch.cat([torch.full((len(row),), number) for number, row in enumerate(each)])
        allowed = (owner[:, None] == owner[None]).tril()
        bias = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)[None, None]
        hidden = model.model(ids, attention_mask=bias, position_ids=positions).last_hidden_state
        loss = hidden.square().mean(-1).sum()
        loss.backward()
        total += loss.item()
    return total


def gradients(model, run):
    model.zero_grad()
    run()
    return torch.cat([each.grad.flatten() for each in model.model.parameters()])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = build_tiny_model(TinyPolicySettings(VOCABULARY, hidden_size=64, layers=3, max_length=1024), 0)
    table = {}
    for kind in ("turns", "episodes"):
        generator = torch.Generator().manual_seed(0)
        rows = [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in row_lengths(kind)]
        tokens = sum(map(len, rows))
        sizes = [
            ("buckets", bucketed, 4096),
            ("buckets", bucketed, 32768),
            ("packed", packed, 256 if kind == "turns" else 1024),
            ("packed", packed, 2048),
        ]
        forms = {f"{name} {size}": partial(form, model, rows, size) for name, form, size in sizes}
        wanted = gradients(model, next(iter(forms.values())))
        for name, form in forms.items():
            difference = (gradients(model, form) - wanted).abs().max() / wanted.abs().max()
            assert difference < 1e-4, f"{name} changes the update by {difference}"
        times = {name: [] for name in forms}
        for _ in range(options.rounds):
            for name, form in forms.items():
                begun = time.process_time()
                form()
                times[name].append((time.process_time() - begun) / tokens * 1e6)
        table[kind] = {
            "rows": len(rows),
            "tokens": tokens,
            "cpu_s_per_million_tokens": {
                name: round(statistics.median(each), 1) for name, each in times.items()
            },
        }
    commit = revision()
    result = {
        "command": "python benchmarks/training/packing.py",
        "commit": commit,
        "load_average": round(os.getloadavg()[0], 2),
        "rounds": options.rounds,
        "results": table,
    }
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
