"""What a call that opened a session answered; kept, and given again after a crash."""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from gymnasium import Space

from env_server.access.context import Context
from env_server.journal.journal_file import Opening
from env_server.operations.failures import busy, step_mismatch
from env_server.operations.running import Runner
from env_server.sessions.replies import Reply, reset_reply, session_reply
from env_server.sessions.session import ResetRecord, Session
from env_server.sessions.sessions import Sessions, session_gone


class OpenedSession(NamedTuple):
    """What the answer to a call that opened a session holds; the session itself may end before it is asked again."""

    reply: Reply
    observation_space: Space[Any]
    episode: int
    step: int
    reset: ResetRecord | None

    @classmethod
    def of(cls, session: Session, reset: ResetRecord | None) -> "OpenedSession":
        """A session as it is now."""
        return cls(session_reply(session), session.observation_space, session.episode, session.step, reset)

    def answer(self, context: Context) -> Reply:
        """The answer to the make of one session, in the caller's encoding.

        Raises:
            EncodeError: If the environment gave something that has no form on the wire.
        """
        if self.reset is None:
            return self.reply
        return {**self.reply, "reset": reset_reply(self.observation_space, self.reset, context)}


async def open_again(
    opening: Opening, opened: Sequence[Session], sessions: Sessions, runner: Runner
) -> list[OpenedSession]:
    """What a request answered in the process before this one: replay gives it again.

    Raises:
        ProblemError: `session_gone` or `step_mismatch`, if a session has ended or gone on since.
    """
    if opening.op == "fork":
        # Its answer names the copies, and says no more of them.
        return [OpenedSession.of(session, None) for session in opened]
    return list(await asyncio.gather(*(_open_again(opening, each, sessions, runner) for each in opened)))


async def _open_again(
    opening: Opening, session: Session, sessions: Sessions, runner: Runner
) -> OpenedSession:
    ended = sessions.end_reason(session.session_id)
    if ended is not None:
        raise session_gone(session.session_id, ended)
    if session.running is not None:
        raise busy(session.running)
    if (session.episode, session.step) != (opening.episode, opening.step):
        raise step_mismatch(session, f"{session.session_id!r} has gone on since this {opening.op} opened it")

    async def rebuilt() -> ResetRecord | None:
        if session.attached:
            await session.worker.close(session.session_id)
            session.attached = False
        return await runner.persist(session, lambda: runner.rebuild(session, session.journal))

    began = await runner.result(runner.start(session, "recovery", rebuilt()))
    return OpenedSession.of(session, began if opening.op == "make" else None)
