"""Calls to another I/O process reach it, or are tried anew."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rollgym.env_server.peers.forwarder import Forwarder


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
