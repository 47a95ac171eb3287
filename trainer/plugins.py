"""Code of the user's that a setting names as `module:attr`: a reward, an agent, a context policy, a task source.

This is the boundary to it, the only place where whatever it raises is caught: when its module is imported, and when
it is called.
"""

import inspect
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from clients.protocol.errors import ProblemError
from trainer.errors import ConfigError, PluginError, TrainerError
from trainer.numbers import InvalidNumberError


@dataclass(frozen=True, slots=True)
class Plugin:
    """A function (or class) of the user's.

    Attributes:
        setting: The setting that names it, such as `rollout.reward`.
        path: How it is named, `module:attr`.
        function: The attribute itself.
    """

    setting: str
    path: str
    function: Any

    def __call__(self, *arguments: Any) -> Any:
        """Call it.

        Raises:
            PluginError: If it raises.
        """
        with self.running():
            return self.function(*arguments)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Name the plug-in in whatever its code raises while the context is open.

        What our own code has said to it passes as it is: an agent that asks the environment for a step does not have
        to handle its problems.

        Raises:
            PluginError: If it raises.
        """
        try:
            yield
        except (TrainerError, ProblemError, InvalidNumberError):
            raise
        except Exception as error:
            if _is_our_clients(error):
                raise
            raise self.broken(f"raised {type(error).__name__}: {one_line(error)}", error) from error

    def broken(self, what: str, error: Exception | None = None) -> PluginError:
        """Return the error that says what the plug-in did wrong, and where.

        Args:
            what: Said of it, such as "returned 3 rewards for 4 turns".
            error: What it raised, if it did.
        """
        return PluginError(f"{self.setting} '{self.path}' {what} ({self._place(error)})")

    def _place(self, error: Exception | None) -> str:
        """The deepest line of its own file that was running, or where it is defined."""
        file, line = _definition(self.function)
        if error is not None:
            frames = traceback.extract_tb(error.__traceback__)
            own = [frame for frame in frames if frame.filename == file]
            if own:
                line = own[-1].lineno or line
            elif len(frames) > 2 and file == _UNKNOWN:
                file, line = frames[-1].filename, frames[-1].lineno or 0
        return f"{file}, line {line}"


_UNKNOWN = "unknown file"


def load_plugin(path: str, setting: str) -> Plugin:
    """Return what a setting names.

    Args:
        path: `package.module:attribute`.
        setting: The setting.

    Raises:
        ConfigError: If the path is malformed, nothing is there, or the module cannot be imported.
    """
    return Plugin(setting, path, load_attribute(path))


def load_attribute(path: str) -> Any:
    """Return the attribute that `path` names.

    Args:
        path: `package.module:attribute`.

    Raises:
        ConfigError: If the path is malformed, nothing is there, or the module cannot be imported.
    """
    module_name, separator, attribute = path.partition(":")
    if not separator or not module_name or not attribute:
        raise ConfigError(f"'{path}' is not of the form module:attribute")
    module = _import(module_name, path)
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise ConfigError(f"module '{module_name}' has no attribute '{attribute}'") from error


def one_line(error: BaseException, limit: int = 300) -> str:
    """Return an error's message on one line of bounded length."""
    text = " ".join(str(error).split())
    return text if len(text) <= limit else f"{text[:limit]}..."


def _import(name: str, path: str) -> ModuleType:
    try:
        return import_module(name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"cannot import '{name}' of '{path}': {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """What went wrong and where, on one line."""
    if isinstance(error, ModuleNotFoundError):
        return str(error)
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}, line {error.lineno})"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {one_line(error)} ({last.filename}, line {last.lineno})"


def _definition(function: Any) -> tuple[str, int]:
    """The file and line where a function or class is defined."""
    code = inspect.unwrap(function) if callable(function) else function
    if not inspect.isroutine(code) and not inspect.isclass(code):
        code = type(code)
    try:
        file = inspect.getsourcefile(code)
        return (file or _UNKNOWN), inspect.getsourcelines(code)[1]
    except (TypeError, OSError):
        return _UNKNOWN, 0


def _is_our_clients(error: Exception) -> bool:
    """Whether a connection to an environment server failed, and not one that the plug-in made itself."""
    if not isinstance(error, ConnectionError | TimeoutError):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(str(frame.f_globals.get("__name__", "")).startswith("clients.") for frame in frames)
