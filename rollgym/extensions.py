"""What other packages add to ours by their entry points: environments, sandboxes, advantages and so on."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeVar


class _Named(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=_Named)


@dataclass(frozen=True, slots=True)
class Extension:
    """Something that a package adds.

    Attributes:
        path: `module:attribute`.
        packages: The distributions that bring one of this name.
        ambiguous: Whether they mean different things by it.
    """

    path: str
    packages: tuple[str, ...]
    ambiguous: bool

    @property
    def owner(self) -> str:
        """The packages' names, for a message."""
        return " and ".join(self.packages)

    def load(self) -> Any:
        """Import it; what its package raises is the caller's to tell."""
        from importlib.metadata import EntryPoint

        return EntryPoint(self.owner, self.path, "").load()


class Capabilities(Mapping[str, T]):
    """Objects of one kind by name: ours, then those that packages add by entry points.

    A package's object is imported when it is asked for. To iterate gives the names and imports nothing.

    Args:
        noun: What one of them is called, for messages.
        group: The group of entry points.
        base: The class of all of them.
        ours: Those that ship.
    """

    def __init__(self, noun: str, group: str, base: type[T], ours: Sequence[T]) -> None:
        self.group = group
        self._noun = noun
        self._base = base
        self._ours = {each.name: each for each in ours}

    def __getitem__(self, name: str) -> T:
        """Return an object.

        Raises:
            KeyError: There is none of this name.
            ValueError: The package that adds it is broken.
        """
        if (found := self._ours.get(name)) is not None:
            return found
        added: T = _load(self._noun, self._base, name, self._installed()[name])
        return added

    def __contains__(self, name: object) -> bool:
        return name in self._ours or name in self._installed()

    def __iter__(self) -> Iterator[str]:
        yield from self._ours
        yield from self.added()

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def added(self) -> list[str]:
        """Return the names that packages add; one cannot take a name of ours."""
        return [name for name in self._installed() if name not in self._ours]

    def _installed(self) -> Mapping[str, Extension]:
        return _installed(tuple(sys.path), self.group)


# Replies are read by the thousand, and to look through what is installed takes milliseconds.
@lru_cache(maxsize=16)
def _installed(path: tuple[str, ...], group: str) -> Mapping[str, Extension]:
    return extensions(group)


@lru_cache(maxsize=64)
def _load(noun: str, base: type[T], name: str, added: Extension) -> T:
    if added.ambiguous:
        raise ValueError(f"the {noun} {name!r} is in several packages, {added.owner}: uninstall all but one")
    try:
        found = added.load()
    except Exception as error:  # the boundary to the code of another package
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"the {noun} {name!r} of the package {added.owner} cannot be loaded: {reason}"
        ) from error
    if not isinstance(found, base) or found.name != name:
        article = "an" if base.__name__[0] in "AEIOU" else "a"
        raise ValueError(
            f"the {noun} {name!r} of the package {added.owner}: {added.path} is not {article} {base.__name__} of this "
            "name"
        )
    return found


def extensions(group: str) -> dict[str, Extension]:
    """Return what packages add to a group of entry points, by name; nothing of them is imported."""
    # As heavy as all else of a short command, and nearly always for nothing.
    from importlib.metadata import entry_points

    found: dict[str, dict[str, str]] = {}
    for entry in entry_points(group=group):
        package = "?" if entry.dist is None else entry.dist.name
        found.setdefault(entry.name, {})[package] = entry.value
    return {
        name: Extension(next(iter(paths.values())), tuple(sorted(paths)), len(set(paths.values())) > 1)
        for name, paths in sorted(found.items())
    }
