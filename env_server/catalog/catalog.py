"""The catalog: every environment that can be made here, with its worker and the options that clients may set.

Entries are of classes that settings name or packages install, and of ids of Gymnasium.
"""

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import gymnasium
from gymnasium import Space
from gymnasium.envs.registration import EnvSpec

from rollgym.clients.process.modules import current_path, installed_environments
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.messages import Isolation
from rollgym.clients.protocol.spaces import UnicodeText, describe_space
from rollgym.clients.protocol.values import EncodeError, encode_value
from rollgym.env_server.catalog.actions import ActionReader, action_reader
from rollgym.env_server.catalog.kwargs_rules import NO_KWARGS, KwargsRules
from rollgym.env_server.common.settings import ConfigurationError, ServerSettings
from rollgym.env_server.workers.base import EnvSource
from rollgym.envs.adapters.text import TextAdapter, step_limit, text_metadata
from rollgym.envs.registry import builtin_environments
from rollgym.extensions import Extension
from rollgym.suggestions import near_names
from rollgym.user_code import misnamed, missing_attribute, missing_module

ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
"""The pattern of an environment's id."""
_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9._-]")
_Schema = Mapping[str, Any] | Callable[[], Mapping[str, Any]]
_NEAR_NAMES = 3


@dataclass(slots=True)
class CatalogEntry:
    """One environment that the server offers.

    The spaces are those of the environment as it is made without kwargs; they are known once it was probed. For an
    environment of registered servers, `replicas` counts them, and the entry says whether they keep the sessions. A
    `built_in` environment may be probed in this process. `label` is its name in metrics.
    """

    env_id: str
    source: EnvSource
    isolation: Isolation
    rules: KwargsRules
    step_timeout_s: float
    metadata: dict[str, Any]
    max_episode_steps: int | None
    deterministic: bool
    replicas: Callable[[], int] | None = None
    relayed: bool = False
    built_in: bool = False
    action_space: Space[Any] = field(default_factory=UnicodeText)
    observation_space: Space[Any] = field(default_factory=UnicodeText)
    read_action: ActionReader = field(init=False)
    label: str = ""

    def __post_init__(self) -> None:
        self.label = self.label or self.env_id
        self.read_action = action_reader(self.action_space)

    @property
    def version(self) -> str:
        """The version that the environment declares."""
        return str(self.metadata.get("version", "0"))

    @property
    def stateless(self) -> bool:
        """Whether it scores responses without a session."""
        return self.metadata.get("kind") == "stateless"

    @property
    def forkable(self) -> bool:
        """Whether a session can be copied, by replay of a deterministic environment."""
        return bool(self.metadata.get("forkable", self.deterministic)) and self.deterministic

    @property
    def reset_options(self) -> frozenset[str] | None:
        """The declared options of a reset; None if the environment declares none and accepts any."""
        declared = self.metadata.get("reset_options")
        return frozenset(map(str, declared)) if isinstance(declared, list | tuple) else None

    @property
    def render_modes(self) -> list[str]:
        """The modes that `render` takes: all but the one that opens a window on the server's machine."""
        modes = self.metadata.get("render_modes")
        return [str(mode) for mode in modes if mode != "human"] if isinstance(modes, list | tuple) else []

    def take_spaces(self, action_space: Space[Any], observation_space: Space[Any]) -> None:
        """Learn the spaces from an environment that was made."""
        self.action_space = action_space
        self.observation_space = observation_space
        self.read_action = action_reader(action_space)

    def describe(self) -> dict[str, Any]:
        """Return the `EnvInfo` that clients receive."""
        return {
            "env_id": self.env_id,
            "version": self.version,
            "kind": "stateless" if self.stateless else "episodic",
            "origin": "local" if self.replicas is None else "registered",
            "isolation": self.isolation,
            "description": str(self.metadata.get("description", "")),
            "action_space": describe_space(self.action_space),
            "observation_space": describe_space(self.observation_space),
            "kwargs_schema": self.rules.schema,
            "max_episode_steps": self.max_episode_steps,
            "deterministic": self.deterministic,
            "forkable": self.forkable,
            "replicas": 1 if self.replicas is None else self.replicas(),
            "metadata": _plain(self.metadata) | self._drawn(),
        }

    def _drawn(self) -> dict[str, Any]:
        return {"render_modes": self.render_modes} if "render_modes" in self.metadata else {}


def _plain(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an environment's metadata that can be encoded."""
    plain: dict[str, Any] = {}
    for name, value in metadata.items():
        try:
            plain[str(name)] = encode_value(None, value, binary=False)
        except EncodeError:
            continue
    return plain


def named_class(text: str) -> tuple[str, str]:
    """The id and the `module:Class` of an environment that is named by `module:Class` or `name=module:Class`.

    Raises:
        ConfigurationError: If it cannot be called so.
    """
    return _split(text, lambda target: target.rpartition(":")[2])


def _named_id(text: str) -> tuple[str, str]:
    """The id here and the id of Gymnasium's that is named by `Id`, `module:Id` or `name=module:Id`.

    Raises:
        ConfigurationError: If it cannot be called so.
    """
    return _split(text, lambda target: _NOT_IN_IDS.sub("-", target.rpartition(":")[2]))


def _split(text: str, default_name: Callable[[str], str]) -> tuple[str, str]:
    name, separator, target = text.partition("=")
    if not separator:
        target = text
        name = default_name(text)
    if ID.fullmatch(name) is None:
        raise ConfigurationError(f"{name!r} cannot be the id of an environment ({text!r})")
    return name, current_path(target)


def _class_entry(env_id: str, target: str, settings: ServerSettings, *, ours: bool) -> CatalogEntry:
    """The entry of a class, either built in or an author's.

    Raises:
        ConfigurationError: It cannot be imported, or its declaration is invalid.
    """
    env_class = _load_class(target)
    schema, operator_kwargs = _declared_kwargs(env_class, target, ours=ours)
    metadata = dict(env_class.metadata)
    return _entry(
        env_id,
        EnvSource(
            kind="class",
            target=target,
            operator_kwargs=settings.operator_kwargs.get(env_id, {}),
            pinned_thread=bool(metadata.get("pinned_thread", False)),
        ),
        settings,
        metadata=metadata,
        isolation=_isolation(metadata) if ours else _isolation_of_others(metadata, settings),
        schema=schema,
        operator_kwargs=operator_kwargs,
        max_episode_steps=metadata.get("max_episode_steps"),
        deterministic=bool(metadata.get("deterministic", ours)),
    )


def _installed_entry(
    env_id: str, installed: Extension, settings: ServerSettings, *, taken: bool
) -> CatalogEntry:
    """The entry of a class that an installed package brings.

    Raises:
        ConfigurationError: It cannot be served under that id, or not be imported.
    """
    remedy = "uninstall it, or serve what you name and nothing else: --no-builtin"
    if taken or installed.ambiguous or ID.fullmatch(env_id) is None:
        reason = "is taken" if taken else "means two classes" if installed.ambiguous else "is no id"
        raise ConfigurationError(
            f"the environment {env_id!r} of the package {installed.owner} {reason}: {remedy}"
        )
    try:
        return _class_entry(env_id, installed.path, settings, ours=False)
    except ConfigurationError as error:
        raise ConfigurationError(f"the package {installed.owner} is broken: {error}; {remedy}") from error


def _declared_kwargs(
    env_class: type[gymnasium.Env[Any, Any]], target: str, *, ours: bool
) -> tuple[_Schema | None, frozenset[str]]:
    """The schema of the kwargs that clients may set, and the names of those for the operator, as the class declares
    them.

    For the many built-in environments they are made on demand, since most are never used.
    """
    try:
        schema: _Schema | None = (
            partial(getattr, env_class, "kwargs_schema")
            if ours
            else getattr(env_class, "kwargs_schema", None)
        )
        return schema, frozenset(getattr(env_class, "operator_kwargs", frozenset()))
    except Exception as error:  # the boundary to an author's annotations
        raise ConfigurationError(
            f"cannot read the kwargs that {target!r} declares: {type(error).__name__}: {error}"
        ) from error


def _gymnasium_entry(env_id: str, target: str, settings: ServerSettings) -> CatalogEntry:
    """The entry of an environment that is registered with Gymnasium.

    Raises:
        ConfigurationError: It is not, or cannot be imported.
    """
    spec, metadata = _registered(target)
    metadata = {**metadata, "version": str(spec.version or 0)}
    return _entry(
        env_id,
        EnvSource(
            kind="gymnasium",
            target=target,
            operator_kwargs=settings.operator_kwargs.get(env_id, {}),
            pinned_thread=bool(metadata.get("pinned_thread", False)),
        ),
        settings,
        metadata=metadata,
        isolation="process",
        schema=None,
        operator_kwargs=frozenset(),
        max_episode_steps=spec.max_episode_steps,
        deterministic=not spec.nondeterministic,
    )


def _gymnasium_text_entry(env_id: str, target: str, settings: ServerSettings) -> CatalogEntry:
    """The entry of a Gymnasium environment whose values become text.

    Raises:
        ConfigurationError: It is not registered, or cannot be imported.
    """
    spec, inner = _registered(target)
    metadata = text_metadata(spec, inner)
    operator_kwargs = settings.operator_kwargs.get(env_id, {})
    return _entry(
        env_id,
        EnvSource(
            kind="class",
            target=f"{TextAdapter.__module__}:{TextAdapter.__qualname__}",
            operator_kwargs={**operator_kwargs, "env": target},
            pinned_thread=bool(metadata.get("pinned_thread", False)),
        ),
        settings,
        metadata=metadata,
        isolation="process",
        schema=TextAdapter.kwargs_schema,
        operator_kwargs=TextAdapter.operator_kwargs,
        max_episode_steps=operator_kwargs.get("max_episode_steps") or step_limit(spec),
        deterministic=bool(metadata["deterministic"]),
    )


def _registered(target: str) -> tuple[EnvSpec, dict[str, Any]]:
    """The registration of a Gymnasium environment, and its class's metadata.

    As for `gymnasium.make`, the id may stand behind the module that registers it: `module:Id`.
    """
    module, _, env_id = target.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        spec = gymnasium.spec(env_id)
        env_class = (
            gymnasium.envs.registration.load_env_creator(spec.entry_point)
            if isinstance(spec.entry_point, str)
            else spec.entry_point
        )
    except Exception as error:  # the boundary to an author's module
        reason = (
            str(error) if isinstance(error, gymnasium.error.Error) else f"{type(error).__name__}: {error}"
        )
        raise ConfigurationError(f"cannot serve the Gymnasium environment {target!r}: {reason}") from error
    return spec, dict(getattr(env_class, "metadata", {}))


def _entry(
    env_id: str,
    source: EnvSource,
    settings: ServerSettings,
    *,
    metadata: dict[str, Any],
    isolation: Isolation,
    schema: _Schema | None,
    operator_kwargs: frozenset[str],
    max_episode_steps: int | None,
    deterministic: bool,
) -> CatalogEntry:
    schema = settings.kwargs_schemas.get(env_id, schema)
    names = operator_kwargs | source.operator_kwargs.keys()
    return CatalogEntry(
        env_id=env_id,
        source=replace(source, env_id=env_id),
        isolation=settings.isolation.get(env_id, isolation),
        rules=KwargsRules(env_id, NO_KWARGS if schema is None else schema, names),
        step_timeout_s=settings.env_step_timeout_s.get(env_id, settings.step_timeout_s),
        metadata=metadata,
        max_episode_steps=max_episode_steps,
        deterministic=deterministic,
    )


def _isolation(metadata: Mapping[str, Any]) -> Isolation:
    if metadata.get("inline"):
        return "inline"
    if metadata.get("pinned_thread") or metadata.get("thread"):
        return "thread"
    return "process"


def _isolation_of_others(metadata: Mapping[str, Any], settings: ServerSettings) -> Isolation:
    """Return where a class of an author runs: inline only if the class requests it and the operator trusts it."""
    return "inline" if settings.trust_inline and metadata.get("inline") else "process"


def _load_class(target: str) -> type[gymnasium.Env[Any, Any]]:
    if wrong := misnamed(target):
        raise ConfigurationError(wrong)
    module_name, _, class_name = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"cannot import {target!r}: {missing_module(error, module_name)}") from error
    except Exception as error:  # the boundary to an author's module
        raise ConfigurationError(f"cannot import {target!r}: {type(error).__name__}: {error}") from error
    found = getattr(module, class_name, None)
    if found is None:
        raise ConfigurationError(f"cannot import {target!r}: {missing_attribute(module, class_name)}")
    if not (isinstance(found, type) and issubclass(found, gymnasium.Env)):
        raise ConfigurationError(f"{target!r} is not a subclass of gymnasium.Env")
    return found


class Catalog:
    """All environments of a server, by id.

    Attributes:
        absence: Explains why an environment that was here before is missing, if that is known.
    """

    def __init__(self, entries: Mapping[str, CatalogEntry]) -> None:
        self._entries = dict(entries)
        self.absence: Callable[[str], ProblemError | None] = lambda env_id: None

    @classmethod
    def load(cls, settings: ServerSettings) -> "Catalog":
        """The built-in environments, those that other packages bring, and those that the settings add.

        Raises:
            ConfigurationError: If an environment cannot be imported or a setting names one that is not there.
        """
        entries: dict[str, CatalogEntry] = {}
        # The built-in ones are what a gateway's nodes register.
        bundled = {} if settings.gateway or not settings.builtin else builtin_environments()
        for env_id, bundle in bundled.items():
            entry = _class_entry(env_id, bundle.path, settings, ours=True)
            # With data of the operator, making one may need a child process; it is not probed in this one.
            entry.built_in = not entry.source.operator_kwargs
            entries[env_id] = entry
        if bundled:
            for env_id, installed in installed_environments().items():
                entries[env_id] = _installed_entry(env_id, installed, settings, taken=env_id in entries)
        for text in settings.env:
            env_id, target = named_class(text)
            _refuse_twice(entries, env_id)
            entries[env_id] = _class_entry(env_id, target, settings, ours=False)
        for names, entry_of in (
            (settings.gymnasium, _gymnasium_entry),
            (settings.gymnasium_text, _gymnasium_text_entry),
        ):
            for text in names:
                env_id, target = _named_id(text)
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
