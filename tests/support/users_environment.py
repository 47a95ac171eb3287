"""A virtual environment of a user's, that has rollgym in its site-packages."""

import sys
import venv
from pathlib import Path

from tests.support.processes import ROOT


def make_users_environment(folder: Path) -> Path:
    """Make the environment, and return its Python.

    Only `py.typed` opens the door to the types there: a checker does not find this repository in another way.
    """
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    places = [Path(each) for each in sys.path if each.endswith("site-packages")]
    ours = next(place for place in places if (place / "gymnasium").exists())
    (site / "rollgym.pth").write_text(f"{ROOT}\n{ours}\n")
    return folder / "bin" / "python"
