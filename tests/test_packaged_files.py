"""A wheel has the examples, and the templates of new folders, as they are in the repository."""

import subprocess
import sys
from pathlib import Path

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
