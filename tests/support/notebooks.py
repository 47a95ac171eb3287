"""Runs the code cells of a notebook in order, in one namespace and one event loop, as Jupyter does."""

import ast
import asyncio
import inspect
import json
import sys
from pathlib import Path


def code_of(notebook: Path) -> list[str]:
    """The text of each code cell."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


async def run(notebook: Path) -> None:
    """Run all cells; what one raises ends it."""
    names: dict[str, object] = {"__name__": "__main__"}
    for number, text in enumerate(code_of(notebook), 1):
        code = compile(text, f"{notebook.name}, cell {number}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(code, names)  # the notebook is one of ours
        if inspect.isawaitable(result):
            await result


if __name__ == "__main__":
    sys.path.insert(0, "")
    asyncio.run(run(Path(sys.argv[1])))
