"""What all peers' servers share: the environment, and a uvicorn on a free port."""

import importlib.util
import socket
from typing import Any

import uvicorn

from rollgym.envs.games.frozen_lake import FrozenLakeEnv


class Lake:
    """FrozenLake-v0 of this repository, with outcomes as a tuple (observation, reward, terminated, truncated, info)."""

    def __init__(self) -> None:
        self._game = FrozenLakeEnv()

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return self._game.reset(seed=seed)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return self._game.step(action)


def serve(app: Any) -> None:
    """Run an application with uvicorn's defaults, on the fast loop and parser, without an access log.

    Connections are kept alive as long as by our server, so that sessions at rest keep theirs.
    """
    assert importlib.util.find_spec("uvloop"), "every server of the comparison has uvloop"
    assert importlib.util.find_spec("httptools"), "every server of the comparison has httptools"
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(2048)
    print(f"serving on http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    config = uvicorn.Config(app, access_log=False, log_level="warning", timeout_keep_alive=75)
    uvicorn.Server(config).run(sockets=[listening])
