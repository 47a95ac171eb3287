"""A problem as a reference solution, whose docstring states it, and a maker of inputs."""

import ast
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Generator = np.random.Generator
_HIDDEN = 12
_TRIES = 200


@dataclass(frozen=True, slots=True)
class CodeProblem:
    """A problem.

    Attributes:
        solve: The reference solution; its docstring says what is asked.
        make: Draws the arguments of one test.
        corners: Arguments that are always tested, and never shown.
        reads: Whether a program is asked for that reads and writes: `solve` then takes and gives the whole text.
    """

    solve: Callable[..., Any]
    make: Callable[[Generator], list[Any]]
    corners: Sequence[list[Any]] = ()
    reads: bool = False

    @property
    def name(self) -> str:
        """Its name."""
        return self.solve.__name__

    def statement(self) -> str:
        """Return what is asked."""
        return " ".join((self.solve.__doc__ or "").split())

    def solution(self) -> str:
        """Return the source of the reference solution, as a response would have it."""
        tree = ast.parse(inspect.getsource(self.solve))
        function = tree.body[0]
        assert isinstance(function, ast.FunctionDef)
        function.body = function.body[1:]
        source = ast.unparse(tree)
        return (
            f"import sys\n\n{source}\n\nprint({self.name}(sys.stdin.read()))\n"
            if self.reads
            else f"{source}\n"
        )

    def signature(self) -> str:
        """Return the first line of the function."""
        return f"def {self.name}{inspect.signature(self.solve)}:"

    def task(self, rng: Generator) -> dict[str, Any]:
        """Return the problem with tests, in the form of APPS: two that are shown, then the hidden ones.

        Args:
            rng: Draws the tests.
        """
        shown: list[list[Any]] = []
        for _ in range(_TRIES):
            args = self.make(rng)
            if args not in shown and len(json.dumps(args)) < 200:
                shown.append(args)
            if len(shown) == 2:
                break
        hidden = [*self.corners, *(self.make(rng) for _ in range(_HIDDEN - len(self.corners)))]
        inputs = [*shown, *(args for args in hidden if args not in shown)]
        outputs = [self.solve(*_copied(args)) for args in inputs]
        tests: dict[str, Any] = (
            {"inputs": [args[0] for args in inputs], "outputs": [f"{output}\n" for output in outputs]}
            if self.reads
            # In a list of one, as such items have it: a list that is returned would be taken for that otherwise.
            else {"fn_name": self.name, "inputs": inputs, "outputs": [[output] for output in outputs]}
        )
        return {
            "problem_id": self.name,
            "question": self._question(inputs[: len(shown)], outputs),
            "starter_code": "" if self.reads else f"{self.signature()}\n    ...\n",
            "input_output": json.dumps(tests),
            "solution": self.solution(),
        }

    def _question(self, inputs: Sequence[list[Any]], outputs: Sequence[Any]) -> str:
        lines = [self.statement(), ""]
        if self.reads:
            lines.append("Write a program that reads from standard input and writes to standard output.")
            for (text,), output in zip(inputs, outputs, strict=False):
                lines += ["", "Input:", text.rstrip("\n"), "Output:", str(output)]
        else:
            lines += ["Write this function:", "", self.signature(), "", "Examples:"]
            for args, output in zip(inputs, outputs, strict=False):
                lines.append(f"{self.name}({', '.join(map(repr, args))}) == {output!r}")
        return "\n".join(lines)


def whole(rng: Generator, low: int, high: int) -> int:
    """Draw a whole number, both ends included."""
    return int(rng.integers(low, high + 1))


def wholes(rng: Generator, low: int, high: int, least: int = 0, most: int = 12) -> list[int]:
    """Draw a list of whole numbers."""
    return [int(each) for each in rng.integers(low, high + 1, whole(rng, least, most))]


def letters(rng: Generator, alphabet: str, least: int = 0, most: int = 14) -> str:
    """Draw a text."""
    return "".join(alphabet[int(each)] for each in rng.integers(0, len(alphabet), whole(rng, least, most)))


def words(rng: Generator, alphabet: str = "abc", least: int = 1, most: int = 7) -> list[str]:
    """Draw short words."""
    return [letters(rng, alphabet, 1, 4) for _ in range(whole(rng, least, most))]


def _copied(args: Sequence[Any]) -> Any:
    return json.loads(json.dumps(list(args)))
