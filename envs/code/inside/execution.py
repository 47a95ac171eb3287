"""Executes what is typed at an interpreter, and catches all that it writes."""

import os
import sys
from typing import Any

_MOST_BYTES = 64 * 1024


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
