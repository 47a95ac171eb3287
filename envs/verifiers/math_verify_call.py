"""Math-Verify's comparison of one answer with its reference; runs in a process of a `ProcessPool` only.

Its own time-outs are signals, which work in main threads alone: they are off, and the pool ends what takes too long.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

# It says at every start that its time-outs are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def compare(request: Mapping[str, Any]) -> dict[str, Any]:
    """Compare an answer with its reference.

    Args:
        request: `gold` and `answer`, texts; `match_types`, `boxed_match_priority`, `float_rounding`, `strict` and
            `allow_set_relation_comp` as Math-Verify's tests call them.

    Returns:
        `equal`; and whether there is something to compare in `gold` and `answer`: an `expression`, no more than a
        `text`, or `nothing`.
    """
    targets: list[Any] = []
    if "latex" in request["match_types"]:
        targets.append(LatexExtractionConfig(boxed_match_priority=request["boxed_match_priority"]))
    if "expr" in request["match_types"]:
        targets.append(ExprExtractionConfig())
    gold = parse(request["gold"], targets, parsing_timeout=None)
    answer = parse(request["answer"], targets, parsing_timeout=None)
    equal = verify(
        gold,
        answer,
        float_rounding=request["float_rounding"],
        strict=request["strict"],
        allow_set_relation_comp=request["allow_set_relation_comp"],
        timeout_seconds=None,
    )
    return {"equal": bool(equal), "gold": _form(gold), "answer": _form(answer)}


def _form(parsed: Sequence[Any]) -> str:
    if not parsed:
        return "nothing"
    return "text" if all(isinstance(each, str) for each in parsed) else "expression"
