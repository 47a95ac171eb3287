"""Attempts at a run: what dies between two of them, and who ends it there."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollgym.trainer.config.load import settings_from
from rollgym.trainer.core.errors import RoleDiedError, RoleLostError
from rollgym.trainer.core.shutdown import GracefulShutdown, InterruptedRunError
from rollgym.trainer.records.checkpoint import CheckpointStore
from rollgym.trainer.run.roles import PersistentRoles
from rollgym.trainer.run.supervision import Supervision


@dataclass
class Supervised:
    """A run whose roles are none."""

    directory: Path

    def __post_init__(self):
        settings = settings_from(
            {
                "tasks": [{"env_id": "FrozenLake-v0"}],
                "output_dir": str(self.directory),
                "cluster": {"restart_after_s": 0.3},
            }
        )
        self.shutdown = GracefulShutdown()
        store = CheckpointStore(self.directory / "checkpoints", keep=1)
        self.supervision = Supervision(
            settings, store, self.shutdown, PersistentRoles(settings, self.shutdown)
        )

    async def attempt(self, death):
        with self.shutdown.watching():
            async with self.supervision.attempt():
                raise death

    def ends(self, *reasons):
        """Have somebody end the run for these reasons, once it waits before its next attempt."""
        for number, reason in enumerate(reasons, start=1):
            asyncio.get_running_loop().call_later(0.1 * number, self.shutdown.end, reason)


POLICY = RoleDiedError("actor_train", "rank 0 of actor_train is gone")
CRITIC = RoleDiedError("critic", "rank 0 of critic is gone")


async def test_a_role_that_dies_while_another_is_waited_for_is_started_again_with_it(tmp_path, capsys):
    run = Supervised(tmp_path)
    run.ends(CRITIC)
    async with asyncio.timeout(30):
        await run.attempt(POLICY)
    assert not run.supervision.done
    assert run.shutdown.reason is None
    said = " ".join(capsys.readouterr().out.split())
    assert "actor_train is started again in 0.3 s (1 of 3)" in said
    assert "critic is started again in 0.3 s (1 of 3)" in said


async def test_processes_of_one_role_that_die_one_after_the_other_are_one_restart(tmp_path, capsys):
    run = Supervised(tmp_path)
    run.ends(*(RoleDiedError("actor_train", f"rank {rank} of actor_train is gone") for rank in range(1, 6)))
    async with asyncio.timeout(30):
        await run.attempt(POLICY)
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("is started again") == said.count("(1 of 3)") == 1
    assert "rank 5 of actor_train is gone" in said


@pytest.mark.parametrize("reason", [InterruptedRunError(2), RoleLostError("critic", "", "died too often")])
async def test_who_ends_a_run_between_two_attempts_ends_it(tmp_path, reason):
    run = Supervised(tmp_path)
    run.ends(reason)
    with pytest.raises(type(reason)):
        async with asyncio.timeout(30):
            await run.attempt(POLICY)


async def test_an_interruption_counts_more_than_a_death_that_came_before_it(tmp_path):
    run = Supervised(tmp_path)
    run.ends(CRITIC, InterruptedRunError(2))
    with pytest.raises(InterruptedRunError):
        async with asyncio.timeout(30):
            await run.attempt(POLICY)
