"""What counts as the expected answer."""

from collections import deque
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgym.envs.code.comparing import holds, near, same, same_approximately, same_stream

NAN, INF = float("nan"), float("inf")
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda parts: (
        st.lists(parts, max_size=3) | st.dictionaries(st.text(), parts, max_size=3) | st.tuples(parts, parts)
    ),
    max_leaves=8,
)


@given(PLAIN)
def test_a_value_is_the_same_as_itself(value):
    assert same(value, value)
    assert same(value, value, loose=True)


@given(PLAIN, PLAIN)
def test_the_strict_comparison_says_what_python_says(one, other):
    assert same(one, other) == (one == other)


@pytest.mark.parametrize(
    ("expected", "answer", "strictly", "loosely"),
    [
        (1, True, True, False),
        (True, 1, True, False),
        ([1], [True], True, False),
        ({1}, {True}, True, False),
        ({1: 2}, {True: 2}, True, False),
        (0, False, True, False),
        (1, False, False, False),
        (1, 1.0, True, True),
        (0.5, Fraction(1, 2), True, True),
        (Decimal("0.5"), 0.5, True, True),
        ([1, 2], (1, 2), False, True),
        ([[1]], ((1,),), False, True),
        ((1, 2), [1, 2], False, True),
        (deque([1]), [1], False, True),
        ({"1": 2}, {1: 2}, False, True),
        ({"1": 2}, {10**300: 2}, False, False),
        (0.3, 0.1 + 0.2, False, True),
        (0.3, 0.301, False, False),
        (NAN, NAN, False, False),
        (1.0, NAN, False, False),
        (INF, INF, True, True),
        (1e308, INF, False, False),
        ("1", 1, False, False),
        (1, "1", False, False),
        ([1, 2, 3], [3, 2, 1], False, False),
        ({1, 2}, [1, 2], False, False),
        (frozenset({1}), {1}, True, True),
        (None, 0, False, False),
        (Decimal("1e400"), 1, False, False),
        ([], None, False, False),
        (b"a", "a", False, False),
        (10**400, 1e300, False, False),
        (Fraction(1, 3), Decimal("0.3"), False, False),
    ],
)
def test_values(expected, answer, strictly, loosely):
    assert same(expected, answer) is strictly
    assert same(expected, answer, loose=True) is loosely


@pytest.mark.parametrize(
    ("center", "answer", "distance", "expected"),
    [
        (1.0, 1.0000001, 1e-6, True),
        (1.0, 1.1, 1e-6, False),
        (1.0, NAN, 1e-6, False),
        (1.0, INF, 1e-6, False),
        (1.0, True, 1.0, True),
        (1.0, "1", 1.0, False),
        (1.0, None, 1.0, False),
        (1.0, 1j, 1.0, False),
    ],
)
def test_nearness(center, answer, distance, expected):
    assert near(center, answer, distance) is expected


@pytest.mark.parametrize(
    ("relation", "expected", "answer", "right"),
    [
        ("true", None, [0], True),
        ("true", None, [], False),
        ("false", None, 0, True),
        ("identical", True, True, True),
        ("identical", True, 1, False),
        ("identical", None, None, True),
        ("unequal", 1, 2, True),
        ("unequal", 1, 1, False),
        ("near", (1.0, 0.1), 1.05, True),
    ],
)
def test_relations(relation, expected, answer, right):
    assert holds(relation, expected, answer) is right


@pytest.mark.parametrize(
    ("expected", "written", "right"),
    [
        ("3\n", "3", True),
        ("3", "3\n\n\n", True),
        ("1 2\n3", "1 2  \r\n3 \n", True),
        ("1 2", "1\n2", False),
        ("0.5", "0.50000001", True),
        ("0.5", "0.51", False),
        ("1.0", "1", True),
        ("1", "1.0", True),
        ("1000000", "1000001", False),
        ("nan", "nan", True),
        ("0.5", "nan", False),
        ("0.5", "inf", False),
        ("1e400", "2e400", False),
        ("Yes", "YES", False),
        ("", "", True),
        ("3", "", False),
        ("3", "3\n4", False),
    ],
)
def test_outputs(expected, written, right):
    assert same_stream([expected], written) is right
    assert same_stream(["something else", expected], written) is right


def test_a_tolerance_reaches_into_lists():
    assert same_approximately([1.0, [2.0]], [1.0000001, [2.0]], 1e-6)
    assert not same_approximately([1.0], [1.1], 1e-6)
    assert not same_approximately([1.0], [NAN], 1e-6)
    assert not same_approximately(1.0, True, 1e-6)
