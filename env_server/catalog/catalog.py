"""What can be made here: every environment with where it runs and what a client may ask of it."""

import difflib
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import gymnasium
from gymnasium import Space
from gymnasium.envs.registration import EnvSpec

from clients.process.installed import InstalledEnvironment, installed_environments
from clients.protocol.errors import ProblemError
from clients.protocol.spaces import UnicodeText, describe_space
from clients.protocol.values import EncodeError, encode_value
from env_server.catalog.actions import ActionReader, action_reader
from env_server.catalog.kwargs_rules import NO_KWARGS, KwargsRules
from env_server.common.setting_sections import Isolation
from env_server.common.settings import ConfigurationError, Settings
from env_server.workers.base import EnvSource
from envs.adapters.text import TextAdapter, step_limit, text_metadata
from envs.registry import builtin_environments

_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9._-]")
_NEAR_NAMES = 3
_Schema = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


@dataclass(slots=True)
class CatalogEntry:
    """One environment that the server offers.

    The spaces are those of the environment as it is made without kwargs; they are known once it was probed. What other
    servers have registered says how many replicas there are at present, and whether those keep the sessions. What is
    `built_in` may be made in this process to be looked at. `label` is what metrics call it.
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
        """Whether a session can be copied: what is deterministic can, by replay."""
        return bool(self.metadata.get("forkable", self.deterministic)) and self.deterministic

    @property
    def reset_options(self) -> frozenset[str] | None:
        """The options of a reset, where the environment declares them; None where it does not, and takes any."""
        declared = self.metadata.get("reset_options")
        return frozenset(map(str, declared)) if isinstance(declared, list | tuple) else None

    @property
    def render_modes(self) -> list[str]:
        """The modes that `render` takes: all but the one that opens a window where the server runs."""
        return [str(mode) for mode in self.metadata.get("render_modes", ()) if mode != "human"]

    def take_spaces(self, action_space: Space[Any], observation_space: Space[Any]) -> None:
        """Learn the spaces from an environment that was made."""
        self.action_space = action_space
        self.observation_space = observation_space
        self.read_action = action_reader(action_space)

    def describe(self) -> dict[str, Any]:
        """The environment's `EnvInfo`."""
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
            "metadata": _plain(self.metadata),
        }


class Catalog:
    """All environments of a server, by id.

    Attributes:
        absence: Says why an environment is not here that was here before, where that is known.
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
            entry = _class_entry(env_id, spec.entry_point, settings, spec.max_episode_steps, ours=True)
            # Where the operator adds data to one, making it may take what a child has to give.
            entry.built_in = not entry.source.operator_kwargs
            entries[env_id] = entry
        if bundled:
            for env_id, installed in installed_environments().items():
                entries[env_id] = _installed_entry(env_id, installed, settings, taken=env_id in entries)
        for text in settings.env:
            env_id, target = named_class(text)
            _refuse_twice(entries, env_id)
            entries[env_id] = _class_entry(env_id, target, settings, None, ours=False)
        for names, entry_of in (
            (settings.gymnasium, _gymnasium_entry),
            (settings.gymnasium_text, _gymnasium_text_entry),
        ):
            for text in names:
                env_id, target = _split(text, lambda target: _NOT_IN_IDS.sub("-", target.rpartition(":")[2]))
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
            ProblemError: `unknown_env`, with near names, or `draining` where its server may come back.
        """
        entry = self._entries.get(env_id)
        absence = None if entry is not None else self.absence(env_id)
        if absence is not None:
            raise absence
        if entry is None and _ID.fullmatch(env_id) is None:
            raise ProblemError(
                "unknown_env", "what was asked for cannot be the id of an environment", suggestions=[]
            )
        if entry is None:
            near = difflib.get_close_matches(env_id, self._entries, n=_NEAR_NAMES, cutoff=0.5)
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


def named_class(text: str) -> tuple[str, str]:
    """The id and the `module:Class` of an environment that is named by `module:Class` or `name=module:Class`.

    Raises:
        ConfigurationError: If it cannot be called so.
    """
    return _split(text, lambda target: target.rpartition(":")[2])


def _split(text: str, default_name: Any) -> tuple[str, str]:
    name, separator, target = text.partition("=")
    if not separator:
        target = text
        name = default_name(text)
    if _ID.fullmatch(name) is None:
        raise ConfigurationError(f"{name!r} cannot be the id of an environment ({text!r})")
    return name, target


def _refuse_twice(entries: Mapping[str, CatalogEntry], env_id: str) -> None:
    if env_id in entries:
        raise ConfigurationError(
            f"two environments are called {env_id!r}; give one another name with name=..."
        )


def _class_entry(
    env_id: str, target: str, settings: Settings, max_episode_steps: int | None, *, ours: bool
) -> CatalogEntry:
    env_class = _load_class(target)
    schema, operator_kwargs = _declared_kwargs(env_class, target, ours=ours)
    metadata = dict(env_class.metadata)
    if max_episode_steps is None:
        max_episode_steps = metadata.get("max_episode_steps")
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
        isolation=_isolation(metadata) if ours else "process",
        schema=schema,
        operator_kwargs=operator_kwargs,
        max_episode_steps=max_episode_steps,
        deterministic=bool(metadata.get("deterministic", ours)),
    )


def _installed_entry(
    env_id: str, installed: InstalledEnvironment, settings: Settings, *, taken: bool
) -> CatalogEntry:
    packages = " and ".join(installed.packages)
    remedy = "uninstall it, or serve what you name and nothing else: --no-builtin"
    if taken or installed.ambiguous or _ID.fullmatch(env_id) is None:
        reason = "is taken" if taken else "means two classes" if installed.ambiguous else "is no id"
        raise ConfigurationError(f"the environment {env_id!r} of the package {packages} {reason}: {remedy}")
    try:
        return _class_entry(env_id, installed.path, settings, None, ours=False)
    except ConfigurationError as error:
        raise ConfigurationError(f"the package {packages} is broken: {error}; {remedy}") from error


def _declared_kwargs(
    env_class: type[gymnasium.Env[Any, Any]], target: str, *, ours: bool
) -> tuple[_Schema | None, frozenset[str]]:
    """The schema of what a client may set, and the names that are the operator's, as the class says.

    Those of the many environments that are built in are made when they are asked for: few of them will be.
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


def _gymnasium_entry(env_id: str, target: str, settings: Settings) -> CatalogEntry:
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


def _gymnasium_text_entry(env_id: str, target: str, settings: Settings) -> CatalogEntry:
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
    settings: Settings,
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


def _load_class(target: str) -> type[gymnasium.Env[Any, Any]]:
    module_name, separator, class_name = target.partition(":")
    if not separator or not module_name or not class_name:
        raise ConfigurationError(f"{target!r} is not module:Class")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the boundary to an author's module
        raise ConfigurationError(f"cannot import {target!r}: {type(error).__name__}: {error}") from error
    found = getattr(module, class_name, None)
    if found is None:
        raise ConfigurationError(f"cannot import {target!r}: there is no {class_name} in {module_name}")
    if not (isinstance(found, type) and issubclass(found, gymnasium.Env)):
        raise ConfigurationError(f"{target!r} is not a subclass of gymnasium.Env")
    return found


def _plain(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What of an environment's metadata can go over the wire."""
    plain: dict[str, Any] = {}
    for name, value in metadata.items():
        try:
            plain[str(name)] = encode_value(None, value, binary=False)
        except EncodeError:
            continue
    return plain
