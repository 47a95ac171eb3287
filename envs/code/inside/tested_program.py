"""The program under test, which runs elsewhere: what tests ask of it, and what they are given for its answers."""

import builtins
from collections.abc import Callable, Collection, Mapping
from typing import Any

from rollgym.envs.code.inside import objects, proxies, values
from rollgym.envs.code.inside.proxies import (
    KEEPS_MADE,
    Class,
    Coroutine,
    Function,
    Handle,
    Made,
    UnsupportedError,
)

UNLOADABLE = "it cannot be loaded"
"""How the failure of a program begins that could not even be loaded."""
NO_ANSWER = "it gave no answer"
"""How the failure of a program begins that did not answer; the status follows."""
_MADE_OF_MORE = (UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError)
"""Exceptions that are made of more than a text."""
_Ask = Callable[[int | None, Mapping[str, Any]], dict[str, Any]]


class ProgramFailedError(BaseException):
    """The program gave no answer: nothing that a test catches."""


class Asked:
    """How often a program was asked.

    Attributes:
        ever: In all.
        in_case: In the case that runs, or ran last.
        outside: Outside of cases.
        is_in_case: Whether a case runs.
    """

    def __init__(self) -> None:
        self.ever = self.in_case = self.outside = 0
        self.is_in_case = False

    def begin(self) -> None:
        """Begin a case."""
        self.in_case = 0
        self.is_in_case = True

    def count(self) -> None:
        """Count once more."""
        self.ever += 1
        self.in_case += self.is_in_case
        self.outside += not self.is_in_case


class ProgramUnderTest:
    """The program under test.

    Args:
        ask: Asks it for something.
        shared: Whether the calls of a case share a process; otherwise each call has its own.
        classes: Names that are classes, as the item has it: what a program makes a class of besides is called like a
            function, and its objects are answers.
        allows_nan: Whether the tests know of numbers that are none; elsewhere such an answer is a failure, because
            they compare with everything as false.

    Attributes:
        has_raised: Whether it has raised anything, or failed, so far.
        asked: How often tests have asked it for something besides the names of its functions and classes.
    """

    def __init__(self, ask: _Ask, *, shared: bool, classes: Collection[str], allows_nan: bool) -> None:
        self._ask = ask
        self._shared = shared
        self._classes = classes
        self._allows_nan = allows_nan
        self._children = 0
        self._open: list[int] = []
        self._failure = ""
        self._callbacks: list[Callable[..., Any]] = []
        self._errors: dict[str, type[BaseException]] = {}
        self.has_raised = False
        self.asked = Asked()

    def begin(self) -> None:
        """Begin a case: with a clean process, and no failure yet."""
        self._failure = ""
        self.asked.begin()

    def let_go(self) -> None:
        """End the processes of a case."""
        for child in self._open:
            self._ask(child, {"end": True})
        self._open.clear()
        self._callbacks.clear()

    def end(self) -> str:
        """End a case, and its processes; return what the program failed with."""
        self.let_go()
        self.asked.is_in_case = False
        return self._failure

    def resolve(self, name: str) -> Any:
        """Return a function, class, exception or value of the program."""
        found = self._request(None, {"name": name})
        if "class" in found and found.get("error") is True:
            if not isinstance(found["class"], list) or not found["class"]:
                raise self._failed("it answered in an unknown form")
            return self._error_class([str(each) for each in found["class"]])
        if "class" in found and name in self._classes:
            return Class(self, name)
        if "value" not in found:
            return Function(self, name)
        self.asked.count()
        return found["value"]

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, made: bool = False) -> Any:
        """Call a function or class of the program."""
        self.asked.count()
        do = {"call": name, **self._arguments(args, kwargs), "changes": True}
        child = next(
            (self._child_of(each) for each in (*args, *kwargs.values()) if isinstance(each, Handle)), None
        )
        lasts = self._shared or made or bool(self._callbacks)
        if child is None and not lasts:
            answer = self._ask(None, do)
            if "refused" not in _reply(answer):
                return self._taken(answer, args, None, made=False)
        if child is None:
            child = self._open[0] if self._open else self._new_child()
        return self._taken(self._ask(child, {**do, "keep": True}), args, child, made=made)

    def operate(
        self, handle: "Handle", operation: str, *args: Any, is_last: bool = False, **kwargs: Any
    ) -> Any:
        """Do something with an object of the program; `is_last` puts it behind the other operand."""
        self.asked.count()
        operands = (*args, handle) if is_last else (handle, *args)
        of_class = object.__getattribute__(handle, "_is_of_class")
        try:
            sent = self._arguments(operands, kwargs)
        except UnsupportedError as error:
            if of_class:
                raise
            # The program has chosen to answer with an object, where what is plain would have taken it.
            raise self._failed(f"it answered with an object, and {error}") from None
        do = {"operate": operation, **sent, "keep": True}
        child = self._child_of(handle)
        made = operation in KEEPS_MADE and isinstance(handle, Made)
        return self._taken(self._ask(child, do), args, child, made=made, of_class=of_class)

    def _request(self, child: int | None, do: Mapping[str, Any]) -> Any:
        try:
            answer = values.build(self._checked(self._ask(child, do)))
        except values.ValueRefusedError as error:
            raise self._failed(str(error)) from None
        if not isinstance(answer, dict):
            raise self._failed("it answered in an unknown form")
        return answer

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"args": values.plain(list(args), self._sent), "kwargs": values.plain(kwargs, self._sent)}
        except values.TooLargeError as error:
            # Tests have nothing as large of their own: it was an answer before.
            raise self._failed(str(error)) from None
        except values.ValueRefusedError as error:
            raise UnsupportedError(f"a test passes what is no plain value: {error}") from None

    def _sent(self, value: Any) -> values.Remote:
        if isinstance(value, Function):
            raise UnsupportedError(f"a test passes {value.__name__} to the program itself")
        if callable(value):
            self._callbacks.append(value)
            return values.Remote(len(self._callbacks) - 1, objects.CALLBACK)
        raise values.ValueRefusedError(f"a {type(value).__name__}")

    def _called_back(self, asked: Any, child: int) -> dict[str, Any]:
        """Call a function of the tests for the program; return the program's next answer."""
        number, args, kwargs = asked["callback"], asked.get("args"), asked.get("kwargs")
        if type(number) is not int or not 0 <= number < len(self._callbacks):
            raise self._failed("it called back what there is not")
        if not isinstance(args, list) or not isinstance(kwargs, dict):
            raise self._failed("it called back in an unknown form")
        do: dict[str, Any]
        try:
            do = {"value": values.plain(self._callbacks[number](*args, **kwargs), self._sent)}
        except values.ValueRefusedError as error:
            # It has chosen what it calls it with.
            raise self._failed(f"a function of the tests gave it what is no plain value: {error}") from None
        except Exception as error:  # noqa: BLE001 - the tests' own function, and the program may catch what it raises
            do = {"raised": type(error).__name__, "text": str(error)[:300]}
        return self._ask(child, do)

    def _new_child(self) -> int:
        self._children += 1
        self._open.append(self._children)
        return self._children

    def _child_of(self, handle: "Handle") -> int:
        child: int = object.__getattribute__(handle, "_child")
        return child

    def _taken(
        self,
        answer: dict[str, Any],
        args: tuple[Any, ...],
        child: int | None,
        *,
        made: bool,
        of_class: bool = False,
    ) -> Any:
        def find(remote: values.Remote) -> Any:
            found = (Made if made else Handle)(self, child or 0, remote)
            object.__setattr__(found, "_is_of_class", made or of_class)
            return found

        try:
            told = values.build(self._checked(answer), None if child is None else find)
            while child is not None and isinstance(told, dict) and "callback" in told:
                told = values.build(self._checked(self._called_back(told, child)), find)
        except values.ValueRefusedError as error:
            raise self._failed(str(error)) from None
        if isinstance(told, dict) and "coroutine" in told:
            told["value"] = Coroutine(told["coroutine"])
        if not isinstance(told, dict) or "value" not in told:
            raise self._failed("it answered in an unknown form")
        changed = told.get("changed")
        for number, value in changed.items() if isinstance(changed, dict) else ():
            if isinstance(number, int) and 0 <= number < len(args):
                _change(args[number], value)
        return told["value"]

    def _checked(self, answer: dict[str, Any]) -> Any:
        """Return what was answered; raise what the program raised."""
        reply = _reply(answer)
        if "refused" in reply:
            raise self._failed(str(reply["refused"])[:200])
        if "raised" in reply:
            self.has_raised = True
            names, text = reply["raised"], str(reply.get("text", ""))[:300]
            if not isinstance(names, list) or not names:
                raise self._failed("it answered in an unknown form")
            if reply.get("loading"):
                raise self._failed(f"{UNLOADABLE}: {names[0]}: {text}")
            error = self._error_class([str(each) for each in names])
            if error is ProgramFailedError:
                raise self._failed(f"{names[0]}: {text}")
            raise error(text)
        if "status" in reply:
            raise self._failed(f"{NO_ANSWER} ({reply['status']})")
        if not self._allows_nan and values.holds_nan(reply):
            raise self._failed("it answered with a number that is none")
        return reply

    def _failed(self, why: str) -> ProgramFailedError:
        self._failure = self._failure or why
        self.has_raised = True
        return ProgramFailedError(why)

    def _error_class(self, names: list[str]) -> type[BaseException]:
        """Return the class that stands for one of the program's exceptions here."""
        if names[0] in self._errors:
            return self._errors[names[0]]
        known = (getattr(builtins, name, None) for name in names)
        base = next((each for each in known if isinstance(each, type) and issubclass(each, Exception)), None)
        if base is None:
            return ProgramFailedError
        base = proxies.STAND_INS.get(base, base)
        is_made_of_more = issubclass(base, _MADE_OF_MORE)
        if base.__name__ == names[0] and not is_made_of_more:
            return base
        parents = [self._errors[name] for name in names[1:] if name in self._errors]
        own: dict[str, Any] = {"__init__": _init_error}
        if is_made_of_more:
            own["__str__"] = Exception.__str__
        self._errors[names[0]] = type(names[0], (parents[0] if parents else base,), own)
        return self._errors[names[0]]


def _reply(answer: dict[str, Any]) -> dict[str, Any]:
    """Return what a process of the program answered, or how it ended."""
    if answer.get("status") != "answered":
        return {"status": answer.get("status", "gone")}
    try:
        reply = values.read_json(answer["reply"])
    except values.ValueRefusedError:
        return {"status": "unreadable"}
    return reply if isinstance(reply, dict) and "status" not in reply else {"status": "unreadable"}


def _change(argument: Any, value: Any) -> None:
    """Do to a test's own object what the program did to its copy."""
    if isinstance(argument, list | bytearray) and isinstance(value, list | bytearray):
        argument[:] = value
    elif isinstance(argument, dict | set) and type(argument) is type(value):
        argument.clear()
        argument.update(value)


def _init_error(error: BaseException, text: str = "") -> None:
    error.args = (text,)
