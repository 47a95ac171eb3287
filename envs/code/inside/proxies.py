"""Names and objects of a program that runs elsewhere, for tests to use as if it ran here."""

import builtins
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from envs.code.inside import objects, stops, values

UNLOADABLE = "it cannot be loaded"
"""How the failure of a program begins that could not even be loaded."""
NO_ANSWER = "it gave no answer"
"""How the failure of a program begins that did not answer; the status follows."""
_MADE_OF_MORE = (UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError)
"""Exceptions that are made of more than a text."""
_Ask = Callable[[int | None, Mapping[str, Any]], dict[str, Any]]


class UnsupportedError(BaseException):
    """A test does what cannot be done over values; the program is not to blame."""


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


class Program:
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
        made = operation in _KEEPS_MADE and handle_is_made(handle)
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
        base = stops.STAND_INS.get(base, base)
        is_made_of_more = issubclass(base, _MADE_OF_MORE)
        if base.__name__ == names[0] and not is_made_of_more:
            return base
        parents = [self._errors[name] for name in names[1:] if name in self._errors]
        own: dict[str, Any] = {"__init__": _init_error}
        if is_made_of_more:
            own["__str__"] = Exception.__str__
        self._errors[names[0]] = type(names[0], (parents[0] if parents else base,), own)
        return self._errors[names[0]]


class Function:
    """A function of the program."""

    def __init__(self, program: Program, name: str) -> None:
        self._program = program
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it where it is."""
        return self._program.call(self.__name__, args, kwargs)


class Class(Function):
    """A class of the program: what it makes stays there."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make an object."""
        return self._program.call(self.__name__, args, kwargs, made=True)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Handle) and values.Remote.kind_of(instance) == self.__name__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedError(f"a test reads {self.__name__}.{name} of a class")


class Handle(values.Remote):
    """An object of the program that one of its functions has returned.

    Its own notion of being equal, less, true or a number is never asked for: only parts of it that are plain values
    count, so that no object can pass for what is expected.
    """

    def __init__(self, program: Program, child: int, remote: values.Remote) -> None:
        super().__init__(values.Remote.number_of(remote), values.Remote.kind_of(remote))
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_child", child)
        # Whether it is, or came from, an object of a class of the item's.
        object.__setattr__(self, "_is_of_class", False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name != "__name__":
            raise AttributeError(name)
        return self._program.operate(self, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._program.operate(self, "setattr", name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the object."""
        return self._program.operate(self, "call", *args, **kwargs)

    def __len__(self) -> int:
        return _whole(self._program.operate(self, "len"))

    def __getitem__(self, key: Any) -> Any:
        return self._program.operate(self, "getitem", key)

    def __iter__(self) -> Iterator[Any]:
        parts = self._program.operate(self, "iter")
        if isinstance(parts, Handle):
            raise TypeError("it is not iterable")
        return iter(parts)

    def __next__(self) -> Any:
        try:
            return self._program.operate(self, "next")
        except stops.STAND_INS[StopIteration] as end:
            # Here the end was asked for.
            raise StopIteration(*end.args) from None

    def __enter__(self) -> Any:
        return self._program.operate(self, "enter")

    def __exit__(self, *error: Any) -> None:
        self._program.operate(self, "exit")


class Made(Handle):
    """An object that a test has made by calling a class of the program: all of its behaviour is under test."""

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        # Only with its like, and who is equal to everything is equal to nothing.
        return isinstance(other, Made) and self._truth("eq", other) and not self._truth("unlike")

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return _whole(self._program.operate(self, "hash"))

    def __bool__(self) -> bool:
        return self._truth("bool")

    def __contains__(self, part: Any) -> bool:
        return self._truth("contains", part)

    def __str__(self) -> str:
        return str(self._program.operate(self, "str"))

    def __repr__(self) -> str:
        return str(self._program.operate(self, "repr"))

    def _truth(self, operation: str, *args: Any) -> bool:
        return self._program.operate(self, operation, *args) is True


class SolutionModule(types.ModuleType):
    """The module that tests import the program from."""

    def __init__(self, program: Program) -> None:
        super().__init__("solution")
        self.__dict__["_program"] = program
        self.__dict__["__all__"] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = self.__dict__["_program"].resolve(name)
        self.__dict__[name] = found
        return found


def handle_is_made(handle: Handle) -> bool:
    """Tell whether a test has made an object itself."""
    return isinstance(handle, Made)


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


def _whole(number: Any) -> int:
    if type(number) is not int:
        raise TypeError(f"a whole number is needed, not a {type(number).__name__}")
    return number


def _init_error(error: BaseException, text: str = "") -> None:
    error.args = (text,)


def _operator(operation: str, *, is_last: bool = False) -> Callable[..., Any]:
    def operate(self: Handle, *args: Any) -> Any:
        return self._program.operate(self, operation, *args, is_last=is_last)

    return operate


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_UNARY = ("neg", "pos", "invert", "abs")
_OTHERS = ("lt", "le", "gt", "ge", "int", "float", "round", "setitem", "delitem")
_KEEPS_MADE = frozenset({*_BINARY, *_UNARY, "enter"})
for _name in (*_BINARY, *_UNARY, *_OTHERS):
    setattr(Made, f"__{_name}__", _operator(_name))
for _name in _BINARY:
    setattr(Made, f"__r{_name}__", _operator(_name, is_last=True))
