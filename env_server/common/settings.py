"""Everything an operator can set, with its default, its flag and its meaning, read from a YAML file and from flags."""

import argparse
import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from sandbox.core.naming import parse_name

EnvironmentId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")]
Origin = Annotated[str, Field(pattern=r"^https?://[A-Za-z0-9.\-\[\]:]+$")]
Isolation = Literal["inline", "thread", "process"]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
# A model's own `register` leaves no room for a setting of that name.
_SHORTER = {"register_with": ("--register",)}


class Settings(BaseModel):
    """Settings of one server. A YAML file (`--config`) and the flags use the same names."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(
        8000, ge=0, le=65535, description="Port to listen on; 0 picks a free one and prints it."
    )
    processes: int = Field(1, ge=1, le=256, description="I/O processes on the one port.")
    workers: int | Literal["ray"] = Field(
        2,
        description="Environment child processes of each I/O process, or `ray`: they are in actors of a Ray cluster.",
    )
    threads: int = Field(32, ge=1, le=4096, description="Threads for environments isolated by thread.")

    ray_address: str | None = Field(
        None,
        description="Ray cluster to run workers in: `auto`, `HOST:PORT` or `ray://HOST:PORT`; one of this machine is "
        "started and ended with the server if unset.",
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
        32, description="A Ray actor is added where there are more sessions than this for each."
    )
    ray_operations_per_actor: float = Field(
        2.0,
        gt=0,
        allow_inf_nan=False,
        description="A Ray actor is added where more operations than this, on average, run or wait at each.",
    )
    ray_idle_timeout_s: Seconds = Field(
        60.0, description="A Ray actor that is not needed for so long is released."
    )
    ray_start_timeout_s: Seconds = Field(
        120.0,
        description="A session waits so long for a Ray actor, and a node for that, before it is given up.",
    )
    ray_working_dir: Path | None = Field(
        None, description="Directory that Ray sends to its nodes, where environments are imported from."
    )

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
    isolation: dict[EnvironmentId, Isolation] = Field(
        default_factory=dict,
        description="Where an environment runs, against the rule: `ENV=inline|thread|process` (repeatable).",
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
    env_step_timeout_s: dict[EnvironmentId, Seconds] = Field(
        default_factory=dict,
        description="Step time-out of one environment, in seconds: `ENV=SECONDS` (repeatable).",
    )
    builtin: bool = Field(True, description="Serve the built-in environments (a gateway never does).")
    sandbox: str | None = Field(
        None,
        description="Where programs are run, of environments that run some and, unless it is another server, of "
        "`POST /run_code`: `auto`, `namespaces`, `docker:IMAGE`, `remote:URL?token_file=PATH`, ... (docs/run_code.md).",
    )
    max_runs: Count = Field(4, description="Programs of `run_code` that run at one time in one I/O process.")
    max_waiting_runs: int = Field(64, ge=0, description="Programs that wait for that; more are refused.")
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
    allow_expert: bool = Field(False, description="Let clients ask environments for expert actions.")

    gateway: bool = Field(
        False,
        description="Take registrations of environments that other servers have; of its own, a gateway serves what "
        "`env` and the like name, and not the built-in environments.",
    )
    allow_network: tuple[str, ...] = Field(
        (),
        description="Networks that registered servers may be in beside public ones: `loopback`, `private`, or one "
        "such as `10.1.0.0/16` (repeatable).",
    )

    journal_url: SecretStr | None = Field(
        None,
        description="Redis or Valkey that several gateways share, `redis://HOST:PORT/0`: any of them goes on with any "
        "session, and no answered step is lost with a node or a gateway; needs the extra `redis`.",
    )

    register_with: tuple[str, ...] = Field(
        (), description="URL of a gateway to register this server's environments with (repeatable)."
    )
    advertise: str | None = Field(
        None, description="URL under which the gateways reach this server; the one it listens on if unset."
    )
    register_token_file: Path | None = Field(
        None, description="File with the token for the gateways (role register)."
    )
    node_token_file: Path | None = Field(
        None, description="File with the token that the gateways use here (role play)."
    )

    token_file: Path | None = Field(None, description="YAML file of tokens (hashes) and their roles.")
    allowed_origins: tuple[Origin, ...] = Field(
        (),
        description="Origin of web pages that may use the server beside its own console, such as "
        "`https://lab.example` (repeatable).",
    )
    rate_limit: float | None = Field(
        None,
        gt=0,
        description="Operations a second allowed to one token in one I/O process; unlimited if unset.",
    )
    auth_timeout_s: Seconds = Field(
        20.0, description="A socket whose token comes in its first frame has so long for it."
    )
    state_dir: Path | None = Field(
        None, description="Directory for journals: sessions go on after a crash of the server."
    )

    max_sessions: Count = Field(4096, description="Sessions of the server.")
    max_sessions_per_token: Count = Field(1024, description="Sessions of one token.")
    max_sockets_per_token: Count = Field(4096, description="Open sockets of one token in one I/O process.")
    max_unauthenticated_sockets: Count = Field(
        64, description="Open sockets of one address, in one I/O process, whose token has not come yet."
    )
    max_registrations_per_token: Count = Field(1024, description="Registrations of one token at a gateway.")
    max_connections: Count = Field(
        8192, description="Open connections of one I/O process; more are closed at once."
    )
    max_upstream_connections: Count = Field(
        256,
        description="Connections of a gateway to one registered server that does not speak `rollgym`; more requests "
        "wait for their turn.",
    )
    max_header_bytes: Count = Field(64 * 1024, description="Largest head of a request: its path and headers.")
    request_timeout_s: Seconds = Field(
        60.0,
        description="A request has to be here, body and all, in so long. One that was answered before its body came "
        "is read on for 5 s and 4 MiB.",
    )
    max_request_bytes: Count = Field(1024 * 1024, description="Largest request body or frame.")
    max_reply_bytes: Count = Field(8 * 1024 * 1024, description="Largest reply.")
    max_batch: Count = Field(
        1024, description="Operations in one batch, items of one verify, sessions of one make."
    )
    max_env_labels: Count = Field(
        200,
        description="Registered environments that metrics show by name; the others share the label `other`.",
    )
    max_in_flight: Count = Field(
        1024, description="Frames of one socket that may be unanswered before it is read on."
    )
    max_episode_bytes: Count = Field(
        16 * 1024 * 1024, description="Largest sum of the actions of one episode, which its journal keeps."
    )
    max_remembered_requests: Count = Field(
        4096,
        description="Sessions of one token whose answers to make, fork and restore are kept for repeated request ids.",
    )

    idle_timeout_s: Seconds = Field(3600.0, description="A session not used for so long is evicted.")
    linger_s: float = Field(
        30.0, ge=0, description="A session made on a socket stays so long after its last socket dropped."
    )
    step_timeout_s: Seconds = Field(60.0, description="Step (and render) time-out.")
    make_timeout_s: Seconds = Field(120.0, description="Make and reset time-out.")
    verify_timeout_s: Seconds = Field(60.0, description="Time-out of one verify item.")
    drain_grace_s: float = Field(
        20.0, ge=0, description="On SIGTERM, running operations may take so long to finish."
    )
    stop_at_end_of_input: bool = Field(
        False,
        description="Stop as on SIGTERM when standard input ends: a program that starts a server and holds the other "
        "end of a pipe leaves no server behind, however it dies.",
    )
    trace_endpoint: str | None = Field(
        None,
        pattern=r"^https?://",
        description="Where traces go (OTLP over HTTP), such as `http://127.0.0.1:4318/v1/traces`; needs the extra "
        "`otel`.",
    )
    trace_ratio: float = Field(
        1.0, ge=0, le=1, description="Share of the traces that begin here which are kept."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Log level.")
    log_format: Literal["text", "json"] = Field(
        "text", description="Lines of the log: for people, or one JSON object each."
    )

    @field_validator("workers", mode="plain")
    @classmethod
    def _number_or_ray(cls, value: Any) -> int | str:
        text = str(value)
        if text == "ray":
            return text
        if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 1024):
            raise ValueError(f"a number from 1 to 1024, or `ray`, and not {value!r}")
        return int(text)

    @model_validator(mode="after")
    def _ray_where_asked_for(self) -> "Settings":
        if self.workers != "ray":
            for name, field in type(self).model_fields.items():
                if name.startswith("ray_") and getattr(self, name) != field.default:
                    raise ValueError(f"{name} is for `workers: ray` only")
        elif self.ray_min_actors > self.ray_max_actors:
            raise ValueError("ray_min_actors is more than ray_max_actors")
        elif self.processes > 1 and self.ray_address is None:
            raise ValueError(
                "several I/O processes share one Ray cluster: start it (`ray start --head`) and set "
                "ray_address to auto"
            )
        return self

    @field_validator("sandbox")
    @classmethod
    def _names_a_sandbox(cls, text: str | None) -> str | None:
        if text is not None:
            parse_name(text)
        return text

    @property
    def runs_code(self) -> bool:
        """Whether there is a sandbox here that others may use; that of another server they can ask themselves."""
        return self.sandbox is not None and parse_name(self.sandbox)[0] != "remote"

    @model_validator(mode="after")
    def _one_gateway_process(self) -> "Settings":
        if self.gateway and self.processes > 1:
            raise ValueError("a gateway has one I/O process: start several gateways that nodes register with")
        return self

    @model_validator(mode="after")
    def _journal_of_gateways(self) -> "Settings":
        if self.journal_url is not None and not self.gateway:
            raise ValueError("journal_url is for gateways (gateway): a server by itself has state_dir")
        return self

    @model_validator(mode="after")
    def _tokens_beyond_loopback(self) -> "Settings":
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


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each setting. Absent flags leave nothing in the namespace."""
    for name, field in Settings.model_fields.items():
        flags = ["--" + name.replace("_", "-"), *_SHORTER.get(name, ())]
        text = f"{field.description} {_default_text(field)}".strip().replace("%", "%%")
        if field.annotation is bool:
            parser.add_argument(
                *flags, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
            )
        elif _is_repeatable(field):
            parser.add_argument(
                *flags, action="append", metavar=_metavar(name), default=argparse.SUPPRESS, help=text
            )
        else:
            parser.add_argument(*flags, metavar=_metavar(name), default=argparse.SUPPRESS, help=text)


def load_settings(flags: Mapping[str, Any], config: Path | None) -> Settings:
    """Settings from a YAML file and flags; a flag wins over the file.

    Raises:
        ConfigurationError: If a setting is unknown or its value is wrong.
    """
    values: dict[str, Any] = _read_yaml(config) if config is not None else {}
    for name, value in flags.items():
        values[name] = _parse_mapping(name, value) if _is_mapping(Settings.model_fields[name]) else value
    return check_settings(values)


def check_settings(values: Mapping[str, Any]) -> Settings:
    """Settings from their values.

    Raises:
        ConfigurationError: If a setting is unknown or its value is wrong.
    """
    unknown = [name for name in values if name not in Settings.model_fields]
    if unknown:
        raise ConfigurationError("\n".join(_unknown_setting(name) for name in unknown))
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise ConfigurationError("\n".join(_explain(error))) from error


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ConfigurationError(f"{path} must hold a mapping of settings")
    return values


def _is_mapping(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is dict


def _is_repeatable(field: FieldInfo) -> bool:
    return get_origin(field.annotation) in (dict, tuple)


def _metavar(name: str) -> str:
    if _is_mapping(Settings.model_fields[name]):
        return "ENV=VALUE"
    return name.upper()


def _default_text(field: FieldInfo) -> str:
    if field.default in (None, False) or _is_repeatable(field):
        return ""
    return f"(default {field.default})"


def _parse_mapping(name: str, entries: Sequence[str]) -> dict[str, Any]:
    holds_json = name in {"operator_kwargs", "kwargs_schemas"}
    values: dict[str, Any] = {}
    for entry in entries:
        key, separator, value = entry.partition("=")
        if not separator:
            raise ConfigurationError(f"{name}: {entry!r} is not ENV=VALUE")
        try:
            values[key] = json.loads(value) if holds_json else value
        except json.JSONDecodeError as error:
            raise ConfigurationError(f"{name}: the value for {key} is not JSON: {error}") from error
    return values


def _unknown_setting(name: str) -> str:
    near = difflib.get_close_matches(name, Settings.model_fields, n=1)
    return f"unknown setting {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def _explain(error: ValidationError) -> list[str]:
    lines = []
    for item in error.errors():
        place = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        lines.append(f"{place}: {message}" if place else message)
    return lines
