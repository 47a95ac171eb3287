"""A server whose own journal is damaged."""

import random
import tempfile
from pathlib import Path

import httpx
from damaged_sessions import LEDGER, Seen, played

import rollgym
from rollgym.env_server.process.embedding import MountedServer
from tests.support.journal_damage import damage


async def look_at_own(seed: str) -> Seen:
    """Play, damage what a process that is killed then leaves, and look what another one makes of it."""
    chance, seen = random.Random(seed), Seen()
    with tempfile.TemporaryDirectory() as place:
        before, after = Path(place, "before"), Path(place, "after")
        app = rollgym.create_app(**LEDGER, state_dir=before)
        async with app.lifespan(), _client(app) as http:
            sessions = await played(http, chance)
            content = {path.name: path.read_bytes() for path in before.glob("journal-*.bin")}
        after.mkdir(0o700)
        for name, each in content.items():
            Path(after, name).write_bytes(each)
        seen.kind = damage(Path(after, "journal-0.bin"), chance)
        app = rollgym.create_app(**LEDGER, state_dir=after)
        async with app.lifespan(), _client(app) as http:
            for session in sessions:
                await session.look(http, seen)
    return seen


def _client(app: MountedServer) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")
