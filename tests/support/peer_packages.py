"""Other projects' packages from PyPI, each with a cached virtual environment of its own: their pins are not ours."""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parent / "peers"

REQUIREMENTS = {
    "openenv": ("openenv==0.10.0",),
    # The extra has the server that runs in a sandbox, and gem-llm, which takes no Python after 3.12.0.
    "rock": ("rl-rock[rocklet]==1.11.0",),
}
_NEWEST_PYTHON = {"openenv": (3, 99), "rock": (3, 11)}


class NoPythonError(Exception):
    """There is no interpreter here that the packages work with."""


def peer_python(peer: str) -> Path:
    """The interpreter of a virtual environment with a peer's packages, made now if there is none."""
    requirements = REQUIREMENTS[peer]
    base = _interpreter(peer)
    key = hashlib.sha256(json.dumps([base, requirements]).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollgym" / "peers"
    cache.mkdir(parents=True, exist_ok=True)
    home = cache / f"{peer}-{key}"
    with (cache / f"{peer}-{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "complete").exists():
            _uv("venv", "--quiet", "--clear", "--python", base, str(home))
            _uv("pip", "install", "--quiet", "--python", str(home / "bin" / "python"), *requirements)
            (home / "complete").touch()
    return home / "bin" / "python"


def _interpreter(peer: str) -> str:
    newest = _NEWEST_PYTHON[peer]
    if sys.version_info[:2] <= newest:
        return sys.executable
    found = shutil.which(f"python{newest[0]}.{newest[1]}")
    if found is None:
        raise NoPythonError(f"{' '.join(REQUIREMENTS[peer])} needs Python {newest[0]}.{newest[1]}")
    return found


def _uv(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "uv", *arguments], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
