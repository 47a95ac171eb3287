"""Nobody keeps a list of kinds by hand: who needs their names asks the tuple that declares them."""

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from rollgym.clients.protocol.upstream_protocols import OURS as UPSTREAM_PROTOCOLS
from rollgym.clients.replies.formats.table import OURS as CALL_FORMATS
from rollgym.sandbox.core.kinds import SANDBOXES
from rollgym.trainer.algorithms.advantage_settings import ADVANTAGES
from rollgym.trainer.algorithms.surrogates import SURROGATES
from rollgym.trainer.config.backend import BACKENDS
from rollgym.trainer.config.inference import INFERENCE_SERVERS
from rollgym.trainer.config.output import TRACKERS
from rollgym.trainer.core.kinds import kind_of
from tests.support.processes import ROOT

FLOORS = ("clients", "env_server", "envs", "integrations", "sandbox", "trainer", "rollgym")
_BETWEEN = r"['`\"]?(?:, (?:or |and )?| or | and |\|)['`\"]?"
FAMILIES: dict[str, tuple[Sequence[str], str]] = {
    # By what they are: their names, and the module that declares them.
    "inference servers": ([each.name for each in INFERENCE_SERVERS], "trainer/config/inference.py"),
    "training back-ends": ([each.name for each in BACKENDS], "trainer/config/backend.py"),
    "advantages": ([kind_of(each) for each in ADVANTAGES], "trainer/algorithms/advantage_settings.py"),
    "surrogates": ([kind_of(each) for each in SURROGATES], "trainer/algorithms/surrogates.py"),
    "upstream protocols": (
        [each.name for each in UPSTREAM_PROTOCOLS],
        "clients/protocol/upstream_protocols.py",
    ),
    "trackers": ([each.name for each in TRACKERS], "trainer/config/output.py"),
    "sandboxes": ([each.name for each in SANDBOXES], "sandbox/core/kinds.py"),
    "formats of calls": ([each.name for each in CALL_FORMATS], "clients/replies/formats/table.py"),
}
_NAMED_ALIKE_NOWHERE = ("inference servers", "training back-ends", "trackers", "sandboxes")
"""Families whose names mean nothing else in the product, such as a tag or a unit."""
KEPT = {
    # Those that are by hand, and why.
    "rollgym/extras.py": "what each extra of pyproject.toml brings, with which a test compares it",
    "sandbox/supervisor/confinements.py": "what surrounds a run, which several back-ends may share",
    "sandbox/core/base.py": "levels, of which two are called as a back-end is",
    "sandbox/local/backends.py": "what to take where this machine can confine nothing",
    "trainer/backends/megatron/backend.py": "what to take where Megatron does not train a model",
    "trainer/config/model.py": "what a setting means to each back-end that reads it",
    "trainer/config/optimizer.py": "the same",
    "trainer/models/division.py": "what to take where Megatron does not build a model",
    "trainer/models/shape.py": "families of models, of which some are called as a format of calls is",
}


@cache
def _trees() -> list[tuple[str, ast.Module]]:
    paths = (path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py")))
    mine = (path for path in paths if path.resolve() == path and "templates" not in path.parts)
    return [(path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))) for path in mine]


def lists_of(names: Sequence[str], tree: ast.Module) -> Iterator[int]:
    """The lines where two of the names are written beside each other, as elements or in a text that is shown."""
    beside = re.compile(rf"(?<![\w-])({'|'.join(names)}){_BETWEEN}({'|'.join(names)})(?![\w-])")
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Set(elts=elements) | ast.List(elts=elements) | ast.Tuple(elts=elements):
                texts = [each.value for each in elements if isinstance(each, ast.Constant)]
            case ast.Dict(keys=keys):
                texts = [each.value for each in keys if isinstance(each, ast.Constant)]
            case ast.Constant(value=str(text)) if id(node) not in docstrings and beside.search(text):
                texts = list(names)
            case _:
                continue
        if len(set(texts) & set(names)) > 1:
            yield node.lineno


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("A = {'a-1', 'b2'}\nB = ['a-1', 'c']\nC = Literal['b2', 'a-1']\nD = {'a-1': 1, 'b2': 2}", [1, 3, 4]),
        ("raise ValueError('take a-1 or b2')\nx = f'{y}: a-1, b2'\nz = 'b2 and more'", [1, 2]),
        ("'''Of a-1 and b2.'''\nx = 'ba-1 or b2'", []),
    ],
)
def test_a_list_of_kinds_is_found(source: str, lines: list[int]) -> None:
    assert sorted(lists_of(["a-1", "b2"], ast.parse(source))) == lines


@pytest.mark.parametrize("family", FAMILIES)
def test_nobody_keeps_a_list_of_kinds_by_hand(family: str) -> None:
    names, declared = FAMILIES[family]
    assert (ROOT / declared).exists()
    found = [
        f"{path}:{line}"
        for path, tree in _trees()
        if path != declared and path not in KEPT
        for line in lists_of(names, tree)
    ]
    assert found == [], f"ask {declared} for what they have in common"


def branches_by(names: Sequence[str], tree: ast.Module) -> Iterator[int]:
    """The lines that compare something with one of the names, or match it against one."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, comparators=[right]) if {
                each.value for each in (left, right) if isinstance(each, ast.Constant)
            } & set(names):
                yield node.lineno
            case ast.MatchValue(value=ast.Constant(value=value)) if value in names:
                yield node.lineno


def test_a_branch_by_a_name_is_found() -> None:
    tree = ast.parse(
        "if x == 'a-1': pass\nmatch y:\n  case 'b2': pass\n  case 'c': pass\nz = 'a-1' != w or y == 2"
    )
    assert sorted(branches_by(["a-1", "b2"], tree)) == [1, 3, 5]


@pytest.mark.parametrize("family", _NAMED_ALIKE_NOWHERE)
def test_nobody_branches_by_the_name_of_a_kind(family: str) -> None:
    names, declared = FAMILIES[family]
    found = [f"{path}:{line}" for path, tree in _trees() for line in branches_by(names, tree)]
    assert found == [], f"have the objects of {declared} say what is asked of them"


def test_what_is_kept_by_hand_is_still_there() -> None:
    trees = dict(_trees())
    names = [kinds for kinds, _ in FAMILIES.values()]
    assert [path for path in KEPT if not any(list(lists_of(each, trees[path])) for each in names)] == []


def test_modules_are_found_by_their_own_paths() -> None:
    assert Path("trainer/config/inference.py").as_posix() in dict(_trees())
