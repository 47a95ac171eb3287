"""The reference: a bare Starlette WebSocket that answers each frame with as many bytes as the real server would.

It parses the frame and serialises an answer with orjson, and does nothing else, so the difference to `roll-serve` is
what sessions, environments and checks cost.
"""

import argparse
import socket

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

STEP = {
    "observation": "P___\n_O_O\n___O\nO__G",
    "reward": 0.0,
    "terminated": False,
    "truncated": False,
    "info": {},
    "episode": 0,
    "step": 1,
}


async def echo(websocket: WebSocket) -> None:
    await websocket.accept()
    try:
        while True:
            frame = orjson.loads(await websocket.receive_text())
            if frame["op"] == "batch":
                answer = {"id": frame["id"], "results": [{"ok": frame["reply"]}] * len(frame["ops"])}
            else:
                answer = {"id": frame["id"], "ok": frame.get("reply", STEP)}
            await websocket.send_text(orjson.dumps(answer).decode())
    except WebSocketDisconnect:
        return


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ws", default="websockets-sansio")
    options = parser.parse_args()
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(2048)
    print(f"serving on http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    config = uvicorn.Config(
        Starlette(routes=[WebSocketRoute("/v1/ws", echo)]),
        ws=options.ws,
        loop="uvloop",
        http="httptools",
        ws_per_message_deflate=False,
        ws_ping_interval=None,
        access_log=False,
        log_level="warning",
    )
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
