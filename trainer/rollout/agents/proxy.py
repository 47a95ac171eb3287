"""Sessions of a standalone proxy: they open by name or on request, and are written once they end."""

import asyncio
import re
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollgym.clients.protocol.json_text import read_shallow_json
from rollgym.trainer.core.errors import InvalidNumberError
from rollgym.trainer.core.run_files import WriteError
from rollgym.trainer.records.trajectory import Trajectory, TrajectoryOutcome
from rollgym.trainer.rollout.agents.black_box import give_posted, unfinished
from rollgym.trainer.rollout.agents.environment import EpisodeEnvironment
from rollgym.trainer.rollout.agents.errors import ApiError
from rollgym.trainer.rollout.agents.http import read_body, refusal, refuse_web_pages
from rollgym.trainer.rollout.agents.policy_service import PolicyService
from rollgym.trainer.rollout.agents.runners import AgentEnd
from rollgym.trainer.rollout.agents.session import AgentSession
from rollgym.trainer.tasks.task import Task

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_REMEMBERED = 65_536
_LONGEST_TASK = 1 << 16
_ENV_ID = "agent"


@dataclass(slots=True)
class _Open:
    session: AgentSession
    used: float


class ProxySessions:
    """The sessions of a proxy.

    Args:
        service: The policy service.
        write: Writes the record of an episode.
        token: Required to open a session; with None, any client opens one by naming it.
        idle_s: Sessions that are idle for this long end by themselves.
        clock: Unix time.

    Attributes:
        model: The name that the policy has in the API.
        written: Episodes that were written.
        unwritten: Records that the disk did not take; they are tried again.
    """

    def __init__(
        self,
        service: PolicyService,
        write: Callable[[Mapping[str, Any]], None],
        token: str | None,
        idle_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.model = service.model
        self.written = 0
        self.unwritten: deque[Mapping[str, Any]] = deque()
        self._service = service
        self._write = write
        self._token = token
        self._idle_s = idle_s
        self._clock = clock
        self._open: dict[str, _Open] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._open)

    # -- what the endpoint asks

    def session(self, key: str) -> AgentSession:
        """Return a session; an unknown one is opened if no token is required.

        Raises:
            ApiError: The session is unknown, or has ended.
        """
        found = self._open.get(key)
        if found is None:
            if key in self._ended:
                raise ApiError(410, "this session has ended", "session_ended")
            if self._token is not None or not _NAME.fullmatch(key):
                raise ApiError(
                    404, "there is no session of this key: open one by POST /sessions", "unknown_session"
                )
            found = self.open(key, {})
        found.used = asyncio.get_running_loop().time()
        return found.session

    def environment(self, key: str) -> EpisodeEnvironment | None:
        """Return None: a proxy's sessions have no environment."""
        return None

    def posted(self, key: str) -> None:
        """The agent is done: its episode is written.

        Raises:
            WriteError: If the disk does not take it; it is tried again when the next one ends.
        """
        self._close(key)

    # -- opening and closing

    def routes(self) -> list[Route]:
        """Return the routes that an endpoint of these sessions has beside the others."""
        return [Route("/sessions", self._open_on_request, methods=["POST"])]

    async def _open_on_request(self, request: Request) -> Response:
        """`POST /sessions`: open a session; `task` is kept in its record."""
        try:
            refuse_web_pages(request)
            self._require_token(request)
            key = secrets.token_urlsafe(24)
            self.open(key, _task_of(await read_body(request, _LONGEST_TASK)))
        except ApiError as error:
            return refusal(error)
        root = str(request.base_url).rstrip("/")
        return JSONResponse({"key": key, "base_url": f"{root}/s/{key}/v1"}, 201)

    def _require_token(self, request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._token is not None and not secrets.compare_digest(given.encode(), self._token.encode()):
            raise ApiError(
                401, "opening a session needs the proxy's token as a bearer token", "invalid_token"
            )

    def open(self, key: str, task: Mapping[str, Any]) -> _Open:
        """Open the session `key`, whose episode plays `task`."""
        options = {"session": key if self._token is None else "", **task}
        # The number tells its random streams apart.
        trajectory = Trajectory(Task(self._numbers, _ENV_ID, seed=0, options=options), 0)
        self._numbers += 1
        loop = asyncio.get_running_loop()
        opened = _Open(AgentSession(self._service, trajectory, None, self._clock), loop.time())
        self._open[key] = opened
        loop.call_later(self._idle_s, self._look_after, key)
        return opened

    def _look_after(self, key: str) -> None:
        opened = self._open.get(key)
        if opened is None:
            return
        loop = asyncio.get_running_loop()
        left = opened.used + self._idle_s - loop.time()
        if opened.session.busy or left > 0:
            loop.call_later(self._idle_s if opened.session.busy else left, self._look_after, key)
            return
        try:
            self._close(key, "nobody used it any more")
        except WriteError:
            loop.call_later(self._idle_s, self._write_all_quietly)

    def close(self) -> None:
        """End all sessions and write them.

        Raises:
            WriteError: If the disk does not take them.
        """
        for key in list(self._open):
            self._finish(key, "the proxy stopped")
        self._write_all()

    def _close(self, key: str, why: str = "") -> None:
        self._finish(key, why)
        self._write_all()

    def _finish(self, key: str, why: str) -> None:
        opened = self._open.pop(key, None)
        if opened is None:
            return
        opened.session.end()
        self._ended[key] = None
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        trajectory = opened.session.trajectory
        if trajectory.turns:
            _conclude(trajectory, opened.session, why)
            self.unwritten.append(trajectory.as_record())

    def _write_all(self) -> None:
        while self.unwritten:
            self._write(self.unwritten[0])
            self.unwritten.popleft()
            self.written += 1

    def _write_all_quietly(self) -> None:
        try:
            self._write_all()
        except WriteError:
            asyncio.get_running_loop().call_later(self._idle_s, self._write_all_quietly)


def _conclude(trajectory: Trajectory, session: AgentSession, why: str) -> None:
    try:
        give_posted(trajectory, session, AgentEnd())
    except InvalidNumberError as error:
        trajectory.outcome, trajectory.detail = TrajectoryOutcome.INVALID_NUMBER, str(error)
        return
    trajectory.outcome, trajectory.detail = unfinished(session, AgentEnd(), None)
    if why and trajectory.outcome is TrajectoryOutcome.TRUNCATED:
        trajectory.detail = why


def _task_of(body: bytes) -> Mapping[str, Any]:
    if not body:
        return {}
    try:
        value = read_shallow_json(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is no JSON: {error}", "invalid_json") from error
    if not isinstance(value, dict) or not isinstance(value.get("task", {}), dict):
        raise ApiError(400, "the body must be an object; its task, too", "invalid_value")
    return value.get("task", {})
