"""A reference for gateways: a bare Starlette WebSocket that answers every step with the bytes that a node answers.

There is no environment and no session behind it. Frames are parsed and serialised with orjson, one answer for each
frame, so what a gateway uses beyond it is the price of passing an operation on to another server.
"""

import socket
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

SPACES = {"action_space": {"type": "UnicodeText"}, "observation_space": {"type": "UnicodeText"}}
STEP = {
    "observation": "P__\n_O_\n__G",
    "reward": 0.0,
    "terminated": False,
    "truncated": False,
    "info": {
        "success": False,
        "action_is_valid": True,
        "format_penalty": 0.0,
        "env_reward": 0.0,
        "available_actions": ["Left", "Down", "Right", "Up"],
        "metrics": {"steps": 1, "invalid_replies": 0},
        "prob": 1.0,
        "anchor": "0",
        "state": {"position": 0, "rows": ["SFF", "FHF", "FFG"]},
    },
    "episode": 0,
    "step": 1,
}
"""What FrozenLake-v0 answers."""
RESET = {"observation": STEP["observation"], "info": STEP["info"], "episode": 0, "step": 0, "seed": 1}
ENV = SPACES | {
    "env_id": "FrozenLake-v0",
    "version": "1",
    "kind": "episodic",
    "origin": "local",
    "isolation": "inline",
    "description": "",
    "kwargs_schema": {},
    "max_episode_steps": None,
    "deterministic": False,
    "forkable": False,
    "replicas": 1,
    "metadata": {},
}
INFO = {"name": "echo", "version": "0", "protocol": 1, "role": "server", "processes": 1, "process": 0}


def answer(fields: dict[str, Any]) -> Any:
    op = fields["op"]
    if op == "step":
        return STEP
    if op == "reset":
        return RESET
    if op == "make":
        made = [SPACES | {"session_id": f"0.{number}"} for number in range(fields.get("count", 1))]
        return {"sessions": made} if "count" in fields else made[0]
    if op == "envs":
        return ENV
    if op == "info":
        return INFO | {"limits": {}, "capacity": {}}
    return {"closed": 0} if op == "close" else {}


def serve() -> Starlette:
    async def echo(websocket: WebSocket) -> None:
        offered = websocket.scope["subprotocols"]
        await websocket.accept(subprotocol=offered[0] if offered else None)
        try:
            while True:
                frame = orjson.loads(await websocket.receive_text())
                reply: dict[str, Any]
                if frame["op"] == "batch":
                    results = [{"ok": answer(fields)} for fields in frame["ops"]]
                    reply = {"id": frame["id"], "results": results}
                else:
                    reply = {"id": frame["id"], "ok": answer(frame)}
                await websocket.send_text(orjson.dumps(reply).decode())
        except WebSocketDisconnect:
            return

    return Starlette(routes=[WebSocketRoute("/v1/ws", echo)])


def serve_on_a_free_port(application: Starlette) -> None:
    """Serve as `roll-serve` does, and say where."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(2048)
    print(f"serving on http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    config = uvicorn.Config(
        application,
        ws="websockets-sansio",
        loop="uvloop",
        http="httptools",
        ws_per_message_deflate=False,
        ws_ping_interval=None,
        access_log=False,
        log_level="warning",
    )
    uvicorn.Server(config).run(sockets=[listening])


def main() -> None:
    serve_on_a_free_port(serve())


if __name__ == "__main__":
    main()
