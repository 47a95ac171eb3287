"""YAML that people write: what a reader that takes everything would leave out in silence is an error."""

from collections.abc import Hashable
from typing import Any

import yaml

_MERGE = "tag:yaml.org,2002:merge"


def read_yaml(text: str, name: str) -> Any:
    """Read one document of YAML.

    Args:
        text: The document.
        name: What it is called where it is told in which of its lines something is wrong.

    Raises:
        yaml.YAMLError: If it is none, names a key twice in a mapping, is nested too deep, or has a value that is none
            of its kind, such as the day 2024-13-45.
    """
    try:
        loader = _Loader(text)
        loader.name = name
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        # A bracket that is not closed is found at the end of the text, and was opened where the context is.
        mark = error.context_mark or error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise yaml.YAMLError(": ".join(filter(None, (place, error.problem or error.context)))) from error
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deep") from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        # What makes numbers, dates and truth values of words lets these out where a word is none.
        raise yaml.YAMLError(f"{name} has a value that is none of its kind: {error}") from error


class _Loader(yaml.SafeLoader):
    """Refuses a key that a mapping has already, of which the last would stand and the others do nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Return a mapping."""
        first: dict[Hashable, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            name = self.construct_object(key)
            line = key.start_mark.line + 1
            if name in first:
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    f"the key {key.value!r} stands in lines {first[name]} and {line}",
                    key.start_mark,
                )
            first[name] = line
        return super().construct_mapping(node, deep)
