"""What may be asked of a loaded program: to call, and to do things with the objects that its calls have made."""

import builtins
import json
import operator
import os
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from rollgym.envs.code.inside import values

CALLBACK = "callback"
"""The kind of a stand-in for a function of the tests."""
_TEXT = 300
_MOST_BYTES = 64 * 1024
_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "getattr": getattr,
    "setattr": setattr,
    "delattr": delattr,
    "call": lambda called, *args, **kwargs: called(*args, **kwargs),
    "len": len,
    "iter": iter,
    "next": next,
    "str": str,
    "repr": repr,
    "bool": bool,
    "hash": hash,
    "abs": abs,
    "int": int,
    "float": float,
    "round": round,
    "contains": operator.contains,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "eq": operator.eq,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
    "matmul": operator.matmul,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "neg": operator.neg,
    "pos": operator.pos,
    "invert": operator.invert,
    "enter": lambda manager: manager.__enter__(),
    "exit": lambda manager: manager.__exit__(None, None, None),
    "unlike": lambda one: one == values.Remote(0, "nothing like it"),
}


class World:
    """A loaded program and the objects that were shown of it.

    Args:
        module: The program.
        exchange: Sends a line to the caller, and returns the next line.
    """

    def __init__(self, module: types.ModuleType, exchange: Callable[[str], str]) -> None:
        self._module = module
        self._exchange = exchange
        self._kept: list[Any] = []

    def do(self, request: Mapping[str, Any]) -> str:
        """Do as asked and return the answer as text."""
        if "name" in request:
            return values.dump(self._look_up(request["name"]))
        if "execute" in request:
            return values.dump(execute(request["execute"], self._module.__dict__))
        args = self._built(request["args"])
        kwargs = self._built(request.get("kwargs", {"dict": []}))
        name = "value"
        if "call" in request:
            result = self._function(request["call"])(*args, **kwargs)
            if isinstance(result, types.CoroutineType):
                # Tests that await it are given its value, and those that do not, no value.
                name, result = "coroutine", _awaited(result)
        else:
            result = _OPERATIONS[request["operate"]](*args, **kwargs)
        keep = self._keep if request.get("keep") else None
        answer: dict[str, Any] = {name: result}
        if request.get("changes"):
            changed = {
                number: value
                for number, (value, before) in enumerate(zip(args, request["args"], strict=True))
                if isinstance(value, list | dict | set | bytearray) and values.plain(value, keep) != before
            }
            answer["changed"] = changed
        return values.dump(answer, keep)

    def _built(self, data: Any) -> Any:
        return values.build(data, self._found)

    def _found(self, remote: values.Remote) -> Any:
        number = values.Remote.number_of(remote)
        if values.Remote.kind_of(remote) != CALLBACK:
            return self._kept[number]

        def call_back(*args: Any, **kwargs: Any) -> Any:
            asked = {"callback": number, "args": list(args), "kwargs": kwargs}
            answer = json.loads(self._exchange(values.dump(asked, self._keep)))
            if "value" in answer:
                return self._built(answer["value"])
            raise getattr(builtins, answer["raised"], RuntimeError)(answer["text"])

        return call_back

    def _keep(self, value: Any) -> values.Remote:
        self._kept.append(value)
        return values.Remote(len(self._kept) - 1, type(value).__name__)

    def _look_up(self, name: str) -> dict[str, Any]:
        found = getattr(self._module, name)
        if isinstance(found, type):
            return {"class": _names(found), "error": issubclass(found, BaseException)}
        if callable(found):
            return {"function": name}
        return {"value": found}

    def _function(self, name: str) -> Callable[..., Any]:
        """Return what is called: a function of the program, or a method of its class Solution."""
        found = getattr(self._module, name, None)
        solution = getattr(self._module, "Solution", None)
        if found is None and isinstance(solution, type) and hasattr(solution, name):
            found = getattr(solution(), name)
        if found is None:
            raise AttributeError(f"the program defines no {name}")
        called: Callable[..., Any] = found
        return called


def described(error: BaseException) -> dict[str, Any]:
    """Say what was raised: the names of its classes and its text, with nothing of the object itself."""
    if type(error) in (values.ValueRefusedError, values.TooLargeError):
        # No exception of the program: a test that expects a ValueError is not met by it.
        return {"refused": str(error)[:_TEXT]}
    try:
        text = str(error)[:_TEXT]
    except BaseException:  # noqa: BLE001 - the text comes from the program, too
        text = ""
    return {"raised": _names(type(error)), "text": str(text)}


def _names(kind: type) -> list[str]:
    return [str(each.__name__) for each in type.mro(kind)][:20]


def _awaited(coroutine: Any) -> Any:
    # Only here: the import is slow, and hardly any program needs it.
    import asyncio

    return asyncio.run(coroutine)


def execute(source: str, names: dict[str, Any]) -> dict[str, Any]:
    """Execute statements, and show the value of a last expression, as an interpreter does.

    Returns:
        `output`, what was written by whatever means; `error`, the traceback of what was raised, or nothing.
    """
    # Only here, as below: most programs are never typed, and these imports take longer than they.
    import tempfile

    count = names.setdefault("__turn__", 0) + 1
    names["__turn__"] = count
    name = f"<turn {count}>"
    error = ""
    with tempfile.TemporaryFile() as written:
        for descriptor in (1, 2):
            os.dup2(written.fileno(), descriptor)
        try:
            _run(source, name, names)
        except BaseException as raised:  # noqa: BLE001 - whatever is typed
            error = _described(raised, name)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (ValueError, OSError, AttributeError):
                continue
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (1, 2):
            os.dup2(nothing, descriptor)
        os.close(nothing)
        size = written.seek(0, os.SEEK_END)
        written.seek(0)
        output = written.read(_MOST_BYTES).decode(errors="replace")
    if size > _MOST_BYTES:
        output += f"\n[... {size - _MOST_BYTES} bytes are left out ...]"
    return {"output": output, "error": error}


def _run(source: str, name: str, names: dict[str, Any]) -> None:
    import ast
    import linecache

    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec", dont_inherit=True), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), names)
        if value is not None:
            sys.stdout.write(f"{value!r}\n")


def _described(raised: BaseException, name: str) -> str:
    """Return the traceback from the first line that was typed."""
    import traceback

    trace = raised.__traceback__
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<turn"):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(raised), raised, trace, limit=-8))[-4000:]
