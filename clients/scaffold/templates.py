"""The templates of new folders: readable files with marks that are replaced by names."""

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable

_ROOT = files("rollgym.clients.scaffold") / "templates"
_COMPILED = "__pycache__"


def rendered(templates: Sequence[str], names: Mapping[str, str]) -> dict[str, str]:
    """Return the files of templates, with names in place of their marks.

    Args:
        templates: Folders of `templates/`; a file of a later one replaces that of an earlier one.
        names: The text that replaces each mark, in paths and in texts.

    Returns:
        The texts, by path.
    """
    marks = re.compile("|".join(map(re.escape, names)))

    def named(text: str) -> str:
        return marks.sub(lambda found: names[found[0]], text)

    return {
        named(path): named(text) for template in templates for path, text in template_texts(template).items()
    }


def template_texts(template: str) -> dict[str, str]:
    """Return the files of a template as they stand, by path."""
    return dict(_texts(_ROOT / template, ""))


def _texts(folder: Traversable, prefix: str) -> Iterator[tuple[str, str]]:
    for entry in sorted(folder.iterdir(), key=lambda each: each.name):
        if entry.name == _COMPILED:
            continue
        if entry.is_dir():
            yield from _texts(entry, f"{prefix}{entry.name}/")
        else:
            yield f"{prefix}{entry.name}", entry.read_text(encoding="utf-8")
