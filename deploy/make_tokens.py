"""Makes a fleet's tokens once: one for each who calls, in a folder for each server that reads them.

python make_tokens.py [FOLDER]      FOLDER is /tokens if absent, as in compose.yaml
"""

import os
import sys
from pathlib import Path

from rollgym.env_server.access.tokens import Quota, add_token

_OWNER = 0o600
_ANYBODY = 0o644


def make_tokens(root: Path) -> bool:
    """Make the tokens of a fleet, unless they are there; gives whether they were made.

    Args:
        root: Holds a directory for each container that is given tokens.
    """
    done = root / "gateway" / "tokens.yaml"
    if done.exists():
        return False
    # Moved to its place last: what was interrupted is begun anew.
    gateway = root / "gateway" / "new.yaml"
    nodes = root / "nodes" / "tokens.yaml"
    sandbox = root / "sandbox" / "tokens.yaml"
    for name in ("gateway", "nodes", "registrar", "prometheus", "sandbox", "trainer"):
        (root / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    for unfinished in (gateway, nodes, sandbox):
        unfinished.unlink(missing_ok=True)
    _keep(root / "trainer" / "token", add_token(gateway, "trainer", ["play"]))
    _keep(root / "nodes" / "register", add_token(gateway, "nodes", ["register"]))
    _keep(root / "nodes" / "play", add_token(nodes, "gateway", ["play"]))
    _keep(root / "nodes" / "sandbox", add_token(sandbox, "nodes", ["play"], Quota(max_runs=1024)))
    _keep(root / "registrar" / "token", add_token(gateway, "registrar", ["register"]))
    # The image of Prometheus has a user of its own, and no other container has this directory.
    _keep(root / "prometheus" / "gateway", add_token(gateway, "prometheus", ["admin"]), _ANYBODY)
    _keep(root / "prometheus" / "nodes", add_token(nodes, "prometheus", ["admin"]), _ANYBODY)
    _keep(root / "prometheus" / "sandbox", add_token(sandbox, "prometheus", ["admin"]), _ANYBODY)
    gateway.rename(done)
    return True


def _keep(path: Path, token: str, mode: int = _OWNER) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as stream:
        stream.write(token + "\n")


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "/tokens")
    sys.stdout.write("tokens were made\n" if make_tokens(folder) else "the tokens are there\n")
