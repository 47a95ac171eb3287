"""Requests that fit their schema and mean no good."""

import asyncio

from tests.support.wire import Server


async def test_time_outs_too_short_for_a_clock(server: Server) -> None:
    """A deadline that has passed when it is set is one all the same, and harms nobody else."""
    item = {"response": "4", "answer": "4"}
    async with server.http() as client, server.socket() as socket:
        for timeout_s in (3e-153, 1e-9, 1e-6):
            answer = await client.post(
                "/v1/verify/Equal", json={"items": [item] * 4, "timeout_s": timeout_s}, timeout=60
            )
            assert answer.status_code == 200
            assert {each["outcome"] for each in answer.json()["results"]} <= {"correct", "timeout"}
            made = await socket.make("SlowCount")
            step = await socket.ask("step", session_id=made, action="a", timeout_s=timeout_s)
            assert "ok" in step or step["error"]["code"] == "step_timeout"
            assert (await socket.call("reset", session_id=made))["step"] == 0
            await socket.call("close", session_id=made)
        verdicts = (await socket.call("verify", env_id="Equal", items=[item] * 4))["results"]
        assert {each["outcome"] for each in verdicts} == {"correct"}


async def test_idle_times_too_short_for_a_clock(server: Server) -> None:
    async with server.http() as client:
        before = (await client.get("/v1/info")).json()["capacity"]["sessions"]
        for idle_timeout_s in (3e-153, 1e-9):
            body = {"env_id": "Count", "idle_timeout_s": idle_timeout_s, "count": 3}
            assert (await client.post("/v1/sessions", json=body)).status_code == 201
        async with asyncio.timeout(30):
            while (await client.get("/v1/info")).json()["capacity"]["sessions"] != before:
                await asyncio.sleep(0.01)
