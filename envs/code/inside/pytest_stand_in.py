"""The few things of pytest that tests of one function use; pytest itself is not in every sandbox."""

import inspect
import math
import re
import types
import unittest
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

from rollgym.envs.code.inside.proxies import UnsupportedError


class Raises:
    """Context in which an exception is expected."""

    def __init__(self, expected: Any, match: str | None = None) -> None:
        self._expected = expected
        self._match = match
        self.value: BaseException | None = None

    def __enter__(self) -> "Raises":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        if error is None:
            raise AssertionError("nothing was raised")
        if not isinstance(error, self._expected):
            return False
        if self._match is not None and not re.search(self._match, str(error)):
            raise AssertionError(f"{str(error)[:100]!r} does not match")
        self.value = error
        self.type = kind
        return True


class Approx:
    """A value that others are near to."""

    def __init__(
        self, expected: Any, rel: float | None = None, abs: float | None = None, nan_ok: bool = False
    ) -> None:
        self._expected = expected
        self._relative = rel
        self._absolute = abs
        self._nan_ok = nan_ok

    def __eq__(self, other: object) -> bool:
        return self._near(self._expected, other)

    __hash__ = None  # type: ignore[assignment]

    def _near(self, expected: Any, other: Any) -> bool:
        if isinstance(expected, Mapping):
            return (
                isinstance(other, Mapping)
                and expected.keys() == other.keys()
                and all(self._near(value, other[key]) for key, value in expected.items())
            )
        if isinstance(expected, Sequence) and not isinstance(expected, str | bytes):
            return (
                isinstance(other, Sequence)
                and len(expected) == len(other)
                and all(self._near(one, two) for one, two in zip(expected, other, strict=True))
            )
        numbers = int | float | complex
        if not isinstance(expected, numbers) or not isinstance(other, numbers) or isinstance(expected, bool):
            return bool(type(expected) is type(other) and expected == other)
        if expected == other:
            return True
        if isinstance(expected, float) and math.isnan(expected):
            return self._nan_ok and isinstance(other, float) and math.isnan(other)
        relative = 1e-6 if self._relative is None and self._absolute is None else self._relative or 0.0
        absolute = 1e-12 if self._absolute is None else self._absolute
        distance = abs(other - expected)
        return bool(distance <= max(relative * abs(expected), absolute) and distance != math.inf)


class Mark:
    """Marks: all are without meaning here but `parametrize`."""

    def parametrize(
        self, names: str | Sequence[str], cases: Sequence[Any], **options: Any
    ) -> Callable[[Any], Any]:
        """Run a test for each case."""
        split = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)

        def mark(function: Any) -> Any:
            rows = [
                dict(
                    zip(
                        split,
                        getattr(case, "values", case) if len(split) > 1 else [_single(case)],
                        strict=True,
                    )
                )
                for case in cases
            ]
            function.cases = [*getattr(function, "cases", []), rows]
            return function

        return mark

    def __getattr__(self, name: str) -> Any:
        def mark(*args: Any, **kwargs: Any) -> Any:
            return (
                args[0] if len(args) == 1 and callable(args[0]) and not kwargs else lambda function: function
            )

        return mark


class Param:
    """One case of a parametrized test."""

    def __init__(self, *parts: Any, **options: Any) -> None:
        self.values = parts


def _single(case: Any) -> Any:
    return case.values[0] if isinstance(case, Param) else case


def _fixture(*args: Any, **options: Any) -> Any:
    def mark(function: Any) -> Any:
        function.is_fixture = True
        return function

    return mark(args[0]) if args and callable(args[0]) else mark


def _raises(expected: Any, *args: Any, match: str | None = None, **kwargs: Any) -> Any:
    context = Raises(expected, match)
    if not args:
        return context
    with context:
        args[0](*args[1:], **kwargs)
    return context


def _fail(reason: str = "", **options: Any) -> None:
    raise AssertionError(reason)


def _skip(reason: str = "", **options: Any) -> None:
    raise unittest.SkipTest(reason)


def _missing(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise UnsupportedError(f"a test uses pytest.{name}, which there is none of here")


def module() -> types.ModuleType:
    """Return what `import pytest` gives."""
    made = types.ModuleType("pytest")
    made.__dict__.update(
        raises=_raises,
        approx=Approx,
        mark=Mark(),
        fixture=_fixture,
        fail=_fail,
        skip=_skip,
        param=Param,
        main=lambda *_: 0,
        __getattr__=_missing,
    )
    return made


def run(space: Mapping[str, Any], name: str, case: Any) -> None:
    """Run a test function, or a method of a test class, as one case: `test_it`, `TestIt.test_it`."""
    with case:
        holder, _, method = name.partition(".")
        found = space[holder]
        if method and issubclass(found, unittest.TestCase):
            result = unittest.TestResult()
            test = found(method)
            for step in (test.setUpClass, test.setUp):
                step()
            getattr(test, method)()
            for step in (test.tearDown, test.tearDownClass, test.doCleanups):
                step()
            assert result.wasSuccessful()
            return
        owner = found() if method else None
        for prepare in ("setup_method", "setup"):
            if owner is not None and hasattr(owner, prepare):
                _called(getattr(owner, prepare), {}, space, owner)
                break
        function = getattr(owner, method) if method else found
        for chosen in product(*getattr(function, "cases", [])):
            given = {key: value for row in chosen for key, value in row.items()}
            _called(function, given, space, owner)
            case.again()


def _called(function: Any, given: Mapping[str, Any], space: Mapping[str, Any], owner: Any) -> Any:
    arguments = dict(given)
    for name, parameter in inspect.signature(function).parameters.items():
        if name in arguments or parameter.default is not parameter.empty or parameter.kind in (2, 4):
            continue
        fixture = getattr(owner, name, None) or space.get(name)
        if name == "method" and owner is not None:
            arguments[name] = function
        elif not getattr(fixture, "is_fixture", False):
            raise UnsupportedError(f"a test asks for the fixture {name}, which there is none of here")
        else:
            arguments[name] = _called(fixture, {}, space, owner)
    result = function(**arguments)
    return next(result) if inspect.isgenerator(result) else result
