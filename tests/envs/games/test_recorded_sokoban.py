"""Sokoban-v0 over HTTP does what gym-sokoban 0.0.6 was recorded to do, step by step."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.wire import Server

TRACES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "recorded" / "sokoban.json").read_text())


@pytest.fixture(scope="module")
def server() -> Any:
    with Server() as running:
        yield running


@pytest.mark.parametrize("trace", TRACES, ids=range(len(TRACES)))
async def test_traces_are_gym_sokobans(server: Server, trace: dict[str, Any]) -> None:
    kwargs = {"level": trace["level"], "max_episode_steps": trace["limit"]}
    async with server.http() as client:
        made = await client.post("/v1/sessions", json={"env_id": "Sokoban-v0", "kwargs": kwargs, "reset": {}})
        assert made.json()["reset"]["info"]["state"]["level"] == trace["level"]
        path = f"/v1/sessions/{made.json()['session_id']}/step"
        for number, (action, reward, board) in enumerate(trace["steps"], 1):
            result = (await client.post(path, json={"action": action})).json()
            last = number == len(trace["steps"])
            assert result["info"]["state"]["level"] == board
            assert result["reward"] == pytest.approx(reward, abs=1e-9)
            assert result["terminated"] == (last and trace["solved"])
            assert result["truncated"] == (last and not trace["solved"])
