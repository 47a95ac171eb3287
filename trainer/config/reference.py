"""Writes the pages of settings from the code: `python -m rollgym.trainer.config.reference`.

`docs/configuration.md` lists the sections and the keys of the run itself; each section has a page in
`docs/configuration/`. Every key is an item of a list and not a row of a table, so that a page reads well on a phone.
"""

import argparse
import json
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rollgym.trainer.config.agents import ToolFormats
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.kinds import Named
from rollgym.trainer.core.strict import models_of

INDEX = "configuration.md"
FOLDER = "configuration"
Shared = dict[str, list[type[BaseModel]]]
"""Classes by the name of a setting that they share."""

_OWN_PAGES = ("algorithm",)
"""Sections so long that each of their parts that has several kinds has a page of its own."""

_HEADER = """# Settings of a run

Every setting, by section. A YAML file holds any of them, and `roll-train --config FILE key=value ...` lays values
over it (`rollout.group_size=16`, `tasks.0.kwargs.size=8`). Numbers, `true`, `null`, lists and mappings are those of
YAML 1.2, in files and on the command line; any other word there is text as typed. `~` is the home folder where a
setting is a path. Unknown keys are refused. `--dry-run` prints the settings that a run resolves to. These pages are
written from the code by `python -m rollgym.trainer.config.reference`; a test compares them with it.
"""


@dataclass(frozen=True, slots=True)
class DocumentedKey:
    """The documentation of one key.

    Attributes:
        key: The key, such as `algorithm.advantage`; empty for the run itself.
        models: The settings class, or one for each kind that may be chosen.
        parts: The sections under it.
        described: Keys under it whose section is described elsewhere, each with the key of that place.
    """

    key: str
    models: tuple[type[BaseModel], ...]
    parts: tuple["DocumentedKey", ...]
    described: dict[str, str]

    @property
    def title(self) -> str:
        """The last word of the key, as people write it."""
        return self.key.rpartition(".")[2].replace("_", " ").capitalize()

    @property
    def summary(self) -> str:
        """The first paragraph of the class's documentation; empty if there are several kinds."""
        return _summary(self.models[0]) if len(self.models) == 1 else ""

    @property
    def has_page(self) -> bool:
        """Whether the key's documentation starts a page."""
        parent, _, _ = self.key.rpartition(".")
        return not parent or (parent in _OWN_PAGES and len(self.models) > 1)

    @property
    def page(self) -> str:
        """The name of the page that it begins."""
        return f"{self.key.replace('.', '_')}.md"


def reference() -> dict[str, str]:
    """Return the text of every page by its path in the folder of the documentation."""
    run = _section("", (RunSettings,), {})
    sections = [each for each in _sections(run) if each.key and each.has_page]
    own = _keys(RunSettings, run, "", f"{FOLDER}/")
    listed = [f"- [`{each.key}`]({FOLDER}/{each.page}): {each.summary or _kinds(each)}" for each in sections]
    index = "\n".join([_HEADER, "## Sections", "", *listed, "", "## The run itself", "", *own, ""])
    return {INDEX: index} | {f"{FOLDER}/{each.page}": _page(each) for each in sections}


def _section(
    key: str, models: tuple[type[BaseModel], ...], seen: dict[type[BaseModel], str]
) -> DocumentedKey:
    """Describe what stands under a key; a class that two keys have is described at the first."""
    seen.update(dict.fromkeys(models, key))
    parts: list[DocumentedKey] = []
    described: dict[str, str] = {}
    for model in models:
        for name, field in model.model_fields.items():
            inner = f"{key}.{name}" if key else name
            found = models_of(field)
            if new := tuple(each for each in found if each not in seen):
                parts.append(_section(inner, new, seen))
            elif found and seen[found[0]] != inner:
                described[inner] = seen[found[0]]
    return DocumentedKey(key, models, tuple(parts), described)


def _sections(section: DocumentedKey) -> Iterator[DocumentedKey]:
    yield section
    for part in section.parts:
        yield from _sections(part)


def _page(section: DocumentedKey) -> str:
    lines = [f"# Settings: {section.key}", ""]
    parent = section.key.rpartition(".")[0]
    up = f"[{parent}]({parent}.md)" if parent else f"[all sections](../{INDEX})"
    lines += [f"Written from the code; {up}.", ""]
    for part in _on_page(section):
        if part is not section:
            lines += [f"## {part.title} (`{part.key}`)", ""]
        lines += [*_body(part, 2 if part is section else 3), ""]
    return "\n".join(lines)


def _on_page(section: DocumentedKey) -> Iterator[DocumentedKey]:
    yield section
    for part in section.parts:
        if not part.has_page:
            yield from _on_page(part)


def _body(section: DocumentedKey, level: int) -> Iterator[str]:
    if len(section.models) == 1:
        (model,) = section.models
        if summary := _summary(model):
            yield from (summary, "")
        yield from _keys(model, section, section.key, "")
        return
    yield f"`{section.key}.kind` is one of {_kinds(section)}."
    yield ""
    shared = _shared(section.models)
    for heading, names in (
        ("All kinds", [name for name, models in shared.items() if len(models) == len(section.models)]),
        ("Several kinds", [name for name, models in shared.items() if len(models) < len(section.models)]),
    ):
        if names:
            yield from (f"{'#' * level} {heading}", "")
            yield from (_shared_item(section, name, shared[name]) for name in names)
            yield ""
    for model in section.models:
        yield from (f"{'#' * level} {_kind(model) or model.__name__}", "")
        if summary := _summary(model):
            yield from (summary, "")
        own = _keys(model, section, section.key, "", leave_out=["kind", *_names_shared_by(model, shared)])
        some = [
            f"`{name}`" for name in _names_shared_by(model, shared) if len(shared[name]) < len(section.models)
        ]
        yield from own
        if some:
            yield from ("", f"Also takes {', '.join(some)} (above).")
        elif not own:
            yield "No settings of its own."
        yield ""


def _names_shared_by(model: type[BaseModel], shared: Shared) -> list[str]:
    return [name for name, models in shared.items() if model in models]


def _shared_item(section: DocumentedKey, name: str, models: Sequence[type[BaseModel]]) -> str:
    """The item of a setting that several kinds have: of which, and with which defaults."""
    field = models[0].model_fields[name]
    defaults = {_kind(model) or model.__name__: _default(model.model_fields[name]) for model in models}
    whose = (
        "" if len(models) == len(section.models) else f" · of {', '.join(f'`{kind}`' for kind in defaults)}"
    )
    return _item(f"{section.key}.{name}", field, _type_of(field) + whose, _together(defaults))


def _keys(
    model: type[BaseModel], section: DocumentedKey, prefix: str, folder: str, leave_out: Sequence[str] = ()
) -> list[str]:
    """The items of a class's own settings, with links to the sections under them."""
    parts = {part.key: part for part in section.parts}
    lines = []
    for name, field in model.model_fields.items():
        if name in leave_out:
            continue
        key = f"{prefix}.{name}" if prefix else name
        what = _type_of(field)
        or_null = " or null" if type(None) in typing.get_args(field.annotation) else ""
        if part := parts.get(key):
            target = f"{folder}{part.page}" if part.has_page else f"#{_anchor(part)}"
            what = f"[its own keys]({target}){or_null}"
        elif key in section.described:
            what = f"keys like those of `{section.described[key]}`{or_null}"
        lines.append(_item(key, field, what, _default(field)))
    return lines


def _item(key: str, field: FieldInfo, what: str, default: str) -> str:
    meaning = " ".join((field.description or "").split())
    said = f" · {default}" if default else ""
    return f"- **`{key}`** · {what}{said}" + (f"<br>\n  {meaning}" if meaning else "")


def _anchor(section: DocumentedKey) -> str:
    """The anchor that sites and forges make of a section's heading."""
    heading = f"{section.title} ({section.key})".lower()
    return "".join(each for each in heading if each.isalnum() or each in " _-").replace(" ", "-")


def _shared(models: Sequence[type[BaseModel]]) -> Shared:
    """The settings that at least two classes have with one type and one meaning, each with those classes."""
    found: Shared = {}
    for model in models:
        for name, field in model.model_fields.items():
            same = [
                other
                for other in models
                if (theirs := other.model_fields.get(name)) is not None
                and (theirs.annotation, theirs.description) == (field.annotation, field.description)
            ]
            if len(same) > 1 and name != "kind" and len(same) > len(found.get(name, ())):
                found[name] = same
    return found


def _together(defaults: dict[str, str]) -> str:
    """One text for the defaults of all kinds: the most frequent, and whose are others."""
    values = list(defaults.values())
    most = max(values, key=values.count)
    others = [
        f"{', '.join(f'`{kind}`' for kind in defaults if defaults[kind] == value)}: {value.removeprefix('default ')}"
        for value in dict.fromkeys(values)
        if value != most
    ]
    return "; ".join([most, *others])


def _kind(model: type[BaseModel]) -> str | None:
    """The value of `kind` that chooses a class."""
    field = model.model_fields.get("kind")
    return str(typing.get_args(field.annotation)[0]) if field is not None else None


def _kinds(section: DocumentedKey) -> str:
    return ", ".join(f"`{_kind(model) or model.__name__}`" for model in section.models)


def _summary(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined and field.default_factory is None:
        return "required"
    if field.default_factory is not None or isinstance(field.default, BaseModel):
        return ""
    value = field.default
    written = value if isinstance(value, str) and value else json.dumps(value, default=str)
    return f"default `{written}`"


def _type_of(field: FieldInfo) -> str:
    """What a setting takes: the names that it chooses among, or its type."""
    for each in field.metadata:
        if isinstance(each, Named | ToolFormats):
            return ", ".join(f"`{name}`" for name in each.known)
    return _type_name(field.annotation)


def _type_name(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    parts = typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_name(parts[0])
    if origin is typing.Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type_name(part) for part in parts)
    if origin is not None:
        return f"{origin.__name__} of {', '.join(_type_name(part) for part in parts if part is not Ellipsis)}"
    if annotation is type(None):
        return "null"
    return getattr(annotation, "__name__", str(annotation))


def write(docs: Path) -> None:
    """Write the pages into a folder of documentation, and remove those of removed sections."""
    pages = reference()
    (docs / FOLDER).mkdir(parents=True, exist_ok=True)
    for old in (docs / FOLDER).glob("*.md"):
        if f"{FOLDER}/{old.name}" not in pages:
            old.unlink()
    for path, text in pages.items():
        (docs / path).write_text(text, encoding="utf-8")


def main() -> None:
    """Write the pages of the settings reference."""
    parser = argparse.ArgumentParser(
        prog="python -m rollgym.trainer.config.reference", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("docs", nargs="?", type=Path, default=Path("docs"), help="default: %(default)s")
    write(parser.parse_args().docs)


if __name__ == "__main__":
    main()
