"""The output of an environment server of one's own is read on, whatever it prints."""

import asyncio

from rollgym.trainer.core.embedded_server import _read_on


async def test_a_line_that_is_longer_than_a_reader_keeps_does_not_end_the_reading():
    output = asyncio.StreamReader(limit=16)
    output.feed_data(b"x" * 1000 + b"\n" + b"y" * 1000)
    output.feed_eof()
    async with asyncio.timeout(20):
        await _read_on(output)
    assert output.at_eof()
