"""Test code taken apart: what can be expressed as calls and expected values, and what has to be run.

Tests of a file are collected as pytest would. A test that would vanish without a word, or that says nothing about the
program, makes the item unusable: it would be passed by whatever is written, or by nothing.
"""

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rollgym.envs.code.item import ItemError
from rollgym.envs.code.steps import (
    SOLUTION,
    AssertedPair,
    Numbers,
    SuiteStep,
    checks_of,
    evaluation_of,
    free_names,
    imports_program,
    source_of,
    steps_of_check,
    steps_together,
    uses,
)

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
_UNITTEST = frozenset({"unittest.TestCase", "TestCase"})
# By these decorators a test is left out, or has to fail: what it says of a program is nothing, or the contrary.
_NOT_COUNTED = frozenset({"skip", "xfail", "expectedFailure"})


def _collect(tree: ast.Module, names: frozenset[str], module: str) -> list[tuple[str, ast.FunctionDef]]:
    """Return the test functions of a test file with their names: `test_it`, `TestIt.test_it`.

    Args:
        tree: The file.
        names: Those of the program.
        module: What the program is imported as.

    Raises:
        ItemError: A test would not be run, or says nothing about the program.
    """
    about = Leading(names | _imported_as(tree, module), module)
    about.follow(tree.body)
    found: dict[str, ast.FunctionDef] = {}
    for node in tree.body:
        for name, function in _tests_of(node, tree.body):
            if name in found:
                raise ItemError(f"two tests are named {name}: the second takes the place of the first")
            holder = node if isinstance(node, ast.ClassDef) else None
            if not about.leads(function) and (holder is None or not _prepared(holder, about)):
                raise ItemError(f"the test {name} says nothing about the program")
            found[name] = function
    return list(found.items())


class Leading:
    """Names by which tests come to the program: its own, and those of helpers, fixtures and values that use them.

    Args:
        names: The program's.
        module: What it is imported as, which may also stand in a text.
    """

    def __init__(self, names: Iterable[str], module: str = "") -> None:
        self._names = set(names)
        self._module = module

    def follow(self, body: Sequence[ast.stmt]) -> None:
        """Add what statements bind that use them, whatever their order."""
        count = -1
        while count < len(self._names):
            count = len(self._names)
            for statement in body:
                if self.leads(statement):
                    self._names |= set(_bound_by(statement))

    def leads(self, node: ast.AST) -> bool:
        """Tell whether a piece of code uses one of them."""
        return any(self._is_one(each) for each in ast.walk(node))

    def _is_one(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            return node.id in self._names
        if isinstance(node, ast.arg):
            return node.arg in self._names
        if isinstance(node, ast.ImportFrom):
            return bool(self._module) and node.module == self._module
        return isinstance(node, ast.Constant) and bool(self._module) and node.value == self._module


def _is_test(node: ast.AST) -> bool:
    """Tell whether a statement is a test function, or a class of tests."""
    if isinstance(node, ast.ClassDef):
        return node.name.startswith("Test") or _is_unittest(node)
    return isinstance(node, _Function) and node.name.startswith("test")


def _is_unittest(node: ast.ClassDef) -> bool:
    return any(ast.unparse(each) in _UNITTEST for each in node.bases)


def _tests_of(node: ast.stmt, body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.FunctionDef]]:
    if isinstance(node, ast.ClassDef):
        if _is_test(node):
            for each in _methods(node, body):
                yield f"{node.name}.{each.name}", each
    elif isinstance(node, _Function):
        if _is_test(node):
            yield node.name, _runnable(node, node.name)
    else:
        _refuse_hidden(node)


def _methods(node: ast.ClassDef, body: Sequence[ast.stmt]) -> list[ast.FunctionDef]:
    found = []
    _refuse_not_counted(node, node.name)
    for each in node.body:
        if isinstance(each, _Function):
            if _is_test(each):
                found.append(_runnable(each, f"{node.name}.{each.name}"))
        elif not isinstance(each, ast.ClassDef):
            _refuse_hidden(each)
    made = any(isinstance(each, ast.FunctionDef) and each.name == "__init__" for each in node.body)
    if found and made and not _is_unittest(node):
        raise ItemError(f"the class {node.name} has an __init__, so that its tests are not run")
    bases = {each.id for each in node.bases if isinstance(each, ast.Name)}
    for other in body:
        if isinstance(other, ast.ClassDef) and other.name in bases and any(map(_is_test, other.body)):
            raise ItemError(
                f"the class {node.name} inherits the tests of {other.name}, which are not run in it"
            )
    return found


def _runnable(function: _Function, name: str) -> ast.FunctionDef:
    _refuse_not_counted(function, name)
    if isinstance(function, ast.AsyncFunctionDef):
        raise ItemError(f"the test {name} is a coroutine, which is not run: write a function that awaits it")
    if any(isinstance(each, ast.Yield | ast.YieldFrom) for each in _own(function)):
        raise ItemError(f"the test {name} is a generator, which is not run")
    return function


def _refuse_not_counted(node: _Function | ast.ClassDef, name: str) -> None:
    for each in node.decorator_list:
        called = each.func if isinstance(each, ast.Call) else each
        said = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if said in _NOT_COUNTED:
            raise ItemError(f"the test {name} is marked as {said}, so that it says nothing about the program")


def _refuse_hidden(node: ast.stmt) -> None:
    """Refuse tests that stand within another statement, or are not definitions."""
    for each in _own(node):
        if _is_test(each):
            raise ItemError("a test stands within another statement, where it is not found")
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
        for target in node.targets:
            if isinstance(target, ast.Name) and target.id.startswith("test"):
                raise ItemError(f"the test {target.id} is no definition")


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """Go through a statement, but not into what is defined in it."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, _Scope):
            yield from _own(child)


def _prepared(holder: ast.ClassDef, about: Leading) -> bool:
    """Return whether a class of tests uses the program outside its tests: in what prepares them, and in helpers."""
    return any(about.leads(each) for each in holder.body if not _is_test(each))


def _imported_as(tree: ast.Module, module: str) -> frozenset[str]:
    return frozenset(
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == module
    )


def _bound_by(statement: ast.stmt) -> Iterator[str]:
    """Return what is bound outside of the definitions in a statement."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    for node in ast.walk(statement):
        if isinstance(node, ast.Global):
            yield from node.names
    for node in (statement, *_own(statement)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]


# Of its own, or as in `isnan`: a banana is none.
_NAN = re.compile(r"(?<![a-z])(?:is)?nan(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Script:
    """What a checker runs.

    Attributes:
        before: Sources that the tests' names come from, each with a file name.
        names: What the program defines, called as functions.
        units: Sources of the tests.
        functions: Test functions to run, each with the number of its case.
    """

    before: Sequence[tuple[str, str]]
    names: Sequence[str]
    units: Sequence[tuple[str, str]]
    functions: Sequence[tuple[int, str]] = ()


@dataclass(frozen=True)
class Suite:
    """Tests of an item.

    Attributes:
        tests: How many there are; each is passed or not.
        pairs: Assertions as data.
        cases: The test that each case belongs to, by number; a case has to be run.
        shared: Whether the calls of a case share a process, as those of one pytest function do.
        evaluation: Makes the script that tells the values of pairs, without any program.
        checking: Makes the script that runs the cases, and these pairs besides.
        mentions_nan: Whether the tests know of numbers that are none.
        classes: What is imported as a class.
        candidate: What the tests call the item's function.
        first: The text of the first test.
    """

    tests: int
    pairs: Sequence[AssertedPair]
    cases: dict[int, int]
    shared: bool
    evaluation: Callable[[], Script]
    checking: Callable[[frozenset[int]], Script]
    mentions_nan: bool
    classes: frozenset[str] = frozenset()
    candidate: str = ""
    first: str = ""


def suite_of_check(source: str, entry: str, preamble: str) -> Suite:
    """Take a `check(candidate)` apart: each of its assertions is a test.

    Args:
        source: The code with the function.
        entry: What is checked.
        preamble: Code whose names the tests may use: helpers that are given, and not the program's.

    Raises:
        ItemError: It cannot be read, or tests nothing.
    """
    tree = parsed(source, "test")
    check = next(
        (each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == "check"), None
    )
    if check is None or not check.args.args:
        raise ItemError("the field 'test' defines no function check(candidate)")
    before = [("preamble", preamble)] if preamble.strip() else []
    helpers = free_names([tree], [parsed(text, name) for name, text in before]) - {entry}
    names = frozenset({check.args.args[0].arg, entry, *helpers})
    numbers = Numbers()
    steps = steps_of_check(check.body, names, numbers)
    others = [each for each in tree.body if each is not check and not _is_run_of(each, "check")]

    def script(body: list[ast.stmt]) -> list[tuple[str, str]]:
        made = ast.FunctionDef("check", check.args, body or [ast.Pass()], [], None, None)
        call = ast.parse(f"check({entry})").body
        return [("test", source_of([*others, made, *call]))]

    return Suite(
        tests=numbers.tests,
        pairs=numbers.pairs,
        cases=numbers.cases,
        shared=False,
        candidate=check.args.args[0].arg,
        first=next((source_of([step.statement]) for step in steps if step.kind in ("pair", "case")), ""),
        evaluation=lambda: Script(before, [entry, *helpers], script(evaluation_of(steps))),
        checking=lambda inline: Script(before, [entry, *helpers], script(checks_of(steps, inline))),
        mentions_nan=_mentions_nan(source),
    )


def suite_of_list(sources: Sequence[str], setup: str) -> Suite:
    """Take a list of assertions apart: each entry is a test.

    Raises:
        ItemError: One cannot be read.
    """
    trees = [parsed(source, f"test_list[{number}]") for number, source in enumerate(sources)]
    before = [("setup", setup)] if setup.strip() else []
    names = free_names(trees, [parsed(text, name) for name, text in before])
    _see_that_each_leads(trees, names)
    numbers = Numbers()
    entries = [steps_together(tree.body, names, numbers, numbers.test()) for tree in trees]
    steps = [step for entry in entries for step in entry]
    return Suite(
        tests=numbers.tests,
        pairs=numbers.pairs,
        cases=numbers.cases,
        shared=False,
        evaluation=lambda: Script(before, (), [("tests", source_of(evaluation_of(steps)))]),
        checking=lambda inline: Script(
            before, sorted(names), [("tests", source_of(checks_of(steps, inline)))]
        ),
        mentions_nan=any(map(_mentions_nan, sources)),
        first=sources[0].strip() if sources else "",
    )


def suite_of_pytest(source: str, solution: str) -> Suite:
    """Take a test file apart that imports the program as `solution`: each test function is a test.

    Args:
        source: The test file.
        solution: The item's own solution, which tells classes from functions; without one, a name with a capital is
            taken for a class.

    Raises:
        ItemError: It cannot be read, or has no test function.
    """
    tree = parsed(source, "test")
    imported = [
        alias
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == SOLUTION
        for alias in node.names
    ]
    renamed = any(alias.asname not in (None, alias.name) for alias in imported)
    free = free_names([tree])
    names = free | {alias.asname or alias.name for alias in imported}
    numbers = Numbers()
    steps: dict[str, list[SuiteStep]] = {}
    functions: list[tuple[int, str]] = []
    module_uses_program = any(
        uses(each, names) for each in tree.body if not isinstance(each, ast.FunctionDef | ast.ClassDef)
    )
    tests = _collect(tree, names, SOLUTION)
    for name, function in tests:
        test = numbers.test()
        plain = name == function.name and not function.decorator_list and not function.args.args
        if plain and not renamed and not module_uses_program:
            made = steps_together(function.body, names, numbers, test)
            if made[0].kind != "case":
                steps[name] = made
                continue
            functions.append((made[0].number, name))
        else:
            functions.append((numbers.case(function, test).number, name))
    if not numbers.tests:
        raise ItemError("the field 'test' has no test function, such as `def test_it(): assert f(1) == 2`")
    owners = {step.number: name for name, made in steps.items() for step in made}
    context = [each for each in tree.body if not imports_program(each) and not _is_test(each)]

    def evaluation() -> Script:
        made = [
            ast.FunctionDef(name, _no_arguments(), evaluation_of(each) or [ast.Pass()], [], None, None)
            for name, each in steps.items()
        ]
        runs = [(owner[0].number, name) for name, owner in steps.items() if owner]
        return Script((), (), [("tests", source_of([*context, *made]))], runs)

    def checking(inline: frozenset[int]) -> Script:
        again = {owners[number]: number for number in inline}
        runs = [*functions, *((number, name) for name, number in again.items())]
        return Script((), sorted(free), [("tests", source)], runs)

    used = {
        each.id
        for node in tree.body
        for each in ast.walk(node)
        if isinstance(each, ast.Name) and each.id in names
    }
    return Suite(
        tests=numbers.tests,
        pairs=numbers.pairs,
        cases=numbers.cases,
        # What remembers over several functions, or makes objects, is tested as one program that runs on.
        shared=len(used) > 1,
        evaluation=evaluation,
        checking=checking,
        mentions_nan=_mentions_nan(source),
        classes=_classes(solution, names),
        first=ast.unparse(tests[0][1]),
    )


def _classes(solution: str, names: frozenset[str]) -> frozenset[str]:
    if solution.strip() and readable(solution):
        tree = parsed(solution, "solution")
        return frozenset(each.name for each in tree.body if isinstance(each, ast.ClassDef))
    return frozenset(name for name in names if name[:1].isupper())


def _mentions_nan(source: str) -> bool:
    return _NAN.search(source) is not None


def parsed(source: str, what: str) -> ast.Module:
    """Return the syntax tree of a text.

    Raises:
        ItemError: It is not Python.
    """
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ItemError(f"the field '{what}' is no Python: {error}") from None


def readable(source: str) -> bool:
    """Tell whether a text is Python."""
    try:
        parsed(source, "")
    except ItemError:
        return False
    return True


def _see_that_each_leads(trees: Sequence[ast.Module], names: frozenset[str]) -> None:
    """Refuse a list of tests of which one says nothing about the program, and would be passed by any.

    Raises:
        ItemError: It names that entry.
    """
    about = Leading(names)
    about.follow([statement for tree in trees for statement in tree.body])
    for number, tree in enumerate(trees):
        if not about.leads(tree):
            raise ItemError(f"the test test_list[{number}] says nothing about the program")


def _is_run_of(node: ast.stmt, name: str) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == name
    )


def _no_arguments() -> Any:
    return ast.arguments([], [], None, [], [], None, [])
