"""The user's code, which a setting names as `module:attr`: a reward, an agent, a context policy, a task source.

This is the boundary to it, the only place that catches whatever it raises: when its module is imported, and when
it is called.
"""

import asyncio
import contextvars
import inspect
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

from rollgym.clients.process.modules import current_path
from rollgym.clients.protocol.errors import ProblemError
from rollgym.trainer.core.errors import ConfigError, InvalidNumberError, PluginError, TrainerError
from rollgym.user_code import misnamed, missing_attribute, missing_module


@dataclass(frozen=True, slots=True)
class Plugin:
    """A user's function (or class).

    Attributes:
        setting: The setting that names it, such as `rollout.reward`.
        path: Its name, `module:attr`.
        function: The attribute itself.
    """

    setting: str
    path: str
    function: Any
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False, repr=False, compare=False)

    def __call__(self, *arguments: Any) -> Any:
        """Call the function and return its result.

        Raises:
            PluginError: If it raises, or is a coroutine, which this call cannot await.
        """
        with self.running():
            given = self.function(*arguments)
        if inspect.iscoroutine(given):
            given.close()
            raise self.broken("is a coroutine, and must be a plain function: write def in place of async def")
        return given

    async def answer(self, *arguments: Any) -> Any:
        """Call the function, and await its result if it is a coroutine.

        A plain function may be slow: it runs in a thread, one call after the other, without blocking the event loop.

        Raises:
            PluginError: If it raises.
        """
        if _is_coroutine(self.function):
            with self.running():
                return await self.function(*arguments)
        async with self._turn:
            given = await beside_the_loop(partial(self._called, arguments))
        with self.running():
            return await given if inspect.isawaitable(given) else given

    def _called(self, arguments: tuple[Any, ...]) -> Any:
        with self.running():
            return self.function(*arguments)

    def elements(self, given: Any, expected: str, *, ordered: bool = True) -> list[Any]:
        """Return what it has returned, or what a generator of its yields, as a list.

        Args:
            given: The returned value.
            expected: Description of a correct value, for the message.
            ordered: Whether an element belongs to a place, so that a set says nothing.

        Raises:
            PluginError: If that is nothing to go through in an order that means something, or its generator raises.
                To go through a mapping gives its keys: numbers that were meant to name places, and not rewards.
        """
        unfit = Mapping | Set | str | bytes if ordered else Mapping | str | bytes
        if not isinstance(given, Iterable) or isinstance(given, unfit):
            raise self.broken(f"must return {expected}, not {type(given).__name__}")
        with self.running():
            return list(given)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Name the plug-in in whatever its code raises while the context is open.

        Errors of our own code pass through unchanged: an agent that asks the environment for a step does not have
        to handle its problems. Neither `sys.exit` nor a `CancelledError` of something that it waited for may pass:
        the one would end the run without a word, and for the other the run would wait for ever.

        Raises:
            PluginError: If it raises.
        """
        task = _running_task()
        try:
            yield
        except (TrainerError, ProblemError, InvalidNumberError, KeyboardInterrupt):
            raise
        except BaseException as error:
            if _is_our_clients(error) or _is_our_cancellation(error) or _is_the_end_of(task, error):
                raise
            raise self.broken(f"raised {_named(error)}{_advice(error)}", error) from error

    def broken(self, what: str, error: BaseException | None = None) -> PluginError:
        """Return the error that says what the plug-in did wrong, and where.

        Args:
            what: Said of it, such as "returned 3 rewards for 4 turns".
            error: The exception that it raised, if any.
        """
        return PluginError(f"{self.setting} '{self.path}' {what} ({self._place(error)})")

    def _place(self, error: BaseException | None) -> str:
        """The deepest line of its own file that was running, or else its definition."""
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
    if wrong := misnamed(path):
        raise ConfigError(wrong)
    module_name, _, attribute = current_path(path).partition(":")
    module = _import(module_name, path)
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise ConfigError(missing_attribute(module, attribute)) from error


_LONGEST_MESSAGE = 300


def one_line(error: BaseException) -> str:
    """Return an error's message on one line of bounded length."""
    try:
        text = " ".join(str(error).split())
    except Exception as another:  # noqa: BLE001 - a user's class may fail at that, too
        text = f"(its message cannot be read: {type(another).__name__})"
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]}..."


def _named(error: BaseException) -> str:
    """An error's class and message; a `CancelledError` has none."""
    return f"{type(error).__name__}: {one_line(error)}".rstrip(": ")


def _import(name: str, path: str) -> ModuleType:
    try:
        return import_module(name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"cannot import '{name}' of '{path}': {_reason(error, name)}") from error


def _reason(error: BaseException, module: str) -> str:
    """Return the error and its place, on one line."""
    if isinstance(error, ModuleNotFoundError):
        return missing_module(error, module)
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}, line {error.lineno})"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{_named(error)} ({last.filename}, line {last.lineno})"


def _definition(function: Any) -> tuple[str, int]:
    """Return the file and line of a function's or class's definition."""
    code = inspect.unwrap(function) if callable(function) else function
    if not inspect.isroutine(code) and not inspect.isclass(code):
        code = type(code)
    try:
        file = inspect.getsourcefile(code)
        return (file or _UNKNOWN), inspect.getsourcelines(code)[1]
    except (TypeError, OSError):
        return _UNKNOWN, 0


def _is_our_clients(error: BaseException) -> bool:
    """Whether a connection to an environment server failed, and not one that the plug-in made itself."""
    if not isinstance(error, ConnectionError | TimeoutError):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(str(frame.f_globals.get("__name__", "")).startswith("rollgym.clients.") for frame in frames)


def _is_our_cancellation(error: BaseException) -> bool:
    """Whether the running task was cancelled, and not only something that the plug-in waited for."""
    if not isinstance(error, asyncio.CancelledError):
        return False
    task = _running_task()
    return task is not None and task.cancelling() > 0


def _is_the_end_of(task: "asyncio.Task[Any] | None", error: BaseException) -> bool:
    """Whether a coroutine is closed that a task has abandoned: that task then does not run it."""
    return isinstance(error, GeneratorExit) and _running_task() is not task


def _running_task() -> "asyncio.Task[Any] | None":
    try:
        return asyncio.current_task()
    except RuntimeError:  # a thread without an event loop
        return None


def _advice(error: BaseException) -> str:
    """Return the remedy for an error that plain functions cause because they run in a thread."""
    if isinstance(error, ValueError) and "main thread" in str(error):
        return "; plain functions run in threads of their own: write async def for what needs the main one"
    return ""


def _is_coroutine(function: Any) -> bool:
    """Whether a call only makes a coroutine, which takes no time."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - of an object
    )


async def beside_the_loop(call: Callable[[], Any]) -> Any:
    """Return the result of a call in a daemon thread, which is abandoned on cancellation and at exit."""
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    done: asyncio.Future[Any] = loop.create_future()

    def tell(result: Any, error: BaseException | None) -> None:
        if done.done():
            return  # it was cancelled
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = context.run(call)
        except BaseException as raised:  # noqa: BLE001 - raised again in the waiting task
            error = raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=work, name="beside the loop", daemon=True).start()
    return await done
