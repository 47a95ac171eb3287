"""What is packed and what it asks for: examples and templates in a wheel, the lock of the serving install."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
_OUTPUTS = """
import setuptools  # It stands for distutils.
from distutils.core import run_setup

built = run_setup("setup.py", stop_after="config")
built.include_package_data = False  # what an earlier build wrote into the .egg-info says nothing of this one
command = built.get_command_obj("build_py")
command.ensure_finalized()
command.build_lib = ""
print(*command.get_outputs(), sep="\\n")
"""


def packaged() -> set[str]:
    """What a build takes into the wheel; nothing is built."""
    done = subprocess.run(
        [sys.executable, "-c", _OUTPUTS], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines())


def test_the_wheel_has_every_example_and_every_template() -> None:
    files = packaged()
    for folder in ("examples", "clients/scaffold/templates"):
        found = {
            f"rollgym/{path.relative_to(ROOT)}"
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert len(found) > 15
        assert found <= files, sorted(found - files)
    assert not any("__pycache__" in name for name in files)


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


def test_what_an_older_build_of_the_clone_left_is_not_packed(tmp_path: Path) -> None:
    left = tmp_path / "lib" / "envs" / "__init__.py"
    left.parent.mkdir(parents=True)
    left.touch()
    build = ["egg_info", "--egg-base", str(tmp_path), "build", "--build-base", str(tmp_path)]
    subprocess.run([sys.executable, "setup.py", "-q", *build], cwd=ROOT, check=True)
    assert [each.name for each in (tmp_path / "lib").iterdir()] == ["rollgym"]
    assert (tmp_path / "lib" / "rollgym" / "envs" / "__init__.py").is_file()
