"""Math-Verify's comparison of one answer with its reference; runs in a process of a `ProcessPool` only.

Its own time-outs are signals, which work in main threads alone: they are off, and the pool ends what takes too long.
Its comparison of numbers is absolute: whatever is smaller than its precision is nothing, and two such numbers are
equal. In this process it is asked only where numbers are near to each other by their own size.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, grader, parse, verify
from sympy import Equality, Expr, FiniteSet, Float, I, MatrixBase, Rational, Tuple
from sympy.concrete.expr_with_limits import ExprWithLimits
from sympy.core.relational import Relational

# It says at every start that its time-outs are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)

# A decimal number, rounded, has at least three digits that say something.
_ROUNDED = Rational(1, 200)
# Floats are read with fifteen digits, of which sums lose some.
_FLOATS = Rational(1, 10**12)
# Differences that are lost in so many digits are looked for in more; of a cosine that is near to one, half of them, and
# of the differences of such ones a third, say something.
_DIGITS = (15, 600, 2_500)
_MOST_BITS = 1_400
_absolutely_equal = grader.sympy_numeric_eq
_simplifies_to_equal = grader.sympy_symbolic_eq


def compare(request: Mapping[str, Any]) -> dict[str, Any]:
    """Compare an answer with its reference.

    Args:
        request: `gold` and `answer`, texts; `match_types`, `boxed_match_priority`, `float_rounding`, `strict` and
            `allow_set_relation_comp` as Math-Verify's tests call them; `in_box`, whether the answer stands in a box.

    Returns:
        `equal`; and whether there is something to compare in `gold` and `answer`: an `expression`, no more than a
        `text`, or `nothing`.
    """
    latex = LatexExtractionConfig(boxed_match_priority=request["boxed_match_priority"])
    targets: list[Any] = []
    if "latex" in request["match_types"]:
        targets.append(latex)
    if "expr" in request["match_types"]:
        targets.append(ExprExtractionConfig())
    # Of a formula that it cannot read, Math-Verify would take the last number for all of it.
    whole = [latex] if latex in targets else targets
    gold = _parsed(request["gold"], whole if _is_box(request["gold"]) else targets)
    answer = _parsed(request["answer"], whole if request.get("in_box") else targets)
    equal = verify(
        gold,
        answer,
        float_rounding=request["float_rounding"],
        strict=request["strict"],
        allow_set_relation_comp=request["allow_set_relation_comp"],
        timeout_seconds=None,
    )
    return {"equal": bool(equal), "gold": _form(gold), "answer": _form(answer)}


def _relatively_equal(one: Any, other: Any, float_rounding: int, numeric_precision: int) -> bool:
    """Compare as Math-Verify does, but let no two numbers be equal because both are small."""
    if not _absolutely_equal(one, other, float_rounding, numeric_precision):
        return False
    if not (isinstance(one, Expr) and isinstance(other, Expr)) or one == other:
        return True
    if any(grader.is_atomic_or_pct_atomic(each, Float) for each in (one, other)):
        return _is_near(one, other, _ROUNDED)
    return _is_near(one, other, _FLOATS if one.has(Float) or other.has(Float) else Rational(0))


def _is_near(one: Expr, other: Expr, share: Expr) -> bool:
    """Whether two expressions differ by no more than a share of the larger one, whatever their letters stand for."""
    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    values = {symbol: Rational(97 + 12 * index, 89) for index, symbol in enumerate(symbols)}
    # An unknown that both have lost does not make them equal.
    first, second = one.doit().subs(values), other.doit().subs(values)
    for digits in _DIGITS:
        difference = abs((first - second).evalf(digits))
        # What cannot be worked out is left as it is.
        if not difference.is_Number:
            return True
        if difference != 0 and getattr(difference, "_prec", 0) != 1:
            size = max(abs(first.evalf(digits)), abs(second.evalf(digits)))
            return bool(difference <= share * size)
    # What cancels to the last digit that is worked out is nothing, unless smaller numbers stand in it than that.
    return first == second or not (_is_extreme(first) or _is_extreme(second))


def _is_extreme(expression: Expr) -> bool:
    """Whether a number stands in an expression whose differences may lie below the last digit worked out."""
    return any(max(abs(each.p), each.q).bit_length() > _MOST_BITS for each in expression.atoms(Rational))


def _simply_equal(one: Any, other: Any) -> bool:
    """Compare by simplifying, as Math-Verify does, but let no logarithm near to one be taken for nothing."""
    if not _simplifies_to_equal(one, other):
        return False
    if not (isinstance(one, Expr) and isinstance(other, Expr)) or one.free_symbols or other.free_symbols:
        return True
    return _is_near(one, other, _FLOATS if one.has(Float) or other.has(Float) else Rational(0))


grader.sympy_numeric_eq = _relatively_equal
grader.sympy_symbolic_eq = _simply_equal


def _is_box(text: str) -> bool:
    return text.startswith("\\boxed{") and text.endswith("}")


def _parsed(text: str, targets: Sequence[Any]) -> list[Any]:
    return [_complex(each) for each in parse(text, targets, parsing_timeout=None)]


def _complex(parsed: Any) -> Any:
    """Take `i` for the imaginary unit, which Math-Verify reads as a variable; if it is ordered or set, it is one."""
    if isinstance(parsed, Equality) and str(parsed.lhs) != "i":
        return Equality(_complex(parsed.lhs), _complex(parsed.rhs), evaluate=False)
    if not isinstance(parsed, (Expr, FiniteSet, MatrixBase, Tuple)) or parsed.has(Relational, ExprWithLimits):
        return parsed
    units = [symbol for symbol in parsed.free_symbols if str(symbol) == "i"]
    return parsed.subs(dict.fromkeys(units, I)) if units else parsed


def _form(parsed: Sequence[Any]) -> str:
    if not parsed:
        return "nothing"
    return "text" if all(isinstance(each, str) for each in parsed) else "expression"
