"""What other packages add to ours by their entry points: environments, sandboxes, advantages and so on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
