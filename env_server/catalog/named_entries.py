"""Entries for environments that settings name or packages install: classes, and ids of Gymnasium."""

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from rollgym.clients.process.module_paths import current_path
from rollgym.env_server.catalog.entry import CatalogEntry
from rollgym.env_server.catalog.kwargs_rules import NO_KWARGS, KwargsRules
from rollgym.env_server.common.setting_sections import Isolation
from rollgym.env_server.common.settings import ConfigurationError, Settings
from rollgym.env_server.workers.base import EnvSource
from rollgym.envs.adapters.text import TextAdapter, step_limit, text_metadata
from rollgym.extensions import Extension
from rollgym.user_code import misnamed, missing_attribute, missing_module

ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
"""The pattern of an environment's id."""
_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9._-]")
_Schema = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


def named_class(text: str) -> tuple[str, str]:
    """The id and the `module:Class` of an environment that is named by `module:Class` or `name=module:Class`.

    Raises:
        ConfigurationError: If it cannot be called so.
    """
    return _split(text, lambda target: target.rpartition(":")[2])


def named_id(text: str) -> tuple[str, str]:
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


def class_entry(
    env_id: str, target: str, settings: Settings, max_episode_steps: int | None, *, ours: bool
) -> CatalogEntry:
    """The entry of a class, either built in or an author's.

    Raises:
        ConfigurationError: It cannot be imported, or its declaration is invalid.
    """
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
        isolation=_isolation(metadata) if ours else _isolation_of_others(metadata, settings),
        schema=schema,
        operator_kwargs=operator_kwargs,
        max_episode_steps=max_episode_steps,
        deterministic=bool(metadata.get("deterministic", ours)),
    )


def installed_entry(env_id: str, installed: Extension, settings: Settings, *, taken: bool) -> CatalogEntry:
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
        return class_entry(env_id, installed.path, settings, None, ours=False)
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


def gymnasium_entry(env_id: str, target: str, settings: Settings) -> CatalogEntry:
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


def gymnasium_text_entry(env_id: str, target: str, settings: Settings) -> CatalogEntry:
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


def _isolation_of_others(metadata: Mapping[str, Any], settings: Settings) -> Isolation:
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
