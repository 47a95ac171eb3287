"""Statements of test code, sorted: what is expressed as calls and expected values, what is run, and what they need.

An assertion becomes data if it compares the result of one call of the program with a value.
"""

import ast
import builtins
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rollgym.envs.code.item import ItemError

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


def _split_assertion(statement: ast.Assert, names: frozenset[str]) -> Assertion | None:
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


_Kind = Literal["context", "pair", "case", "bare", "dropped"]
SOLUTION = "solution"
"""The module that tests import the program from."""


@dataclass(frozen=True, slots=True)
class AssertedPair:
    """An assertion with its number and the number of the test that it belongs to."""

    number: int
    test: int
    assertion: Assertion


@dataclass
class SuiteStep:
    """A statement, and what becomes of it.

    Attributes:
        kind: `pair`, an assertion as data; `case`, run as it is; `bare`, it uses the program without a test of its own;
            `context`, it does not use it; `dropped`, it says nothing.
        statement: The statement.
        number: Of a pair or a case.
        pair: The assertion of a pair.
    """

    kind: _Kind
    statement: ast.stmt
    number: int = -1
    pair: AssertedPair | None = None


@dataclass
class Numbers:
    """Counts tests, and numbers the pairs and cases in them.

    Attributes:
        tests: How many there are.
        used: How many pairs and cases.
        pairs: Those so far.
        cases: The test of each case so far, by number.
    """

    tests: int = 0
    used: int = 0
    pairs: list[AssertedPair] = field(default_factory=list)
    cases: dict[int, int] = field(default_factory=dict)

    def pair(self, statement: ast.stmt, test: int, assertion: Assertion) -> SuiteStep:
        """Number an assertion that is data."""
        self.pairs.append(AssertedPair(self.used, test, assertion))
        self.used += 1
        return SuiteStep("pair", statement, self.used - 1, self.pairs[-1])

    def case(self, statement: ast.stmt, test: int) -> SuiteStep:
        """Number a statement that has to be run."""
        self.cases[self.used] = test
        self.used += 1
        return SuiteStep("case", statement, self.used - 1)

    def test(self) -> int:
        """Number a test."""
        self.tests += 1
        return self.tests - 1


def steps_of_check(body: Sequence[ast.stmt], names: frozenset[str], numbers: Numbers) -> list[SuiteStep]:
    """Sort statements of which each assertion, or loop of assertions, is a test of its own.

    Raises:
        ItemError: Assertions stand in a function that is never called.
    """
    steps, depends = [], False
    asserting: set[str] = set()
    waiting: set[str] = set()
    for statement in body:
        mentions = uses(statement, names)
        waiting -= {name for name in waiting if uses(statement, frozenset({name}))}
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            # What it says of the program it says at its calls.
            steps.append(SuiteStep("bare" if mentions else "context", statement))
            if mentions:
                names |= {statement.name}
            if mentions and _asserts(statement, asserting):
                asserting.add(statement.name)
                waiting.add(statement.name)
            continue
        if not isinstance(statement, ast.Assert):
            if _asserts(statement, asserting) and (mentions or depends):
                steps.append(numbers.case(statement, numbers.test()))
                depends = True
            else:
                steps.append(SuiteStep("bare" if mentions else "context", statement))
                depends |= mentions
            continue
        assertion = _split_assertion(statement, names) if mentions else None
        if assertion is not None and (not depends or assertion.literal() is not None):
            steps.append(numbers.pair(statement, numbers.test(), assertion))
        elif mentions or depends:
            steps.append(numbers.case(statement, numbers.test()))
        else:
            # It says nothing about the program: items of HumanEval have such lines beside their tests.
            steps.append(SuiteStep("dropped", statement))
    if waiting:
        raise ItemError(f"the tests in {min(waiting)} are never run: nothing calls it")
    return steps


def _asserts(statement: ast.stmt, asserting: Collection[str]) -> bool:
    """Tell whether a statement asserts something, by itself or by a function that does."""
    return any(isinstance(node, ast.Assert) for node in ast.walk(statement)) or uses(
        statement, frozenset(asserting)
    )


def steps_together(
    body: Sequence[ast.stmt], names: frozenset[str], numbers: Numbers, test: int
) -> list[SuiteStep]:
    """Sort statements that are one test: all of its assertions are data, or it is run as a whole."""
    found = [
        _split_assertion(each, names) if isinstance(each, ast.Assert) and uses(each, names) else None
        for each in body
    ]
    simple = all(
        assertion is not None or _is_simple(statement, names)
        for statement, assertion in zip(body, found, strict=True)
    )
    if not simple or not any(found):
        whole = ast.If(ast.Constant(True), list(body) or [ast.Pass()], [])
        return [numbers.case(whole, test)]
    return [
        SuiteStep("context", statement) if assertion is None else numbers.pair(statement, test, assertion)
        for statement, assertion in zip(body, found, strict=True)
    ]


def _is_simple(statement: ast.stmt, names: frozenset[str]) -> bool:
    plain = ast.Assign | ast.AnnAssign | ast.Import | ast.ImportFrom | ast.Expr | ast.Pass | ast.FunctionDef
    return isinstance(statement, plain) and not uses(statement, names) and not imports_program(statement)


def evaluation_of(steps: Iterable[SuiteStep]) -> list[ast.stmt]:
    """Return statements that tell the values of the pairs, and call nothing of the program."""
    made: list[ast.stmt] = []
    for step in steps:
        if step.kind == "context":
            made.append(step.statement)
        elif step.pair is not None:
            assertion = step.pair.assertion
            values = [ast.Constant(step.number), assertion.args, assertion.kwargs, assertion.expected]
            tell = ast.Expr(ast.Call(ast.Name("__pair__", ast.Load()), values, []))
            made.append(_guarded(step.number, tell))
    return made


def checks_of(steps: Iterable[SuiteStep], inline: frozenset[int]) -> list[ast.stmt]:
    """Return statements that run the cases, and the pairs whose values are not known."""
    made: list[ast.stmt] = []
    for step in steps:
        if step.kind in ("context", "bare"):
            made.append(step.statement)
        elif step.kind == "case" or (step.kind == "pair" and step.number in inline):
            made.append(_guarded(step.number, step.statement))
    return made


def _guarded(number: int, statement: ast.stmt) -> ast.stmt:
    case = ast.Call(ast.Name("__case__", ast.Load()), [ast.Constant(number)], [])
    return ast.With([ast.withitem(case, None)], [statement])


def source_of(body: Sequence[ast.stmt]) -> str:
    """Return statements as text."""
    return ast.unparse(ast.fix_missing_locations(ast.Module(list(body), [])))


def imports_program(node: ast.stmt) -> bool:
    """Tell whether a statement imports from the program."""
    if isinstance(node, ast.ImportFrom):
        return node.module == SOLUTION
    return isinstance(node, ast.Import) and any(alias.name == SOLUTION for alias in node.names)
