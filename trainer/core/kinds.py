"""Parts of the settings that are of one of several kinds, ours or of another package.

A kind is one class: its settings, what is to be known of it, and what it does. Ours stand in one tuple; a package adds
one by an entry point of its group, whose name is the `kind`, and which is imported where settings name it.
"""

import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, Field, GetCoreSchemaHandler, ValidatorFunctionWrapHandler
from pydantic_core import PydanticKnownError, core_schema

from rollgym.extensions import Extension, extensions
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.plugins import load_attribute


@dataclass(frozen=True, slots=True)
class Kinds:
    """An annotation of a part: which kinds it may be of.

    Attributes:
        group: The entry points by which packages add some.
        base: The class that all of them are of.
        ours: Those that ship, each with a `kind` of its own.
    """

    group: str
    base: type[BaseModel]
    ours: tuple[type[BaseModel], ...]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        ours = handler.generate_schema(Annotated[typing.Union[self.ours], Field(discriminator="kind")])  # noqa: UP007
        return core_schema.no_info_wrap_validator_function(
            self._validated, ours, serialization=core_schema.simple_ser_schema("any")
        )

    def __hash__(self) -> int:
        return hash(self.group)

    def _validated(self, value: Any, ours: ValidatorFunctionWrapHandler) -> Any:
        kind = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)
        known = {kind_of(each) for each in self.ours}
        if not isinstance(kind, str) or kind in known:
            return ours(value)
        added = extensions(self.group)
        if kind not in added:
            names = ", ".join(f"'{name}'" for name in (*map(kind_of, self.ours), *added))
            raise PydanticKnownError(
                "union_tag_invalid", {"discriminator": "'kind'", "tag": kind, "expected_tags": names}
            )
        return loaded(self.base, kind, added[kind]).model_validate(value)


def loaded(base: type[BaseModel], kind: str, added: Extension) -> type[BaseModel]:
    """Return the class of a kind that a package adds.

    Raises:
        ValueError: If it cannot be imported, is none of the base, or of another kind than its entry point says.
    """
    if added.ambiguous:
        raise ValueError(f"kind '{kind}' is in several packages, {added.owner}: uninstall all but one")
    try:
        found = load_attribute(added.path)
    except ConfigError as error:
        raise ValueError(f"kind '{kind}' of the package {added.owner} is broken: {error}") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(
            f"kind '{kind}' of the package {added.owner} is broken: {added.path} is no subclass of "
            f"{base.__module__}.{base.__name__}"
        )
    if kind_of(found) != kind:
        raise ValueError(
            f"kind '{kind}' of the package {added.owner} is broken: {added.path} says `kind: Literal"
            f"[{kind_of(found)!r}]`; the entry point must have the same name"
        )
    return found


def kind_of(model: type[BaseModel]) -> str:
    """Return the value of `kind` that chooses a class; empty if it has none."""
    field = model.model_fields.get("kind")
    words = () if field is None else typing.get_args(field.annotation)
    return str(words[0]) if words else ""
