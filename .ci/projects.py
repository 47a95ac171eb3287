"""Write projects whose modules are called as the floors of this repository are, each with `use_rollgym.py` in it.

Usage: projects.py FOLDER
"""

import shutil
import sys
from pathlib import Path

NAMES = ("envs", "trainer", "clients", "sandbox", "env_server", "tests")
OWN = """
import gymnasium
{imports}

from rollgym import UnicodeText

class Coin(gymnasium.Env):
    metadata = {{"deterministic": True}}

    def __init__(self):
        self.action_space = self.observation_space = UnicodeText()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "heads or tails?", {{"instruction": "Reply with heads or tails.", "success": False}}

    def step(self, action):
        return "it is heads", float(action == "heads"), True, False, {{"success": action == "heads"}}
"""


def main(folder: Path) -> None:
    packages, files = folder / "packages", folder / "files"
    for name in NAMES:
        (packages / name).mkdir(parents=True)
        (packages / name / "__init__.py").write_text(f"MINE = {name!r}\n")
        files.mkdir(exist_ok=True)
        (files / f"{name}.py").write_text(f"MINE = {name!r}\n")
    for project in (packages, files):
        own = "\n".join(f"import {name}\n\nassert {name}.MINE == {name!r}" for name in NAMES)
        (project / "coin.py").write_text(OWN.format(imports=own))
        shutil.copy(Path(__file__).parent / "use_rollgym.py", project)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
