"""The reference: a bare Starlette WebSocket with orjson and nothing of ours but the environment.

Each socket has environments of its own, kept in a list; a frame is parsed, the environments are stepped, the outcomes
are serialised. There are no sessions, checks, retries, journals or metrics, so the difference to `roll-serve` is what
those cost. `--env none` steps nothing and answers a constant: the price of the transport. `--gymnasium ID` steps an
environment of Gymnasium's.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import gymnasium
import orjson
from echo import serve_on_a_free_port
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from rollgym.envs.registry import builtin_environments

Build = Callable[[], gymnasium.Env[Any, Any]]
CONSTANT = {"observation": "P___\n_O_O\n___O\nO__G", "reward": 0.0, "terminated": False, "truncated": False}


def step(environment: gymnasium.Env[Any, Any], action: Any) -> dict[str, Any]:
    observation, reward, terminated, truncated, info = environment.step(action)
    outcome = {
        "observation": observation,
        "reward": reward,
        "terminated": terminated,
        "truncated": truncated,
        "info": info,
    }
    if terminated or truncated:
        outcome["reset"] = environment.reset()
    return outcome


def builtin(env_id: str) -> Build:
    build: Build = builtin_environments()[env_id].load()
    return build


def serve(build: Build | None) -> Starlette:
    async def bare(websocket: WebSocket) -> None:
        environments: list[gymnasium.Env[Any, Any]] = []
        await websocket.accept()
        try:
            while True:
                frame = orjson.loads(await websocket.receive_text())
                ops = frame["ops"] if frame["op"] == "batch" else [frame]
                if build is None:
                    answers = [CONSTANT for _ in ops]
                else:
                    while len(environments) < len(ops):
                        environments.append(build())
                        environments[-1].reset(seed=len(environments))
                    answers = [step(each, op["action"]) for each, op in zip(environments, ops, strict=False)]
                await websocket.send_text(orjson.dumps({"id": frame["id"], "results": answers}).decode())
        except WebSocketDisconnect:
            return

    return Starlette(routes=[WebSocketRoute("/v1/ws", bare)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", default="FrozenLake-v0")
    parser.add_argument("--gymnasium", help="a Gymnasium id to serve instead")
    options = parser.parse_args()
    build: Build | None = None
    if options.gymnasium is not None:
        build = functools.partial(gymnasium.make, options.gymnasium, disable_env_checker=True)
    elif options.env != "none":
        build = builtin(options.env)
    serve_on_a_free_port(serve(build))


if __name__ == "__main__":
    main()
