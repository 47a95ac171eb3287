"""Functions for a `ProcessPool` that do what functions may do, at worst."""

import os
import time
from typing import Any


def act(request: dict[str, Any]) -> Any:
    match request["do"]:
        case "say":
            return {"pid": os.getpid(), "said": request.get("what")}
        case "hang":
            while True:
                pass
        case "sleep":
            time.sleep(request["seconds"])
            return "awake"
        case "die":
            os._exit(3)
        case "eat":
            return len(bytearray(64 * 2**30))
        case _:
            raise KeyError(request["do"])
