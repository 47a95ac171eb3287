"""The kinds of inference servers, each declared once: what a run may ask of it, and where its code is."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.kinds import Named

if TYPE_CHECKING:
    from rollgym.trainer.config.run import RunSettings


def _none(settings: "RunSettings") -> Iterator[str]:
    yield from ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKind:
    """Who samples from the policy.

    Attributes:
        name: Its name in `inference.kind`; launched, it is looked for as a package of this name, with an extra of it.
        title: Its name for people.
        program: `module:attribute` of its `ServerProgram`: what is said to it, and how it is started.
        group: `module:attribute` of a function that meets its ranks, to broadcast weights to them; empty if it takes
            none.
        group_package: Which package that needs beside the trainer where NCCL broadcasts; empty for none.
        admin_key: Whether its admin routes may have a key of their own.
        tells_checksums: Whether it tells checksums of the weights that it has.
        inexact: What is said of log-probabilities that are not those of every distribution that tokens are drawn from.
        refusals: Yields what of a run it cannot do, and what to take in its place.
    """

    name: str
    title: str
    program: str = ""
    group: str = ""
    group_package: str = ""
    admin_key: bool = False
    tells_checksums: bool = False
    inexact: str = ""
    refusals: "Callable[[RunSettings], Iterator[str]]" = _none


_VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes for `--max-lora-rank`; at any other number it ends."""


def vllm_lora_rank(rank: int) -> int:
    """Return the `--max-lora-rank` of a vLLM that takes adapters of a rank: the least that it allows.

    Raises:
        ConfigError: If it allows none that is large enough.
    """
    for allowed in _VLLM_LORA_RANKS:
        if rank <= allowed:
            return allowed
    raise ConfigError(_too_large(rank))


def _too_large(rank: int) -> str:
    return (
        f"model.lora.rank {rank} is more than vLLM takes: lower it to {_VLLM_LORA_RANKS[-1]}, or set weights.transport "
        "to disk, which sends whole weights"
    )


def _vllm_refusals(settings: "RunSettings") -> Iterator[str]:
    lora = settings.model.lora
    if settings.weights.transport == "adapter" and lora is not None and lora.rank > _VLLM_LORA_RANKS[-1]:
        yield _too_large(lora.rank)


EMBEDDED = ServerKind(name="embedded", title="the engine in this process")

INFERENCE_SERVERS = (
    ServerKind(
        name="vllm",
        title="vLLM",
        program="rollgym.trainer.inference.vllm_server:VLLM",
        group="rollgym.trainer.learn.weights.broadcast:vllm_group",
        group_package="vllm",
        inexact="the server reports log-probabilities before temperature, top_p and top_k: requests with other values "
        "than 1, 1 and 0 are refused (start vLLM with --logprobs-mode processed_logprobs)",
        refusals=_vllm_refusals,
    ),
    ServerKind(
        name="sglang",
        title="SGLang",
        program="rollgym.trainer.inference.sglang_server:SGLANG",
        group="rollgym.trainer.learn.weights.broadcast:sglang_group",
        admin_key=True,
        tells_checksums=True,
        inexact="SGLang reports log-probabilities before top_p: requests with it and without a top_k are refused",
    ),
)
"""Ours."""

SERVERS: Named[ServerKind] = Named(
    "rollgym.inference", ServerKind, MappingProxyType({each.name: each for each in INFERENCE_SERVERS})
)
"""All servers by name, with those of other packages."""
SAMPLERS: Named[ServerKind] = Named(
    SERVERS.group, ServerKind, MappingProxyType({EMBEDDED.name: EMBEDDED, **SERVERS.known})
)
"""The same, and the engine in the run's process."""

ServerName = Annotated[str, SERVERS]
"""The name of a kind of inference servers."""
