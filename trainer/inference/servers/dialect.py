"""What a kind of inference servers is to the trainer: the dialect that it speaks, and how it is started. No I/O.

A dialect builds the calls to make and parses their answers. What a server says of its model is compared with the run's
before it is sent anything.
"""

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, cast

from rollgym.trainer.config.inference import SERVERS, InferenceSettings, LaunchSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.plugins import load_attribute
from rollgym.trainer.inference.base import PauseMode, SamplingParams
from rollgym.trainer.inference.calls import HttpAnswer, HttpCall, excerpt, message_of
from rollgym.trainer.inference.errors import (
    MalformedReplyError,
    RequestRefusedError,
    ServerSetupError,
    WrongKeyError,
)
from rollgym.trainer.inference.servers.chunks import GenerationCall, GenerationChunk

Result = TypeVar("Result")

Conversation = Generator[HttpCall, HttpAnswer, Result]
"""Calls to make one after the other: it yields a call, is sent the answer, and returns what came of it."""

MemoryTag = Literal["weights", "kv_cache"]

LogprobsOf = Literal["model", "temperature", "sampled"]
"""Whose log-probabilities a server reports: the model's at temperature 1, those after temperature, or those of the
distribution that tokens are drawn from, after top-k and top-p."""

UpdateWay = Literal["disk", "broadcast", "adapter"]
"""How new weights reach a server."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that one message of an update carries, in the order in which they are sent.

    Attributes:
        names: Hugging Face names.
        dtypes: Of torch, without the prefix: "bfloat16".
        shapes: One for each name.
        flattened: Whether the bytes of all tensors are sent as one.
    """

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]
    flattened: bool = False

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise ValueError(
                f"a bucket has {len(self.names)} names, {len(self.dtypes)} dtypes and {len(self.shapes)} shapes"
            )


@dataclass(frozen=True, slots=True)
class GroupAddress:
    """Where trainer and server meet to exchange tensors; the trainer is rank 0.

    Attributes:
        master_address: Host of the trainer.
        master_port: Port of its store.
        world_size: The trainer and all ranks of all servers.
        rank_offset: Rank of this server's first.
        group_name: SGLang's name of the group.
        backend: "nccl", or what stands for it.
        options: More that vLLM's transfer engine takes: `packed`, `packed_buffer_size_bytes`, ...
    """

    master_address: str
    master_port: int
    world_size: int
    rank_offset: int = 1
    group_name: str = "weight_update_group"
    backend: str = "nccl"
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InspectedServer:
    """What a server reports about itself to read-only calls.

    Attributes:
        server: Name and release, for people.
        release: Numbers of the release.
        model: Name of the base model.
        max_length: Longest row in tokens; None if the server does not say.
        source: Folder or hub name that its weights came from; None if the server does not say.
        config: What it says of its model's configuration.
    """

    server: str
    release: tuple[int, ...]
    model: str
    max_length: int | None
    source: str | None = field(default=None, kw_only=True)
    config: Mapping[str, Any] = field(default_factory=dict, kw_only=True)


@dataclass(frozen=True, slots=True)
class ServerCapabilities(InspectedServer):
    """What a server can do, as probed at its start.

    Attributes:
        logprobs_of: Whose log-probabilities it reports.
        weight_label: Current name of its weights; None if the server does not say.
        spans: Whether replies say which weights drew each token.
        tokens_route: vLLM: whether `/inference/v1/generate` answers.
        keeps_aborted: Whether a reply that is aborted by name comes back with its tokens.
        sessions: SGLang: whether updates run between begin and end.
        drains: Whether it can wait by itself until replies under way have ended.
        world_size: Ranks that take weights.
        streams: Whether a stream has each token once: SGLang's have all that there is with every event, unless it is
            started with `--incremental-streaming-output`.
        reads_seeds: Whether equal seeds draw equal tokens: SGLang reads them with `--enable-deterministic-inference`.
        masked_top_k: SGLang: largest top-k for which it reports, if asked, log-probabilities of the distribution that
            top-k and top-p leave; 0 for none.
        tried: Whether it was asked for tokens: until then `logprobs_of`, `masked_top_k` and `tokens_route` are guesses.
    """

    logprobs_of: LogprobsOf
    weight_label: str | None
    spans: bool
    tokens_route: bool = True
    keeps_aborted: bool = True
    sessions: bool = True
    drains: bool = True
    world_size: int = 1
    streams: bool = True
    reads_seeds: bool = True
    masked_top_k: int = 0
    tried: bool = True

    def inexact(self, sampling: SamplingParams) -> bool:
        """Whether log-probabilities of tokens drawn so are not those of the distribution that they were drawn from."""
        cuts = sampling.top_p < 1.0 or sampling.top_k > 0
        if self.logprobs_of == "sampled" or 0 < sampling.top_k <= self.masked_top_k:
            return False
        if self.logprobs_of == "temperature":
            return cuts
        return cuts or sampling.temperature not in (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class ServerRequirements:
    """What a run needs of a server.

    Attributes:
        way: How new weights reach it; None if it never gets any.
        mode: What becomes of replies in flight while they are taken.
        vocabulary: How many token ids the policy's model knows; None if unknown.
    """

    way: UpdateWay | None = None
    mode: PauseMode = "abort"
    vocabulary: int | None = None

    @property
    def tried_with(self) -> int:
        """The token that a server is tried with: the policy's last, which one of a smaller vocabulary refuses."""
        return 0 if self.vocabulary is None else self.vocabulary - 1


class Dialect(Protocol):
    """Calls of one kind of server, built for what one server can do."""

    capabilities: ServerCapabilities

    def generate(self, call: GenerationCall) -> HttpCall:
        """Build the request that samples a reply."""
        ...

    def read_generation(self, answer: HttpAnswer, call: GenerationCall) -> GenerationChunk:
        """Read a reply.

        Raises:
            RequestRefusedError: If the server refuses the request.
            MalformedReplyError: If the reply breaks the contract.
        """
        ...

    def drawn(self, event: Mapping[str, Any], seen: int) -> Sequence[int]:
        """Return the ids that an event of a stream brings after the `seen` ones before it."""
        ...

    def joined(self, events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return what the server had answered without a stream."""
        ...

    def score(
        self, prompt_ids: Sequence[int], cache_salt: str, adapter: str | None
    ) -> Conversation[list[float]]:
        """Return the log-probabilities of a prompt's tokens after the first, at temperature 1."""
        ...

    def abort(self, request_ids: Sequence[str]) -> Conversation[None]:
        """End replies with the tokens that they have; no effect if `keeps_aborted` is false."""
        ...

    def pause(self, mode: PauseMode) -> Conversation[None]:
        """Stop generating. A server without a mode "wait" must be idle by then."""
        ...

    def resume(self) -> Conversation[None]:
        """Resume generating after a pause."""
        ...

    def load_folder(self, folder: str, label: str, mode: PauseMode) -> Conversation[None]:
        """Take weights from disk, under a pause of `mode`, and call them `label`."""
        ...

    def join_group(self, address: GroupAddress) -> Conversation[None]:
        """Meet the trainer; it must come at the same time."""
        ...

    def leave_group(self, address: GroupAddress) -> Conversation[None]:
        """Leave the trainer's group, so that another can be joined."""
        ...

    def begin_update(self) -> Conversation[None]:
        """Open an update, after closing one that was left open, such as by a run that died."""
        ...

    def update(self, bucket: Bucket, address: GroupAddress) -> Conversation[None]:
        """Announce the tensors that the group carries at the same time."""
        ...

    def end_update(self, label: str, mode: PauseMode) -> Conversation[None]:
        """Close an update, and call the weights `label`."""
        ...

    def abandon_update(self) -> Conversation[None]:
        """Close an update that failed: which weights the server has is undefined."""
        ...

    def weight_label(self) -> Conversation[str | None]:
        """Return what the weights are called; None where the server does not say."""
        ...

    def checksums(self) -> Conversation[Mapping[str, str] | None]:
        """Return the checksum of each tensor that all ranks hold alike, by its name; None if it reports none."""
        ...

    def load_adapter(self, name: str, folder: str) -> Conversation[None]:
        """Load an adapter from a folder, and serve it under a name."""
        ...

    def unload_adapter(self, name: str) -> Conversation[None]:
        """Unload the adapter of that name, and free its memory."""
        ...

    def sleep(self, *, keep_weights: bool) -> Conversation[None]:
        """Free accelerator memory: the cache, and the weights unless they are kept."""
        ...

    def wake(self, tags: Sequence[MemoryTag]) -> Conversation[None]:
        """Allocate again what `sleep` freed, by its tags."""
        ...


def require_token(answer: HttpAnswer, what: str, need: ServerRequirements) -> HttpAnswer:
    """Return an answer to the token that a server is tried with.

    Raises:
        ServerSetupError: If the server does not know the token.
        RequestRefusedError: If it says no for another reason.
    """
    if answer.status in (400, 422) and need.vocabulary is not None:
        raise ServerSetupError(
            f"{what}: {answer.status}, {message_of(answer.body)}. It was asked with the policy's last token, "
            f"{need.tried_with}: does it serve another model?"
        )
    return require(answer, what)


def require(answer: HttpAnswer, what: str, *, missing: str = "") -> HttpAnswer:
    """Return an answer that says yes.

    Args:
        answer: What came back.
        what: What was asked, for the message.
        missing: Which switch of the server makes the route, where a 404 means that it was not set.

    Raises:
        ServerSetupError: If the route does not exist, or, as a `WrongKeyError`, the key is not the server's.
        RequestRefusedError: If the server says no.
    """
    if answer.ok:
        return answer
    said = message_of(answer.body)
    if answer.status == 401:
        raise WrongKeyError(f"{what}: the server wants another API key ({said})")
    if answer.status == 404 and missing:
        raise ServerSetupError(f"{what}: the server has no such route; {missing}")
    raise RequestRefusedError(f"{what}: {answer.status}, {said}", answer.status)


def read_release(text: str) -> tuple[int, ...]:
    """Return the numbers at the start of a version string: "0.33.1.dev5+g12" gives (0, 33, 1).

    Raises:
        MalformedReplyError: If it does not start with two numbers.
    """
    found = re.match(r"v?(\d{1,6}(?:\.\d{1,6}){1,3})", text)
    if found is None:
        raise MalformedReplyError(f"the server's version is {excerpt(text.encode())!r}")
    return tuple(int(part) for part in found.group(1).split("."))


SERVED_NAME = "policy"
"""What the model is called on servers that we start."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a server is started with.

    Attributes:
        folder: The model's.
        max_length: Longest row in tokens.
        lora_rank: Largest rank of the adapters that it will be given; 0 for none.
        adapters: Adapters that it holds at once.
        broadcast: The collective that broadcasts weights; empty if they are not broadcast.
    """

    folder: Path
    max_length: int
    lora_rank: int = 0
    adapters: int = 1
    broadcast: str = ""


StartCommand = tuple[list[str], dict[str, str]]
"""The words of a command line, and environment variables beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProgram:
    """A kind of inference servers. Nothing of it does I/O.

    Attributes:
        probe: Asks a server what it can do.
        look: Asks it for its name, release and model, by read-only calls.
        try_out: Asks it for tokens, if that was not possible when it was probed.
        sign_of_life: What it is asked to find whether it lives.
        engine_sign: What it is asked to find whether its engine works.
        command: What it is started with, given settings, the model and a port; it is ready once its `/health` answers.
        row_switch: The switch by which it takes rows of so many tokens.
        exactly: What makes its log-probabilities those of the distribution that tokens are drawn from.
    """

    probe: Callable[[ServerRequirements], Conversation[Dialect]]
    look: Callable[[ServerRequirements], Conversation[InspectedServer]]
    try_out: Callable[[ServerRequirements, ServerCapabilities], Conversation[Dialect]]
    sign_of_life: str
    engine_sign: str
    command: Callable[[InferenceSettings, LaunchSettings, ServedModel, int], StartCommand]
    row_switch: Callable[[int], str]
    exactly: Callable[[ServerCapabilities], str]


def server_program(name: str) -> ServerProgram:
    """Return the program of a kind of servers."""
    return cast(ServerProgram, load_attribute(SERVERS[name].program))


_NAMES = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "n_embd",
    "num_hidden_layers",
    "n_layer",
    "num_attention_heads",
    "n_head",
    "num_key_value_heads",
    "intermediate_size",
    "num_local_experts",
    "num_experts",
)
"""What of a configuration of transformers says which tensors a model has, and of which shapes."""


def config_in(text: str) -> Mapping[str, Any]:
    """Return the configuration that a file holds; empty if it holds none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def shape_of(config: Mapping[str, Any]) -> dict[str, int | str]:
    """Return the fields of a configuration that determine a model's tensors; of several models, the text model's."""
    text = config.get("text_config")
    named = dict(text) if isinstance(text, Mapping) else dict(config)
    named["model_type"] = config.get("model_type")
    return {name: named[name] for name in _NAMES if type(named.get(name)) in (int, str)}


def _is_text_model_of(policy: object, served: object) -> bool:
    """Say whether a policy is the text model of a family with pictures, which transformers loads alone."""
    return isinstance(policy, str) and isinstance(served, str) and policy.startswith(f"{served}_text")


def check_same_model(policy: Mapping[str, Any], served: Mapping[str, Any], url: str, name: str) -> None:
    """Refuse a server of another model than the run's, as far as both say which they are.

    Args:
        policy: The policy's configuration.
        served: The server's, as far as it is known.
        url: The server's address.
        name: What it calls its model.

    Raises:
        ConfigError: With what differs.
    """
    own, other = shape_of(policy), shape_of(served)
    if _is_text_model_of(own.get("model_type"), other.get("model_type")):
        own.pop("model_type")
    apart = [
        f"{key} {other[key]!r}, where the policy has {own[key]!r}"
        for key in _NAMES
        if key in own and key in other and own[key] != other[key]
    ]
    if apart:
        raise ConfigError(
            f"{url} serves another model, '{name}': {'; '.join(apart)}. Start it from the run's model, or name its "
            "own in model.path; nothing was sent to it"
        )
