"""Operations in workers that die: they are tried again, but not for ever."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rollgym.env_server.common.settings import ServerSettings
from rollgym.env_server.operations.runner import Runner
from rollgym.env_server.workers.base import NoWorker, WorkerLost
from tests.support.virtual_time import run_virtually


def test_an_operation_whose_workers_die_one_after_another_ends_in_time() -> None:
    settings = ServerSettings(make_timeout_s=120)
    sessions: Any = SimpleNamespace(end_reason=lambda session_id: None)
    session: Any = SimpleNamespace(session_id="0.a", episode=-1, attached=True, recoverable=False)
    tried = 0

    async def lost() -> None:
        nonlocal tried
        tried += 1
        await asyncio.sleep(10)
        raise WorkerLost("the worker process died")

    async def begin() -> float:
        metrics: Any = None
        runner = Runner(settings, metrics, sessions)
        with pytest.raises(NoWorker, match="the worker process died"):
            await runner.persist(session, lost)
        return asyncio.get_running_loop().time()

    assert run_virtually(begin()) == 130
    assert tried == 13
