"""Plays with OpenEnv's own clients, as a JSON list says: `[client, URL, seed, actions]`, or `["full", URL]` or
`["authors", URL]` each."""

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

from openenv.core import EnvClient, GenericEnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server.types import Action, Observation, State


class GameAction(Action):
    action: str


class GameObservation(Observation):
    text: str
    info: dict[str, Any]


class GameClient(EnvClient[GameAction, GameObservation, State]):
    """What an author of an OpenEnv environment writes: models, and how they are read."""

    def _step_payload(self, action: GameAction) -> dict[str, Any]:
        return action.model_dump()

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[GameObservation]:
        observation = GameObservation(
            **payload["observation"], reward=payload["reward"], done=payload["done"]
        )
        return StepResult(observation=observation, reward=observation.reward, done=observation.done)

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(**payload)


async def typed(url: str, seed: int, actions: Sequence[str]) -> dict[str, Any]:
    async with GameClient(base_url=url) as env:
        result = await env.reset(seed=seed, episode_id="mine")
        seen = [(result.observation.text, result.reward, result.done)]
        for action in actions:
            result = await env.step(GameAction(action=action))
            seen.append((result.observation.text, result.reward, result.done))
        state = await env.state()
        return {
            "seen": seen,
            "state": [state.episode_id, state.step_count],
            "success": result.observation.info["success"],
        }


def generic(url: str, seed: int, actions: Sequence[Any]) -> dict[str, Any]:
    with GenericEnvClient(base_url=url).sync() as env:
        result = env.reset(seed=seed, episode_id="mine")
        seen = [(_content(result), result.reward, result.done)]
        for action in actions:
            result = env.step({"action": action})
            seen.append((_content(result), result.reward, result.done))
        state = env.state()
        return {
            "seen": seen,
            "state": [state["episode_id"], state["step_count"]],
            "success": result.observation["info"].get("success"),
            "metadata": result.metadata,
        }


def full(url: str) -> dict[str, Any]:
    """What a client is told that finds no room, and whether there is room again once another has gone."""
    one, other = GenericEnvClient(base_url=url).sync(), GenericEnvClient(base_url=url).sync()
    one.reset()
    told = ""
    try:
        other.reset()
    except RuntimeError as error:
        told = str(error)
    one.close()
    done = other.reset().done
    other.close()
    return {"told": told, "done": done}


class GuessAction(Action):
    guess: int


class GuessObservation(Observation):
    hint: str = ""
    left: int = 0


class GuessClient(EnvClient[GuessAction, GuessObservation, State]):
    """What `openenv init` writes for the author of an environment, here of openenv_server.py's game."""

    def _step_payload(self, action: GuessAction) -> dict[str, Any]:
        return {"guess": action.guess}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[GuessObservation]:
        seen = payload.get("observation", {})
        observation = GuessObservation(hint=seen.get("hint", ""), left=seen.get("left", 0))
        return StepResult(observation=observation, reward=payload["reward"], done=payload["done"])

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(**payload)


async def authors(url: str) -> dict[str, Any]:
    """What the author's own client sees at a reset, and what it is told of a step."""
    async with GuessClient(base_url=url) as env:
        hint, told = (await env.reset(seed=2)).observation.hint, ""
        try:
            hint += (await env.step(GuessAction(guess=2))).observation.hint
        except RuntimeError as error:
            told = str(error)
        return {"hint": hint, "told": told}


def _content(result: StepResult[Any]) -> Any:
    return result.observation.get("text", result.observation.get("value"))


def play(client: str, url: str, seed: int = 0, actions: Sequence[Any] = ()) -> dict[str, Any]:
    if client == "full":
        return full(url)
    if client == "authors":
        return asyncio.run(authors(url))
    if client == "generic":
        return generic(url, seed, actions)
    return asyncio.run(typed(url, seed, actions))


if __name__ == "__main__":
    print(json.dumps([play(*each) for each in json.loads(sys.argv[1])]))
