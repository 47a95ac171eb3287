"""Drawing the state of an environment."""

from collections.abc import Awaitable, Mapping
from typing import Any

from clients.protocol.messages import RenderRequest
from clients.protocol.values import EncodeError, encode_value
from env_server.access.context import Context
from env_server.messages.fields import own_fields
from env_server.messages.validation import invalid, validate
from env_server.operations.failures import busy, environment_error, not_reset
from env_server.operations.running import Runner
from env_server.sessions.replies import Reply
from env_server.sessions.session import Running, Session


class Rendering:
    """The handler of render.

    Args:
        runner: Runs the drawing.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def render(self, context: Context, session: Session, fields: Mapping[str, Any]) -> Awaitable[Reply]:
        """Draw the state."""
        request = validate(RenderRequest, own_fields(fields))
        modes = session.entry.render_modes
        mode = request.mode if request.mode is not None else next(iter(modes), None)
        if mode is None or mode not in modes:
            raise invalid("mode", f"{session.entry.env_id} renders {' or '.join(modes) or 'nothing'}")
        if session.running is not None:
            raise busy(session.running)
        if session.episode < 0:
            raise not_reset(session)
        running = self._runner.start(session, "render", self._render(session, mode))
        return self._rendered(running, context.binary)

    async def _render(self, session: Session, mode: str) -> Any:
        timeout = session.entry.step_timeout_s
        return await self._runner.in_episode(
            session, lambda: session.worker.render(session.session_id, mode, timeout=timeout)
        )

    async def _rendered(self, running: Running, binary: bool) -> Reply:
        frame = await self._runner.result(running)
        try:
            return {"frame": encode_value(None, frame, binary=binary)}
        except EncodeError as error:
            raise environment_error(error) from error
