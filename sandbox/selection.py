"""Which sandbox is used: the one asked for, or the best one that works here, and never a weaker one than allowed."""

import importlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast, get_args

from sandbox.core.base import Sandbox, SandboxUnavailableError
from sandbox.core.naming import parse_name
from sandbox.core.result import Guarantees

Level = Literal["container", "namespaces", "landlock", "none"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""From the strongest to none."""

_CLASSES: Mapping[str, str] = {
    "namespaces": "sandbox.local.namespaces:NamespaceSandbox",
    "bubblewrap": "sandbox.local.bubblewrap:BubblewrapSandbox",
    "docker": "sandbox.containers.docker:DockerSandbox",
    "landlock": "sandbox.local.landlock:LandlockSandbox",
    "unsafe": "sandbox.local.unsafe:UnsafeSandbox",
    "remote": "sandbox.remote.remote:RemoteSandbox",
}
BACKENDS = tuple(_CLASSES)
# What starts in milliseconds comes before what takes a second; the last two are for who asks for them.
_AUTOMATIC = ("namespaces", "bubblewrap", "docker", "landlock")


def open_sandbox(name: str | None = None, *, minimum_level: Level = "landlock", **options: Any) -> Sandbox:
    """Return a back-end that has been probed.

    Args:
        name: Of a back-end, or `auto` for the first that works and is strong enough; also as `docker:IMAGE` and
            `remote:URL`. What the environment variable `ROLLGYM_SANDBOX` says if there is none. `unsafe`, which is no
            boundary, and `remote`, which needs an address, are used by name only.
        minimum_level: The weakest that will do. Naming `unsafe` says that nothing is needed.
        options: For the back-end's constructor; not with `auto`.

    Raises:
        SandboxUnavailableError: If none is there, with the reason and the remedy of each.
        ValueError: If there is no such back-end or level.
    """
    if minimum_level not in LEVELS:
        raise ValueError(f"there is no level {minimum_level!r}: {', '.join(LEVELS)}")
    name, named = parse_name(name)
    if name != "auto":
        sandbox = make_sandbox(name, **named, **options)
        return _probed(sandbox, "none" if name == "unsafe" else minimum_level)
    if options:
        raise ValueError("options belong to one back-end: name it")
    reasons = []
    for candidate in _AUTOMATIC:
        try:
            return _probed(make_sandbox(candidate), minimum_level)
        except SandboxUnavailableError as error:
            reasons.append(f"- {error}")
    raise SandboxUnavailableError(
        f"no sandbox of level {minimum_level} or above works here:\n" + "\n".join(reasons)
    )


def make_sandbox(name: str, **options: Any) -> Sandbox:
    """Return a back-end that has not been probed yet.

    Raises:
        SandboxUnavailableError: If a package that it needs is not installed.
        ValueError: If there is none of this name.
    """
    if name not in _CLASSES:
        raise ValueError(f"there is no sandbox {name!r}: auto, {', '.join(BACKENDS)}")
    module_name, _, class_name = _CLASSES[name].partition(":")
    try:
        # Imported by name, so that a command for one back-end does not load the others.
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise SandboxUnavailableError(
            f"{name} needs the package {error.name}: pip install 'rollgym[{name}]'"
        ) from error
    return cast(Sandbox, getattr(module, class_name)(**options))


def survey() -> Iterator[tuple[str, Guarantees | SandboxUnavailableError]]:
    """Probe every back-end that needs no address, one after another."""
    for name in BACKENDS:
        if name == "remote":
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
