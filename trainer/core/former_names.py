"""Names that settings and options had before: understood for one release, with a warning that names the new one."""

import warnings
from collections.abc import Mapping
from typing import Any


def with_current_keys(values: Any, former_keys: Mapping[str, str], section: str) -> Any:
    """Return the settings of a section under their present names, and warn of each former name.

    Args:
        values: The settings, or anything else, which is returned unchanged.
        former_keys: The present name of each key, by its former name.
        section: The section's name, for the warning.

    Raises:
        ValueError: If a setting is given by both names.
    """
    former = [key for key in former_keys if isinstance(values, Mapping) and key in values]
    for key in former:
        if former_keys[key] in values:
            raise ValueError(f"'{key}' is the former name of '{former_keys[key]}', which is given, too")
        warn_of_former_name(f"{section}.{key}", f"{section}.{former_keys[key]}")
    return {former_keys.get(key, key): value for key, value in values.items()} if former else values


def warn_of_former_name(former: str, current: str) -> None:
    """Warn of a name that was given and is another now."""
    # FutureWarning: Python shows it to the settings' author, and not only to developers.
    warnings.warn(f"{former} is called {current} now", FutureWarning, stacklevel=3)
