"""Choice of the sandbox: the named one, or the best one that works here, and never a weaker one than allowed."""

import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, cast

from rollgym.extensions import extensions
from rollgym.extras import missing_extra
from rollgym.sandbox.core.base import (
    LEVELS,
    CancellableSandbox,
    Guarantees,
    Level,
    Sandbox,
    SandboxUnavailableError,
)
from rollgym.sandbox.core.kinds import BY_NAME, SANDBOXES, parse_sandbox_name

GROUP = "rollgym.sandboxes"
"""Entry points `name = "module:Class"` of back-ends in other packages."""


def open_sandbox(name: str | None = None, *, minimum_level: Level = "landlock", **options: Any) -> Sandbox:
    """Return a back-end that has been probed.

    Args:
        name: Of a back-end, ours or of another package, or `auto` for the first of ours that works and is strong
            enough; also as `docker:IMAGE` and `remote:URL`. If None, the value of the environment variable
            `ROLLGYM_SANDBOX`. `unsafe`, which is not a boundary, `remote`, which needs an address, and back-ends of
            other packages are used by name only.
        minimum_level: The weakest level to accept. Naming `unsafe` means that no level is required.
        options: For the back-end's constructor; not with `auto`.

    Raises:
        SandboxUnavailableError: If no back-end works, with the reason and the remedy of each.
        ValueError: If the back-end or the level does not exist.
    """
    if minimum_level not in LEVELS:
        raise ValueError(f"there is no level {minimum_level!r}: {', '.join(LEVELS)}")
    name, named = parse_sandbox_name(name)
    if name != "auto":
        sandbox = make_sandbox(name, **named, **options)
        return _probed(sandbox, "none" if name in BY_NAME and BY_NAME[name].bounds_nothing else minimum_level)
    if options:
        raise ValueError("options belong to one back-end: name it")
    reasons = []
    for candidate in SANDBOXES:
        if not candidate.automatic:
            continue
        try:
            return _probed(make_sandbox(candidate.name), minimum_level)
        except SandboxUnavailableError as error:
            reasons.append(f"- {error}")
    raise SandboxUnavailableError(
        f"no sandbox of level {minimum_level} or above works here:\n" + "\n".join(reasons)
    )


def open_cancellable(name: str | None = None) -> CancellableSandbox:
    """Return a back-end that has been probed, and whose runs can be cancelled.

    Raises:
        SandboxUnavailableError: If no back-end works, or if the named one cannot cancel runs.
    """
    try:
        sandbox = open_sandbox(name)
    except ValueError as error:
        raise SandboxUnavailableError(str(error)) from error
    if "cancellation" not in inspect.signature(sandbox.run).parameters:
        sandbox.close()
        raise SandboxUnavailableError(
            f"{sandbox.name} cannot end a run that nobody waits for any more: its `run` has no argument `cancellation`"
        )
    return cast(CancellableSandbox, sandbox)


def make_sandbox(name: str, **options: Any) -> Sandbox:
    """Return a back-end that has not been probed yet.

    Raises:
        SandboxUnavailableError: If a package that it needs is not installed, or that of another author is broken.
        ValueError: If there is none of this name.
    """
    if name not in BY_NAME:
        return _installed(name, options)
    module_name, _, class_name = BY_NAME[name].path.partition(":")
    try:
        # Imported by name, so that a command for one back-end does not load the others.
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if (missing := missing_extra(error, name)) is None:
            raise
        raise SandboxUnavailableError(str(missing)) from error
    return cast(Sandbox, getattr(module, class_name)(**options))


def known_backends() -> tuple[str, ...]:
    """Return the names of ours, and of those that other packages bring."""
    return (*BY_NAME, *(name for name in extensions(GROUP) if name not in BY_NAME))


def _installed(name: str, options: Mapping[str, Any]) -> Sandbox:
    """Make the back-end of another package.

    Raises:
        SandboxUnavailableError: If the package cannot make it.
        ValueError: If no package has it, or several have.
    """
    if (found := extensions(GROUP).get(name)) is None:
        raise ValueError(f"there is no sandbox {name!r}: auto, {', '.join(known_backends())}")
    if found.ambiguous:
        raise ValueError(f"the sandbox {name!r} is in several packages, {found.owner}: uninstall all but one")
    try:
        return cast(Sandbox, found.load()(**options))
    except SandboxUnavailableError:
        raise
    except Exception as error:  # the boundary to the code of another package
        raise SandboxUnavailableError(
            f"{name} of the package {found.owner} cannot be made: {type(error).__name__}: {error}"
        ) from error


def survey() -> Iterator[tuple[str, Guarantees | SandboxUnavailableError]]:
    """Probe every back-end that needs no address, one after another; those of other packages come last."""
    for name in known_backends():
        if name in BY_NAME and BY_NAME[name].needs_argument:
            continue
        try:
            sandbox = make_sandbox(name)
        except SandboxUnavailableError as error:
            yield name, error
            continue
        try:
            yield name, sandbox.probe()
        except SandboxUnavailableError as error:
            yield name, error
        finally:
            sandbox.close()


def _probed(sandbox: Sandbox, minimum_level: Level) -> Sandbox:
    try:
        seen = sandbox.probe()
    except SandboxUnavailableError:
        sandbox.close()
        raise
    if LEVELS.index(seen.level) > LEVELS.index(minimum_level):
        sandbox.close()
        raise SandboxUnavailableError(
            f"{sandbox.name} keeps the level {seen.level} here, and {minimum_level} is asked for"
        )
    return sandbox
