"""The catalog: every environment that can be made here, with its worker and the options that clients may set."""

from collections.abc import Callable, Iterator, Mapping

from rollgym.clients.process.installed import installed_environments
from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.catalog.entry import CatalogEntry
from rollgym.env_server.catalog.named_entries import (
    ID,
    class_entry,
    gymnasium_entry,
    gymnasium_text_entry,
    installed_entry,
    named_class,
    named_id,
)
from rollgym.env_server.common.settings import ConfigurationError, Settings
from rollgym.envs.registry import builtin_environments
from rollgym.suggestions import near_names

_NEAR_NAMES = 3


class Catalog:
    """All environments of a server, by id.

    Attributes:
        absence: Explains why an environment that was here before is missing, if that is known.
    """

    def __init__(self, entries: Mapping[str, CatalogEntry]) -> None:
        self._entries = dict(entries)
        self.absence: Callable[[str], ProblemError | None] = lambda env_id: None

    @classmethod
    def load(cls, settings: Settings) -> "Catalog":
        """The built-in environments, those that other packages bring, and those that the settings add.

        Raises:
            ConfigurationError: If an environment cannot be imported or a setting names one that is not there.
        """
        entries: dict[str, CatalogEntry] = {}
        # The built-in ones are what a gateway's nodes register.
        bundled = {} if settings.gateway or not settings.builtin else builtin_environments()
        for env_id, spec in bundled.items():
            entry = class_entry(env_id, spec.entry_point, settings, spec.max_episode_steps, ours=True)
            # With data of the operator, making one may need a child process; it is not probed in this one.
            entry.built_in = not entry.source.operator_kwargs
            entries[env_id] = entry
        if bundled:
            for env_id, installed in installed_environments().items():
                entries[env_id] = installed_entry(env_id, installed, settings, taken=env_id in entries)
        for text in settings.env:
            env_id, target = named_class(text)
            _refuse_twice(entries, env_id)
            entries[env_id] = class_entry(env_id, target, settings, None, ours=False)
        for names, entry_of in (
            (settings.gymnasium, gymnasium_entry),
            (settings.gymnasium_text, gymnasium_text_entry),
        ):
            for text in names:
                env_id, target = named_id(text)
                _refuse_twice(entries, env_id)
                entries[env_id] = entry_of(env_id, target, settings)
        for name in ("isolation", "operator_kwargs", "kwargs_schemas", "env_step_timeout_s"):
            for env_id in getattr(settings, name):
                if env_id not in entries:
                    raise ConfigurationError(f"{name} names {env_id!r}, which is not served")
        return cls(entries)

    def __iter__(self) -> Iterator[CatalogEntry]:
        return iter(list(self._entries.values()))

    def get(self, env_id: str) -> CatalogEntry:
        """The entry of an environment.

        Raises:
            ProblemError: `unknown_env`, with near names, or `draining` if its server may come back.
        """
        entry = self._entries.get(env_id)
        absence = None if entry is not None else self.absence(env_id)
        if absence is not None:
            raise absence
        if entry is None and ID.fullmatch(env_id) is None:
            raise ProblemError(
                "unknown_env", "what was asked for cannot be the id of an environment", suggestions=[]
            )
        if entry is None:
            near = near_names(env_id, self._entries, _NEAR_NAMES)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ProblemError("unknown_env", f"there is no environment {env_id!r}{hint}", suggestions=near)
        return entry

    def put(self, entry: CatalogEntry) -> None:
        """Offer an environment from now on."""
        self._entries[entry.env_id] = entry

    def remove(self, env_id: str) -> None:
        """Offer an environment no more."""
        del self._entries[env_id]

    def find(self, env_id: str) -> CatalogEntry | None:
        """The entry of an environment, or None."""
        return self._entries.get(env_id)


def _refuse_twice(entries: Mapping[str, CatalogEntry], env_id: str) -> None:
    if env_id in entries:
        raise ConfigurationError(
            f"two environments are called {env_id!r}; give one another name with name=..."
        )
