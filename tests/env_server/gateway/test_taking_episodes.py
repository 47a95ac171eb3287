"""Long episodes that a gateway takes from a node or from the shared journal: others have turns meanwhile."""

import asyncio
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any, TypeVar

from rollgym.clients.protocol.episode import PortableEpisode
from rollgym.env_server.gateway.journal_entries import Step, packed_steps, read_steps
from rollgym.env_server.gateway.relayed_session import RelayedSession
from rollgym.env_server.sessions.journal import Journal

_STEPS = 60_000
_Result = TypeVar("_Result")


def _episode(steps: int) -> dict[str, Any]:
    return {
        "env_id": "there",
        "env_version": "0",
        "seed": 3,
        "reset_digest": "0" * 16,
        "actions": [f"{number} of them" for number in range(steps)],
        "digests": [f"{number:016x}" for number in range(steps)],
    }


def _session(steps: int) -> RelayedSession:
    """One that has seen so many steps go by."""
    session = RelayedSession.__new__(RelayedSession)
    session.session_id = "S"
    session.entry = SimpleNamespace(env_id="Here")  # type: ignore[assignment]
    session.journal = Journal.from_portable(PortableEpisode.model_validate(_episode(steps)))
    session.episode, session.step, session.seed, session.incomplete = 0, steps, 3, False
    return session


async def _with_turns(work: Awaitable[_Result]) -> tuple[_Result, int]:
    """What comes of it, and how many turns others had until then."""
    turns, task = 0, asyncio.ensure_future(work)
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    return task.result(), turns


async def test_steps_are_packed_and_read_in_turns() -> None:
    episode = _episode(_STEPS)
    packed, turns = await _with_turns(packed_steps("S", 0, episode["actions"], episode["digests"]))
    assert turns >= 5
    steps, turns = await _with_turns(read_steps("S", 0, packed))
    assert turns >= 5
    assert steps == [Step(*each) for each in zip(episode["actions"], episode["digests"], strict=True)]


async def test_a_session_learns_what_others_have_done_with_it() -> None:
    for steps in (5, _STEPS):
        session = _session(2)
        _, turns = await _with_turns(session.take_episode(_episode(steps)))
        assert session.journal.portable(0).in_json()["actions"] == _episode(steps)["actions"]
        assert (session.episode, session.step, session.incomplete) == (0, steps, False)
        assert (turns > 2) == (steps == _STEPS)


async def test_what_goes_by_while_an_episode_is_read_is_not_forgotten() -> None:
    session = _session(2)
    taking = asyncio.ensure_future(session.take_episode(_episode(_STEPS)))
    await asyncio.sleep(0)
    step = {"episode": 0, "step": 3, "observation": 1, "reward": 0.0, "terminated": False, "truncated": False}
    session.take_step({"action": "new"}, step, False)
    await taking
    assert (session.step, session.journal.actions[-1], session.incomplete) == (3, "new", True)


async def test_the_shared_journal_is_told_of_all_steps() -> None:
    session, episode = _session(2), _episode(_STEPS)
    told, turns = await _with_turns(session.note_episode(1, episode))
    assert (told[0], told[-_STEPS - 1]) == ("episode", _STEPS)
    assert Step.read(told[-1], "S", 0, _STEPS - 1) == Step(episode["actions"][-1], episode["digests"][-1])
    assert turns > 5
