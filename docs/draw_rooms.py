"""Draw the floors and their rooms from the imports, into ARCHITECTURE.md.

    python docs/draw_rooms.py           writes the drawings anew
    python docs/draw_rooms.py --check   says whether they are as the imports are

A drawing is made of the imports between packages, and of nothing else. An arrow that follows from two others is left
out, where the rooms of a floor stand in an order at all.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import grimp

PAGE = Path(__file__).parents[1] / "ARCHITECTURE.md"
FLOORS = ("trainer", "env_server", "envs", "clients", "sandbox")
_WITHOUT_ROOMS = ("integrations",)
ROOT_ROOM = "root"
Arrows = dict[str, set[str]]


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="Write nothing; exit code 1 where it is out of date."
    )
    options = parser.parse_args()
    before = PAGE.read_text()
    after = drawn(before)
    if options.check:
        if after != before:
            print("ARCHITECTURE.md is not as the imports are: make drawings", file=sys.stderr)
        return int(after != before)
    PAGE.write_text(after)
    return 0


def drawn(page: str) -> str:
    """Return a page with its drawings made anew: what stands between `<!-- rooms of X -->` and `<!-- end -->`."""
    graph = grimp.build_graph("rollgym", include_external_packages=False, cache_dir=None)
    modules = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    page = _between(page, "floors", _drawing(_arrows(modules, _floor_of)))
    for floor in FLOORS:
        page = _between(page, f"rooms of {floor}", _drawing(_arrows(modules, partial(_room_of, floor))))
    return page


def _floor_of(module: str) -> str | None:
    floor = module.removeprefix("rollgym.").partition(".")[0]
    return floor if floor in (*FLOORS, *_WITHOUT_ROOMS) else None


def _room_of(floor: str, module: str) -> str | None:
    """The package of a module within its floor; modules beside the packages share one room."""
    parts = module.removeprefix("rollgym.").split(".")
    if parts[0] != floor:
        return None
    is_package = len(parts) > 1 and (PAGE.parent / floor / parts[1]).is_dir()
    return parts[1] if is_package else ROOT_ROOM


def _arrows(modules: dict[str, set[str]], place_of: Callable[[str], str | None]) -> Arrows:
    arrows: Arrows = defaultdict(set)
    for name, imported in modules.items():
        source = place_of(name)
        if source is None:
            continue
        arrows[source] |= {place for each in imported if (place := place_of(each)) not in (None, source)}
    return {source: arrows[source] for source in sorted(arrows)}


def _drawing(arrows: Arrows) -> str:
    shown = _without_shortcuts(arrows)
    lines = ["```mermaid", "flowchart TD"]
    for source in _in_order(arrows):
        targets = sorted(shown.get(source, ()))
        lines += [f"    {source} --> {target}" for target in targets] or [f"    {source}"]
    return "\n".join([*lines, "```"])


def _without_shortcuts(arrows: Arrows) -> Arrows:
    """Leave out arrows that follow from others; all stay among rooms that reach each other."""
    reached = {source: _reached(arrows, source) for source in arrows}
    circle = {source for source in arrows if source in reached[source]}
    return {
        source: {
            target
            for target in targets
            if {source, target} & circle
            or not any(target in reached.get(between, ()) for between in targets - {target} - circle)
        }
        for source, targets in arrows.items()
    }


def _reached(arrows: Arrows, source: str) -> set[str]:
    found: set[str] = set()
    waiting = list(arrows.get(source, ()))
    while waiting:
        each = waiting.pop()
        if each not in found:
            found.add(each)
            waiting += arrows.get(each, ())
    return found


def _in_order(arrows: Arrows) -> list[str]:
    return sorted(arrows, key=lambda source: (-len(_reached(arrows, source)), source))


def _between(page: str, name: str, drawing: str) -> str:
    begin, end = f"<!-- {name} -->", "<!-- end -->"
    before, marker, after = page.partition(begin)
    if not marker:
        raise SystemExit(f"ARCHITECTURE.md has no {begin}")
    return f"{before}{begin}\n{drawing}\n{end}{after.partition(end)[2]}"


if __name__ == "__main__":
    sys.exit(main())
