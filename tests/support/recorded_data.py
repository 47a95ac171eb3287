"""Recorded behaviour of reference programs, which lies beside the repository or where ROLLGYM_DATA says."""

import os
from pathlib import Path

import pytest


def recorded(name: str) -> Path:
    """Return a file or folder of recorded data; skip the test where it is absent."""
    folder = Path(os.environ.get("ROLLGYM_DATA", Path(__file__).parents[2].parent / "shared" / "data"))
    if not (folder / name).exists():
        pytest.skip(f"no recorded data: {folder / name} is absent (set ROLLGYM_DATA)")
    return folder / name
