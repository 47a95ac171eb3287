"""Checks whether a server has the weights that it was sent, by its and the trainer's log-probabilities of a few tokens.

In float32 any token that is further away than a thousandth is a fault. In 16 bits a server rounds elsewhere than the
trainer does, and the largest difference of some tokens has no bound that holds for all models; but most tokens of a
healthy server are near. So a sign test decides for each prompt and for both together, as in the look before a run:
if no token is further away than the tolerance with a probability of more than a half, 53 of 64 or 94 of 128 are with
one of less than one in ten million. A router that breaks a tie the other way refuses no server. What changes
log-probabilities less than rounding does, such as one small step of training, is not seen by it: checksums see that,
if a server has them.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from statistics import mean
from typing import Literal

import torch

from rollgym.trainer.backends.base import TrainBackend, TrainRow
from rollgym.trainer.core.numbers import least_by_no_chance
from rollgym.trainer.core.seeding import derive_seed
from rollgym.trainer.inference.base import (
    GenerationRequest,
    GenerationResult,
    InferenceClient,
    SamplingParams,
)
from rollgym.trainer.inference.errors import WeightsReleasedError, WrongWeightsError
from rollgym.trainer.learn.weights.checksums import ChecksumCheck

_SPREAD_TOKENS = 32

CountedDifference = Literal["largest", "most", "mean"]
"""What of the differences counts: the largest; whether most of a prompt's tokens are apart; or their mean."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a server may be from the trainer.

    Attributes:
        nats: Of a log-probability.
        measure: What of the differences may be no larger than that. Where weights are rounded more than the trainer's,
            single tokens may be any distance apart.
    """

    nats: float
    measure: CountedDifference = "largest"

    @property
    def replies(self) -> int:
        """How many replies to each prompt are looked at."""
        return 4 if self.measure == "most" else 1

    @property
    def tokens(self) -> int:
        """Length of each of these replies, in tokens."""
        return 16 if self.measure == "most" else 8


_NATS = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}
_NATS_FP8 = 1.0


def tolerance_for(dtype: str, quantization: str | None, nats: float | None = None) -> Tolerance:
    """Return how far two computations of one log-probability may be apart.

    Args:
        dtype: Number format of the server's weights, such as "bfloat16"; what is not known is taken for 16 bits.
        quantization: How the server quantises them.
        nats: In place of what suits the format.
    """
    if quantization is not None:
        return Tolerance(nats or _NATS_FP8, "mean")
    measure: CountedDifference = "largest" if dtype == "float32" else "most"
    return Tolerance(nats or _NATS.get(dtype, _NATS["bfloat16"]), measure)


def probe_prompts(
    conversation: Sequence[int], vocabulary: int, max_length: int, tolerance: Tolerance
) -> list[list[int]]:
    """Return prompts to probe with: a conversation, and ids from all over the vocabulary.

    The second one reads what a conversation may never: rows of the embedding on every server's share of it.

    Args:
        conversation: Token ids of a rendered conversation.
        vocabulary: Number of tokens.
        max_length: Longest row in tokens, prompt and reply.
        tolerance: How the replies are compared.
    """
    room = max(1, max_length - tolerance.tokens)
    count = min(_SPREAD_TOKENS, room, vocabulary)
    spread = [index * vocabulary // count for index in range(count)]
    return [list(conversation)[-room:], spread]


class WeightCheck:
    """Compares what servers answer with what the trainer computes, for the weights of one version at a time.

    Args:
        prompts: Token ids of the prompts that servers are probed with.
        temperature: The rollouts' sampling temperature: log-probabilities are those of that distribution.
        tolerance: The difference that is accepted.
        seed: The run's seed; the tokens that are drawn come from a stream below it.
        max_length: Longest row in tokens, prompt and reply; None for no limit.
        checksums: Compares single tensors, if servers report checksums of them.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        temperature: float,
        tolerance: Tolerance,
        seed: int,
        *,
        max_length: int | None = None,
        checksums: ChecksumCheck | None = None,
    ) -> None:
        self._prompts = [list(prompt) for prompt in prompts]
        longest = max(map(len, self._prompts))
        tokens = (
            tolerance.tokens if max_length is None else max(1, min(tolerance.tokens, max_length - longest))
        )
        self._sampling = SamplingParams(tokens, temperature)
        self._tolerance = tolerance
        self._seed = seed
        self._checksums = checksums
        self._version = 0
        self._backend: TrainBackend | None = None
        self._known: dict[tuple[int, tuple[int, ...]], list[float]] = {}
        self._computing = asyncio.Lock()
        self._asked = 0
        self.largest = 0.0

    def begin(self, version: int, backend: TrainBackend) -> None:
        """The trainer's weights are those of `version`, until `end`."""
        self._version, self._backend = version, backend
        self._known, self.largest = {}, 0.0
        if self._checksums is not None:
            self._checksums.begin(version, backend)

    async def end(self) -> None:
        """Training resumes: log-probabilities computed for this version stay, and no more can be computed.

        Those that are being computed, for a server that is brought up to date alone, are waited for: the model would be
        trained meanwhile.
        """
        try:
            async with self._computing:
                pass
        finally:
            self._backend = None
            if self._checksums is not None:
                await self._checksums.end()

    @property
    def tensors_compared(self) -> int | None:
        """How many tensors have the trainer's checksum, on the server with the fewest; None if none are reported."""
        return None if self._checksums is None else self._checksums.compared

    async def __call__(self, name: str, client: InferenceClient) -> float:
        """Ask a server and return the largest difference of a token.

        Args:
            name: The server's; for people.
            client: Talks to it.

        Raises:
            WrongWeightsError: If it is too far away, the answer has no numbers, or a tensor is another one.
            WeightsReleasedError: If training has resumed, and the server drew other tokens than were compared.
        """
        asked = [
            (number, draw) for number in range(len(self._prompts)) for draw in range(self._tolerance.replies)
        ]
        replies = await asyncio.gather(*(client.generate(self._request(*each)) for each in asked))
        for reply in replies:
            _require_numbers(name, reply)
        keys = [(number, tuple(reply.token_ids)) for (number, _), reply in zip(asked, replies, strict=True)]
        await self._compute(name, keys)
        apart: list[list[float]] = [[] for _ in self._prompts]
        for key, reply in zip(keys, replies, strict=True):
            apart[key[0]] += _differences(reply.logprobs, self._known[key])
        largest = max(each for of_prompt in apart for each in of_prompt)
        self.largest = max(self.largest, largest)
        if (found := _beyond(apart, self._tolerance)) is not None:
            raise WrongWeightsError(
                f"{name} took the weights of version {self._version} and answers with others: {found}. Where the "
                "model shares its output layer with the embedding, weights.separate_head=true helps servers that do "
                "not reload shared ones; where the server rounds or quantises more than the trainer, set "
                "inference.dtype, inference.quantization or weights.tolerance"
            )
        if self._checksums is not None:
            await self._checksums(name, client)
        return largest

    def _request(self, number: int, draw: int) -> GenerationRequest:
        self._asked += 1
        stream = (self._version, number) if draw == 0 else (self._version, number, draw)
        return GenerationRequest(
            request_id=f"weights-{self._version}-{number}-{self._asked}",
            prompt_ids=list(self._prompts[number]),
            sampling=self._sampling,
            seed=derive_seed(self._seed, "weights", *stream),
            order=(number, draw),
        )

    async def _compute(self, name: str, keys: Iterable[tuple[int, tuple[int, ...]]]) -> None:
        """Have the trainer say what it has not said yet of the replies to prompts."""
        async with self._computing:
            missing = [key for key in dict.fromkeys(keys) if key not in self._known]
            if not missing:
                return
            if self._backend is None:
                raise WeightsReleasedError(
                    f"{name} is back, and waits for the next weights: those of version {self._version} are the "
                    "trainer's no more"
                )
            rows = [(self._prompts[number], ids) for number, ids in missing]
            said = await asyncio.to_thread(log_probabilities, self._backend, rows)
            self._known.update(zip(missing, said, strict=True))


def _require_numbers(name: str, reply: GenerationResult) -> None:
    if len(reply.logprobs) != len(reply.token_ids) or not reply.token_ids:
        raise WrongWeightsError(
            f"{name} answers a probe with {len(reply.token_ids)} tokens and {len(reply.logprobs)} "
            "log-probabilities: it must give that of each token that it draws"
        )


def _differences(theirs: Iterable[float], ours: Iterable[float]) -> list[float]:
    """Return how far numbers are apart; infinity if one is NaN or infinite, since a maximum may skip a NaN."""
    apart = (abs(their - our) for their, our in zip(theirs, ours, strict=True))
    return [each if isfinite(each) else inf for each in apart]


def _beyond(apart: Sequence[Sequence[float]], tolerance: Tolerance) -> str | None:
    """Return how differences of each prompt's tokens are beyond the tolerance; None if they are not."""
    everywhere = [each for of_prompt in apart for each in of_prompt]
    largest = max(everywhere)
    if tolerance.measure == "most" and largest < inf:
        return _most_beyond(apart, tolerance.nats)
    found, how = (mean(everywhere), "on average") if tolerance.measure == "mean" else (largest, "up to")
    if found <= tolerance.nats:
        return None
    return f"log-probabilities of a probe are {how} {found:.3g} from the trainer's, and {tolerance.nats:g} is allowed"


def _most_beyond(apart: Sequence[Sequence[float]], nats: float) -> str | None:
    together = [each for of_prompt in apart for each in of_prompt]
    # What only one prompt reads is found in that one, and what is small in all that there are.
    for tokens in (*apart, together):
        # Too few tokens for a statistical verdict fail only if all of them exceed the tolerance.
        least = min(len(tokens), least_by_no_chance(len(tokens)))
        further = sum(each > nats for each in tokens)
        if further >= least:
            return (
                f"{further} of {len(tokens)} log-probabilities of a probe are more than {nats:g} from the trainer's "
                f"(up to {max(tokens):.3g}), and {least - 1} may be"
            )
    return None


def log_probabilities(
    backend: TrainBackend, rows: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[list[float]]:
    """Return what the trainer says of the tokens of replies, at its sampling temperature.

    Args:
        backend: The trainer's.
        rows: Prompts, and a reply to each.
    """
    asked = []
    for prompt, reply in rows:
        ids = torch.tensor([*prompt, *reply])
        mask = torch.zeros(len(ids), dtype=torch.bool)
        mask[len(prompt) :] = True
        asked.append(TrainRow(ids, mask))
    outputs = backend.forward(asked)
    return [output[len(prompt) :].tolist() for (prompt, _), output in zip(rows, outputs, strict=True)]
