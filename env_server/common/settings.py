"""Everything an operator can set, with its default and its meaning; flags and the keys of a YAML file come from it.

The settings are in sections: code that needs some of them names the section that it reads.
"""

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)

from rollgym.clients.protocol.messages import Isolation
from rollgym.sandbox.core.kinds import BY_NAME, SANDBOXES, parse_sandbox_name
from rollgym.user_paths import expand_user

EnvironmentId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")]
Origin = Annotated[str, Field(pattern=r"^https?://[A-Za-z0-9.\-\[\]:]+$")]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
UserPath = Annotated[
    Path, BeforeValidator(lambda value: expand_user(value) if isinstance(value, str) else value)
]
"""A file or folder of this machine; `~` is the home folder."""


def _is_address(text: str) -> str:
    if re.fullmatch(r"https?://[^/\s]\S*", text) is None:
        raise ValueError(f"{text!r} is no address of a server: write http://HOST:PORT")
    return text


Address = Annotated[str, AfterValidator(_is_address)]
_SANDBOX_NAMES = ", ".join(f"`{name}`" for each in SANDBOXES for name in each.names)


class Section(BaseModel):
    """Some of a server's settings.

    Attributes:
        title: What they are about, for those who read `--help`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    title: ClassVar[str]


class ProcessSettings(Section):
    """Where the server listens, and what it is as a program."""

    title = "The process"

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(
        8000, ge=0, le=65535, description="Port to listen on; 0 picks a free one and prints it."
    )
    processes: int = Field(1, ge=1, le=256, description="I/O processes on the one port.")
    stop_at_end_of_input: bool = Field(
        False,
        description="Stop as on SIGTERM when standard input ends. A program that starts a server and holds the other "
        "end of the pipe then leaves no server behind, however it dies.",
    )
    drain_grace_s: float = Field(
        20.0, ge=0, description="Time for running operations to finish after SIGTERM."
    )


class WorkerSettings(Section):
    """What environments run in on this machine."""

    title = "Workers"

    workers: int | Literal["ray"] = Field(
        2,
        description="Environment child processes of each I/O process, or `ray` for actors of a Ray cluster.",
    )
    threads: int = Field(32, ge=1, le=4096, description="Threads for environments isolated by thread.")

    @field_validator("workers", mode="plain")
    @classmethod
    def _number_or_ray(cls, value: Any) -> int | str:
        text = str(value)
        if text == "ray":
            return text
        if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 1024):
            raise ValueError(f"a number from 1 to 1024, or `ray`, and not {value!r}")
        return int(text)


class RaySettings(Section):
    """What environments run in where `workers` is `ray`."""

    title = "Workers in a Ray cluster"

    ray_address: str | None = Field(
        None,
        description="Ray cluster to run workers in: `auto`, `HOST:PORT` or `ray://HOST:PORT`. If unset, the server "
        "starts one on this machine, and ends it.",
    )
    ray_num_cpus: float = Field(
        1.0,
        ge=0,
        le=1024,
        allow_inf_nan=False,
        description="CPUs that each Ray actor reserves; it has as many child processes, and at least one.",
    )
    ray_min_actors: int = Field(1, ge=0, description="Ray actors that each I/O process has at all times.")
    ray_max_actors: Count = Field(64, description="Ray actors that each I/O process has at most.")
    ray_sessions_per_actor: Count = Field(
        32, description="A Ray actor is added above this number of sessions for each."
    )
    ray_operations_per_actor: float = Field(
        2.0,
        gt=0,
        allow_inf_nan=False,
        description="A Ray actor is added above this average number of running or waiting operations for each.",
    )
    ray_idle_timeout_s: Seconds = Field(
        60.0, description="A Ray actor that is not needed for this long is released."
    )
    ray_start_timeout_s: Seconds = Field(
        120.0,
        description="How long a session waits for a Ray actor, and its node, before it fails.",
    )
    ray_working_dir: UserPath | None = Field(
        None, description="Directory that Ray sends to its nodes, where environments are imported from."
    )


class CatalogSettings(Section):
    """Which environments are served, and how."""

    title = "Environments"

    env: tuple[str, ...] = Field(
        (), description="An environment to serve: `module:Class` or `name=module:Class` (repeatable)."
    )
    gymnasium: tuple[str, ...] = Field(
        (), description="A Gymnasium id to serve: `ID`, `module:ID` or `name=ID` (repeatable)."
    )
    gymnasium_text: tuple[str, ...] = Field(
        (),
        description="A Gymnasium id to serve as text, for language models: `ID`, `module:ID` or `name=ID` "
        "(repeatable).",
    )
    builtin: bool = Field(True, description="Serve the built-in environments (a gateway never does).")
    isolation: dict[EnvironmentId, Isolation] = Field(
        default_factory=dict,
        description="Where an environment runs, in place of the default: `ENV=inline`, `ENV=thread` or `ENV=process` "
        "(repeatable).",
    )
    trust_inline: bool = Field(
        False,
        description="Run classes of `env` and of installed packages inline if their metadata ask for it: steps are "
        "cheaper, but nothing can interrupt a step that does not end.",
    )
    operator_kwargs: dict[EnvironmentId, dict[str, Any]] = Field(
        default_factory=dict,
        description="Kwargs that only the operator sets: `ENV={JSON object}` (repeatable).",
    )
    kwargs_schemas: dict[EnvironmentId, dict[str, Any]] = Field(
        default_factory=dict,
        description="JSON Schema of the kwargs a client may set, for an environment that declares none: "
        "`ENV={JSON object}` (repeatable).",
    )
    allow_expert: bool = Field(False, description="Let clients ask environments for expert actions.")
    face: tuple[str, ...] = Field(
        (),
        description="A protocol of an installed package, by its name, that clients may speak, too (repeatable).",
    )


class TimeoutSettings(Section):
    """How long an environment may take."""

    title = "Time-outs of environments"

    step_timeout_s: Seconds = Field(60.0, description="Step (and render) time-out.")
    env_step_timeout_s: dict[EnvironmentId, Seconds] = Field(
        default_factory=dict,
        description="Step time-out of one environment, in seconds: `ENV=SECONDS` (repeatable).",
    )
    make_timeout_s: Seconds = Field(120.0, description="Make and reset time-out.")
    verify_timeout_s: Seconds = Field(60.0, description="Time-out of one verify item.")


class SessionSettings(Section):
    """How many sessions there are, how long, and what is kept of them."""

    title = "Sessions"

    max_sessions: Count = Field(4096, description="Sessions of the server.")
    max_sessions_per_token: Count = Field(1024, description="Sessions of one token.")
    idle_timeout_s: Seconds = Field(
        3600.0, description="A session that is not used for this long is evicted."
    )
    linger_s: float = Field(
        30.0,
        ge=0,
        description="How long a session that was made on a socket stays after its last socket dropped.",
    )
    state_dir: UserPath | None = Field(
        None, description="Directory for journals: sessions continue after a crash of the server."
    )
    max_episode_bytes: Count = Field(
        16 * 1024 * 1024,
        description="Largest episode: its actions in JSON, 20 bytes for each, and the kwargs and options of its "
        "session. A step that would exceed it is refused. Requests that restore an episode may be larger by this much.",
    )
    max_remembered_requests: Count = Field(
        4096,
        description="Sessions of one token whose answers to make, fork and restore are kept for repeated request ids.",
    )


class AccessSettings(Section):
    """Who may use the server, from where, and how much."""

    title = "Access"

    token_file: UserPath | None = Field(None, description="YAML file of tokens (hashes) and their roles.")
    allowed_origins: tuple[Origin, ...] = Field(
        (),
        description="Origin of web pages that may use the server beside its own console, such as "
        "`https://lab.example` (repeatable).",
    )
    rate_limit: float | None = Field(
        None,
        gt=0,
        description="Operations a second of one token in one I/O process; unlimited if unset.",
    )
    auth_timeout_s: Seconds = Field(
        20.0, description="How long a socket may take to send its token in the first frame."
    )
    max_sockets_per_token: Count = Field(4096, description="Open sockets of one token in one I/O process.")
    max_unauthenticated_sockets: Count = Field(
        64, description="Open sockets of one address, in one I/O process, that have not sent their token yet."
    )


class MessageSettings(Section):
    """How many connections there are, and how large what comes over them may be."""

    title = "Connections and messages"

    max_connections: Count = Field(
        8192, description="Open connections of one I/O process; more are closed at once."
    )
    max_header_bytes: Count = Field(
        64 * 1024,
        description="Largest head of a request: its path and headers. As much may be around the parts of its body.",
    )
    request_timeout_s: Seconds = Field(
        60.0,
        description="How long a whole request may take to arrive, and a client may read nothing of answers that wait "
        "for it. If a request was answered before its body came, the body is read for 5 s and up to 4 MiB.",
    )
    max_request_bytes: Count = Field(
        1024 * 1024, description="Largest request body or frame, except for `restore`."
    )
    max_reply_bytes: Count = Field(
        8 * 1024 * 1024,
        description="Largest reply. A portable episode may be larger, up to `max_episode_bytes`.",
    )
    max_batch: Count = Field(
        1024, description="Operations in one batch, items of one verify, sessions of one make."
    )
    max_in_flight: Count = Field(
        1024,
        description="Unanswered frames of one socket. Further frames wait for `max_queue_s`, and are then answered "
        "`overloaded`.",
    )
    max_queue_s: Seconds = Field(
        1.0,
        description="How long requests may wait before they begin. Those that wait longer are answered `overloaded`, "
        "except for closing, cancelling and describing.",
    )


class SandboxSettings(Section):
    """Where programs run, and within which limits."""

    title = "Sandbox"

    sandbox: str | None = Field(
        None,
        description="Where programs run: those of environments and, unless it is another server, of `POST /run_code`: "
        f"`auto`, {_SANDBOX_NAMES} or one of another package (docs/run_code.md).",
    )
    max_runs: Count = Field(4, description="Programs of `run_code` that run at one time in one I/O process.")
    max_waiting_runs: int = Field(64, ge=0, description="Programs of `run_code` that wait; more are refused.")
    max_runs_per_token: Count = Field(64, description="Programs of one token that run or wait.")
    max_program_sessions: Count = Field(32, description="Interactive sessions in the sandbox at one time.")
    max_program_session_s: Seconds = Field(
        21_600.0, description="Longest time that an interactive session may take."
    )
    max_run_s: Seconds = Field(
        60.0, description="Longest time that a caller may give a program, or its compiler."
    )
    max_run_memory_mb: Count = Field(
        1024, description="Most memory that a caller may give a program, in MiB."
    )

    @field_validator("sandbox")
    @classmethod
    def _names_a_sandbox(cls, text: str | None) -> str | None:
        if text is not None:
            parse_sandbox_name(text)
        return text

    @property
    def runs_code(self) -> bool:
        """Whether a sandbox here serves clients; one on another server they can call directly."""
        if self.sandbox is None:
            return False
        kind = BY_NAME.get(parse_sandbox_name(self.sandbox)[0])
        return kind is None or not kind.elsewhere


class GatewaySettings(Section):
    """What a gateway takes from other servers."""

    title = "Gateway"

    gateway: bool = Field(
        False,
        description="Offer environments that other servers register. Of its own, a gateway serves what `env` and "
        "similar settings name, and not the built-in ones.",
    )
    allow_network: tuple[str, ...] = Field(
        (),
        description="Networks of registered servers, beside public ones: `loopback`, `private`, or one such as "
        "`10.1.0.0/16` (repeatable).",
    )
    journal_url: SecretStr | None = Field(
        None,
        description="Redis or Valkey that several gateways share, `redis://HOST:PORT/0`. Any of them can then continue "
        "any session, and no answered step is lost with a node or a gateway. Needs the extra `redis`.",
    )
    journal_replicas: int = Field(
        0,
        ge=0,
        description="Replicas of the journal that must confirm a write before a gateway answers. With 1 or more, a "
        "fail-over loses nothing that was answered.",
    )
    max_registrations_per_token: Count = Field(1024, description="Registrations of one token at a gateway.")
    max_upstream_connections: Count = Field(
        256,
        description="Connections of a gateway to one registered server that does not speak `rollgym`; further requests "
        "wait.",
    )


class NodeSettings(Section):
    """Which gateways the environments of this server are registered with."""

    title = "Node of a gateway"

    register_with: tuple[Address, ...] = Field(
        (), description="URL of a gateway to register this server's environments with (repeatable)."
    )
    advertise: Address | None = Field(
        None, description="URL at which the gateways reach this server; by default the one it listens on."
    )
    register_token_file: UserPath | None = Field(
        None, description="File with the token for the gateways (role register)."
    )
    node_token_file: UserPath | None = Field(
        None, description="File with the token that the gateways use here (role play)."
    )


class TelemetrySettings(Section):
    """Which telemetry the server emits, and where to."""

    title = "Log, metrics, traces"

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Log level.")
    log_format: Literal["text", "json"] = Field(
        "text", description="Lines of the log: text for people, or JSON objects."
    )
    max_env_labels: Count = Field(
        200,
        description="Registered environments that metrics show by name; the others share the label `other`.",
    )
    trace_endpoint: str | None = Field(
        None,
        pattern=r"^https?://",
        description="Where traces go (OTLP over HTTP), such as `http://127.0.0.1:4318/v1/traces`; needs the extra "
        "`otel`.",
    )
    trace_ratio: float = Field(
        1.0, ge=0, le=1, description="Share of kept traces, among those that begin here."
    )


class ServerSettings(
    ProcessSettings,
    WorkerSettings,
    RaySettings,
    CatalogSettings,
    TimeoutSettings,
    SessionSettings,
    AccessSettings,
    MessageSettings,
    SandboxSettings,
    GatewaySettings,
    NodeSettings,
    TelemetrySettings,
):
    """Settings of one server. A YAML file (`--config`) and the flags use the same names, without sections."""

    @property
    def max_restore_bytes(self) -> int:
        """The largest request that restores a session: the longest episode, plus the size of an ordinary request."""
        return self.max_episode_bytes + self.max_request_bytes

    @property
    def max_portable_bytes(self) -> int:
        """The largest reply that holds a portable episode: every episode can be exported, and then restored."""
        return max(self.max_reply_bytes, self.max_restore_bytes)

    def request_limit(self, op: str) -> int:
        """The bytes that a request of an operation may have."""
        return self.max_restore_bytes if op == "restore" else self.max_request_bytes

    def make_state_dir(self) -> None:
        """Make the folder of journals, if one is set and not there.

        Raises:
            ConfigurationError: It cannot be made.
        """
        if self.state_dir is None:
            return
        try:
            self.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"state_dir: {self.state_dir} cannot be made ({error.strerror}): "
                "name a folder that can be written to"
            ) from error

    @model_validator(mode="after")
    def _ray_where_asked_for(self) -> "ServerSettings":
        if self.workers != "ray":
            for name, field in RaySettings.model_fields.items():
                if getattr(self, name) != field.default:
                    raise ValueError(f"{name} is for `workers: ray` only")
        elif self.ray_min_actors > self.ray_max_actors:
            raise ValueError("ray_min_actors is more than ray_max_actors")
        elif self.processes > 1 and self.ray_address is None:
            raise ValueError(
                "several I/O processes share one Ray cluster: start it (`ray start --head`) and set "
                "ray_address to auto"
            )
        return self

    @model_validator(mode="after")
    def _one_gateway_process(self) -> "ServerSettings":
        if self.gateway and self.processes > 1:
            raise ValueError("a gateway has one I/O process: start several gateways that nodes register with")
        return self

    @model_validator(mode="after")
    def _journal_of_gateways(self) -> "ServerSettings":
        if self.journal_url is not None and not self.gateway:
            raise ValueError("journal_url is for gateways (gateway): a server by itself has state_dir")
        if self.journal_replicas and self.journal_url is None:
            raise ValueError("journal_replicas is for gateways that share a journal: set journal_url")
        return self

    @model_validator(mode="after")
    def _tokens_beyond_loopback(self) -> "ServerSettings":
        if self.token_file is None and not is_loopback(self.host):
            raise ValueError(
                f"no tokens are configured, so the server binds to loopback only, not to {self.host!r}: "
                "set token_file (see `roll-serve token --help`) or host 127.0.0.1"
            )
        return self


def is_loopback(host: str) -> bool:
    """Whether a listening address is reachable from this machine only."""
    return host in {"localhost", "::1"} or host.startswith("127.")


class ConfigurationError(Exception):
    """Settings that cannot be used; the message is for the operator."""
