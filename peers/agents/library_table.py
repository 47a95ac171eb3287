"""Writes what `libraries.py` has measured as the table of docs/guides/agent_libraries.md.

python peers/agents/library_table.py
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "agent_libraries.json"
PAGE = ROOT / "docs" / "guides" / "agent_libraries.md"
PLAYERS = Path(__file__).parent / "players"
_PLAYER = re.compile(r"^# (\w+) = (\[.*\])$", re.MULTILINE)
BEGIN, END = "<!-- libraries -->\n", "<!-- end -->"


def players() -> dict[str, tuple[Path, list[str]]]:
    """The programs that play and what they need, by the names of the players."""
    programs = [(path, path.read_text()) for path in PLAYERS.glob("play_*.py")]
    return {
        name: (path, json.loads(needed)) for path, text in programs for name, needed in _PLAYER.findall(text)
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """The libraries as a table of Markdown, by the names of their players."""
    titles = (
        "library",
        "its episode",
        "asked for",
        "held",
        "ignored",
        "refused",
        "calls",
        "record",
    )
    head = f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}"
    return "\n".join([head, *map(row, results.values())]) + "\n"


def row(found: dict[str, Any]) -> str:
    if "not_installed" in found:
        return f"| {found['library']} | cannot be installed | | | | | | |"
    cells = [
        f"{found['library'].partition('[')[0]} {found['version']}",
        ", ".join(
            f"{name}{': no' if said.startswith('failed: ') else ''}" for name, said in found["parts"].items()
        ),
        ", ".join(
            f"{_asked(asked)} {count}" for asked, count in (found["requests"] | found["forms"]).items()
        ),
        str(found["held"]),
        ", ".join(f"`{name}`" for name in found["ignored"]),
        ", ".join(f"{count} × {_short(error)}" for error, count in found["refused"].items()),
        str(found["calls"]),
        "equal" if found["record_equals_log"] else "none" if not found["calls"] else "**differs**",
    ]
    return "| " + " | ".join(cells) + " |"


def _asked(what: str) -> str:
    """A route, or a field with its kind, in as few letters as tell it."""
    return what.removeprefix("/v1/").replace("response_format: ", "").replace("text.format: ", "")


def _short(error: str) -> str:
    words = error.replace("|", "/").replace("\n", " ")
    return words if len(words) <= 80 else f"{words[:77]}..."


def page_with(text: str, made: str) -> str:
    """A page whose part between the marks is made anew."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + made + END + rest.partition(END)[2]


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page_with(PAGE.read_text(), table(json.loads(RESULTS.read_text()))))


if __name__ == "__main__":
    main()
