"""What the first process of a container is started with: its files as one text, so that images need nothing of ours."""

import json
from importlib import resources

_PACKAGE = "sandbox.containers.inside"
# In the order in which they import each other.
_MODULES = ("memory", "frames", "files", "run", "main")
_START = """
import json, sys, types
for name, source in json.loads(sources):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    exec(compile(source, name, "exec"), vars(module))
sys.modules[name].main()
"""


def first_process() -> str:
    """Return the program of the first process, for `python3 -c`."""
    parents = [_PACKAGE.rsplit(".", depth)[0] for depth in (2, 1)]
    sources = [(name, "") for name in (*parents, _PACKAGE)]
    for name in _MODULES:
        text = resources.files(_PACKAGE).joinpath(f"{name}.py").read_text("utf-8")
        sources.append((f"{_PACKAGE}.{name}", text))
    return f"sources = {json.dumps(sources)!r}{_START}"
