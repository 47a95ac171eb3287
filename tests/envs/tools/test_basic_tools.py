"""The calculator against Python's own exact arithmetic, and what it refuses."""

import ast
import operator
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.envs.tools.basic_tools import calculate, number_text
from rollgym.envs.tools.tool import ToolError

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def exact(node):
    if isinstance(node, ast.BinOp):
        return Fraction(OPERATORS[type(node.op)](exact(node.left), exact(node.right)))
    if isinstance(node, ast.UnaryOp):
        return -exact(node.operand)
    return Fraction(str(node.value))


NUMBERS = st.integers(0, 999).map(str) | st.decimals(0, 99, places=2).map(str)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda parts: st.one_of(
        st.tuples(parts, st.sampled_from(["+", "-", "*", "/", "//", "%"]), parts).map(
            lambda each: " ".join(each)
        ),
        parts.map(lambda each: f"({each})"),
        parts.map(lambda each: f"-{each}"),
        st.tuples(parts, st.sampled_from("0123")).map(lambda each: f"({each[0]}) ** {each[1]}"),
    ),
    max_leaves=8,
)


@given(EXPRESSIONS)
@settings(max_examples=150)
def test_values_are_those_of_pythons_grammar(expression):
    try:
        expected = exact(ast.parse(expression, mode="eval").body)
    except ZeroDivisionError:
        with pytest.raises(ToolError, match="division by zero"):
            calculate(expression)
        return
    except SyntaxError:
        return
    assert calculate(expression) == expected


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("-2 ** 2", "-4"),
        ("2 ** 3 ** 2", "512"),
        ("2 ^ -1", "0.5"),
        ("1 / 3", "0.333333333333333"),
        ("sqrt(16 / 9) * 3", "4"),
        ("sqrt(2)", "1.4142135623731"),
        ("round(2.5) + round(-2.5) + round(1.005, 2)", "1.01"),
        ("max(1, 2, 3) - min(4, 5) + gcd(12, 18)", "5"),
        ("factorial(20)", "2432902008176640000"),
        ("floor(-1.5) + ceil(1.2) + abs(-3)", "3"),
        ("1e3 + .5", "1000.5"),
    ],
)
def test_what_is_shown(expression, text):
    assert number_text(calculate(expression)) == text


@pytest.mark.parametrize(
    "expression",
    [
        *(
            "",
            "1 +",
            "(1",
            "1)",
            "1 2",
            "a",
            "sqrt",
            "sqrt(1, 2)",
            "import os",
            "1; 2",
            "1 // 0",
            "0 ** -1",
            "sqrt(-1)",
        ),
        *(
            "9 ** 9 ** 9",
            "2 ** 99999",
            "(-8) ** (1 / 3)",
            "factorial(10 ** 9)",
            "factorial(2.5)",
            "0.5 ** 9e99",
        ),
        *(
            "(" * 500 + "1" + ")" * 500,
            "-" * 900 + "1",
            "1" * 2_000,
            "round(1, 99)",
            "1e999",
            "gcd(0.5)",
            "x" * 900,
        ),
    ],
)
def test_what_is_no_number_within_bounds_is_refused(expression):
    with pytest.raises(ToolError):
        calculate(expression)
