"""Exceptions by which a program could end a loop of its tests.

`all(map(f, cases))` takes a StopIteration of `f` for the end of the cases, and what is left of them is never checked.
So the program's are raised as exceptions of another class, and where tests name StopIteration as what they catch, they
catch that, too.
"""

import ast
import types
from collections.abc import Mapping

STAND_INS: Mapping[type[BaseException], type[Exception]] = {
    each: type(each.__name__, (Exception,), {"__doc__": f"The program raised a {each.__name__}."})
    for each in (StopIteration, StopAsyncIteration)
}
"""What is raised in the place of an exception that ends a loop."""
_NAMES = {each.__name__: f"__{each.__name__}__" for each in STAND_INS}
_CATCHING = frozenset({"raises", "assertRaises", "assertRaisesRegex", "suppress"})


def compiled(file: str, source: str) -> types.CodeType:
    """Return the code of tests, which catch the stand-ins with what they stand for."""
    if not any(name in source for name in _NAMES):
        return compile(source, file, "exec", dont_inherit=True)
    tree = ast.fix_missing_locations(_Catching().visit(ast.parse(source, file)))
    return compile(tree, file, "exec", dont_inherit=True)


def names() -> dict[str, type[Exception]]:
    """Return the names by which compiled tests know the stand-ins."""
    return {_NAMES[each.__name__]: stand_in for each, stand_in in STAND_INS.items()}


class _Catching(ast.NodeTransformer):
    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        if node.type is not None:
            node.type = _widened(node.type)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if _last_name(node.func) in _CATCHING:
            node.args = [_widened(each) for each in node.args]
            for keyword in node.keywords:
                keyword.value = _widened(keyword.value)
        return self.generic_visit(node)


def _widened(node: ast.expr) -> ast.expr:
    """Return an expression for exceptions that holds their stand-ins, too."""
    if isinstance(node, ast.Tuple):
        parts = [_widened(each) for each in node.elts]
        flat = [inner for each in parts for inner in (each.elts if isinstance(each, ast.Tuple) else [each])]
        return ast.Tuple(flat, ast.Load())
    name = _last_name(node)
    return ast.Tuple([node, ast.Name(_NAMES[name], ast.Load())], ast.Load()) if name in _NAMES else node


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
