"""A node's side of registration: it announces its environments to gateways, and sends heartbeats (`--register`)."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx
from pydantic import ValidationError

from rollgym.clients.protocol.errors import RETRY_LATER
from rollgym.clients.protocol.messages import AnnounceAnswer, AnnounceReply
from rollgym.env_server.common.settings import ConfigurationError, ServerSettings
from rollgym.env_server.gateway.registry import DEFAULT_TTL_S
from rollgym.env_server.gateway.upstream.http_client import connect

_BEAT_S = DEFAULT_TTL_S / 4
_PENDING_S = 0.5
_LEAVE_S = 1.0
_TIMEOUT_S = 90.0
_log = logging.getLogger(__name__)


class _Pauses(NamedTuple):
    """How long to wait after the first, and at most after many failures in a row; each is twice the one before."""

    first_s: float
    longest_s: float


# A restarted gateway is found soon; one that refuses is retried at growing intervals.
_AWAY = _Pauses(0.1, 1.0)
_SAYS_NO = _Pauses(1.0, 15.0)
# An environment that is refused costs its gateway a probe, and this server a worker, each time ...
_REFUSED = _Pauses(2.0, 300.0)
# ... but a very short time if the gateway asked only for the server's description.
_NOT_PLAYED = _Pauses(0.5, 15.0)


@dataclass(slots=True)
class Patience:
    """How often something failed in a row in one way: a gateway that was away for long has not said no for long."""

    pauses: _Pauses | None = None
    failures: int = 0

    def pause_s(self, pauses: _Pauses, problem: Mapping[str, Any]) -> float:
        """How long to wait after one more failure; as long as the problem says, if it does."""
        self.failures = self.failures + 1 if pauses is self.pauses else 0
        self.pauses = pauses
        pause_s = min(pauses.longest_s, pauses.first_s * 2.0 ** min(self.failures, 32))
        asked_s = problem.get("retry_after")
        if isinstance(asked_s, (int, float)) and asked_s > pause_s:
            return max(pause_s, min(asked_s, _BEAT_S))
        return pause_s


@dataclass(slots=True)
class _Refusals:
    """The reason why one environment was refused, and when to offer it again, on the loop's clock."""

    patience: Patience = field(default_factory=Patience)
    again_at: float = 0.0
    told: str = ""


@dataclass(slots=True)
class _Gateway:
    """The registrations of this server at one gateway.

    Attributes:
        url: The gateway's URL.
        registered: The ids of registrations, by environment.
        refusals: The environments that it refused last time.
        nudged: Set when it may have forgotten this server.
    """

    url: str
    registered: dict[str, str] = field(default_factory=dict)
    refusals: dict[str, _Refusals] = field(default_factory=dict)
    nudged: asyncio.Event = field(default_factory=asyncio.Event)

    def due(self, env_ids: Iterable[str], now: float) -> list[str]:
        """The environments to speak of now."""
        return [
            env_id
            for env_id in env_ids
            if env_id not in self.refusals or self.refusals[env_id].again_at <= now
        ]

    def take(self, answer: AnnounceAnswer, now: float) -> None:
        """Record a gateway's answer for an environment."""
        if answer.registration_id is not None:
            self.registered[answer.env_id] = answer.registration_id
            self.refusals.pop(answer.env_id, None)
        elif answer.error is not None:
            refusals = self.refusals.setdefault(answer.env_id, _Refusals())
            pauses = _REFUSED if _was_played(answer.error) else _NOT_PLAYED
            pause_s = refusals.patience.pause_s(pauses, answer.error)
            refusals.again_at = now + pause_s
            detail = str(answer.error.get("detail"))
            if detail != refusals.told:
                refusals.told = detail
                _log.warning(
                    "%s does not take %s, next try in %g s: %s", self.url, answer.env_id, pause_s, detail
                )

    def pause_s(self, now: float) -> float:
        """How long it needs not be spoken to, if nothing happens."""
        return min([_BEAT_S, *(max(0.0, each.again_at - now) for each in self.refusals.values())])


class Announcer:
    """Registers a server's environments with gateways, and again with one that has forgotten them.

    One call announces all environments, and is repeated every few seconds. An environment that a gateway refuses does
    not delay the others; it is offered again after growing delays.

    Args:
        settings: The gateways, and the fields of the announcement.
        url: The URL that this server listens on; announced unless `advertise` is set.
        env_ids: The environments.
        load: How full the server is, from 0 to 1.

    Raises:
        ConfigurationError: If a token cannot be read, or if other machines cannot reach this server at its own address.
    """

    def __init__(
        self, settings: ServerSettings, url: str, env_ids: Iterable[str], load: Callable[[], float]
    ) -> None:
        if settings.advertise is None and settings.host in ("0.0.0.0", "::"):
            raise ConfigurationError(
                "register needs advertise: the URL under which gateways reach this server"
            )
        self._url = settings.advertise or url
        self._token = None if settings.node_token_file is None else _read_token(settings.node_token_file)
        self._env_ids = list(env_ids)
        self._load = load
        headers = {}
        if settings.register_token_file is not None:
            headers["Authorization"] = f"Bearer {_read_token(settings.register_token_file)}"
        verify = any(gateway.startswith("https:") for gateway in settings.register_with)
        self._client = connect(headers=headers, timeout=_TIMEOUT_S, verify=verify)
        self._gateways = [_Gateway(gateway.rstrip("/")) for gateway in settings.register_with]
        self._tasks: list[asyncio.Task[None]] = []

    def socket_dropped(self) -> None:
        """Look at once whether the gateways still know this server: one of their sockets may have dropped."""
        for gateway in self._gateways:
            gateway.nudged.set()

    def start(self) -> None:
        """Start the announcements to all gateways."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._announce(gateway)) for gateway in self._gateways]

    async def leave(self) -> None:
        """Notify the gateways that the server takes no new sessions."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        await asyncio.gather(
            *(
                self._unregister(f"{gateway.url}/v1/registrations/{registration_id}")
                for gateway in self._gateways
                for registration_id in gateway.registered.values()
            )
        )
        await self._client.aclose()

    async def _announce(self, gateway: _Gateway) -> None:
        """Repeat the announcement for ever; retry a gateway that is away until it answers."""
        loop = asyncio.get_running_loop()
        patience, told = Patience(), ""
        while True:
            known = len(gateway.registered)
            gateway.nudged.clear()
            try:
                pending = await self._say(gateway)
            except Exception as error:  # noqa: BLE001 - it would be the last that gateways hear of this server
                trouble = str(error) or type(error).__name__
                if trouble != told:
                    _log.warning("cannot register with %s, trying on: %s", gateway.url, trouble)
                    if not isinstance(error, httpx.HTTPError | CallRefused):
                        _log.error("announcing failed inside the server", exc_info=error)
                told = trouble
                await asyncio.sleep(pause_s(patience, error))
                continue
            if told or len(gateway.registered) > known:
                _log.warning("registered %d environments with %s", len(gateway.registered), gateway.url)
            patience, told = Patience(), ""
            await asyncio.sleep(_PENDING_S)
            if not pending:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(gateway.pause_s(loop.time())):
                        await gateway.nudged.wait()

    async def _say(self, gateway: _Gateway) -> bool:
        """Announce the environments to a gateway; return whether it still probes some of them."""
        due = gateway.due(self._env_ids, asyncio.get_running_loop().time())
        if not due:
            return False
        envs = [{"env_id": env_id, "probed": env_id in gateway.registered} for env_id in due]
        body: dict[str, Any] = {"url": self._url, "token": self._token, "load": self._load(), "envs": envs}
        if len(self._gateways) > 1:
            body["gateways"] = len(self._gateways)
        reply = _reply(await self._client.post(f"{gateway.url}/v1/registrations", json=body))
        now = asyncio.get_running_loop().time()
        for answer in reply.registrations:
            gateway.take(answer, now)
        return any(answer.pending for answer in reply.registrations)

    async def _unregister(self, path: str) -> None:
        # A gateway may give ids that no address can hold.
        with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL):
            await self._client.delete(path, timeout=_LEAVE_S)


class CallRefused(Exception):  # noqa: N818 - never leaves the announcer
    """The gateway does not take the call.

    Attributes:
        problem: The gateway's problem; empty if that cannot be read.
    """

    def __init__(self, message: str, problem: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.problem = problem


def pause_s(patience: Patience, error: Exception) -> float:
    """How long a gateway that did not take a call is left alone; one that is starting is as good as away."""
    if not isinstance(error, CallRefused):
        return patience.pause_s(_AWAY if isinstance(error, httpx.HTTPError) else _SAYS_NO, {})
    is_starting = error.problem.get("code") == "draining"
    return patience.pause_s(_AWAY if is_starting else _SAYS_NO, error.problem)


def _was_played(problem: Mapping[str, Any]) -> bool:
    """Whether a gateway ran an environment before it refused it, or may have."""
    if problem.get("code") in RETRY_LATER:
        return False
    report = problem.get("report")
    return not isinstance(report, list) or len(report) > 1


def _reply(answer: httpx.Response) -> AnnounceReply:
    """Read the answer of a gateway.

    Raises:
        CallRefused: It is a problem, or nothing that a gateway would say.
    """
    try:
        body = answer.json()
        if answer.status_code == 200:
            return AnnounceReply.model_validate(body)
    except (ValueError, ValidationError) as error:
        raise CallRefused(f"it is no gateway of this version (status {answer.status_code})", {}) from error
    problem = body if isinstance(body, dict) else {}
    raise CallRefused(str(problem.get("detail", answer.status_code)), problem)


def _read_token(path: Any) -> str:
    try:
        token = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigurationError(f"cannot read the token in {path}: {error}") from error
    if not token:
        raise ConfigurationError(f"{path} holds no token")
    return str(token)
