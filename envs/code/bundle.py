"""Our own programs for a sandbox: several modules as one text."""

from functools import cache
from importlib import import_module, resources

from rollgym.sandbox.core.program import Program

_PACKAGES = ("rollgym", "rollgym.envs", "rollgym.envs.code", "rollgym.envs.code.inside")
_NEEDED = {
    "candidate": ("values", "processes", "execution", "objects"),
    "checker": ("values", "execution", "objects", "stops", "proxies", "tested_program", "pytest_stand_in"),
    "shell": (),
}
_BEGINNING = """import sys as _sys
import types as _types


def _add(name, source):
    module = _types.ModuleType(name)
    _sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(_sys.modules[parent], last, module)
    exec(compile(source, name, "exec"), module.__dict__)
    return module


"""


@cache
def program(name: str) -> Program:
    """Return a module of `rollgym.envs.code.inside`, with those that it uses, as a program that runs its `main`."""
    lines = [f"_add({package!r}, '').__path__ = []" for package in _PACKAGES]
    lines += [f"_add({f'{_PACKAGES[-1]}.{each}'!r}, {_source(each)!r})" for each in (*_NEEDED[name], name)]
    lines.append(f"_sys.modules[{f'{_PACKAGES[-1]}.{name}'!r}].main()")
    return Program("python", _BEGINNING + "\n".join(lines) + "\n")


def _source(name: str) -> str:
    package = import_module(_PACKAGES[-1])
    return resources.files(package).joinpath(f"{name}.py").read_text(encoding="utf-8")
