"""Names and objects of a program that runs elsewhere, for tests to use as if it ran here."""

import ast
import collections.abc
import types
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Protocol

from rollgym.envs.code.inside import values

STAND_INS: Mapping[type[BaseException], type[Exception]] = {
    each: type(each.__name__, (Exception,), {"__doc__": f"The program raised a {each.__name__}."})
    for each in (StopIteration, StopAsyncIteration)
}
"""What is raised in the place of an exception that ends a loop."""
_NAMES = {each.__name__: f"__{each.__name__}__" for each in STAND_INS}
_CATCHING = frozenset({"raises", "assertRaises", "assertRaisesRegex", "suppress"})


class UnsupportedError(BaseException):
    """A test does what cannot be done over values; the program is not to blame."""


class Asking(Protocol):
    """What asks the program."""

    def resolve(self, name: str) -> Any:
        """Return a function, class, exception or value of the program."""

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, made: bool = False) -> Any:
        """Call a function or class of the program."""

    def operate(
        self, handle: "Handle", operation: str, *args: Any, is_last: bool = False, **kwargs: Any
    ) -> Any:
        """Do something with an object of the program; `is_last` puts it behind the other operand."""


class Function:
    """A function of the program."""

    def __init__(self, program: Asking, name: str) -> None:
        self._program = program
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it in its own process."""
        return self._program.call(self.__name__, args, kwargs)


class Class(Function):
    """A class of the program: what it makes stays there."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make an object."""
        return self._program.call(self.__name__, args, kwargs, made=True)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Handle) and values.Remote.kind_of(instance) == self.__name__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedError(f"a test reads {self.__name__}.{name} of a class")


class Coroutine(collections.abc.Coroutine[Any, Any, Any]):
    """What an `async def` of the program has returned: a value once awaited, and not before."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def send(self, value: Any) -> Any:
        """Give the value, as a coroutine does that has nothing to wait for."""
        raise StopIteration(self._value)

    def throw(self, *error: Any) -> Any:
        """Raise what is thrown into it."""
        return super().throw(*error)

    def close(self) -> None:
        """End it; there is nothing to end."""

    def __await__(self) -> Generator[Any, Any, Any]:
        yield from ()
        return self._value

    def __bool__(self) -> bool:
        raise TypeError("the program returned a coroutine, which is not awaited")


class Handle(values.Remote):
    """An object of the program that one of its functions has returned.

    Its own notion of being equal, less, true or a number is never asked for: only parts of it that are plain values
    count, so that no object can pass for what is expected.
    """

    def __init__(self, program: Asking, child: int, remote: values.Remote) -> None:
        super().__init__(values.Remote.number_of(remote), values.Remote.kind_of(remote))
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_child", child)
        # Whether it is, or came from, an object of a class of the item's.
        object.__setattr__(self, "_is_of_class", False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name != "__name__":
            raise AttributeError(name)
        return self._program.operate(self, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._program.operate(self, "setattr", name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the object."""
        return self._program.operate(self, "call", *args, **kwargs)

    def __len__(self) -> int:
        return _whole(self._program.operate(self, "len"))

    def __getitem__(self, key: Any) -> Any:
        return self._program.operate(self, "getitem", key)

    def __iter__(self) -> Iterator[Any]:
        parts = self._program.operate(self, "iter")
        if isinstance(parts, Handle):
            raise TypeError("it is not iterable")
        return iter(parts)

    def __next__(self) -> Any:
        try:
            return self._program.operate(self, "next")
        except STAND_INS[StopIteration] as end:
            # Here the end was asked for.
            raise StopIteration(*end.args) from None

    def __enter__(self) -> Any:
        return self._program.operate(self, "enter")

    def __exit__(self, *error: Any) -> None:
        self._program.operate(self, "exit")


class Made(Handle):
    """An object that a test has made by calling a class of the program: all of its behaviour is under test."""

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        # Only with its like, and who is equal to everything is equal to nothing.
        return isinstance(other, Made) and self._truth("eq", other) and not self._truth("unlike")

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return _whole(self._program.operate(self, "hash"))

    def __bool__(self) -> bool:
        return self._truth("bool")

    def __contains__(self, part: Any) -> bool:
        return self._truth("contains", part)

    def __str__(self) -> str:
        return str(self._program.operate(self, "str"))

    def __repr__(self) -> str:
        return str(self._program.operate(self, "repr"))

    def _truth(self, operation: str, *args: Any) -> bool:
        return self._program.operate(self, operation, *args) is True


class SolutionModule(types.ModuleType):
    """The module that tests import the program from."""

    def __init__(self, program: Asking) -> None:
        super().__init__("solution")
        self.__dict__["_program"] = program
        self.__dict__["__all__"] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = self.__dict__["_program"].resolve(name)
        self.__dict__[name] = found
        return found


def _whole(number: Any) -> int:
    if type(number) is not int:
        raise TypeError(f"a whole number is needed, not a {type(number).__name__}")
    return number


def _operator(operation: str, *, is_last: bool = False) -> Callable[..., Any]:
    def operate(self: Handle, *args: Any) -> Any:
        return self._program.operate(self, operation, *args, is_last=is_last)

    return operate


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_UNARY = ("neg", "pos", "invert", "abs")
_OTHERS = ("lt", "le", "gt", "ge", "int", "float", "round", "setitem", "delitem")
KEEPS_MADE = frozenset({*_BINARY, *_UNARY, "enter"})
"""What is done to an object that a test has made, and gives another such."""
for _name in (*_BINARY, *_UNARY, *_OTHERS):
    setattr(Made, f"__{_name}__", _operator(_name))
for _name in _BINARY:
    setattr(Made, f"__r{_name}__", _operator(_name, is_last=True))


def compiled(file: str, source: str) -> types.CodeType:
    """Return the code of tests, which catch the stand-ins with what they stand for."""
    if not any(name in source for name in _NAMES):
        return compile(source, file, "exec", dont_inherit=True)
    tree = ast.fix_missing_locations(_Catching().visit(ast.parse(source, file)))
    return compile(tree, file, "exec", dont_inherit=True)


def stand_in_names() -> dict[str, type[Exception]]:
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
