"""YAML that people write: words have the meaning of YAML 1.2, and silently dropped parts are errors.

By YAML 1.1, which PyYAML reads, `no` is false, `010` is 8, `1:30` is 90, `2024-01-02` is a date, and `1e-6` is text.
"""

import re
from collections.abc import Hashable, Mapping
from typing import Any

import yaml

_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"
_STRUCTURE = ("[", "{", "'", '"')
"""How a value begins that is more than a word."""
_BLOCK = re.compile(r"(?:-|[\w.-]+:)(?: [^\n]*)?\n")
"""How a list or a mapping of several lines begins."""

# The core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema), by the characters that a word begins with;
# but for integers with zeros before them, which are 10 to one reader and 8 to the next.
_CORE = (
    ("null", r"~|null|Null|NULL|", ("~", "n", "N", "")),
    ("bool", r"true|True|TRUE|false|False|FALSE", tuple("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+", tuple("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        tuple("-+0123456789."),
    ),
    ("merge", r"<<", ("<",)),
)
_UNICODE_LINE_END = re.compile("[\x85\u2028\u2029]")
_Resolvers = dict[str, list[tuple[str, re.Pattern[str]]]]


def read_yaml(text: str, name: str) -> Any:
    """Read one document of YAML.

    Args:
        text: The document.
        name: Its name in the error messages, which also give the line.

    Raises:
        yaml.YAMLError: If the document is invalid, repeats a key in a mapping, is nested too deep, or has an invalid
            value, such as the day 2024-13-45.
    """
    try:
        loader = _Loader(text)
        loader.name = name
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        # An unclosed bracket is found at the end of the text, but was opened at the context's place.
        mark = error.context_mark or error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise yaml.YAMLError(": ".join(filter(None, (place, error.problem or error.context)))) from error
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deep") from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        # The constructors of numbers, dates and truth values let these errors out if a word is invalid.
        raise yaml.YAMLError(f"{name} has a value that is none of its kind: {error}") from error


def read_word(text: str, name: str) -> Any:
    """Read a value that is a word of a command line.

    Numbers, `true`, `null` and their like, lists, mappings and quoted texts are YAML; any other text is taken as it is,
    with its `#`, its `:` and its blanks.

    Args:
        text: The word.
        name: Its name in the error messages.

    Raises:
        yaml.YAMLError: As `read_yaml` does.
    """
    bare = text.strip()
    if bare.startswith(_STRUCTURE) or _BLOCK.match(bare) or _core_tag(bare) not in (None, _MERGE):
        return read_yaml(text, name)
    return text


def write_yaml(value: Any) -> str:
    """Return plain data as a document that `read_yaml` reads back, and readers of YAML 1.1 alike."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


def _core_tag(text: str) -> str | None:
    return next(
        (tag for tag, pattern in _Loader.yaml_implicit_resolvers.get(text[:1], []) if pattern.match(text)),
        None,
    )


def _core_resolvers() -> _Resolvers:
    found: _Resolvers = {}
    for name, pattern, beginnings in _CORE:
        for beginning in beginnings:
            found.setdefault(beginning, []).append((f"{_TAG}{name}", re.compile(rf"(?:{pattern})\Z")))
    return found


def _of_both(one: Mapping[str, list[Any]], other: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    return {key: [*one.get(key, []), *other.get(key, [])] for key in {*one, *other}}


class _Loader(yaml.SafeLoader):
    """Reads words by the core schema of YAML 1.2, and refuses a key that a mapping has already."""

    yaml_implicit_resolvers = _core_resolvers()

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Return a mapping, and refuse duplicate keys."""
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


class _Dumper(yaml.SafeDumper):
    """Quotes texts that either version of YAML would read as another type."""

    yaml_implicit_resolvers = _of_both(_core_resolvers(), yaml.SafeDumper.yaml_implicit_resolvers)

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Return a text; one with line ends that only Unicode knows, which its plain styles fold, is escaped."""
        style = '"' if _UNICODE_LINE_END.search(data) else None
        return self.represent_scalar(f"{_TAG}str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)
