"""Our environments in Gymnasium's registry."""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMESPACE = "rollgym"
_REGISTRY = "gymnasium.envs.registration"


def register_environments() -> None:
    """Register `rollgym/Remote-v0` and the built-in environments, as names only: nothing of them is imported.

    `import rollgym` sees to this; `gymnasium.make("rollgym:rollgym/Remote-v0", ...)` imports by itself. Calling it
    again does nothing.
    """
    from gymnasium.envs.registration import register, registry

    from rollgym.envs.registry import builtin_environments

    remote = f"{NAMESPACE}/Remote-v0"
    if remote in registry:
        return
    register(
        id=remote,
        entry_point="rollgym.clients.client.env:RemoteEnv",
        vector_entry_point="rollgym.clients.client.vector:RemoteVectorEnv",
    )
    for name, environment in builtin_environments().items():
        # The environments count their steps themselves (`truncated`), so Gymnasium need not.
        register(id=f"{NAMESPACE}/{name}", entry_point=environment.path)


def register_once_gymnasium_is_imported() -> None:
    """Register the environments now, or when somebody imports Gymnasium.

    Every module of ours imports `rollgym` first, also in processes that never need Gymnasium and NumPy (a supervisor
    of programs, the keeper of an inference server), or that have neither (a sandbox under the system's own Python).
    """
    if _REGISTRY in sys.modules:
        register_environments()
    elif not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds Gymnasium's registry, once, as it would be found without it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _REGISTRY or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Loads Gymnasium's registry as its own loader does, and registers our environments in it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # What looks at the module later (`inspect`, `pkgutil`) finds its own loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        register_environments()
