"""Packages that only some installations have."""

import importlib
from types import ModuleType


class MissingExtraError(ImportError):
    """A package is not installed; the message names the extra that brings it."""


def import_extra(module: str, extra: str) -> ModuleType:
    """Import a module of a package that an extra brings.

    Args:
        module: Its full name.
        extra: The extra.

    Raises:
        MissingExtraError: Its package, or one that it needs, is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{module} needs the package {error.name}, which is not installed: pip install 'rollgym[{extra}]'"
        ) from error
