"""Which tests a test file has, as pytest would collect them.

A test that would vanish without a word, or that says nothing about the program, makes the item unusable: it would be
passed by whatever is written, or by nothing.
"""

import ast
from collections.abc import Iterable, Iterator, Sequence

from rollgym.envs.code.item import ItemError

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
_UNITTEST = frozenset({"unittest.TestCase", "TestCase"})
# By these decorators a test is left out, or has to fail: what it says of a program is nothing, or the contrary.
_NOT_COUNTED = frozenset({"skip", "xfail", "expectedFailure"})


def collect(tree: ast.Module, names: frozenset[str], module: str) -> list[tuple[str, ast.FunctionDef]]:
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


def is_test(node: ast.AST) -> bool:
    """Tell whether a statement is a test function, or a class of tests."""
    if isinstance(node, ast.ClassDef):
        return node.name.startswith("Test") or _is_unittest(node)
    return isinstance(node, _Function) and node.name.startswith("test")


def _is_unittest(node: ast.ClassDef) -> bool:
    return any(ast.unparse(each) in _UNITTEST for each in node.bases)


def _tests_of(node: ast.stmt, body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.FunctionDef]]:
    if isinstance(node, ast.ClassDef):
        if is_test(node):
            for each in _methods(node, body):
                yield f"{node.name}.{each.name}", each
    elif isinstance(node, _Function):
        if is_test(node):
            yield node.name, _runnable(node, node.name)
    else:
        _refuse_hidden(node)


def _methods(node: ast.ClassDef, body: Sequence[ast.stmt]) -> list[ast.FunctionDef]:
    found = []
    _refuse_not_counted(node, node.name)
    for each in node.body:
        if isinstance(each, _Function):
            if is_test(each):
                found.append(_runnable(each, f"{node.name}.{each.name}"))
        elif not isinstance(each, ast.ClassDef):
            _refuse_hidden(each)
    made = any(isinstance(each, ast.FunctionDef) and each.name == "__init__" for each in node.body)
    if found and made and not _is_unittest(node):
        raise ItemError(f"the class {node.name} has an __init__, so that its tests are not run")
    bases = {each.id for each in node.bases if isinstance(each, ast.Name)}
    for other in body:
        if isinstance(other, ast.ClassDef) and other.name in bases and any(map(is_test, other.body)):
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
    """Refuse tests that stand within another statement, or are no definitions."""
    for each in _own(node):
        if is_test(each):
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
    """Tell whether a class of tests uses the program in what is no test: what prepares them, and helpers."""
    return any(about.leads(each) for each in holder.body if not is_test(each))


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
