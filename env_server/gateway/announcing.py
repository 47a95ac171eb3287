"""A node's side of registration: it tells gateways what it has, and that it is still there (`--register`)."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import Any

import httpx

from env_server.configuration import ConfigurationError
from env_server.gateway.registry import DEFAULT_TTL_S
from env_server.settings import Settings

_BEAT_S = DEFAULT_TTL_S / 4
_RETRY_S = 1.0
_TIMEOUT_S = 90.0
_log = logging.getLogger(__name__)


class Announcer:
    """Registers a server's environments with gateways, and again with one that has forgotten them.

    Args:
        settings: The gateways, and what they are told.
        url: Where this server listens; what gateways are told if `advertise` says nothing else.
        env_ids: The environments.
        load: How full the server is, from 0 to 1.

    Raises:
        ConfigurationError: If a token cannot be read, or nobody else can reach this server at its own address.
    """

    def __init__(
        self, settings: Settings, url: str, env_ids: Iterable[str], load: Callable[[], float]
    ) -> None:
        if settings.advertise is None and settings.host in ("0.0.0.0", "::"):
            raise ConfigurationError(
                "register needs advertise: the URL under which gateways reach this server"
            )
        self._url = settings.advertise or url
        self._gateways = [gateway.rstrip("/") for gateway in settings.register_with]
        self._token = None if settings.node_token_file is None else _read_token(settings.node_token_file)
        self._env_ids = list(env_ids)
        self._load = load
        headers = {}
        if settings.register_token_file is not None:
            headers["Authorization"] = f"Bearer {_read_token(settings.register_token_file)}"
        self._client = httpx.AsyncClient(headers=headers, timeout=_TIMEOUT_S, trust_env=False)
        self._registered: dict[str, dict[str, str]] = {gateway: {} for gateway in self._gateways}
        self._tasks: list[asyncio.Task[None]] = []
        self._nudged = {gateway: asyncio.Event() for gateway in self._gateways}

    def socket_dropped(self) -> None:
        """Look at once whether the gateways still know this server: one of their sockets may have dropped."""
        for nudged in self._nudged.values():
            nudged.set()

    def start(self) -> None:
        """Begin to announce."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._announce(gateway)) for gateway in self._gateways]

    async def leave(self) -> None:
        """Tell the gateways that no new sessions are wanted."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        for gateway, registered in self._registered.items():
            for registration_id in registered.values():
                with contextlib.suppress(httpx.HTTPError):
                    await self._client.delete(
                        f"{gateway}/v1/registrations/{registration_id}", timeout=_RETRY_S
                    )
        await self._client.aclose()

    async def _announce(self, gateway: str) -> None:
        """Register what is not registered, then send heartbeats; a gateway that is away is tried again and again."""
        registered = self._registered[gateway]
        told = ""
        while True:
            try:
                for env_id in self._env_ids:
                    if env_id in registered and not await self._beat(gateway, registered[env_id]):
                        del registered[env_id]
                    if env_id not in registered:
                        registered[env_id] = await self._register(gateway, env_id)
            except (httpx.HTTPError, _Refused) as error:
                trouble = str(error) or type(error).__name__
                if trouble != told:
                    _log.warning("cannot register with %s, trying on: %s", gateway, trouble)
                told = trouble
                await asyncio.sleep(_RETRY_S)
                continue
            if told or not registered:
                _log.warning("registered with %s", gateway)
            told = ""
            await asyncio.sleep(_RETRY_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_BEAT_S - _RETRY_S):
                    await self._nudged[gateway].wait()
            self._nudged[gateway].clear()

    async def _register(self, gateway: str, env_id: str) -> str:
        body: dict[str, Any] = {
            "env_id": env_id,
            "url": self._url,
            "protocol": "rollgym",
            "token": self._token,
        }
        if len(self._gateways) > 1:
            body["gateways"] = len(self._gateways)
        answer = await self._client.post(f"{gateway}/v1/envs", json=body)
        reply = _reply(answer)
        if answer.status_code != 201:
            raise _Refused(f"{env_id}: {reply.get('detail', answer.status_code)}")
        return str(reply["registration_id"])

    async def _beat(self, gateway: str, registration_id: str) -> bool:
        """Send a heartbeat; whether the gateway knows the registration."""
        answer = await self._client.post(
            f"{gateway}/v1/registrations/{registration_id}/heartbeat", json={"load": self._load()}
        )
        if answer.status_code == 404:
            return False
        if answer.status_code != 200:
            raise _Refused(str(_reply(answer).get("detail", answer.status_code)))
        return True


class _Refused(Exception):  # noqa: N818 - never leaves this module
    """The gateway says no."""


def _reply(answer: httpx.Response) -> dict[str, Any]:
    try:
        reply = answer.json()
    except ValueError:
        return {}
    return reply if isinstance(reply, dict) else {}


def _read_token(path: Any) -> str:
    try:
        token = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigurationError(f"cannot read the token in {path}: {error}") from error
    if not token:
        raise ConfigurationError(f"{path} holds no token")
    return str(token)
