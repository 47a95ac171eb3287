"""Plays each environment of a server with the OpenEnv environment of verifiers, by a script: the server's URL."""

import asyncio
import itertools
import json
import sys
import types
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from verifiers.v1.tasksets.openenv import OpenEnvConfig, OpenEnvEnv, OpenEnvTaskset

TURNS = 12
# A text with an answer, one that is also JSON, and one that is neither.
REPLIES = ("<answer>Right</answer>", "42", "no idea")


class Trace:
    def __init__(self) -> None:
        self.rewards: dict[str, float] = {}

    def record_reward(self, name: str, reward: float) -> None:
        self.rewards[name] = reward

    def stop(self, reason: str) -> None:
        raise AssertionError(reason)


class Interaction:
    """An agent that replies by a script until it has had its turns."""

    def __init__(self) -> None:
        self.trace = Trace()
        self._replies = itertools.cycle(REPLIES)
        self._turns = 0

    async def turn(self, payload: str) -> types.SimpleNamespace:
        self._turns += 1
        schema = json.loads(payload)["action_schema"]
        assert "available_tools" not in schema, "the environment was taken for one of tools"
        reply = action(schema["properties"]["action"], next(self._replies))
        return types.SimpleNamespace(terminated=self._turns > TURNS, last_reply=reply)


def action(schema: dict[str, Any], text: str) -> str:
    """A reply: a text, or the JSON of a value of the space."""
    if schema.get("type") == "string":
        return text
    space = schema["x-space"]
    if space["type"] == "Box":
        return json.dumps([0.0] * space["shape"][0])
    return json.dumps(schema["minimum"])


class Player:
    @asynccontextmanager
    async def interaction(self, task: object) -> AsyncIterator[Interaction]:
        self.last = Interaction()
        yield self.last


async def play(base_url: str) -> None:
    (task,) = OpenEnvTaskset(OpenEnvConfig(base_url=base_url, resets=[{"seed": 3}])).load()
    player = Player()
    environment = object.__new__(OpenEnvEnv)
    await environment.run(task, types.SimpleNamespace(player=player))
    assert "openenv_reward" in player.last.trace.rewards


if __name__ == "__main__":
    with urllib.request.urlopen(f"{sys.argv[1]}/v1/envs") as listed:
        env_ids = [each["env_id"] for each in json.load(listed)["envs"]]
    lost = 0
    for env_id in env_ids:
        try:
            asyncio.run(play(f"{sys.argv[1]}/openenv/{env_id}"))
        except Exception as error:  # noqa: BLE001 - it is told, and the next environment is tried
            lost += 1
            print(f"{env_id}: {type(error).__name__}: {error}")
    print(f"verifiers: {len(env_ids) - lost} of {len(env_ids)} environments are played")
    sys.exit(bool(lost))
