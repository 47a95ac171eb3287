"""Writes docs/configuration.md: `python -m rollgym.trainer.config.reference > docs/configuration.md`."""

import sys
import types
import typing
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.strict import models_in

_HEADER = """# Settings of a run

Written from the code by `python -m rollgym.trainer.config.reference`; a test keeps it in step.
A file holds any of these as YAML; `roll-train --config FILE key=value ...` lays words over it
(`rollout.group_size=16`, `tasks.0.kwargs.size=8`). Unknown keys are refused. `--dry-run` prints the resolved settings.
"""


def reference() -> str:
    """Return the page."""
    sections: list[str] = [_HEADER]
    _write(RunSettings, "The run", "", sections, set())
    return "\n".join(sections)


def _write(
    model: type[BaseModel], title: str, prefix: str, sections: list[str], seen: set[type[BaseModel]]
) -> None:
    if model in seen:
        return
    seen.add(model)
    lines = [f"## {title}" + (f" (`{prefix}`)" if prefix else ""), ""]
    if model.__doc__:
        lines += [model.__doc__.strip().split("\n\n")[0].replace("\n", " "), ""]
    lines += ["| key | type | default | |", "|---|---|---|---|"]
    nested: list[tuple[type[BaseModel], str]] = []
    for name, field in model.model_fields.items():
        key = f"{prefix}.{name}" if prefix else name
        for inner in models_in(field.annotation):
            nested.append((inner, key))
        if field.default is PydanticUndefined and field.default_factory is None:
            default = "required"
        elif field.default_factory is not None or isinstance(field.default, BaseModel):
            default = "see below"
        else:
            default = f"`{field.default!r}`"
        meaning = (field.description or "").replace("|", "\\|").replace("\n", " ")
        lines.append(f"| `{key}` | {_type_name(field.annotation)} | {default} | {meaning} |")
    sections.append("\n".join(lines) + "\n")
    for inner, key in nested:
        _write(inner, inner.__name__.removesuffix("Settings"), key, sections, seen)


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


if __name__ == "__main__":
    sys.stdout.write(reference())
