"""What settings choose among several kinds, ours or of another package.

A kind is one object: what is to be known of it, and what it does. Of parts with settings of their own it is their
class. Ours stand in one tuple; a package adds one by an entry point of its group, whose name is the `kind`, and which
is imported where settings name it.
"""

import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, Field, GetCoreSchemaHandler, ValidatorFunctionWrapHandler
from pydantic_core import PydanticKnownError, core_schema

from rollgym.extensions import Extension, extensions
from rollgym.suggestions import did_you_mean
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.plugins import load_attribute

_LONGEST_SHOWN = 60
T = TypeVar("T")


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


@dataclass(frozen=True, slots=True)
class Named(Generic[T]):
    """An annotation of a name: of which kind something is, that has no settings of its own.

    Attributes:
        group: The entry points by which packages add some.
        base: What all of them are.
        known: Those that ship, by name.
    """

    group: str
    base: type[T]
    known: Mapping[str, T]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, core_schema.str_schema())

    def __hash__(self) -> int:
        return hash(self.group)

    def __getitem__(self, name: str) -> T:
        """Return the kind of a name.

        Raises:
            ValueError: If there is none, or the package that adds it is broken.
        """
        if (ours := self.known.get(name)) is not None:
            return ours
        added = extensions(self.group)
        if name not in added:
            names = self.names()
            hint = did_you_mean(name, names, 3) or f"there are {', '.join(names)}"
            raise ValueError(f"there is no kind {name[:_LONGEST_SHOWN]!r}; {hint}")
        found = imported(name, added[name])
        if not isinstance(found, self.base):
            raise ValueError(f"{_broken(name, added[name])}: {added[name].path} is no {self.base.__name__}")
        return found

    def names(self) -> list[str]:
        """Return all names, ours first."""
        return [*self.known, *(name for name in extensions(self.group) if name not in self.known)]

    def _checked(self, name: str) -> str:
        _ = self[name]
        return name


def loaded(base: type[BaseModel], kind: str, added: Extension) -> type[BaseModel]:
    """Return the class of a kind that a package adds.

    Raises:
        ValueError: If it cannot be imported, is none of the base, or of another kind than its entry point says.
    """
    found = imported(kind, added)
    if not (isinstance(found, type) and issubclass(found, base)):
        wanted = f"{base.__module__}.{base.__name__}"
        raise ValueError(f"{_broken(kind, added)}: {added.path} is no subclass of {wanted}")
    if kind_of(found) != kind:
        raise ValueError(
            f"{_broken(kind, added)}: {added.path} says `kind: Literal[{kind_of(found)!r}]`; the entry point must have "
            "the same name"
        )
    return found


def imported(kind: str, added: Extension) -> Any:
    """Return what a package adds under a name.

    Raises:
        ValueError: If several do, or it cannot be imported.
    """
    if added.ambiguous:
        raise ValueError(f"kind '{kind}' is in several packages, {added.owner}: uninstall all but one")
    try:
        return load_attribute(added.path)
    except ConfigError as error:
        raise ValueError(f"{_broken(kind, added)}: {error}") from error


def _broken(kind: str, added: Extension) -> str:
    return f"kind '{kind}' of the package {added.owner} is broken"


def kind_of(model: type[BaseModel]) -> str:
    """Return the value of `kind` that chooses a class; empty if it has none."""
    field = model.model_fields.get("kind")
    words = () if field is None else typing.get_args(field.annotation)
    return str(words[0]) if words else ""
