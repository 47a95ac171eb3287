"""Test code taken apart: what can be told as calls and expected values, and what has to be run."""

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rollgym.envs.code.asserts import free_names, uses
from rollgym.envs.code.collecting import Leading, collect, is_test
from rollgym.envs.code.item import ItemError
from rollgym.envs.code.steps import (
    SOLUTION,
    Numbers,
    Pair,
    Step,
    checks_of,
    evaluation_of,
    imports_program,
    source_of,
    steps_of_check,
    steps_together,
)

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
    pairs: Sequence[Pair]
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
    steps: dict[str, list[Step]] = {}
    functions: list[tuple[int, str]] = []
    module_uses_program = any(
        uses(each, names) for each in tree.body if not isinstance(each, ast.FunctionDef | ast.ClassDef)
    )
    tests = collect(tree, names, SOLUTION)
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
    context = [each for each in tree.body if not imports_program(each) and not is_test(each)]

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
        ItemError: It is no Python.
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
