"""Math-Verify's comparison of one answer with its reference; runs in a process of a `ProcessPool` only.

Its own time-outs are signals, which work in main threads alone: they are off, and the pool ends what takes too long.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import Equality, Expr, FiniteSet, I, MatrixBase, Tuple
from sympy.concrete.expr_with_limits import ExprWithLimits
from sympy.core.relational import Relational

# It says at every start that its time-outs are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


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


def _is_box(text: str) -> bool:
    return text.startswith("\\boxed{") and text.endswith("}")


def _parsed(text: str, targets: Sequence[Any]) -> list[Any]:
    return [_complex(each) for each in parse(text, targets, parsing_timeout=None)]


def _complex(parsed: Any) -> Any:
    """Take `i` for the imaginary unit, which Math-Verify reads as a variable; where it is ordered or set, it is one."""
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
