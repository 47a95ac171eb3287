"""The fenced blocks of the documentation, and what the line before one says about it."""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import ROOT

SHELLS = ("bash", "console")
"""Languages of what is typed at a prompt."""

CHECKED = (*SHELLS, "json", "python", "toml", "yaml")
"""Languages whose blocks are looked at."""

SHOWN = ("", "mermaid", "nginx", "text")
"""Labels of blocks that are only shown: output, drawings, and the settings of programs of others."""

_OPENING = re.compile(r" *(`{3,}|~{3,}) *([\w+-]*)")
_MARK = re.compile(r"<!-- (not run|run by): (.+) -->")


@dataclass(frozen=True)
class Fence:
    """A fenced block.

    Attributes:
        page: The file, from the root of the repository.
        line: The line of its opening, counted from 1.
        language: Its label.
        text: What stands in it.
        not_run: Why it is not run, if the line before it says so.
        run_by: The test that runs it, if the line before it names one.
    """

    page: str
    line: int
    language: str
    text: str
    not_run: str = ""
    run_by: str = ""

    @property
    def place(self) -> str:
        """Where it is, as an editor opens it."""
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """Every page that a reader is shown: at the root, in `docs/`, and beside benchmarks and packages.

    Templates of pages are none: `tests/clients/scaffold` looks at what is written from them.
    """
    folders = [
        each for each in ROOT.iterdir() if each.is_dir() and not each.name.startswith((".", "build", "runs"))
    ]
    found = {*ROOT.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))}
    return sorted(page for page in found if "templates" not in page.parts)


def fences_of(page: Path) -> list[Fence]:
    """The blocks of one page of the repository."""
    return read_fences(page.read_text(encoding="utf-8"), str(page.relative_to(ROOT)))


def read_fences(text: str, page: str) -> list[Fence]:
    """The blocks of a page's text.

    Raises:
        ValueError: One is never closed.
    """
    found = []
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        opening = _OPENING.match(lines[number])
        if opening is None:
            number += 1
            continue
        closing = re.compile(rf" *{opening[1][0]}{{{len(opening[1])},}} *$")
        end = next((each for each in range(number + 1, len(lines)) if closing.match(lines[each])), None)
        if end is None:
            raise ValueError(f"{page}:{number + 1}: the block that begins here is never closed")
        mark = _MARK.fullmatch(lines[number - 1].strip()) if number else None
        found.append(
            Fence(
                page,
                number + 1,
                opening[2],
                "\n".join(lines[number + 1 : end]) + "\n",
                not_run=mark[2] if mark is not None and mark[1] == "not run" else "",
                run_by=mark[2] if mark is not None and mark[1] == "run by" else "",
            )
        )
        number = end + 1
    return found
