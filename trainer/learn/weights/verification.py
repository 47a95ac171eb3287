"""Whether a server has the weights that it was sent: its log-probabilities of a few tokens, beside the trainer's."""

import asyncio
from collections.abc import Sequence
from math import inf, isfinite
from statistics import mean

import torch

from rollgym.trainer.backends.base import TrainBackend, TrainRow
from rollgym.trainer.core.errors import RunError
from rollgym.trainer.core.seeding import derive_seed
from rollgym.trainer.inference.base import (
    GenerationRequest,
    GenerationResult,
    InferenceClient,
    SamplingParams,
)
from rollgym.trainer.inference.errors import WrongWeightsError

_TOKENS = 8
_SPREAD_TOKENS = 32
_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.25}
_TOLERANCE_FP8 = 1.0


class UnverifiedError(RunError):
    """A server cannot be verified now: the weights that it should have are the trainer's no more."""


def tolerance_for(dtype: str, quantization: str | None) -> float:
    """Return how far two computations of one log-probability may be apart.

    Args:
        dtype: Number format of the server's weights, such as "bfloat16"; what is not known is taken for 16 bits.
        quantization: How the server quantises them.
    """
    return _TOLERANCE_FP8 if quantization is not None else _TOLERANCES.get(dtype, _TOLERANCES["bfloat16"])


def probe_prompts(conversation: Sequence[int], vocabulary: int, max_length: int) -> list[list[int]]:
    """Return prompts to probe with: a conversation, and ids from all over the vocabulary.

    The second one reads what a conversation may never: rows of the embedding on every server's share of it.

    Args:
        conversation: Token ids of a rendered conversation.
        vocabulary: Number of tokens.
        max_length: Longest row in tokens, prompt and reply.
    """
    room = max(1, max_length - _TOKENS)
    count = min(_SPREAD_TOKENS, room, vocabulary)
    spread = [index * vocabulary // count for index in range(count)]
    return [list(conversation)[-room:], spread]


class WeightCheck:
    """Compares what servers answer with what the trainer computes, for the weights of one version at a time.

    Args:
        prompts: What the policy is asked.
        temperature: The rollouts' sampling temperature: log-probabilities are those of that distribution.
        tolerance: Largest difference that is no fault.
        seed: The run's seed; the tokens that are drawn come from a stream below it.
        quantised: Whether the server rounds weights more than the trainer. Then single tokens may be any distance
            apart, and the tolerance is that of the mean of the differences.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        temperature: float,
        tolerance: float,
        seed: int,
        *,
        quantised: bool = False,
    ) -> None:
        self._prompts = [list(prompt) for prompt in prompts]
        self._sampling = SamplingParams(_TOKENS, temperature)
        self._tolerance = tolerance
        self._seed = seed
        self._quantised = quantised
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

    def end(self) -> None:
        """Training goes on: what was computed of the version stays, and nothing more can be."""
        self._backend = None

    async def __call__(self, name: str, client: InferenceClient) -> float:
        """Ask a server and return the largest difference of a token.

        Args:
            name: The server's; for people.
            client: Talks to it.

        Raises:
            WrongWeightsError: If the difference is too large, or the answer has no numbers.
            UnverifiedError: If training has gone on, and the server drew other tokens than those that were compared.
        """
        replies = await asyncio.gather(
            *(client.generate(self._request(n)) for n in range(len(self._prompts)))
        )
        apart: list[float] = []
        for number, reply in enumerate(replies):
            if len(reply.logprobs) != len(reply.token_ids) or not reply.token_ids:
                raise WrongWeightsError(
                    f"{name} answers a probe with {len(reply.token_ids)} tokens and {len(reply.logprobs)} "
                    "log-probabilities: it must give that of each token that it draws"
                )
            said = await self._said_by_trainer(name, number, reply)
            apart += [abs(theirs - ours) for theirs, ours in zip(reply.logprobs, said, strict=True)]
        # A maximum passes over what is no number.
        apart = [each if isfinite(each) else inf for each in apart]
        largest = max(apart)
        self.largest = max(self.largest, largest)
        found, how = (mean(apart), "on average") if self._quantised else (largest, "up to")
        if found > self._tolerance:
            raise WrongWeightsError(
                f"{name} took the weights of version {self._version} and answers with others: log-probabilities of a "
                f"probe are {how} {found:.3g} from the trainer's, and {self._tolerance:g} is allowed. Where the "
                "model shares its output layer with the embedding, weights.separate_head=true helps servers that do "
                "not reload shared ones; where the server rounds or quantises more than the trainer, set "
                "inference.dtype, inference.quantization or weights.tolerance"
            )
        return largest

    def _request(self, number: int) -> GenerationRequest:
        self._asked += 1
        return GenerationRequest(
            request_id=f"weights-{self._version}-{number}-{self._asked}",
            prompt_ids=list(self._prompts[number]),
            sampling=self._sampling,
            seed=derive_seed(self._seed, "weights", self._version, number),
            order=(number,),
        )

    async def _said_by_trainer(self, name: str, number: int, reply: GenerationResult) -> list[float]:
        key = number, tuple(reply.token_ids)
        async with self._computing:
            if key not in self._known:
                if self._backend is None:
                    raise UnverifiedError(
                        f"{name} is back, and waits for the next weights: those of version {self._version} are the "
                        "trainer's no more"
                    )
                prompt = self._prompts[number]
                self._known[key] = await asyncio.to_thread(
                    log_probabilities, self._backend, prompt, reply.token_ids
                )
        return self._known[key]


def log_probabilities(backend: TrainBackend, prompt: Sequence[int], reply: Sequence[int]) -> list[float]:
    """Return what the trainer says of the tokens of a reply, at its sampling temperature."""
    ids = torch.tensor([*prompt, *reply])
    mask = torch.zeros(len(ids), dtype=torch.bool)
    mask[len(prompt) :] = True
    (outputs,) = backend.forward([TrainRow(ids, mask)])
    values: list[float] = outputs[len(prompt) :].tolist()
    return values
