"""What is wrong with a name of the user's code, `module:attribute`, and how to correct it."""

from __future__ import annotations

from types import ModuleType

from rollgym.extras import MissingExtraError
from rollgym.suggestions import did_you_mean


def misnamed(path: str) -> str:
    """Return what is wrong with the form of `module:attribute`; empty if nothing is."""
    module, colon, attribute = path.partition(":")
    if not module or not colon or not attribute:
        return f"'{path}' is not of the form module:attribute"
    if module.endswith(".py") or "/" in module:
        dotted = module.removesuffix(".py").strip("./").replace("/", ".")
        return f"a module is named as in an import, without .py: '{dotted}:{attribute}'"
    return ""


def missing_module(error: ModuleNotFoundError, module: str) -> str:
    """Return why a module cannot be imported: it is not there, or one that it imports is not.

    Args:
        error: What its import raised.
        module: The module's full name.
    """
    name = error.name or ""
    if name and (module == name or module.startswith(f"{name}.")):
        return f"there is no module '{name}' in the current directory, on PYTHONPATH or installed"
    if isinstance(error, MissingExtraError) or not name:
        return str(error)
    return f"it imports '{name}', which is not installed"


def missing_attribute(module: ModuleType, attribute: str) -> str:
    """Return that a module has no such attribute, with the nearest public name that it has."""
    hint = did_you_mean(attribute, (name for name in dir(module) if not name.startswith("_")))
    return f"module '{module.__name__}' has no attribute '{attribute}'" + (f"; {hint}" if hint else "")
