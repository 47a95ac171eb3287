"""Everything of ours is a part of `rollgym`: no module exists under two names."""

import ast
import importlib
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = ("clients", "env_server", "envs", "integrations", "sandbox", "trainer")
# The console has no Python. A clone's examples are programs and configurations of users, which name them as they lie in
# their folder.
OURS = sorted(
    {path.name for path in (ROOT / "rollgym").iterdir() if path.is_symlink()} - {"console", "examples"}
)
# Texts that programs of ours are started with, and paths `module:attribute`, dotted names and prefixes of names.
_STARTED = re.compile(rf"-m[ ,\"']+(?:{'|'.join(FLOORS)})\b")
_IMPORTED = re.compile(rf"^\s*(?:from|import) (?:{'|'.join(FLOORS)})\b(?! floor)", re.MULTILINE)
_NAMED = re.compile(rf"(?:{'|'.join(FLOORS)})(?:\.[a-z_]\w*)*(?:\.|\.[a-z_]\w*(?::\w+)?|:[A-Z]\w+)")
# A file without one of these need not be parsed.
_SUSPECT = re.compile(rf"(?:['\"]|\b(?:import|from|-m)[\s,'\"]+)(?:{'|'.join(FLOORS)})\b")
# What settings of earlier releases say, which is understood.
_MEANT = (
    "tests/clients/process/test_modules.py",
    "tests/trainer/config/test_former_names.py",
    "tests/test_one_name.py",
)
# Names of other things: OpenAPI's and the console's members, lists of settings, files.
_OTHER = re.compile(r"(?:sandbox|envs)\.(?:py|yaml|json|md|sock|org|run|step|reset|close)\b|envs\.")


def python_files() -> Iterator[Path]:
    for folder in (*FLOORS, "benchmarks", "deploy", "docs", "examples", "peers", "tests", ".ci"):
        yield from (ROOT / folder).rglob("*.py")
    yield from (ROOT / "rollgym").glob("*.py")


def bare_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Floors that are imported or named without `rollgym.`, by line."""
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                names = [each.name for each in node.names]
                yield from ((node.lineno, each) for each in names if each.partition(".")[0] in FLOORS)
            case ast.ImportFrom(module=str(module), level=0) if module.partition(".")[0] in FLOORS:
                yield node.lineno, module
            case ast.Constant(value=str(text)):
                found = [*_STARTED.findall(text), *_IMPORTED.findall(text)]
                if _NAMED.fullmatch(text) and not _OTHER.fullmatch(text):
                    found.append(text)
                yield from ((node.lineno, each.strip()) for each in found)
            case ast.List() | ast.Tuple():
                words = [each.value if isinstance(each, ast.Constant) else None for each in node.elts]
                pairs = itertools.pairwise(words)
                yield from (
                    (node.lineno, f"-m {module}")
                    for option, module in pairs
                    if option == "-m" and str(module).partition(".")[0] in FLOORS
                )


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import envs.registry", ["envs.registry"]),
        ("from trainer import cli", ["trainer"]),
        ("run([python, '-m', 'env_server', '--port'])", ["-m env_server"]),
        ("words = 'python -m clients.cli.main list'", ["-m clients"]),
        ("text = 'import sys\\nfrom sandbox.core import probe'", ["from sandbox"]),
        ("name.startswith('clients.')", ["clients."]),
        ("path = 'envs.games.frozen_lake:FrozenLakeEnv'", ["envs.games.frozen_lake:FrozenLakeEnv"]),
        ("from rollgym.envs.registry import x; y = 'rollgym.trainer.cli'; import sandboxes", []),
    ],
)
def test_bare_names_are_found(source: str, found: list[str]) -> None:
    assert [name for _, name in bare_names(ast.parse(source))] == found


def test_no_file_names_a_floor_without_rollgym() -> None:
    assert tuple(OURS) == FLOORS
    found = []
    for path in python_files():
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text()
        if name not in _MEANT and _SUSPECT.search(text):
            found += [f"{name}:{line}: {bare}" for line, bare in bare_names(ast.parse(text))]
    assert found == []


def test_no_module_is_imported_by_a_second_name() -> None:
    # The guard of `conftest.py` holds in every test, wherever the path leads.
    assert sorted(set(sys.modules) & set(FLOORS)) == []
    with pytest.raises(ImportError, match=r"^import rollgym\.envs: no module of ours has a second name$"):
        importlib.import_module("envs")


def test_pytest_as_a_command_finds_what_the_tests_import() -> None:
    # Unlike `python -m pytest`, it has no working directory on its path.
    command = [Path(sys.executable).parent / "pytest", "--collect-only", "-q", "tests/clients/protocol"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
