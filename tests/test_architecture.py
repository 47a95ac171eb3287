"""The page that says where things are, held against where they are."""

import ast
import graphlib
import re
import runpy
from collections import defaultdict
from pathlib import Path

import grimp
import pytest

from tests.conftest import LONGEST

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "ARCHITECTURE.md").read_text()


def test_the_drawings_are_as_the_imports_are() -> None:
    drawn = runpy.run_path(str(ROOT / "docs" / "draw_rooms.py"))["drawn"]
    assert drawn(PAGE) == PAGE, "make drawings"


@pytest.mark.parametrize("arrows", [{"a": {"b", "c"}, "b": {"c"}, "c": set()}])
def test_a_drawing_leaves_out_what_follows(arrows: dict[str, set[str]]) -> None:
    drawing = runpy.run_path(str(ROOT / "docs" / "draw_rooms.py"))["_drawing"]
    assert drawing(arrows).splitlines()[2:-1] == ["    a --> b", "    b --> c", "    c"]
    arrows["c"] = {"b"}
    assert drawing(arrows).splitlines()[2:-1] == ["    a --> b", "    a --> c", "    b --> c", "    c --> b"]


def _rooms(floor: str) -> dict[str, set[str]]:
    """The rooms of a floor, each with those that an arrow leads to from it."""
    drawing = PAGE.partition(f"<!-- rooms of {floor} -->")[2].partition("<!-- end -->")[0]
    rooms: dict[str, set[str]] = {}
    for source, target in re.findall(r"^    (\w+)(?: --> (\w+))?$", drawing, re.MULTILINE):
        rooms.setdefault(source, set()).update({target} - {""})
    return rooms


@pytest.mark.parametrize("floor", ["trainer", "env_server", "envs", "clients", "sandbox"])
def test_no_arrow_leads_up(floor: str) -> None:
    rooms = _rooms(floor)
    # An order exists where there is no circle (`graphlib.CycleError`).
    assert set(graphlib.TopologicalSorter(rooms).static_order()) == set(rooms)


@pytest.mark.parametrize("floor", ["trainer", "env_server", "envs", "clients", "sandbox"])
def test_no_circle_is_between_folders_within_folders(floor: str) -> None:
    graph = grimp.build_graph("rollgym", cache_dir=None)
    here = {f"rollgym.{floor}", *graph.find_descendants(f"rollgym.{floor}")}
    folders: dict[str, set[str]] = defaultdict(set)
    for module in here:
        imported = graph.find_modules_directly_imported_by(module) & here
        folders[_folder_of(module)] |= {_folder_of(each) for each in imported} - {_folder_of(module)}
    assert set(graphlib.TopologicalSorter(folders).static_order()) == set(folders)


def _folder_of(module: str) -> str:
    return module if (ROOT / module.replace(".", "/")).is_dir() else module.rpartition(".")[0]


@pytest.fixture(scope="module")
def running() -> grimp.ImportGraph:
    """The imports that run, at the top of files or in functions."""
    return grimp.build_graph("rollgym", cache_dir=None, exclude_type_checking_imports=True)


@pytest.fixture(scope="module")
def written() -> grimp.ImportGraph:
    """All imports, those for type checkers among them."""
    return grimp.build_graph("rollgym", cache_dir=None)


def _in_circles(graph: grimp.ImportGraph) -> set[str]:
    """Return the rooms in which files import each other in a circle."""
    files: dict[str, dict[str, set[str]]] = defaultdict(dict)
    for module in graph.modules:
        if (room := _folder_of(module)) != module:
            files[room][module] = graph.find_modules_directly_imported_by(module)
    found = set()
    for room, imports in files.items():
        inside = {file: imported & set(imports) for file, imported in imports.items()}
        try:
            graphlib.TopologicalSorter(inside).prepare()
        except graphlib.CycleError:
            found.add(room)
    return found


# May get shorter, and never longer: here some files of a room name types of each other in a circle.
TYPES_IN_CIRCLES = {
    "rollgym.clients.client",
    "rollgym.envs.code",
    "rollgym.trainer.algorithms",
    "rollgym.trainer.config",
}


def test_no_files_of_a_room_import_each_other_in_a_circle(running: grimp.ImportGraph) -> None:
    assert _in_circles(running) == set()


def test_no_files_of_a_further_room_name_types_in_a_circle(written: grimp.ImportGraph) -> None:
    assert _in_circles(written) - TYPES_IN_CIRCLES == set()


def test_rooms_without_such_a_circle_are_off_the_list(written: grimp.ImportGraph) -> None:
    assert TYPES_IN_CIRCLES - _in_circles(written) == set(), "take it off TYPES_IN_CIRCLES"


def test_a_circle_of_files_is_found() -> None:
    graph = grimp.ImportGraph()
    item, steps = "rollgym.envs.code.item", "rollgym.envs.code.steps"
    for module in (item, steps, "rollgym.envs.code.suites"):
        graph.add_module(module)
    graph.add_import(importer=item, imported=steps)
    assert _in_circles(graph) == set()
    graph.add_import(importer=steps, imported=item)
    assert _in_circles(graph) == {"rollgym.envs.code"}


@pytest.mark.parametrize("floor", ["trainer", "env_server", "envs", "clients", "sandbox"])
def test_a_drawing_fits_a_screen(floor: str) -> None:
    assert 1 < len(_rooms(floor)) <= 15


def test_every_place_that_it_names_is_there() -> None:
    named = re.findall(
        r"`((?:trainer|env_server|envs|integrations|clients|sandbox|console|peers|rollgym|docs)/[\w/.]*)`",
        PAGE,
    )
    links = re.findall(r"\]\(([\w/.]+)\)", PAGE)
    assert len(named) > 20
    assert [each for each in (*named, *links) if not (ROOT / each).exists()] == []


def test_every_room_says_what_it_is_for_and_who_enters() -> None:
    for floor in ("trainer", "env_server", "envs", "clients", "sandbox"):
        for room in (ROOT / floor).glob("*/__init__.py"):
            said, _, _ = room.read_text().partition("\n")
            assert said.startswith('"""'), room
            assert re.search(r"\benter(s|ed)?\b", said), room


def test_the_tests_that_come_first_are_there() -> None:
    assert [path for path in LONGEST if not (ROOT / path).exists()] == []


def test_no_pattern_repeats_a_group_possessively() -> None:
    # Python before 3.11.5 goes on behind the place where such a repetition has failed, instead of where it began.
    repeated = re.compile(r"\)(?:[*+?]|\{[\d,]+\})\+|\(\?>")
    patterns = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for floor in ("clients", "env_server", "envs", "integrations", "rollgym", "sandbox", "trainer")
        for path in sorted((ROOT / floor).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and repeated.search(node.value)
    ]
    assert patterns == []
