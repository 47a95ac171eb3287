"""The lock of the serving install against what the package asks for."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PIN = re.compile(r"^([a-z0-9-]+)==(\S+)(?: ; [^\\]+)? \\$", re.MULTILINE)


def test_the_lock_holds_what_the_serving_install_asks_for() -> None:
    text = (ROOT / "requirements-server.lock").read_text()
    pinned: dict[str, list[str]] = {}
    for name, version in PIN.findall(text):
        pinned.setdefault(name, []).append(version)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for wanted in map(Requirement, project["dependencies"]):
        versions = pinned.get(wanted.name, [])
        assert versions, (
            f"{wanted.name} is not in requirements-server.lock; its first lines say how it is made"
        )
        assert all(wanted.specifier.contains(version) for version in versions), wanted


def test_every_pin_has_hashes() -> None:
    text = (ROOT / "requirements-server.lock").read_text()
    pins = len(PIN.findall(text))
    blocks = re.findall(r"^[a-z][^\n]*\\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", text, re.MULTILINE)
    assert pins == len(blocks) > 30
