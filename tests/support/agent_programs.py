"""Runs agents on libraries from PyPI as programs, each by an interpreter that has the library."""

import asyncio
import importlib.util
import sys
from pathlib import Path

import pytest

from tests.support.peer_processes import peer_environment

_ENVIRONMENTS = Path(__file__).parents[2] / "build" / "agents"
_PLAYERS = Path(__file__).with_name("agent_libraries.py")
_PATIENCE_S = 240.0


def interpreter_of(library: str) -> Path:
    """The interpreter of the library's environment; the test is skipped if there is none."""
    if library == "openai" and importlib.util.find_spec("openai") is not None:
        return Path(sys.executable)
    found = _ENVIRONMENTS / library / "bin" / "python"
    if not found.exists():
        pytest.skip(f"{library} is not installed: .ci/agents {library}")
    return found


async def play(library: str, base_url: str) -> None:
    """Play the library's episode to its end.

    Raises:
        AssertionError: The program failed; with what it printed.
        TimeoutError: It did not end.
    """
    # Tracing and telemetry of theirs have no server here.
    environment = peer_environment() | {"OTEL_SDK_DISABLED": "true", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    process = await asyncio.create_subprocess_exec(
        interpreter_of(library),
        *(_PLAYERS, library, base_url),
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(_PATIENCE_S):
            printed, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, printed.decode(errors="replace")[-4000:]
