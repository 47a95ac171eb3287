"""Assertions as data: which call is made, and what is expected of its result."""

import ast
import builtins
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

Relation = Literal["equal", "unequal", "identical", "true", "false", "near", "within"]
_BUILTINS = frozenset(dir(builtins)) | {"__name__", "__file__"}


@dataclass(frozen=True, slots=True)
class Assertion:
    """An assertion about the result of one call.

    Attributes:
        name: What is called.
        args: Expression of a tuple.
        kwargs: Expression of a dictionary.
        relation: What the result has to do with what is expected.
        expected: Expression; a pair of a value and a distance for `near`, which is less than that, and `within`.
    """

    name: str
    args: ast.expr
    kwargs: ast.expr
    relation: Relation
    expected: ast.expr

    def literal(self) -> tuple[Any, ...] | None:
        """Return the three values if they can be read without running anything."""
        try:
            return tuple(_literal(each) for each in (self.args, self.kwargs, self.expected))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return None


def split_assertion(statement: ast.Assert, names: frozenset[str]) -> Assertion | None:
    """Return an assertion as data; None if it is of another form.

    Args:
        statement: The assertion.
        names: What the program defines.
    """
    test = statement.test
    nothing = ast.Constant(None)
    if _is_call(test, names):
        return _assertion(test, names, "true", nothing)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _assertion(test.operand, names, "false", nothing)
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return None
    left, right, sort = test.left, test.comparators[0], test.ops[0]
    relation: Relation
    if isinstance(sort, ast.Eq | ast.NotEq):
        relation = "equal" if isinstance(sort, ast.Eq) else "unequal"
        return _assertion(left, names, relation, right) or _assertion(right, names, relation, left)
    if isinstance(sort, ast.Is) and isinstance(right, ast.Constant) and right.value in (None, True, False):
        return _assertion(left, names, "identical", right)
    if isinstance(sort, ast.Lt | ast.LtE) and _is_distance(left):
        assert isinstance(left, ast.Call)
        distance = left.args[0]
        relation = "near" if isinstance(sort, ast.Lt) else "within"
        assert isinstance(distance, ast.BinOp)
        for one, other in ((distance.left, distance.right), (distance.right, distance.left)):
            pair = ast.Tuple([other, right], ast.Load())
            if found := _assertion(one, names, relation, pair):
                return found
    return None


def uses(node: ast.AST, names: frozenset[str]) -> bool:
    """Tell whether a piece of code mentions any of the names."""
    return any(isinstance(each, ast.Name) and each.id in names for each in ast.walk(node))


def free_names(trees: Iterable[ast.AST], known: Iterable[ast.AST] = ()) -> frozenset[str]:
    """Return the names that code uses and neither it nor other code binds."""
    loaded: set[str] = set()
    bound: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                loaded.add(node.id)
            bound.update(_bound(node))
    for tree in known:
        bound.update(name for node in ast.walk(tree) for name in _bound(node))
    return frozenset(loaded - bound - _BUILTINS)


def _bound(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.alias):
        yield (node.asname or node.name).partition(".")[0]
    elif (isinstance(node, ast.ExceptHandler) and node.name) or (
        isinstance(node, ast.MatchAs | ast.MatchStar) and node.name
    ):
        yield node.name


def _is_call(node: ast.AST, names: frozenset[str]) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def _is_distance(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "abs"
        and len(node.args) == 1
        and isinstance(node.args[0], ast.BinOp)
        and isinstance(node.args[0].op, ast.Sub)
    )


def _assertion(
    call: ast.AST, names: frozenset[str], relation: Relation, expected: ast.expr
) -> Assertion | None:
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id not in names:
        return None
    args = ast.Tuple(call.args, ast.Load())
    kwargs = ast.Dict(
        [None if each.arg is None else ast.Constant(each.arg) for each in call.keywords],
        [each.value for each in call.keywords],
    )
    if any(uses(each, names) for each in (args, kwargs, expected)):
        return None
    return Assertion(call.func.id, args, kwargs, relation, expected)


def _literal(node: ast.expr) -> Any:
    return ast.literal_eval(node)
