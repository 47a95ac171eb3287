"""Which of TextArena's games our adapter can play here, without a network.

    python peers/games/textarena_ids.py --out benchmarks/results/textarena_ids.json

Each game is made, begun twice and played for a few moves, in two processes with different PYTHONHASHSEED; a game that
answers differently there is named as not deterministic.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import io
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import textarena
from textarena.envs.registration import ENV_REGISTRY

from rollgym.clients.measuring.revision import revision
from rollgym.envs.adapters.textarena import TextArenaAdapter

PATIENCE_S = 20
HOME = str(Path(textarena.__file__).parent)
MOVES = ("[0 1]", "hello", "[1]", "[0]", "[A C]", "[2]")


class TooLongError(Exception):
    pass


def refuse(*_, **__):
    raise OSError("there is no network")


def too_long(*_):
    raise TooLongError(f"took more than {PATIENCE_S} s")


def attempt(game):
    """Players of a game and a digest of what it says; or why it cannot be played."""
    signal.alarm(PATIENCE_S)
    try:
        environment = TextArenaAdapter(game)
        said = hashlib.blake2b(digest_size=8)
        for seed in (0, 1):
            text, info = environment.reset(seed=seed)
            said.update(text.encode())
            for move in MOVES:
                listed = info.get("available_actions") or [move]
                text, reward, terminated, truncated, info = environment.step(listed[0])
                said.update(f"{text} {reward}".encode())
                if terminated or truncated:
                    break
        return {"players": len(info["rewards"]), "said": said.hexdigest()}
    except Exception as error:  # noqa: BLE001 - a game of others: whatever it raises is what is looked for
        told = " ".join(str(error).replace(HOME, "textarena").split())
        return {"error": f"{type(error).__name__}: {told[:160]}"}
    finally:
        signal.alarm(0)


def play_all():
    """Print what became of each game."""
    socket.socket.connect = socket.getaddrinfo = refuse
    signal.signal(signal.SIGALRM, too_long)
    games = [name.removesuffix("-raw") for name in ENV_REGISTRY if name.endswith("-raw")]
    with contextlib.redirect_stdout(io.StringIO()):
        found = {game: attempt(game) for game in games}
    print(json.dumps(found))


def elsewhere(salt):
    done = subprocess.run(
        [sys.executable, __file__, "--play"],
        env=os.environ | {"PYTHONHASHSEED": salt},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    return json.loads(done.stdout)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--play", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.play:
        play_all()
        return
    here, there = elsewhere("1"), elsewhere("4711")
    played = {game: each["players"] for game, each in here.items() if "players" in each}
    commit = revision()
    result = {
        "command": "python peers/games/textarena_ids.py",
        "commit": commit,
        "textarena": importlib.metadata.version("textarena"),
        "ids": len(here),
        "played": len(played),
        "not_deterministic": sorted(game for game in played if here[game] != there[game]),
        "players": played,
        "errors": {game: each["error"] for game, each in here.items() if "error" in each},
    }
    print(json.dumps({name: result[name] for name in ("ids", "played", "not_deterministic")}))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
