"""The first look at an environment: its actions, a reset, and the form in which it reads actions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gymnasium import Space

from clients.audit.policies import WORDINGS, Wording, listed_actions, takes_text
from clients.client.client import EnvClient
from clients.client.session import EnvSession
from clients.protocol.errors import ProblemError


@dataclass(frozen=True)
class Discovery:
    """What the first look shows.

    Attributes:
        action_space: The session's.
        info: Of the first reset; empty where that failed.
        wording: How texts are written so that the environment reads them.
    """

    action_space: Space[Any]
    info: Mapping[str, Any]
    wording: Wording


async def discover(client: EnvClient, env_id: str, kwargs: Mapping[str, Any]) -> Discovery:
    """Make a session, and see how it begins.

    Raises:
        ProblemError: There is no such environment, or it cannot be made.
    """
    session = await client.make(env_id, kwargs)
    info: Mapping[str, Any] = {}
    wording = Wording()
    try:
        _, info = await session.reset(0)
        listed = [each for each in listed_actions(info) if isinstance(each, str)]
        if takes_text(session.action_space) and listed:
            wording = await _wording(session, listed[0])
    except ProblemError as problem:
        if problem.code != "env_error":  # every part that plays will meet that, and say so
            raise
    await client.close_sessions([session])
    return Discovery(session.action_space, info, wording)


async def _wording(session: EnvSession, action: str) -> Wording:
    """Return the first form that the environment calls valid; the plain one where it calls none so."""
    for wording in WORDINGS:
        await session.reset(0)
        result = await session.step(wording.write(action))
        if result.info.get("action_is_valid") is True:
            return wording
    return Wording()
