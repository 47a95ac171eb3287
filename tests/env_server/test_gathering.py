"""Answers that are written together."""

import asyncio
import json
from typing import Any

import pytest

from env_server.gathering import GatheringTransport
from tests.support.wire import Server


class Recorder:
    """A transport that remembers what was done to it."""

    def __init__(self) -> None:
        self.done: list[bytes | str] = []
        self.closing = False

    def write(self, data: bytes) -> None:
        self.done.append(data)

    def close(self) -> None:
        self.closing = True
        self.done.append("closed")

    def is_closing(self) -> bool:
        return self.closing

    def get_extra_info(self, name: str) -> str:
        return f"the {name}"


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def gathering(recorder: Recorder, waiting: int) -> tuple[Any, "asyncio.Queue[int]"]:
    queue: asyncio.Queue[int] = asyncio.Queue()
    for number in range(waiting):
        queue.put_nowait(number)
    return GatheringTransport(recorder, queue), queue


async def test_an_answer_goes_out_at_once_if_nothing_waits(recorder: Recorder) -> None:
    transport, _ = gathering(recorder, 0)
    transport.write(b"a")
    transport.write(b"b")
    assert recorder.done == [b"a", b"b"]


async def test_answers_go_out_together_with_that_of_the_last_frame(recorder: Recorder) -> None:
    transport, queue = gathering(recorder, 2)
    for part in (b"a", b"b"):
        transport.write(part)
        queue.get_nowait()
    assert recorder.done == []
    transport.write(b"c")
    assert recorder.done == [b"abc"]
    await asyncio.sleep(0)
    assert recorder.done == [b"abc"]


async def test_answers_go_out_at_the_end_of_the_turn_whatever_waits(recorder: Recorder) -> None:
    transport, _ = gathering(recorder, 1)
    transport.write(b"a")
    transport.write(b"b")
    assert recorder.done == []
    await asyncio.sleep(0)
    assert recorder.done == [b"ab"]
    transport.write(b"c")
    await asyncio.sleep(0)
    assert recorder.done == [b"ab", b"c"]


async def test_much_is_not_gathered(recorder: Recorder) -> None:
    transport, _ = gathering(recorder, 1)
    transport.write(b"a")
    transport.write(b"b" * 100_000)
    assert [len(part) for part in recorder.done] == [100_001]


async def test_closing_writes_first(recorder: Recorder) -> None:
    transport, _ = gathering(recorder, 1)
    transport.write(b"a")
    transport.close()
    assert recorder.done == [b"a", "closed"]


async def test_nothing_is_written_to_a_connection_that_is_gone(recorder: Recorder) -> None:
    transport, _ = gathering(recorder, 1)
    transport.write(b"a")
    recorder.closing = True
    await asyncio.sleep(0)
    assert recorder.done == []


async def test_everything_else_is_the_transport_s_own(recorder: Recorder) -> None:
    transport, _ = gathering(recorder, 0)
    assert transport.get_extra_info("peername") == "the peername"


async def test_many_frames_at_once_are_answered_in_order_and_wait_for_no_slow_one(server: Server) -> None:
    async with server.socket() as socket:
        slow = await socket.make("SlowCount")
        number = 1000
        frames = [{"id": number, "op": "step", "session_id": slow, "action": "sleep 0.5"}]
        frames += [{"id": number + count, "op": "ping"} for count in range(1, 500)]
        await asyncio.gather(*(socket.connection.send(json.dumps(frame)) for frame in frames))
        answers = [(await socket.receive())["id"] for _ in frames]
        assert answers == [*range(number + 1, number + 500), number]
