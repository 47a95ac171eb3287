"""Plays an episode with ROCK's own environment client, which finds the server by ROCK_BASE_URL: id, seed, actions."""

import json
import sys
from typing import Any

import rock


def play(env_id: str, seed: int, actions: list[str]) -> dict[str, Any]:
    env = rock.make(env_id)
    observation, info = env.reset(seed=seed)
    seen = [(observation, 0.0, False, False)]
    for action in actions:
        observation, reward, terminated, truncated, info = env.step(action)
        seen.append((observation, reward, terminated, truncated))
    env.close()
    return {"seen": seen, "success": info.get("success")}


def refused(env_id: str) -> dict[str, Any]:
    """What ROCK's client says of a make that is refused."""
    try:
        rock.make(env_id)
    except Exception as error:  # noqa: BLE001 - ROCK raises no class of its own
        return {"told": str(error)}
    return {"told": ""}


if __name__ == "__main__":
    if len(sys.argv) == 2:
        print(json.dumps(refused(sys.argv[1])))
    else:
        print(json.dumps(play(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))))
