"""Load what a setting names as `module:attr`: a reward, an agent, a context policy, a task source."""

from importlib import import_module
from typing import Any


def load_attribute(path: str) -> Any:
    """Return the attribute that `path` names.

    Args:
        path: `package.module:attribute`.

    Raises:
        ValueError: If the path is malformed, or nothing is there.
    """
    module_name, separator, attribute = path.partition(":")
    if not separator or not module_name or not attribute:
        raise ValueError(f"'{path}' is not of the form module:attribute")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"cannot import '{module_name}' of '{path}': {error}") from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise ValueError(f"module '{module_name}' has no attribute '{attribute}'") from error
