"""The folder in which a reader of the documentation types, with the files that its pages call theirs."""

import json
from pathlib import Path

from tests.support.processes import ROOT
from tests.support.snippets import fences_of

_GUIDE = ROOT / "docs" / "guides" / "tool_environment.md"

_GAME = """
import gymnasium

from rollgym import UnicodeText


class Game(gymnasium.Env):
    def __init__(self):
        self.action_space = self.observation_space = UnicodeText()
"""
_PACKAGE = """
import gymnasium

gymnasium.register("MyGame-v0", entry_point="my_package.game:Game")
"""
_PROGRAMS = {"program.py": "print(input())\n", "program.cpp": "int main() {}\n", "input": "hello\n"}
_LEVEL = "#####\n#@$.#\n#####\n"
_ITEM = {"inputs": ["1\n"], "outputs": ["1\n"], "prompt": "Print what is put in."}


def make_readers_folder(folder: Path) -> None:
    """Put a reader's files there; the repository's own are found beside them, as in a clone.

    Args:
        folder: An empty one.
    """
    for name in ("benchmarks", "deploy", "examples", "peers", "tests"):
        (folder / name).symlink_to(ROOT / name)
    files = {
        **_PROGRAMS,
        "orders.py": next(each.text for each in fences_of(_GUIDE) if each.language == "python"),
        "my_package/__init__.py": _PACKAGE,
        "my_package/game.py": _GAME,
        "runs/frozen_lake/metrics.jsonl": json.dumps({"step": 1, "rollout/success": 0.5}) + "\n",
        "server.yaml": "log_level: warning\n",
        "item.json": json.dumps({"response": "```python\nprint(input())\n```", **_ITEM}),
        "srv/boxoban-levels/medium/000.txt": f"; 0\n{_LEVEL}",
        "srv/levels/mine.xsb": _LEVEL,
        "srv/items/humaneval.jsonl": json.dumps(_ITEM) + "\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
