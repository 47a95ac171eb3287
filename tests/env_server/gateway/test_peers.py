"""Calls to another I/O process reach it, or are tried anew."""

import asyncio
import os
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.gateway.peers import Forwarder


async def test_connections_that_nobody_reads_are_not_tries() -> None:
    """A process that ends accepts connections until its listening socket goes, the last of its files."""
    begun = asyncio.Event()
    refused = 0

    async def answer(caller: Mapping[str, Any], op: str, fields: dict[str, Any], binary: bool) -> Any:
        return {"op": op, "calls": fields["calls"]}

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal refused
        refused += 1
        writer.close()
        if refused == 5:
            begun.set()

    with TemporaryDirectory() as name:
        directory = Path(name)
        here, there = (Forwarder(directory, index, 2) for index in range(2))
        dying = await asyncio.start_unix_server(hang_up, directory / "io-1.sock")
        await here.start(answer, lambda index: None)
        called = asyncio.ensure_future(here.call(1, {}, "step", {"calls": 1}, binary=True))
        async with asyncio.timeout(30):
            await begun.wait()
            dying.close()
            await there.start(answer, lambda index: None)
            assert await called == {"op": "step", "calls": 1}
        await here.close()
        await there.close()


@pytest.mark.parametrize("numbered", [True, False])
async def test_a_step_is_not_known_if_the_process_ends_that_runs_it(numbered: bool) -> None:
    """It may be taken; one that names its place is passed on again."""
    runs = asyncio.Event()

    async def run(caller: Mapping[str, Any], op: str, fields: dict[str, Any], binary: bool) -> Any:
        runs.set()
        await asyncio.Event().wait()

    async def answer(caller: Mapping[str, Any], op: str, fields: dict[str, Any], binary: bool) -> Any:
        return {"op": op}

    with TemporaryDirectory() as name:
        here, ending, following = (Forwarder(Path(name), index, 2) for index in (0, 1, 1))
        await here.start(answer, lambda index: None)
        await ending.start(run, lambda index: None)
        fields = {"step": 0} if numbered else {}
        called = asyncio.ensure_future(here.call(1, {}, "step", fields, binary=True))
        async with asyncio.timeout(30):
            await runs.wait()
            await ending.close()
            await following.start(answer, lambda index: None)
            if numbered:
                assert await called == {"op": "step"}
            else:
                with pytest.raises(ProblemError, match="whether the step was taken is not known"):
                    await called
        await here.close()
        await following.close()


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Use all descriptors up that this process may have."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 4, most))
    try:
        with suppress(OSError):
            while True:
                held.append(os.dup(0))
        yield
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))


async def test_a_process_without_descriptors_reaches_the_others_once_it_has_some() -> None:
    async def answer(caller: Mapping[str, Any], op: str, fields: dict[str, Any], binary: bool) -> Any:
        return {"op": op}

    with TemporaryDirectory() as name:
        here, there = (Forwarder(Path(name), index, 2) for index in range(2))
        for each in (here, there):
            await each.start(answer, lambda index: None)
        with no_descriptor_left():
            called = asyncio.ensure_future(here.call(1, {}, "session", {}, binary=True))
            ended, _ = await asyncio.wait([called], timeout=0.2)
            assert not ended
        async with asyncio.timeout(30):
            assert await called == {"op": "session"}
        await here.close()
        await there.close()
