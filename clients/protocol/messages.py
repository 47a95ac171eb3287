"""Requests and replies of the protocol as models: the schema of HTTP bodies, of socket fields and of OpenAPI."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollgym.clients.protocol.episode import PortableEpisode
from rollgym.clients.protocol.free_form import WHOLE, FreeFields, FreeValue, VerifyItem
from rollgym.clients.protocol.upstream_protocols import ROLLGYM, ProtocolName

IDENTIFIER = r"^[A-Za-z0-9._-]{1,128}$"
"""The pattern of environment, session and registration ids."""

Identifier = Annotated[str, Field(pattern=IDENTIFIER)]
MAX_SEED = 2**53
"""Seeds are below this: larger integers are not exact in JavaScript and other readers of JSON."""
Seed = Annotated[int, Field(ge=0, lt=MAX_SEED, strict=True), WHOLE]
RequestId = Annotated[str, Field(min_length=1, max_length=128)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=1024, strict=True), WHOLE]
FieldName = Annotated[str, Field(min_length=1, max_length=128)]
Isolation = Literal["inline", "thread", "process"]
"""Where a server runs an environment: in its event loop, in a thread, or in a process of its own."""
Gateways = Annotated[
    int,
    Field(ge=1, le=4096, description="`rollgym`: how many gateways pass its sessions on, this one included."),
    WHOLE,
]
_LINGERS = "Whether a session made on a socket ends some time after its last socket dropped."
Index = Annotated[int, Field(ge=0, strict=True), WHOLE]


class Request(BaseModel):
    """Base of all requests: a key that the schema does not know is refused, and so is a value of another type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class BaseReply(BaseModel):
    """Base of all replies: a newer server may add keys."""

    model_config = ConfigDict(extra="ignore")


class ResetFields(Request):
    """Seed and options of an episode."""

    seed: Seed | None = None
    options: FreeFields | None = None


class MakeRequest(Request):
    """Make sessions of one environment."""

    env_id: Identifier
    kwargs: FreeFields | None = None
    count: Count | None = Field(default=None, description="Make this many; the reply is then a list.")
    reset: ResetFields | None = Field(default=None, description="Reset at once, too.")
    idle_timeout_s: Seconds | None = None
    lingers: bool = Field(default=True, description=_LINGERS)
    request_id: RequestId | None = None


class ResetRequest(ResetFields):
    """Begin an episode in a session."""

    request_id: RequestId | None = None
    again: bool = Field(
        default=False, description="Begin none: answer once more how the running episode began."
    )


class StepRequest(Request):
    """Take one action in a session."""

    action: FreeValue
    episode: Index | None = None
    step: Index | None = None
    autoreset: bool = Field(default=False, description="Begin the next episode when this step ends this one.")
    reset: ResetFields | None = Field(default=None, description="How `autoreset` begins the next episode.")
    timeout_s: Seconds | None = None


class RenderRequest(Request):
    """Render the state of a session."""

    mode: str | None = None


class ForkRequest(Request):
    """Copy a session at its present point."""

    count: Count = 1
    reseed: Seed | None = Field(default=None, description="Let the copies' chances differ from here on.")
    lingers: bool = Field(default=True, description=_LINGERS)
    request_id: RequestId | None = None


class RestoreRequest(Request):
    """Make a session at the point of a portable episode."""

    episode: PortableEpisode
    idle_timeout_s: Seconds | None = None
    lingers: bool = Field(default=True, description=_LINGERS)
    request_id: RequestId | None = None


class CloseRequest(Request):
    """Close many sessions in one request."""

    session_ids: list[Identifier] = Field(fail_fast=True)


class VerifyRequest(Request):
    """Score responses without a session."""

    items: list[VerifyItem] = Field(fail_fast=True)
    timeout_s: Seconds | None = None


class RegisterRequest(Request):
    """Add an environment of another server to a gateway's catalog."""

    env_id: Identifier = Field(description="What it is called at the gateway.")
    url: str = Field(min_length=1, max_length=2048, description="Base URL of the server that has it.")
    protocol: ProtocolName = Field(description="What that server speaks.")
    upstream_env_id: str | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        description="What it is called there; `env_id` if absent. Other protocols have other names than ours.",
    )
    token: str | None = Field(
        default=None, max_length=4096, pattern=r"^[!-~]+$", description="Bearer token for that server."
    )
    weight: Seconds = Field(default=1.0, description="Share of new sessions, relative to other replicas.")
    ttl_s: Seconds | None = Field(
        default=None, description="How long it lives past its last heartbeat; 60 if absent."
    )
    gateways: Gateways = 1
    description: str | None = Field(default=None, max_length=4096)
    action_field: FieldName | None = Field(
        default=None,
        description="`openenv`: the field of an action that a text is for; `.` for the JSON of the whole action.",
    )
    observation_field: FieldName | None = Field(
        default=None,
        description="`openenv`: the field of an observation that is the text; `.` for the JSON of the whole.",
    )


class AnnouncedEnvironment(Request):
    """An environment that a server says it has."""

    env_id: Identifier = Field(description="What it is called at the gateway.")
    upstream_env_id: Identifier | None = Field(
        default=None, description="What it is called at the server; `env_id` if absent."
    )
    probed: bool = Field(
        default=False,
        strict=True,
        description="It was registered here before and is the same since, so it is not probed again.",
    )


class AnnounceRequest(Request):
    """Register the environments of a server, and say of those that are registered that it is still there."""

    url: str = Field(min_length=1, max_length=2048, description="Base URL of the server.")
    protocol: ProtocolName = Field(default=ROLLGYM.name, description="What that server speaks.")
    envs: list[AnnouncedEnvironment] = Field(min_length=1, max_length=1024, fail_fast=True)
    token: str | None = Field(
        default=None, max_length=4096, pattern=r"^[!-~]+$", description="Bearer token for that server."
    )
    weight: Seconds = Field(default=1.0, description="Share of new sessions, relative to other replicas.")
    ttl_s: Seconds | None = Field(
        default=None, description="How long they live past the last call; 60 if absent."
    )
    load: float | None = Field(default=None, ge=0, allow_inf_nan=False, description="0 is idle, 1 is full.")
    gateways: Gateways = 1


class HeartbeatRequest(Request):
    """Say that a registered server is still there."""

    load: float | None = Field(default=None, ge=0, allow_inf_nan=False, description="0 is idle, 1 is full.")


class RegisterReply(BaseReply):
    """A registration, its expiry without a heartbeat (seconds since 1970), and the findings of the probe."""

    registration_id: str
    env_id: str
    expires_at: float = Field(allow_inf_nan=False)
    ttl_s: Seconds | None = Field(
        default=None, description="How long it lives past its last heartbeat, on any clock."
    )
    report: list[dict[str, Any]] = Field(default=[], description="The checks: `{check, ok, detail}`.")


class AnnounceAnswer(BaseReply):
    """The result for one environment: it is registered, still being probed, or refused."""

    env_id: str
    registration_id: str | None = None
    expires_at: float | None = None
    ttl_s: Seconds | None = Field(
        default=None, description="How long it lives past its last heartbeat, on any clock."
    )
    pending: bool = Field(default=False, description="It is being probed: say again soon that it is there.")
    error: dict[str, Any] | None = Field(default=None, description="The problem, where it is refused.")


class AnnounceReply(BaseReply):
    """An answer for each environment, in their order."""

    registrations: list[AnnounceAnswer]


class HeartbeatReply(BaseReply):
    """Until when a registration lives now: seconds since 1970, on the gateway's clock."""

    expires_at: float = Field(allow_inf_nan=False)
    ttl_s: Seconds | None = Field(
        default=None, description="How long it lives past its last heartbeat, on any clock."
    )


class ResetReply(BaseReply):
    """The begin of an episode."""

    observation: Any
    info: dict[str, Any]
    episode: int
    step: int
    seed: int


class StepReply(BaseReply):
    """The result of an action."""

    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    episode: int
    step: int
    reset: ResetReply | None = Field(
        default=None, description="With `autoreset`: the episode that the step began."
    )


class SessionReply(BaseReply):
    """A new session with its spaces."""

    session_id: str
    env_id: str
    action_space: dict[str, Any]
    observation_space: dict[str, Any]
    reset: ResetReply | None = None
    episode: int | None = Field(default=None, description="Of a restored session: the episode it is in.")
    step: int | None = Field(default=None, description="Of a restored session: the steps taken in it.")


class SessionsReply(BaseReply):
    """The new sessions of a request with `count`."""

    sessions: list[SessionReply]


class SessionInfo(BaseReply):
    """One of the caller's sessions."""

    session_id: str
    env_id: str
    episode: int | None
    step: int | None
    seed: int | None
    terminated: bool
    truncated: bool
    idle_s: float
    owner: str


class ForkReply(BaseReply):
    """The ids of the copies."""

    session_ids: list[str]


class CloseReply(BaseReply):
    """How many of the named sessions were open and now are closed."""

    closed: int


class RenderReply(BaseReply):
    """A drawing: text, or an array or image in free-form encoding."""

    frame: Any


class VerdictReply(BaseReply):
    """The score of one response."""

    score: float
    outcome: str
    detail: Any = None


class VerifyReply(BaseReply):
    """Verdicts in the order of the items."""

    results: list[VerdictReply]


class EnvInfo(BaseReply):
    """One environment that a server offers."""

    env_id: str
    version: str
    kind: Literal["episodic", "stateless"]
    origin: Literal["local", "registered"]
    isolation: Isolation
    description: str
    action_space: dict[str, Any]
    observation_space: dict[str, Any]
    kwargs_schema: dict[str, Any]
    max_episode_steps: int | None
    deterministic: bool
    forkable: bool
    replicas: int
    metadata: dict[str, Any]

    @property
    def stateless(self) -> bool:
        """Whether it scores answers without sessions."""
        return self.kind == "stateless"


class EnvsReply(BaseReply):
    """The environments that the server offers."""

    envs: list[EnvInfo]


class Capacity(BaseReply):
    """How full a server is."""

    sessions: int
    max_sessions: int


class ServerInfo(BaseReply):
    """A server's description of itself."""

    name: str
    version: str
    protocol: int
    role: Literal["server", "gateway"]
    processes: int
    process: int = Field(default=0, description="Index of the I/O process that answered.")
    limits: dict[str, Any]
    capacity: Capacity
