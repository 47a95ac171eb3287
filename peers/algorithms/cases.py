"""Cases: what a trainer's function made of drawn inputs, a JSON line each.

    {"peer": "verl", "version": "0.9.1", "function": "loss/vanilla", "case": 3, "dtype": "float64",
     "options": {...}, "inputs": {name: nested lists}, "outputs": {name: nested lists or a number},
     "gradients": {input: nested lists}, "gradient_of": "loss"}

`gradients` are those of the sum of the output that `gradient_of` names. `dtype` is what the peer computes in. An output
whose values mean nothing outside a mask is compared where the input `mask` is true, unless "everywhere" names it.
This module runs in the peers' interpreters, too: it needs torch and the standard library only.
"""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Values = Mapping[str, Any]


class Recorder:
    """Writes the cases of one peer to `PEER.jsonl` in a folder."""

    def __init__(self, peer: str, version: str, folder: Path) -> None:
        """Begin the file anew."""
        self.peer, self.version = peer, version
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{peer}.jsonl").open("w")
        self._number = 0

    def record(
        self,
        function: str,
        options: Values,
        inputs: Values,
        call: Callable[[dict[str, Any]], Values],
        *,
        differentiate: Sequence[str] = (),
        gradient_of: str = "loss",
        everywhere: Sequence[str] = (),
    ) -> None:
        """Call a peer's function and write what it gave.

        Args:
            function: Name of the function, `part/name`.
            options: What it is told, in the peer's own words.
            inputs: Tensors and lists.
            call: Makes named outputs of copies of the inputs.
            differentiate: Inputs whose gradients are recorded.
            gradient_of: Output whose sum is differentiated.
            everywhere: Outputs of the mask's shape that are compared outside it, too.
        """
        given = {name: each.clone() if isinstance(each, Tensor) else each for name, each in inputs.items()}
        for name in differentiate:
            given[name].requires_grad_()
        leaves = [given[name] for name in differentiate]
        # Some write into what they are given.
        found = dict(call({**given, **{name: given[name] * 1.0 for name in differentiate}}))
        gradients = {}
        if differentiate:
            made = torch.autograd.grad(found[gradient_of].sum(), leaves, allow_unused=True)
            gradients = {
                name: torch.zeros_like(leaf) if each is None else each
                for name, leaf, each in zip(differentiate, leaves, made, strict=True)
            }
        floats = [
            each.dtype for each in given.values() if isinstance(each, Tensor) and each.is_floating_point()
        ]
        line = {
            "peer": self.peer,
            "version": self.version,
            "function": function,
            "case": self._number,
            "dtype": str(floats[0]).removeprefix("torch.") if floats else "float64",
            "options": dict(options),
            "inputs": plain(inputs),
            "outputs": plain(found),
            "gradients": plain(gradients),
            "gradient_of": gradient_of,
            "everywhere": list(everywhere),
        }
        self._file.write(json.dumps(line) + "\n")
        self._number += 1

    def close(self) -> None:
        """Say how many cases there are."""
        self._file.close()
        print(f"{self._file.name}: {self._number} cases")


def plain(values: Values) -> dict[str, Any]:
    """Return tensors as nested lists."""
    return {
        name: each.detach().tolist() if isinstance(each, Tensor) else each for name, each in values.items()
    }


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the cases of a file."""
    with path.open() as lines:
        for line in lines:
            yield json.loads(line)


class Draw:
    """Random inputs of one case, the same for the same function and number."""

    def __init__(self, function: str, number: int, dtype: torch.dtype = torch.float64) -> None:
        """Seed it."""
        self.generator = torch.Generator().manual_seed(zlib.crc32(function.encode()) % 2**31 + number)
        self.dtype = dtype

    def whole(self, low: int, high: int) -> int:
        """Return a number from low to high, both included."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def chance(self, share: float) -> bool:
        """Return true with this probability."""
        return float(torch.rand((), generator=self.generator)) < share

    def choice(self, choices: Sequence[Any]) -> Any:
        """Return one of these."""
        return choices[self.whole(0, len(choices) - 1)]

    def normal(self, *shape: int) -> Tensor:
        """Return normal numbers."""
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def mask(self, rows: int, width: int, *, empty: float = 0.1, holes: bool = True) -> Tensor:
        """Return which tokens were sampled: runs of turns with observations between them, padding at the end.

        At least one row has two tokens or more.

        Args:
            rows: How many.
            width: Tokens of each, padding included.
            empty: Probability that a row has no token at all.
            holes: Whether there is anything between the sampled tokens.
        """
        mask = torch.zeros(rows, width, dtype=torch.bool)
        for row in range(rows):
            if row and self.chance(empty):
                continue
            end = self.whole(2, width)
            place = 0
            while place < end:
                run = self.whole(1, 5) if holes else end
                mask[row, place : min(place + run, end)] = True
                place += run + (self.whole(1, 3) if holes else 0)
        mask[0, :2] = True
        return mask

    def groups(self, rows: int, *, largest: int = 5, alone: bool = True) -> list[int]:
        """Return the group of each row, in any order: sizes up to `largest`, of one where `alone`."""
        groups: list[int] = []
        while len(groups) < rows:
            size = self.whole(1 if alone else 2, largest)
            groups += [len(set(groups))] * size
        groups = groups[:rows]
        if not alone and groups.count(groups[-1]) == 1:
            groups[-1] = groups[-2]
        order = torch.randperm(rows, generator=self.generator).tolist()
        return [groups[place] for place in order]

    def scores(self, groups: Sequence[int]) -> Tensor:
        """Return a score per row: of any size, or 0 and 1; in some groups all the same."""
        scores = self.normal(len(groups))
        if self.chance(0.5):
            scores = (scores > 0).to(self.dtype)
        for group in sorted(set(groups)):
            if self.chance(0.2):
                members = torch.tensor([each == group for each in groups])
                scores[members] = scores[members][0].clone()
        return scores

    def rewards(self, mask: Tensor, scores: Tensor, *, turns: bool = False) -> Tensor:
        """Return rewards on tokens: the score on the last sampled one, and with `turns` some at the ends of turns."""
        rewards = torch.zeros(mask.shape, dtype=self.dtype)
        for row, score in enumerate(scores):
            places = mask[row].nonzero()[:, 0].tolist()
            if not places:
                continue
            rewards[row, places[-1]] = score
            for place in places[:-1]:
                if turns and not mask[row, place + 1] and self.chance(0.6):
                    rewards[row, place] = self.normal(1)[0]
        return rewards

    def logprobs(self, *shape: int) -> Tensor:
        """Return log-probabilities, most of them near 0, some far below."""
        uniform = torch.rand(*shape, generator=self.generator, dtype=torch.float64)
        return (uniform.clamp(1e-6).log() * self.choice((0.5, 1.0, 3.0)) - 1e-3).to(self.dtype)

    def near(self, logprobs: Tensor, scale: float | None = None) -> Tensor:
        """Return log-probabilities that have moved: mostly a little, sometimes far, and never above 0."""
        scale = self.choice((0.02, 0.2, 0.5)) if scale is None else scale
        tail = self.normal(*logprobs.shape).abs().clamp(0.2)
        # Turned back at 0, not cut off: no two are equal, and nothing depends on how a peer orders equal ones.
        return -(logprobs + scale * self.normal(*logprobs.shape) / tail).abs() - 1e-6

    def advantages(self, mask: Tensor) -> Tensor:
        """Return advantages: one per row or one per token, some of them 0."""
        rows, width = mask.shape
        values = (
            self.normal(rows, 1).expand(rows, width).clone() if self.chance(0.5) else self.normal(rows, width)
        )
        if self.chance(0.3):
            values[self.whole(0, rows - 1)] = 0.0
        return values
