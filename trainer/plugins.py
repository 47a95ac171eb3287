"""Load what a setting names as `module:attr`: a reward, an agent, a context policy, a task source.

This is the boundary to the import of a user's module: the only place where whatever that raises is caught.
"""

import traceback
from importlib import import_module
from types import ModuleType
from typing import Any


def load_attribute(path: str) -> Any:
    """Return the attribute that `path` names.

    Args:
        path: `package.module:attribute`.

    Raises:
        ValueError: If the path is malformed, nothing is there, or the module cannot be imported.
    """
    module_name, separator, attribute = path.partition(":")
    if not separator or not module_name or not attribute:
        raise ValueError(f"'{path}' is not of the form module:attribute")
    module = _import(module_name, path)
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise ValueError(f"module '{module_name}' has no attribute '{attribute}'") from error


def _import(name: str, path: str) -> ModuleType:
    try:
        return import_module(name)
    except (Exception, SystemExit) as error:
        raise ValueError(f"cannot import '{name}' of '{path}': {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """What went wrong and where, on one line."""
    if isinstance(error, ModuleNotFoundError):
        return str(error)
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}, line {error.lineno})"
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text} ({last.filename}, line {last.lineno})"
